"""A batch padded to a size that a plan is there for, and its results cut back.

The last row is repeated after the batch: what an operator can do for one row of the batch it can do for these, too.
Padding is only right where every operator treats each row by itself, and where the caller can't tell the padded inputs
from its own; anything else is refused, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynaflow.capture.batch_analysis.probe import concrete
from dynaflow.capture.captured_graph import Shape, per_row
from dynaflow.core.memory_layout import span
from dynaflow.errors import SplitError
from dynaflow.partition.op_graph import OpGraph, Result


@dataclass(frozen=True, slots=True)
class Batch:
    """From how many rows a batch is padded, and to how many; and what the symbols stand for before that."""

    sizes: dict[sympy.Symbol, int]
    rows: int
    padded: int


class Padding:
    """How the arguments of one graph are padded."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._symbols = graph.batch_axes[0] if graph.batch_axes else frozenset[sympy.Symbol]()
        carried = {v.input: v.dims[0] for v in graph.values if v.input is not None and v.carries_batch}
        self._dims: dict[int, int] = {}
        for i, given in enumerate(graph.graph.inputs):
            dim = None if given.shape is None else carried.get(i, next(iter(self._dims_of(given.shape)), None))
            if dim is not None:
                self._dims[i] = dim
        self._check()

    def _dims_of(self, shape: Shape) -> list[int]:
        """Those whose sizes depend on the batch's."""
        return [dim for dim, size in enumerate(shape.size) if size.free_symbols & self._symbols]

    def _is_by_rows(self, shape: Shape, dim: int | None) -> bool:
        """Whether it has some elements for each row, along this dim, and the same of all others for any batch."""
        if any(d != dim for d in self._dims_of(shape)):
            return False
        return dim is None or per_row(shape.size[dim], self._symbols) is not None

    def _check(self) -> None:
        graph = self._graph
        if len(graph.batch_axes) != 1:
            what = "requests of several lengths" if graph.batch_axes else "no batch"
            raise _refused(f"the graph has {what}, so there is nothing to pad")
        if (found := graph.row_mixing) is not None:
            what = found.op or "a result"
            raise _refused(f"{what} would see the padding: {found.reason}", op=found.op, line=found.line)
        for i, given in enumerate(graph.graph.inputs):
            if given.shape is not None and not self._is_by_rows(given.shape, self._dims.get(i)):
                raise _refused(f"the input {given.name!r} depends on the size of the batch, and not row by row")
        copies = {}
        for value in graph.values:
            if value.input in self._dims:
                copies[value.storage] = value.name
                if value.storage in graph.written:
                    raise _refused(f"the model writes to its input {value.name!r}, which can't be padded in a copy")
        for place, result in enumerate(graph.results):
            if not result.passed and result.input is None:
                for storage in result.storages & copies.keys():
                    raise _refused(f"result {place} is a view of {copies[storage]!r}, which can't be padded in a copy")
            if not self._can_be_cut(result):
                raise _refused(f"result {place} depends on the size of the batch, and not row by row")

    def _can_be_cut(self, result: Result) -> bool:
        """Whether the caller gets what it would have got of the batch as it was."""
        if result.number is not None:
            return result.number.free_symbols <= self._symbols | set(self._graph.other_symbols)
        if result.shape is None or result.input is not None:
            return True
        if not self._is_by_rows(result.shape, result.dim):
            return False
        # A result that has to be laid out anew is no longer a view of another one.
        others = [r for r in self._graph.results if r is not result and r.storages & result.storages]
        return not (others and self._is_laid_out_by_rows(result.shape))

    def _is_laid_out_by_rows(self, shape: Shape) -> bool:
        return any(stride.free_symbols & self._symbols for stride in shape.stride)

    def run(self, run: Callable[[list[Any]], Sequence[Any]], args: list[Any], batch: Batch) -> tuple[Any, ...]:
        """Calls it with the arguments padded, and returns what it would have made of them as they were."""
        given = {r.input: args[r.input] for r in self._graph.results if r.input is not None}
        self._pad(args, batch)
        results = run(args)
        made: list[Any] = []
        tensors: dict[int, Any] = {}
        """Those that are cut already: one that is returned twice is one tensor."""
        for found, result in zip(results, self._graph.results, strict=True):
            made.append(tensors[id(found)] if id(found) in tensors else self._cut(found, result, given, batch))
            if isinstance(found, torch.Tensor):
                tensors[id(found)] = made[-1]
        return tuple(made)

    def _pad(self, args: list[Any], batch: Batch) -> None:
        grown = {**batch.sizes, **dict.fromkeys(self._symbols, batch.padded)}
        for position, given in enumerate(self._graph.graph.inputs):
            if given.shape is None:
                if given.symbol is not None and given.symbol.free_symbols & self._symbols:
                    args[position] = concrete(given.symbol, grown)
            elif (dim := self._dims.get(position)) is not None:
                strides = [concrete(stride, grown) for stride in given.shape.stride]
                args[position] = _padded(args[position], dim, batch.rows, batch.padded, strides)

    def _cut(self, found: Any, result: Result, given: Mapping[int, Any], batch: Batch) -> Any:
        if result.input is not None:
            return given[result.input]
        if result.number is not None:
            value = result.number.xreplace({s: sympy.Integer(n) for s, n in batch.sizes.items()})
            return type(found)(value)
        if result.dim is None or not isinstance(found, torch.Tensor):
            return found
        part = found.narrow(result.dim, 0, found.size(result.dim) // batch.padded * batch.rows)
        if result.shape is None or not self._is_laid_out_by_rows(result.shape):
            return part
        strides = tuple(concrete(stride, batch.sizes) for stride in result.shape.stride)
        if part.stride() == strides:
            return part
        made = _like(part, part.size(), strides)
        _copy(part, made)
        return made


def _refused(what: str, op: str | None = None, line: str | None = None) -> SplitError:
    advice = "let bucket() return the batch's own size for this model"
    return SplitError(f"bucket(): {what}", op=op, line=line, advice=advice)


def _like(tensor: torch.Tensor, size: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return tensor.new_empty(span(size, strides)).as_strided(size, strides)


def _padded(given: torch.Tensor, dim: int, rows: int, padded: int, strides: Sequence[int]) -> torch.Tensor:
    """A copy in memory laid out as the graph wants it."""
    per_row = given.size(dim) // rows
    size = list(given.size())
    size[dim] = per_row * padded
    made = _like(given, size, strides)
    into, given = made.unflatten(dim, (padded, per_row)), given.unflatten(dim, (rows, per_row))
    if padded > rows and into.stride(dim):
        more = into.narrow(dim, rows, padded - rows)
        _copy(given.narrow(dim, rows - 1, 1).expand_as(more), more)
    _copy(given, into.narrow(dim, 0, rows))  # last: rows may share memory
    return made


def _copy(given: torch.Tensor, into: torch.Tensor) -> None:
    """Into memory in which elements may be the same all along a dim."""
    for d, stride in enumerate(into.stride()):
        if stride == 0 and into.size(d):
            into, given = into.narrow(d, 0, 1), given.narrow(d, 0, 1)
    into.copy_(given)
