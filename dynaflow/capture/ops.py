"""The partitioned graph as data: operators, the values between them, and what may be done to each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import sympy
from torch import fx

from dynaflow.capture.graph import CapturedGraph, Shape
from dynaflow.capture.probe import End


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses operators, or an input of the graph. It owns its memory: views don't cross."""

    index: int
    name: str
    dims: tuple[int | None, ...]
    """On which dim it carries the rows of the batch (and, second, the requests of a ragged one)."""
    shape: Shape | None
    storage: int | None
    """The memory behind it, as `Op.touches` numbers it."""
    input: int | None = None
    """Position among the graph's inputs, if it is one."""
    end: End | None = None
    """How it is made, where its maker can write it straight into memory given from outside."""
    fresh: bool = True
    """Its maker always gives it memory of its own; never, for some size, that of what it was made from."""

    @property
    def carries_batch(self) -> bool:
        return any(dim is not None for dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """A schedulable piece of the model."""

    index: int
    name: str
    tags: frozenset[str]
    module: fx.GraphModule
    """Takes `symbols`, then `reads`; returns `writes` as a tuple."""
    symbols: tuple[sympy.Expr, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    touches: tuple[tuple[int, bool], ...]
    """Storages that it reads (False) or writes (True), of those that anyone writes."""
    after: tuple[int, ...]
    """Operators that come before it for the sake of a value or of memory."""
    follows: tuple[int, ...]
    """Operators that have run for all earlier micro-batches when it runs for one. It may be among them itself."""
    shared: bool
    """No row of the batch takes part: it runs once."""
    refusal: str | None
    """Why it can't be split, if it can't: then it runs once, for all rows."""
    line: str | None
    """The line of the model where it starts, or where the rows are mixed."""
    functions: tuple[str, ...] = field(default=(), repr=False)
    """The calls that it holds, by name and in order."""
    groups: tuple[str, ...] = ()
    """The process groups in which it makes ranks meet."""

    @property
    def splittable(self) -> bool:
        return self.refusal is None and not self.shared

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGraph:
    """All operators in an order that respects their dependencies, and how the results are put together."""

    graph: CapturedGraph
    spaces: tuple[frozenset[sympy.Symbol], ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    """The values that `ending` takes, for the whole batch."""
    ending: fx.GraphModule | None
    """Views and numbers among the results, made from `outputs`; None when `outputs` are the results."""
    ending_symbols: tuple[sympy.Expr, ...] = ()
    result_dims: tuple[int | Literal["number"] | None, ...] = ()
    """Of each result: on which dim it carries the rows of the batch; "number" if it is one that follows from them."""

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def written(self) -> frozenset[int]:
        """Storages that some operator writes."""
        return frozenset(s for op in self.ops for s, writes in op.touches if writes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal partitions of equal graphs, in any process."""
        text = [self.graph.gm.code]
        for op in self.ops:
            text.append(f"{op.name} {op.reads} {op.writes} {op.touches} {op.after} {op.follows} {op.splittable}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
