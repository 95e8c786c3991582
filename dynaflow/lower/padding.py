"""Padding: a batch is padded to a size for which a plan exists, and the results are narrowed back.

Contract
    Takes a graph; raises SplitError, with the operator or the input, unless every operator treats each row separately
    and padding can't be observed by the caller.
    `run` takes an executable for the padded size and the arguments of a call. Returns what the unpadded call would
    return, with the same strides. May empty `args`; does not write to the caller's tensors.

Steps of `run`
    1. Copy each input that carries rows into a larger tensor. The last row is repeated, so that padding holds only
       values that operators accept. Numbers that depend on the batch are evaluated for the padded size.
    2. Run.
    3. Narrow each result to the rows of the batch. Numbers are evaluated for the batch's own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynaflow.capture.captured_graph import Shape, concrete, per_row
from dynaflow.core.memory_layout import span
from dynaflow.errors import SplitError
from dynaflow.partition.op_graph import OpGraph, Result


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a batch before and after padding, and the values of all symbols before."""

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
        """The dims whose sizes depend on the batch size."""
        return [dim for dim, size in enumerate(shape.size) if size.free_symbols & self._symbols]

    def _is_by_rows(self, shape: Shape, dim: int | None) -> bool:
        """Whether the size along this dim is a multiple of the rows, and no other dim depends on the batch size."""
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
        """Whether the unpadded result can be made from the padded one."""
        if result.number is not None:
            return result.number.free_symbols <= self._symbols | set(self._graph.other_symbols)
        if result.shape is None or result.input is not None:
            return True
        if not self._is_by_rows(result.shape, result.dim):
            return False
        # A result that is copied into another layout is no longer a view of another result.
        others = [r for r in self._graph.results if r is not result and r.storages & result.storages]
        return not (others and self._is_laid_out_by_rows(result.shape))

    def _is_laid_out_by_rows(self, shape: Shape) -> bool:
        return any(stride.free_symbols & self._symbols for stride in shape.stride)

    def run(self, run: Callable[[list[Any]], Sequence[Any]], args: list[Any], batch: Batch) -> tuple[Any, ...]:
        """Calls `run` with padded arguments, and returns what it would return for the unpadded ones."""
        # 1.
        given = {r.input: args[r.input] for r in self._graph.results if r.input is not None}
        self._pad(args, batch)
        # 2.
        results = run(args)
        # 3.
        made: list[Any] = []
        tensors: dict[int, Any] = {}
        """By id: a tensor that is returned twice stays one tensor."""
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
    """A padded copy with the strides that the graph expects."""
    per_row = given.size(dim) // rows
    size = list(given.size())
    size[dim] = per_row * padded
    made = _like(given, size, strides)
    into, given = made.unflatten(dim, (padded, per_row)), given.unflatten(dim, (rows, per_row))
    if padded > rows and into.stride(dim):
        more = into.narrow(dim, rows, padded - rows)
        _copy(given.narrow(dim, rows - 1, 1).expand_as(more), more)
    _copy(given, into.narrow(dim, 0, rows))  # last: rows may overlap in memory
    return made


def _copy(given: torch.Tensor, into: torch.Tensor) -> None:
    """Copies, also into expanded tensors (stride 0)."""
    for d, stride in enumerate(into.stride()):
        if stride == 0 and into.size(d):
            into, given = into.narrow(d, 0, 1), given.narrow(d, 0, 1)
    into.copy_(given)
