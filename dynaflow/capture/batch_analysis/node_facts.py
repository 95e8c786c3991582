"""What the analysis finds out about each node of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
from torch import fx

from dynaflow.capture.batch_analysis.aten_calls import Dims, dims_of
from dynaflow.capture.batch_analysis.signatures import MergedDim

OutVariant = Literal["pointwise", "matmul"]
"""How a result can be written into given memory: by a loop that a compiler stores elsewhere, or a matmul's
out-variant."""


@dataclass(slots=True, kw_only=True)
class NodeFacts:
    """What one node of the graph does. Storages are numbers."""

    value: Any = None
    """Its result in the fake run."""
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)
    """Storages of the result."""
    made: set[int] = field(default_factory=set)
    """Storages of the result that the node allocates."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Batch axis -> why the node can't be split along it."""
    scalar: bool = False
    """The result consists of numbers that follow from sizes alone."""
    view: bool = False
    """The result only views memory that existed before."""
    returns: fx.Node | None = None
    """The argument that an in-place call, or an item of its results, returns."""
    sized: bool = False
    """An argument is a number that follows from the batch size."""
    out_variant: OutVariant | None = None
    copied: bool = False
    """The result is a plain copy. For other sizes the same call (`reshape`, `to`) may return a view."""
    merged: bool = False
    """The result has the batch and another dim merged, in an unknown order: (s*b, h) of (s, b, h)."""
    reduced: bool = False
    """The result has no rows, but depends on some."""

    def refuse(self, axes: int, reason: str) -> None:
        """Refuses a split along each batch axis, unless there is a refusal already."""
        for axis in range(axes):
            self.refusals.setdefault(axis, reason)


@dataclass(slots=True, kw_only=True)
class Probe:
    """The facts of all nodes, for batch axes given by their symbols (tokens or rows; then requests)."""

    facts: dict[fx.Node, NodeFacts]
    batch_axes: tuple[frozenset[sympy.Symbol], ...]
    rows: tuple[int, ...]
    """Size of each axis in the fake run."""

    def dims(self, node: fx.Node) -> Dims:
        """For each axis, the dim on which the node's (tensor) result carries it."""
        return dims_of(self.facts[node].value) or (None,) * len(self.batch_axes)

    def is_merged(self, node: fx.Node) -> bool:
        """Whether the node's result has its rows merged with a dim before them."""
        return any(isinstance(dim, MergedDim) for dim in self.dims(node))
