"""A run of the captured graph on fake tensors, to learn what each node does to memory and to the batch.

The batch gets a size that occurs nowhere else in the model: twice a large prime. So a dimension that is a
multiple of that prime carries the batch, wherever it turns up. For every node the probe records which
storages it reads and writes, whether its result is a view, on which dim the result carries the batch, and, if
the node can't be split along it, why.

Which row an element belongs to is its position alone. So after a node that mixes rows, and therefore runs for
the whole batch at once, its result may be cut again along whichever dim has the batch's size.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis import higher_order_rules
from dynaflow.capture.batch_analysis.aten_calls import RNG, Dims, dims_of, label, tensors_in, written_tensors
from dynaflow.capture.batch_analysis.batch_sizes import BatchNumbers, evaluated, with_other_sizes
from dynaflow.capture.batch_analysis.probe_memo import FakeCall, MemoEntry, NotMemoizable
from dynaflow.capture.batch_analysis.row_rules import Refusal, follow_rows
from dynaflow.capture.batch_analysis.signatures import Merged, Place, dim_in
from dynaflow.capture.captured_graph import CapturedGraph, Shape
from dynaflow.capture.node_info import source_line

PRIMES = (1009, 1013, 10007, 10037, 101, 103, 11, 13)

_SIZED = {
    "view",
    "reshape",
    "expand",
    "zeros",
    "ones",
    "empty",
    "full",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "repeat",
    "unflatten",
    "broadcast_to",
    "tile",
    "_unsafe_view",
    "resize",
}
"""Calls that take sizes: there a batch size is recomputed for each micro-batch. Elsewhere it is a number."""


OutVariant = Literal["pointwise", "matmul"]
"""A loop over elements, which a compiler can let store elsewhere; or a matrix product with an out-variant."""


@dataclass(slots=True, kw_only=True)
class NodeFacts:
    """What one node of the graph does."""

    value: Any = None
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)
    """Storages behind the result."""
    made: set[int] = field(default_factory=set)
    """Storages that came into being in this node and live on in its result."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Space of rows -> why the node can't be split along it."""
    scalar: bool = False
    """The result is numbers that follow from sizes alone."""
    view: bool = False
    """The result only looks at memory that was there before."""
    returns: fx.Node | None = None
    """An in-place node's result, or one of several, is this argument itself."""
    sized: bool = False
    """A number that follows from the batch's size goes in."""
    out_variant: OutVariant | None = None
    """How the result comes about, where that allows to write it straight into memory given from outside."""
    copied: bool = False
    """The result is a plain copy: for other sizes the same call (`reshape`, `to`) may be a view."""
    merged: bool = False
    """The result has the batch and something else on one dim, in an unknown order: (s*b, h) of (s, b, h)."""
    reduced: bool = False
    """The result has no rows, but was made of some."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """The facts of all nodes, for batch axes given by their symbols (tokens or rows first, then requests)."""

    facts: dict[fx.Node, NodeFacts]
    batch_axes: tuple[frozenset[sympy.Symbol], ...]
    rows: tuple[int, ...]
    """How many rows each axis had."""

    def dims(self, node: fx.Node) -> Dims:
        """On which dim the node's (tensor) result carries each axis."""
        return _dims(self.facts[node].value, len(self.batch_axes))

    def is_merged(self, node: fx.Node) -> bool:
        """The rows of the node's result lie behind another dim, which was merged into theirs."""
        return any(isinstance(place, Merged) for place in self.dims(node))


def probe(graph: CapturedGraph, batch_axes: tuple[frozenset[sympy.Symbol], ...]) -> Probe:
    """Runs the graph on fake tensors, once, with sizes that give the batch away."""
    for given in graph.inputs:
        if given.shape is not None and _is_tied(given.shape):
            raise Unschedulable(f"the input {given.name!r} is made of windows that overlap; pass a copy of it")
    known = graph.hints.keys() | frozenset().union(*batch_axes)
    for node, shape in graph.shapes.items():
        if any(size.free_symbols - known for size in (*shape.size, *shape.stride)):
            raise Unschedulable(f"the size of {node.name} depends on a floating-point number, or on data")
    failure: Exception | None = None
    # In pairs, the likeliest first: rare among sizes, and small enough for products of several.
    for first in range(0, len(PRIMES), 2):
        primes = PRIMES[first : first + len(batch_axes)]
        values = dict(graph.hints)
        values |= {s: 2 * p for p, axis in zip(primes, batch_axes, strict=True) for s in axis}
        if _clashes(graph, values, primes, batch_axes):
            continue
        try:
            facts = _run(graph, values, primes, batch_axes)
            found = Probe(facts=facts, batch_axes=batch_axes, rows=tuple(2 * p for p in primes))
            graph.merged[batch_axes] = {n.name: found.dims(n) for n in found.facts if found.is_merged(n)}
            return found
        except Contradiction as e:  # the model bounds its batch: try a smaller one
            failure = e
    raise Contradiction(str(failure))


class Contradiction(Exception):
    """No fake run of the graph was possible with the batch at this size."""


class Unschedulable(Exception):
    """The graph does something that no cut of it would do: it has to run as it is."""


def _clashes(
    graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...], batch_axes: tuple[Any, ...]
) -> bool:
    batch = frozenset().union(*batch_axes) if batch_axes else frozenset()
    sizes = {
        concrete(size, values)
        for shape in graph.shapes.values()
        for size in shape.size
        if not size.free_symbols & batch
    }
    return any(size and size % p == 0 for size in sizes for p in primes)


def concrete(expr: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> int:
    return int(expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols if s in values}))


def _fake(shape: Shape, values: dict[sympy.Symbol, int]) -> torch.Tensor:
    size = [concrete(s, values) for s in shape.size]
    stride = [concrete(s, values) for s in shape.stride]
    return torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)


def _dims(tensor: Any, batch_axes: int) -> Dims:
    return dims_of(tensor) or (None,) * batch_axes


def _place(tensor: torch.Tensor, axis: int) -> Place:
    dims = dims_of(tensor)
    return dims[axis] if dims else None


def _first_multiple(tensor: torch.Tensor, prime: int) -> int | None:
    return next((d for d, size in enumerate(tensor.shape) if size and size % prime == 0), None)


def _carried(tensor: torch.Tensor, prime: int, declared: int | None) -> int | None:
    if declared is not None and tensor.shape[declared] % prime == 0:
        return declared
    return _first_multiple(tensor, prime)


def _is_tied(shape: Shape) -> bool:
    """Whether a dim that varies has the stride of another one, as in windows that overlap: which of them is outermost
    in a result depends on their sizes, so a part of the rows may be laid out otherwise than all of them."""
    known: dict[sympy.Expr, list[sympy.Expr]] = {}
    for size, stride in zip(shape.size, shape.stride, strict=True):
        if size not in (0, 1) and stride != 0:
            known.setdefault(stride, []).append(size)
    return any(len(sizes) > 1 and any(size.free_symbols for size in sizes) for sizes in known.values())


def _run(
    graph: CapturedGraph,
    values: dict[sympy.Symbol, int],
    primes: tuple[int, ...],
    batch_axes: tuple[frozenset[sympy.Symbol], ...],
) -> dict[fx.Node, NodeFacts]:
    grad = torch.is_grad_enabled()
    try:
        # In inference mode operators would come undecomposed: reshape for view, linear for addmm.
        with torch.inference_mode(False), _torch.concrete_fake_mode() as mode, torch.no_grad():
            saved = graph.forward.merged.get(batch_axes, {}) if graph.forward is not None else {}
            run = ProbeRun(graph, values, primes, BatchNumbers(batch_axes, values, primes), mode, saved)
            try:
                run.run(*run.inputs())
            except Contradiction:
                if run.reshaped is None:
                    raise
            except Exception as e:  # a tensor that is not like others: the graph runs as it is
                raise Contradiction(f"{run.node.format_node()}: {type(e).__name__}: {e}") from e
            if run.reshaped is not None:
                raise Unschedulable(run.reshaped)
            return run.facts
    finally:
        torch.set_grad_enabled(grad)  # the graph may hold nodes that switch it


class ProbeRun(fx.Interpreter):
    def __init__(
        self,
        graph: CapturedGraph,
        values: dict[sympy.Symbol, int],
        primes: tuple[int, ...],
        numbers: BatchNumbers,
        mode: Any,
        saved: Mapping[str, Dims],
    ) -> None:
        super().__init__(graph.gm, garbage_collect_values=False)
        self.captured, self.values, self.primes, self.mode = graph, values, primes, mode
        self.numbers, self.saved = numbers, saved
        self.node: fx.Node
        self.facts: dict[fx.Node, NodeFacts] = {}
        self.ids: dict[int, int] = {}
        self.count = 0
        """Of the numbers that were given to storages."""
        self.keep: list[torch.Tensor] = []
        self.reshaped: str | None = None
        """Which call changes a tensor's shape in place: in eager torch, all that hold the tensor see the new one."""
        self.given: set[int] = set()
        """Storages of the graph's inputs."""
        self.looks: dict[fx.Node, set[int]] = {}
        """By number, and by view that takes one: storages, but for those of inputs, of tensors whose sizes it is made
        of. Whoever uses it needs these tensors."""
        self.regrouped: set[int] = set()
        """Storages of which there is a view that does not keep the rows apart."""
        self.scrambled: set[int] = set()
        """Those of them that were written since."""
        self.observer = _Observer(self)
        self.memo: dict[Any, tuple[MemoEntry, NodeFacts]] = {}
        """By key of a call: what it did."""

    def inputs(self) -> list[Any]:
        made: list[Any] = []
        shared: dict[int, int] = {}
        for given in self.captured.inputs:
            if given.shape is None:
                made.append(evaluated(given.node.meta["example_value"], self.values))
                continue
            tensor = _fake(given.shape, self.values)
            if given.node.name in self.saved:
                label(tensor, self.saved[given.node.name])
            elif not given.owned:
                label(tensor, tuple(_carried(tensor, p, given.batch_dim) for p in self.primes))
            number = self.number(tensor)
            if given.alias_set is not None:  # writes to one are seen through the other
                self.ids[_torch.storage_id(tensor)] = shared.setdefault(given.alias_set, number)
            made.append(tensor)
        return made

    def number(self, tensor: torch.Tensor) -> int:
        key = _torch.storage_id(tensor)
        if key not in self.ids:
            self.ids[key] = self.fresh()
            self.keep.append(tensor)  # or the id could be used again
        return self.ids[key]

    def fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def run_node(self, node: fx.Node) -> Any:
        facts = self.facts[node] = NodeFacts()
        self.node, self.observer.facts = node, facts
        before = self.count
        if node.op in ("placeholder", "output", "get_attr"):
            facts.value = super().run_node(node)
            for tensor in tensors_in(facts.value):
                self.given.add(self.number(tensor))
                facts.merged |= node.name not in self.saved and self._shares_its_dim(tensor)
        else:
            self.call_memoized(node, facts)
            if isinstance(facts.value, (torch.SymInt, torch.SymFloat, torch.SymBool)):  # read from a tensor's data
                facts.value = _torch.hinted(node.meta.get("example_value"))
        self.numbers.visit(node, facts.value, not tensors_in(facts.value) and self._is_of_other_dims(node))
        self._drop_chance_labels(node, facts.value)
        result = tensors_in(facts.value)
        facts.storages = {self.number(t) for t in result}
        facts.made = {n for n in facts.storages if n >= before}
        if node.op in ("placeholder", "get_attr", "output"):
            return facts.value
        self._refuse_numbers(node, facts)
        self._refuse_choice_by_size(node, facts)
        self._lose_rows(node, facts, result)
        inputs = {self.number(t) for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)}
        touched = facts.reads | facts.writes
        facts.scalar = not result and not touched and node.target not in _REGION and _follows_from_sizes(facts.value)
        facts.view = bool(result) and not touched and all(self.number(t) in inputs for t in result)
        looked_at = set[int]().union(*(self.looks.get(a, ()) for a in node.all_input_nodes))
        if facts.scalar or facts.view:
            self.looks[node] = looked_at | (inputs - self.given if facts.scalar else set())
        else:
            facts.reads |= looked_at
        caller = self._caller(node)
        if self.facts[caller].writes and len(result) == 1:
            facts.returns = next((a for a in caller.all_input_nodes if _same(self.facts[a].value, result[0])), None)
        return facts.value

    def _caller(self, node: fx.Node) -> fx.Node:
        """The node that makes the results of which this one takes an item; else the node itself."""
        while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            if isinstance(self.facts[node.args[0]].value, torch.Tensor):  # a view, and no item
                break
            node = node.args[0]
        return node

    def call_memoized(self, node: fx.Node, facts: NodeFacts) -> None:
        """What is alike is called once: most of a model's layers are."""
        if node.target in _REGION:
            self.memo.clear()  # behind it the same call may do something else
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        try:
            call = FakeCall(node.target, args, kwargs, self.number)
        except NotMemoizable:
            self._call(node, facts)
            return
        if call.key in self.memo:
            entry, known = self.memo[call.key]
            facts.value, facts.reads, facts.writes = entry.replay(call, self.mode, self.fresh)
            facts.refusals, facts.out_variant, facts.copied = dict(known.refusals), known.out_variant, known.copied
        elif self._call(node, facts):
            with contextlib.suppress(NotMemoizable):
                # Only if the call left its arguments as they were.
                if FakeCall(node.target, args, kwargs, self.number).key == call.key:
                    entry = MemoEntry.of(call, facts.value, facts.reads, facts.writes)
                    known = NodeFacts(refusals=dict(facts.refusals), out_variant=facts.out_variant, copied=facts.copied)
                    self.memo[call.key] = (entry, known)

    def _call(self, node: fx.Node, facts: NodeFacts) -> bool:
        """Whether it could be made."""
        whole = _WHOLE.get(node.target)
        try:
            with self.observer:
                if whole is None:
                    facts.value = super().run_node(node)
                    self._note_out(node, facts)
                else:
                    args, kwargs = self.fetch_args_kwargs_from_env(node)
                    func = whole.default if kwargs.get("out") is None else whole.out
                    run = super().run_node
                    facts.value = self.observer.observe(func, args, kwargs, lambda: run(node))
            return True
        except Exception as e:
            shape = self.captured.shapes.get(node)
            if shape is None:
                raise Contradiction(f"{node.format_node()}: {e}") from e
            # Only the batch's probe size can be at fault: the same node ran when the graph was captured.
            if any(s.free_symbols & set(self.values) for s in shape.size) or _is_view_when_captured(node):
                raise Contradiction(f"{node.format_node()}: {e}") from e
            facts.value = _fake(shape, self.values)
            given = {self.number(t) for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)}
            facts.reads |= given
            facts.writes |= given  # for all that is known
            for axis in range(len(self.primes)):
                facts.refusals.setdefault(axis, f"{node.target} could not be analysed ({type(e).__name__})")
            return False

    def _note_out(self, node: fx.Node, facts: NodeFacts) -> None:
        """A call returns what it is given as `out=`. `linalg.matrix_rank` leaves that alone on fake tensors."""
        out = self.fetch_args_kwargs_from_env(node)[1].get("out")
        given = {self.number(t) for t in tensors_in(out)}
        if given <= facts.writes or isinstance(node.target, (_torch.OpOverload, _torch.OpOverloadPacket)):
            return
        facts.value, facts.writes = out, facts.writes | given
        for axis in range(len(self.primes)):
            facts.refusals.setdefault(axis, f"{_called(node)} can't be followed with out=; leave out= away")

    def _drop_chance_labels(self, node: fx.Node, value: Any) -> None:
        """A size may be the batch's by chance: twice its half, which is one less when the batch is odd."""
        shape = self.captured.shapes.get(node)
        if shape is None or not isinstance(value, torch.Tensor) or len(shape.size) != value.dim():
            return
        dims = _dims(value, len(self.primes))
        kept = tuple(
            place if (dim := dim_in(place)) is not None and self._grows_with_rows(shape.size[dim], prime) else None
            for place, prime in zip(dims, self.primes, strict=True)
        )
        if kept != dims:
            label(value, kept)

    def _grows_with_rows(self, size: sympy.Expr, prime: int) -> bool:
        if size.is_Symbol:
            return True
        rows = 2 * prime
        batch = frozenset(s for s, n in self.values.items() if n == rows)
        for values in with_other_sizes(self.values, batch):
            more = {**values, **dict.fromkeys(batch, rows + 1)}
            if concrete(size, values) * (rows + 1) != concrete(size, more) * rows:
                return False
        return True

    def note_reshape(self, func: Any) -> None:
        line = source_line(self.node)
        where = f" at {line}" if line else ""
        self.reshaped = self.reshaped or (
            f"{_name(func)}{where} changes a tensor's shape in place; use a call that returns another tensor instead"
        )

    def _lose_rows(self, node: fx.Node, facts: NodeFacts, result: list[torch.Tensor]) -> None:
        """Records whether position still identifies the rows of a result after the node has run on a part of them."""
        given = [self.facts[a] for a in node.all_input_nodes]
        if facts.refusals:
            self.regrouped |= facts.storages
        self.scrambled |= facts.writes & self.regrouped
        lost = facts.refusals or facts.storages & self.scrambled or any(f.merged for f in given)
        facts.merged = bool(lost) and any(self._shares_its_dim(t) for t in result)
        facts.reduced = any(not any(d is not None for d in _dims(t, len(self.primes))) for t in result) and any(
            f.reduced or any(d is not None for t in tensors_in(f.value) for d in _dims(t, len(self.primes)))
            for f in given
        )

    def _shares_its_dim(self, tensor: torch.Tensor) -> bool:
        """Whether the dim that carries the batch has more than the batch."""
        dims = zip(map(dim_in, _dims(tensor, len(self.primes))), self.primes, strict=True)
        return any(dim is not None and tensor.shape[dim] != 2 * prime for dim, prime in dims)

    def _is_of_other_dims(self, node: fx.Node) -> bool:
        """Whether numbers are read from a tensor with dims that are as large as the batch, and do not carry it: such a
        dim of [B, 2 * B] is not cut."""
        dim = next((n for n in node.args[1:2] if isinstance(n, int)), None)
        for tensor in (t for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)):
            asked = range(tensor.dim()) if dim is None or not tensor.dim() else [dim % tensor.dim()]
            for place, prime in zip(_dims(tensor, len(self.primes)), self.primes, strict=True):
                if any(tensor.shape[d] and not tensor.shape[d] % prime and d != dim_in(place) for d in asked):
                    return True
        return False

    def _refuse_numbers(self, node: fx.Node, facts: NodeFacts) -> None:
        """A batch size that is used as a number, not as a size, can't be recomputed for a part of the batch."""
        args = [a for a in node.all_input_nodes if self.numbers.follows(a)]
        if not args or not (tensors_in(facts.value) or facts.writes):
            return
        facts.sized = True
        name = _called(node)
        sizes_only = name in _SIZED and all(self.numbers.is_multiple(a) for a in args)
        if name in ("full", "new_full"):
            fill = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
            sizes_only = sizes_only and not any(fill is a for a in args)
        if not sizes_only:
            for axis in sorted({axis for a in args for axis in self.numbers.follows(a)}):
                facts.refusals.setdefault(axis, f"{name} uses the size of the batch as a number")

    def _refuse_choice_by_size(self, node: fx.Node, facts: NodeFacts) -> None:
        """Without a dim, `cross` takes the first of size 3: the batch's, in a micro-batch of three rows."""
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if _called(node) != "cross" or dim is not None:
            return
        for axis in range(len(self.primes)):
            facts.refusals.setdefault(axis, "cross without a dim looks for one of size 3; pass dim=")


_WHOLE: dict[Any, Any] = {_torch.LINEAR: torch.ops.aten.linear}
"""Calls to be judged as they stand: aten would flatten all dims but the last, wherever the batch is among them."""

_REGION = {*_torch.REGIONS, *_torch.REGIONS.values(), _torch.SET_GRAD}


class _Observer(_torch.TorchDispatchMode):
    """Sees every aten call of the fake run."""

    supports_higher_order_operators = True

    def __init__(self, run: ProbeRun) -> None:
        super().__init__()
        self.run = run
        self.facts = NodeFacts()
        self.inside = False
        """Inside a call that is judged as a whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        return self.observe(func, args, kwargs, lambda: func(*args, **kwargs))

    def observe(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Makes the call and notes what it does."""
        if _torch.op_name(func) in _RESHAPES and not self._is_seen(args[0]):
            return self._reshape(func, args, kwargs)
        self.inside = True
        try:
            out = call()
        finally:
            self.inside = False
        if getattr(func, "namespace", "") == "prim":  # a question about a tensor's metadata
            return out
        outs = tensors_in(out)
        given = tensors_in((args, kwargs))
        schema = _torch.schema_of(func)
        if schema is None:
            self._touch(given, [] if higher_order_rules.is_known(func) else given)
            self._label(outs, lambda rows, place_of: higher_order_rules.follow(func, args, outs, rows, place_of))
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.facts.writes.add(RNG)
        if torch.Tag.inplace_view in func.tags and _name(func) != "detach_":
            self.run.note_reshape(func)
        written = written_tensors(schema, args, kwargs)
        if not (_torch.is_view(schema) or (not written and self._only_looks(outs, given))):
            self.facts.out_variant, self.facts.copied = _out_variant(func), _name(func) in _COPIES
            self._touch(given, written)
        self._label(outs, partial(follow_rows, func, args, kwargs, outs, merged=True))
        return out

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether others than the node that is being run hold the tensor."""
        given = (self.run.facts[a].value for a in self.run.node.all_input_nodes)
        return any(tensor is t for value in given for t in tensors_in(value))

    def _reshape(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call gives another shape to a tensor of its own (`quantile` does): its rows are where a view's would be."""
        with self:
            view = getattr(torch.ops.aten, _torch.op_name(func).removesuffix("_"))(*args, **kwargs)
        out = func(*args, **kwargs)
        label(out, dims_of(view))
        return out

    def _label(self, outs: list[torch.Tensor], follow: Callable[..., list[Place] | Refusal]) -> None:
        """Notes on which dim each result carries the batch, as `follow(rows, place_of)` says."""
        dims: list[list[Place]] = [[None] * len(self.run.primes) for _ in outs]
        for axis, prime in enumerate(self.run.primes):
            found = follow(2 * prime, partial(_place, axis=axis))
            if isinstance(found, Refusal):
                self.facts.refusals.setdefault(axis, found.reason)
                # What was written in place has its rows where they were.
                found = [_first_multiple(t, prime) if (p := _place(t, axis)) is None else p for t in outs]
            for i, dim in enumerate(found):
                dims[i][axis] = dim
        for tensor, d in zip(outs, dims, strict=True):
            label(tensor, tuple(d))

    def _only_looks(self, outs: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
        """Whether the results are views, whatever the schema says: `unsafe_split` and its kin hide it from autograd."""
        memory = {self.run.number(t) for t in given}
        return bool(outs) and all(self.run.number(t) in memory for t in outs)

    def _touch(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self.facts.reads |= {self.run.number(t) for t in read}
        self.facts.writes |= {self.run.number(t) for t in written}


_RESHAPES = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapdims_", "swapaxes_"}
"""Calls after which a tensor looks as its namesake's view of it would."""
_LOOPS = {"_to_copy", "embedding", "index", "_softmax", "mean", "sum", "native_layer_norm",
          "max_pool2d_with_indices", "avg_pool2d"}  # fmt: skip
_PRODUCTS = {"linear", "mm", "addmm", "bmm"}
_COPIES = {"clone", "_to_copy", "copy", "copy_", "contiguous", "_reshape_copy", "lift_fresh_copy", "alias_copy"}


def _is_view_when_captured(node: fx.Node) -> bool:
    """Whether its result shared memory with what it was given."""
    given = (t for a in node.all_input_nodes for t in tensors_in(a.meta.get("example_value")))
    memory = {_torch.storage_id(t) for t in given if t.layout is torch.strided}
    made = (t for t in tensors_in(node.meta.get("example_value")) if t.layout is torch.strided)
    return any(_torch.storage_id(t) in memory for t in made)


def _called(node: fx.Node) -> str:
    """The name of what a node calls, without an overload's."""
    target: Any = node.target
    return target if isinstance(target, str) else _torch.op_name(target) or getattr(target, "__name__", "")


def _name(func: Any) -> str:
    return _torch.schema_of(func).name.removeprefix("aten::")


def _out_variant(func: Any) -> OutVariant | None:
    name = _name(func)
    if name in _PRODUCTS:
        return "matmul"
    return "pointwise" if torch.Tag.pointwise in func.tags or name in _LOOPS else None


def _follows_from_sizes(value: Any) -> bool:
    kinds = (int, float, bool, torch.dtype, torch.device, torch.SymInt, type(None))
    return all(isinstance(leaf, kinds) for leaf in _torch.tree_leaves(value))


def _same(a: Any, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and _torch.storage_id(a) == _torch.storage_id(b)
        and (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)
    )
