"""A captured graph, with the names, sizes and batch dims of its inputs.

Dynamo frees some of this data when its compilation ends, so all of it is read at once.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.collectives import make_contiguous
from dynaflow.capture.dtensor_inputs import use_local_shards
from dynaflow.capture.higher_order import drop_unused_numbers
from dynaflow.capture.host_scalars import HostScalars
from dynaflow.capture.node_info import unwrapped
from dynaflow.errors import SplitError, nearest

BatchDims = Mapping[str, int | None]
Phase = Literal["inference", "forward", "backward"]
DynamicDims = Mapping[str, Sequence[int]]
KIND = "dynaflow_kind"
"""Key in the `meta` of a node, and of its copies, for its Shape, or the expression of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size, strides, dtype and device of a tensor, in the graph's symbols."""

    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(
            size=tuple(_torch.expression(s) for s in tensor.size()),
            stride=tuple(_torch.expression(s) for s in tensor.stride()),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def empty(self, values: Mapping[sympy.Symbol, int]) -> torch.Tensor:
        """A tensor of this layout, for these values of the symbols."""
        size, stride = ([concrete(e, values) for e in exprs] for exprs in (self.size, self.stride))
        return torch.empty_strided(size, stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueValue:
    """An input that is neither a tensor nor a number, such as a device mesh. Dynamo guards that it stays the same."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One placeholder of the graph."""

    node: fx.Node
    name: str
    """The name for the user: `input_ids`, `past_key_values.layers.0.keys`, or a parameter's path."""
    owned: bool
    """A module's own parameter or buffer: never split."""
    shape: Shape | None
    """None for a number."""
    symbol: sympy.Expr | None
    """The expression of a number."""
    batch_dim: int | None = None
    """The batch dim, declared or found."""
    static_address: bool = False
    """Its address is aligned and never changes: a module's own tensor, or marked static."""
    pinned: bool = False
    """In pinned host memory."""
    opaque: OpaqueValue | None = None
    """Its value, if it is neither a tensor nor a number."""
    alias_set: int | None = None
    """Inputs with equal numbers share memory, row by row."""

    @property
    def kind(self) -> Shape | sympy.Expr | OpaqueValue | None:
        """What a compiler needs to know of it."""
        return self.shape or self.symbol or self.opaque


class CapturedGraph:
    """The graph of one capture, and what is known of its inputs.

    *Contract.* The constructor consumes a fresh graph, and changes it in place: collectives get contiguous inputs,
    unused numbers, results made of numbers, and local shards are taken out. After that the graph does not change.
    Raises SplitError if `declared` names an input that the graph does not have.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        parameters: Sequence[str] = (),
        declared: BatchDims | None = None,
        *,
        phase: Phase = "inference",
        partial: bool | None = None,
        batch_symbols: tuple[sympy.Symbol, ...] | None = None,
        saved: frozenset[fx.Node] = frozenset(),
        merged_calls: bool = False,
        forward: CapturedGraph | None = None,
    ) -> None:
        """`declared`: batch dims by input name; None if they are not needed.
        `phase`: "forward" or "backward" for a pass of training.
        `batch_symbols`: symbols that may be the batch, if the inputs don't show them.
        `saved`: results of a forward pass that only its backward pass gets.
        `forward`: for a backward pass, its forward pass.
        `merged_calls`: equal calls were merged."""
        self.gm, self.phase, self.saved, self.forward = gm, phase, saved, forward
        self.merged_calls = merged_calls
        """Equal calls were merged across regions, so a declaration about a region may not hold for its calls."""
        self.merged: dict[Any, dict[str, tuple[Any, ...]]] = {}
        """Batch axes -> name -> dims, of values with the rows merged with another dim. Set by the probe."""
        self.partial = _torch.is_partial_graph(gm) if partial is None else partial
        self.grad = torch.is_grad_enabled() and phase == "inference"
        make_contiguous(gm)
        drop_unused_numbers(gm)
        self.host_scalars = HostScalars(gm)
        """Results computed from numbers only."""
        self.shards = use_local_shards(gm)
        """Positions of DTensor inputs, for which the graph takes the local shard."""
        tensors = example_tensors(gm, parameters)
        self.declared = batch_dims_of(tensors, declared, self.partial, parameters) if declared is not None else {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.inputs = [_read_input(node, parameters, self.declared) for node in placeholders]
        self.shapes: dict[fx.Node, Shape] = {}
        self.hints: dict[sympy.Symbol, int] = {}
        for node in gm.graph.nodes:
            example = node.meta.get("example_value")
            if isinstance(example, torch.Tensor):
                self.shapes[node] = node.meta[KIND] = Shape.of(example)
                for size in (*example.size(), *example.stride()):
                    self._read_hint(size)
            else:
                if isinstance(example, (int, torch.SymInt)):
                    node.meta[KIND] = _torch.expression(example)
                self._read_hint(example)
        self.batch_symbols = tuple(self._batch_symbols()) if batch_symbols is None else batch_symbols

    def _batch_symbols(self) -> Iterator[sympy.Symbol]:
        """Symbols that may be the batch, once for each input that has them."""
        for given in self.inputs:
            if given.shape is None or given.owned or not given.shape.size:
                continue
            dim = given.batch_dim if self.declared else 0
            symbols = given.shape.size[dim].free_symbols if dim is not None else ()
            if len(symbols) == 1:
                yield from symbols

    def with_aliased_inputs(self, pairs: Sequence[tuple[int, int]]) -> CapturedGraph:
        """The same graph, for calls in which inputs at these positions share memory row by row."""
        memory = list(range(len(self.inputs)))
        for one, other in pairs:
            memory = [memory[one] if m == memory[other] else m for m in memory]
        made = copy.copy(self)
        made.inputs = [
            replace(given, alias_set=m if memory.count(m) > 1 else None)
            for given, m in zip(self.inputs, memory, strict=True)
        ]
        return made

    @property
    def unused_numbers(self) -> frozenset[int]:
        """Positions of number inputs that nothing in the graph depends on."""
        sizes = {s for shape in self.shapes.values() for e in (*shape.size, *shape.stride) for s in e.free_symbols}
        return frozenset(
            n for n, i in enumerate(self.inputs)
            if i.symbol is not None and not i.node.users and not i.symbol.free_symbols & sizes
        )  # fmt: skip

    def _read_hint(self, size: Any) -> None:
        if isinstance(size, torch.SymInt):
            expr = _torch.expression(size)
            if expr.is_Symbol and size.node.has_hint():
                self.hints[expr] = _torch.hint_of(size)

    @cached_property
    def device(self) -> torch.device:
        shapes = [i.shape for i in self.inputs if i.shape is not None]
        return next((s.device for s in shapes if s.device.type != "cpu"), torch.device("cpu"))

    def symbol_values(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of each symbol in a call."""
        return {s: int(args[i] if dim is None else args[i].size(dim)) for s, (i, dim) in self._symbol_places.items()}

    @cached_property
    def _symbol_places(self) -> dict[sympy.Symbol, tuple[int, int | None]]:
        """Where to read each symbol: (position, None) of a number input, or (position, dim) of a tensor."""
        places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for i, given in enumerate(self.inputs):
            if given.symbol is not None and given.symbol.is_Symbol:
                places[given.symbol] = (i, None)
        for i, given in enumerate(self.inputs):
            for dim, expr in enumerate(given.shape.size if given.shape is not None else ()):
                if expr.is_Symbol and expr not in places:
                    places[expr] = (i, dim)
        return places

    def batch_axes(self, values: Mapping[sympy.Symbol, int], requests: int) -> tuple[frozenset[sympy.Symbol], ...]:
        """The symbols of the batch's rows, and those of the requests of a ragged batch.

        Inputs may have different symbols for the batch: those of equal value are one axis.
        """
        found = [s for s in self.batch_symbols if s in values]
        if not found:
            return ()
        counts = Counter(values[s] for s in found)
        rows = max(counts, key=lambda value: (counts[value], value != requests))
        batch_axes = [frozenset(s for s in found if values[s] == rows)]
        if requests not in (0, rows) and (others := frozenset(s for s in found if values[s] == requests)):
            batch_axes.append(others)
        return tuple(batch_axes)


def batch_dims_of(
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    declared: BatchDims | None,
    partial: bool,
    parameters: Sequence[str],
) -> dict[str, int]:
    """Batch dims by input name: as declared, or dim 0 of the inputs with the most frequent size.

    `tensors` maps a name to the tensor and whether a module owns it. `partial`: the graph is a part of the model, which
    may lack declared inputs. `parameters`: names of the model's parameters, which the graph need not use.
    """
    if declared is not None:
        found: dict[str, int] = {}
        for name, dim in declared.items():
            hits = [n for n in tensors if is_named(n, name)]
            if not hits and not partial and name not in parameters:
                names = [n for n, (_, owned) in tensors.items() if not owned]
                raise SplitError(
                    f"batch_dims names {name!r}, but the graph has no such input",
                    advice=f"the inputs are {', '.join(nearest(name, names, 8))}",
                )
            for n in hits:
                if dim is None:
                    continue
                tensor = tensors[n][0]
                if not -tensor.dim() <= dim < tensor.dim():
                    raise SplitError(
                        f"batch_dims says dim {dim} for {n!r}, which has {tensor.dim()} dims",
                        advice="name a dim that the tensor has",
                    )
                found[n] = dim % tensor.dim()
        return found
    free = {n: t for n, (t, owned) in tensors.items() if not owned and t.dim() > 0}
    if not free:
        return {}
    sizes = Counter(t.size(0) for t in free.values())
    batch = max(sizes, key=lambda size: sizes[size])  # the most frequent; of several, the first
    return {n: 0 for n, t in free.items() if t.size(0) == batch}


def example_tensors(gm: fx.GraphModule, parameters: Sequence[str]) -> dict[str, tuple[torch.Tensor, bool]]:
    """The real tensors of a fresh capture's placeholders, by name, with whether a module owns them."""
    found = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source, owned, example = _torch.graph_input(node)
        if isinstance(example, torch.Tensor):
            found[input_name(source, parameters)] = (example, owned or isinstance(example, torch.nn.Parameter))
    return found


def dims_to_mark(
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    declared: BatchDims | None,
    requests: int,
    partial: bool,
    parameters: Sequence[str],
    dynamic: DynamicDims,
) -> dict[str, set[int]]:
    """Dims that may vary from call to call: the batch; the requests of an undeclared ragged batch; and `dynamic`."""
    dims = {n: {dim} for n, dim in batch_dims_of(tensors, declared, partial, parameters).items()}
    for n, (t, owned) in tensors.items():
        if owned:
            continue
        if declared is None and requests > 1 and t.dim() and t.size(0) == requests:
            dims.setdefault(n, set()).add(0)
        for name, others in dynamic.items():
            if is_named(n, name):
                dims.setdefault(n, set()).update(dim % t.dim() for dim in others if -t.dim() <= dim < t.dim())
    return {n: {dim for dim in found if tensors[n][0].size(dim) > 1} for n, found in dims.items()}


def make_batch_dynamic(
    gm: fx.GraphModule, declared: BatchDims | None, requests: int, parameters: Sequence[str], dynamic: DynamicDims
) -> list[Callable[[], None]]:
    """Marks dims that vary and that the capture specialized. Returns functions that remove the marks.

    `requests` is the number of requests of a ragged batch, or 0. Inputs of that length are marked too.
    """
    tensors = example_tensors(gm, parameters)
    undo = []
    dims = dims_to_mark(tensors, declared, requests, _torch.is_partial_graph(gm), parameters, dynamic)
    static = {
        input_name(_torch.graph_input(node)[0], parameters): node.meta["example_value"]
        for node in gm.graph.find_nodes(op="placeholder")
    }
    for name, varying in dims.items():
        if any(isinstance(static[name].size(dim), int) for dim in varying):
            undo.append(_torch.mark_dynamic(tensors[name][0], sorted(varying)))
    return undo


def concrete(expr: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> int:
    return int(expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols if s in values}))


def per_row(size: sympy.Expr, batch: frozenset[sympy.Symbol]) -> sympy.Expr | None:
    """Size of a dim per row of the batch, which these symbols are; None if it is not a multiple of the batch."""
    rows = next(iter(batch))
    each = sympy.expand(size.xreplace(dict.fromkeys(batch, rows)) / rows)
    return None if rows in each.free_symbols else each


def input_name(source: str, parameters: Sequence[str] = ()) -> str:
    """Dynamo's source text as a name for the user: L['kwargs']['cache'].layers[0].keys -> cache.layers.0.keys"""
    text = unwrapped(source).replace("._modules", "").replace("._parameters", "").replace("._buffers", "")
    text = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", text)
    text = re.sub(r"^[LG]\.", "", text)
    place = re.match(r"args\.(\d+)", text)
    if place and int(place[1]) < len(parameters):
        text = parameters[int(place[1])] + text[place.end() :]
    return re.sub(r"^kwargs\.", "", text)


ALIGNMENT = 16
"""Alignment, in bytes, that compiled kernels rely on."""


def _has_static_address(tensor: Any, owned: bool) -> bool:
    stays = owned or isinstance(tensor, torch.nn.Parameter) or _torch.is_marked_static(tensor)
    return stays and isinstance(tensor, torch.Tensor) and tensor.data_ptr() % ALIGNMENT == 0


def is_named(full: str, wanted: str) -> bool:
    return full == wanted or full.endswith("." + wanted) or fnmatch.fnmatchcase(full, wanted)


def _read_input(node: fx.Node, parameters: Sequence[str], declared: Mapping[str, int]) -> Input:
    source, owned, real = _torch.graph_input(node)
    owned = owned or isinstance(real, torch.nn.Parameter)
    example = node.meta["example_value"]
    if _torch.shard_of(example) is None and (shard := _torch.shard_of(real)) is not None:
        real = shard
    tensor = isinstance(example, torch.Tensor)
    known = tensor or isinstance(example, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
    return Input(
        node=node,
        name=input_name(source, parameters),
        owned=owned,
        shape=Shape.of(example) if tensor else None,
        symbol=None if tensor else _torch.expression(example) if isinstance(example, (int, torch.SymInt)) else None,
        batch_dim=declared.get(input_name(source, parameters)),
        static_address=tensor and _has_static_address(real, owned),
        pinned=type(real) in (torch.Tensor, torch.nn.Parameter) and not real.is_cuda and real.is_pinned(),
        opaque=None if known or real is None else OpaqueValue(real),
    )
