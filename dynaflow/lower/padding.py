"""A batch padded to a size that a plan is there for, and its results cut back.

Rows of zeros go behind the batch. That is only right where every operator treats each row by itself; anything else is
refused, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynaflow.capture.ops import OpGraph
from dynaflow.capture.probe import concrete
from dynaflow.errors import SplitError


class Padding:
    """How the arguments of one graph are padded."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._symbols = graph.spaces[0] if graph.spaces else frozenset()
        self._dims = {v.input: v.dims[0] for v in graph.values if v.input is not None and v.carries_batch}
        self._refuse_what_mixes_rows()

    def _refuse_what_mixes_rows(self) -> None:
        graph = self._graph
        advice = "let bucket() return the batch's own size for this model"
        if len(graph.spaces) != 1:
            what = "requests of several lengths" if graph.spaces else "no batch"
            raise SplitError(f"bucket(): the graph has {what}, so there is nothing to pad", advice=advice)
        for op in graph.ops:
            if op.refusal is not None:
                raise SplitError(
                    f"bucket(): {op.name} would see the padding: {op.refusal}", op=op.name, line=op.line, advice=advice
                )
        for value in graph.values:
            if value.input in self._dims and value.storage in graph.written:
                what = f"the model writes to its input {value.name!r}, which can't be padded in a copy"
                raise SplitError(f"bucket(): {what}", advice=advice)
        for place, dims in enumerate(graph.result_dims):
            if dims == "number":
                raise SplitError(f"bucket(): result {place} is a number that follows from the batch", advice=advice)

    def pad(self, args: list[Any], rows: int, padded: int) -> None:
        """Gives the arguments `padded` rows in place of `rows`."""
        sizes = dict.fromkeys(self._symbols, padded)
        for position, given in enumerate(self._graph.graph.inputs):
            if given.shape is None:
                if given.symbol is not None and given.symbol.free_symbols <= self._symbols:
                    args[position] = concrete(given.symbol, sizes)
            elif (dim := self._dims.get(position)) is not None:
                arg = args[position]
                size = list(arg.size())
                per_row = size[dim] // rows
                size[dim] = per_row * padded
                args[position] = arg.new_zeros(size)
                args[position].narrow(dim, 0, per_row * rows).copy_(arg)

    def results(self, results: Sequence[Any], rows: int, padded: int) -> tuple[Any, ...]:
        found: list[Any] = []
        for result, dims in zip(results, self._graph.result_dims, strict=True):
            if isinstance(result, torch.Tensor) and isinstance(dims, int):
                result = result.narrow(dims, 0, result.size(dims) // padded * rows)
            found.append(result)
        return tuple(found)
