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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.alike import Apart, Call, Told
from dynaflow.capture.calls import RNG, Dims, dims_of, is_view, label, tensors_in, written_tensors
from dynaflow.capture.graph import CapturedGraph, Shape
from dynaflow.capture.rows import Refusal, follow_rows

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


End = Literal["pointwise", "matmul"]
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
    """An in-place node's result is this argument itself."""
    sized: bool = False
    """A number that follows from the batch's size goes in."""
    end: End | None = None
    """How the result comes about, where that allows to write it straight into memory given from outside."""
    copied: bool = False
    """The result is a plain copy: for other sizes the same call (`reshape`, `to`) may be a view."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """The facts of all nodes, for batch spaces given by their symbols (tokens or rows first, then requests)."""

    facts: dict[fx.Node, NodeFacts]
    spaces: tuple[frozenset[sympy.Symbol], ...]

    def dims(self, node: fx.Node) -> Dims:
        """On which dim the node's (tensor) result carries each space."""
        return _dims(self.facts[node].value, len(self.spaces))


def probe(graph: CapturedGraph, spaces: tuple[frozenset[sympy.Symbol], ...]) -> Probe:
    """Runs the graph on fake tensors, once, with sizes that give the batch away."""
    failure: Exception | None = None
    # In pairs, the likeliest first: rare among sizes, and small enough for products of several.
    for first in range(0, len(PRIMES), 2):
        primes = PRIMES[first : first + len(spaces)]
        values = dict(graph.hints)
        values |= {s: 2 * p for p, space in zip(primes, spaces, strict=True) for s in space}
        if _clashes(graph, values, primes, spaces):
            continue
        try:
            return Probe(facts=_run(graph, values, primes), spaces=spaces)
        except Contradiction as e:  # the model bounds its batch: try a smaller one
            failure = e
    raise Contradiction(str(failure))


class Contradiction(Exception):
    """No fake run of the graph was possible with the batch at this size."""


def _clashes(
    graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...], spaces: tuple[Any, ...]
) -> bool:
    batch = frozenset().union(*spaces) if spaces else frozenset()
    sizes = {
        concrete(size, values)
        for shape in graph.shapes.values()
        for size in shape.size
        if not size.free_symbols & batch
    }
    return any(size and size % p == 0 for size in sizes for p in primes)


def concrete(expr: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    return int(expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols if s in values}))


def _fake(shape: Shape, values: dict[sympy.Symbol, int]) -> torch.Tensor:
    size = [concrete(s, values) for s in shape.size]
    stride = [concrete(s, values) for s in shape.stride]
    return torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)


def _dims(tensor: Any, spaces: int) -> Dims:
    return dims_of(tensor) or (None,) * spaces


def _first_multiple(tensor: torch.Tensor, prime: int) -> int | None:
    return next((d for d, size in enumerate(tensor.shape) if size and size % prime == 0), None)


def _carried(tensor: torch.Tensor, prime: int, declared: int | None) -> int | None:
    if declared is not None and tensor.shape[declared] % prime == 0:
        return declared
    return _first_multiple(tensor, prime)


def _run(graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...]) -> dict[fx.Node, NodeFacts]:
    grad = torch.is_grad_enabled()
    try:
        # In inference mode operators would come undecomposed: reshape for view, linear for addmm.
        with torch.inference_mode(False), _torch.concrete_fake_mode() as mode, torch.no_grad():
            run = _Run(graph, values, primes, mode)
            run.run(*run.inputs())
            return run.facts
    finally:
        torch.set_grad_enabled(grad)  # the graph may hold nodes that switch it


class _Run(fx.Interpreter):
    def __init__(
        self, graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...], mode: Any
    ) -> None:
        super().__init__(graph.gm, garbage_collect_values=False)
        self.captured, self.values, self.primes, self.mode = graph, values, primes, mode
        self.facts: dict[fx.Node, NodeFacts] = {}
        self.ids: dict[int, int] = {}
        self.count = 0
        """Of the numbers that were given to storages."""
        self.keep: list[torch.Tensor] = []
        self.tainted: set[fx.Node] = set()
        self.observer = _Observer(self)
        self.told: dict[Any, tuple[Told, NodeFacts]] = {}
        """By key of a call: what it did."""

    def inputs(self) -> list[Any]:
        made: list[Any] = []
        shared: dict[int, int] = {}
        for given in self.captured.inputs:
            if given.shape is None:
                known = given.symbol is not None
                made.append(concrete(given.symbol, self.values) if known else given.node.meta["example_value"])
                continue
            tensor = _fake(given.shape, self.values)
            if not given.owned:
                label(tensor, tuple(_carried(tensor, p, given.batch_dim) for p in self.primes))
            number = self.number(tensor)
            if given.storage is not None:  # two inputs over one storage: writes to one are seen through the other
                self.ids[_torch.storage_id(tensor)] = shared.setdefault(given.storage, number)
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
        self.observer.facts = facts
        before = self.count
        if node.op in ("placeholder", "output", "get_attr"):
            facts.value = super().run_node(node)
            for tensor in tensors_in(facts.value):
                self.number(tensor)
        else:
            self._call_or_tell(node, facts)
            if isinstance(facts.value, (torch.SymInt, torch.SymFloat, torch.SymBool)):  # read from a tensor's data
                facts.value = _torch.hinted(node.meta.get("example_value"))
        self._drop_chance_labels(node, facts.value)
        result = tensors_in(facts.value)
        facts.storages = {self.number(t) for t in result}
        facts.made = {n for n in facts.storages if n >= before}
        if node.op in ("placeholder", "get_attr", "output"):
            return facts.value
        self._taint(node, facts)
        inputs = {self.number(t) for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)}
        touched = facts.reads | facts.writes
        facts.scalar = not result and not touched and node.target not in _REGION and _follows_from_sizes(facts.value)
        facts.view = bool(result) and not touched and all(self.number(t) in inputs for t in result)
        if facts.writes and len(result) == 1:
            facts.returns = next((a for a in node.all_input_nodes if _same(self.facts[a].value, result[0])), None)
        return facts.value

    def _call_or_tell(self, node: fx.Node, facts: NodeFacts) -> None:
        """What is alike is called once: most of a model's layers are."""
        if node.target in _REGION:
            self.told.clear()  # behind it the same call may do something else
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        try:
            call = Call(node.target, args, kwargs, self.number)
        except Apart:
            self._call(node, facts)
            return
        if call.key in self.told:
            told, known = self.told[call.key]
            facts.value, facts.reads, facts.writes = told.again(call, self.mode, self.fresh)
            facts.refusals, facts.end, facts.copied = dict(known.refusals), known.end, known.copied
        elif self._call(node, facts):
            with contextlib.suppress(Apart):
                if Call(node.target, args, kwargs, self.number).key == call.key:  # else it has changed its arguments
                    told = Told.of(call, facts.value, facts.reads, facts.writes)
                    known = NodeFacts(refusals=dict(facts.refusals), end=facts.end, copied=facts.copied)
                    self.told[call.key] = (told, known)

    def _call(self, node: fx.Node, facts: NodeFacts) -> bool:
        """Whether it could be made."""
        whole = _WHOLE.get(node.target)
        try:
            with self.observer:
                if whole is None:
                    facts.value = super().run_node(node)
                else:
                    args, kwargs = self.fetch_args_kwargs_from_env(node)
                    facts.value = self.observer.observe(whole, args, kwargs, lambda: super(_Run, self).run_node(node))
            return True
        except Exception as e:
            shape = self.captured.shapes.get(node)
            if shape is None:
                raise Contradiction(f"{node.format_node()}: {e}") from e
            # Only the batch's probe size can be at fault: the same node ran when the graph was captured.
            if any(s.free_symbols & set(self.values) for s in shape.size):
                raise Contradiction(f"{node.format_node()}: {e}") from e
            facts.value = _fake(shape, self.values)
            facts.reads |= {self.number(t) for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)}
            for space in range(len(self.primes)):
                facts.refusals.setdefault(space, f"{node.target} could not be analysed ({type(e).__name__})")
            return False

    def _drop_chance_labels(self, node: fx.Node, value: Any) -> None:
        """A size may be the batch's by chance: twice its half, which is one less when the batch is odd."""
        shape = self.captured.shapes.get(node)
        if shape is None or not isinstance(value, torch.Tensor):
            return
        dims = _dims(value, len(self.primes))
        kept = tuple(
            dim if dim is not None and self._grows_with_rows(shape.size[dim], prime) else None
            for dim, prime in zip(dims, self.primes, strict=True)
        )
        if kept != dims:
            label(value, kept)

    def _grows_with_rows(self, size: sympy.Expr, prime: int) -> bool:
        if size.is_Symbol:
            return True
        rows = 2 * prime
        more = {s: n + 1 if n == rows else n for s, n in self.values.items()}
        return concrete(size, self.values) * (rows + 1) == concrete(size, more) * rows

    def _taint(self, node: fx.Node, facts: NodeFacts) -> None:
        """A batch size that is used as a number, not as a size, can't be recomputed for a part of the batch."""
        numbers = [v for v in _torch.tree_leaves(facts.value) if isinstance(v, int) and not isinstance(v, bool)]
        args = [a for a in node.all_input_nodes if a in self.tainted or _is_batch(self.facts[a].value, self.primes)]
        if any(_is_batch(v, self.primes) for v in numbers) or (args and not tensors_in(facts.value)):
            self.tainted.add(node)
        if not (args and tensors_in(facts.value)):
            return
        facts.sized = True
        name = _called(node)
        sizes_only = name in _SIZED and all(_is_batch(self.facts[a].value, self.primes) for a in args)
        if name in ("full", "new_full"):
            fill = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
            sizes_only = sizes_only and not any(fill is a for a in args)
        if not sizes_only:
            for space, prime in enumerate(self.primes):
                if any(a in self.tainted or _is_batch(self.facts[a].value, (prime,)) for a in args):
                    facts.refusals.setdefault(space, f"{name} uses the size of the batch as a number")


_WHOLE: dict[Any, Any] = {_torch.LINEAR: torch.ops.aten.linear.default}
"""Calls to be judged as they stand: aten would flatten all dims but the last, wherever the batch is among them."""

_REGION = {*_torch.REGIONS, *_torch.REGIONS.values(), _torch.SET_GRAD}


class _Observer(_torch.TorchDispatchMode):
    """Sees every aten call of the fake run."""

    supports_higher_order_operators = True

    def __init__(self, run: _Run) -> None:
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
        self.inside = True
        try:
            out = call()
        finally:
            self.inside = False
        if getattr(func, "namespace", "") == "prim":  # a question about a tensor's metadata
            return out
        outs = tensors_in(out)
        spaces = len(self.run.primes)
        given = tensors_in((args, kwargs))
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator: nothing is known of its inside
            self._touch(given, given)
            self._refuse(f"{func} is a higher-order operator, which has no rule")
            self._label_by_size(outs)
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.facts.writes.add(RNG)
        if not is_view(schema):
            if _name(func) != "_unsafe_view":  # a view in all but its schema
                self.facts.end, self.facts.copied = _end(func), _name(func) in _COPIES
            self._touch(given, written_tensors(schema, args, kwargs))
        dims: list[list[int | None]] = [[None] * spaces for _ in outs]
        for space, prime in enumerate(self.run.primes):
            found = follow_rows(func, args, kwargs, outs, 2 * prime, lambda t, s=space: _dims(t, spaces)[s])  # type: ignore[misc]
            if isinstance(found, Refusal):
                self.facts.refusals.setdefault(space, found.reason)
                found = [_first_multiple(t, prime) for t in outs]
            for i, dim in enumerate(found):
                dims[i][space] = dim
        for tensor, d in zip(outs, dims, strict=True):
            label(tensor, tuple(d))
        return out

    def _touch(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self.facts.reads |= {self.run.number(t) for t in read}
        self.facts.writes |= {self.run.number(t) for t in written}

    def _refuse(self, reason: str) -> None:
        for space in range(len(self.run.primes)):
            self.facts.refusals.setdefault(space, reason)

    def _label_by_size(self, outs: list[torch.Tensor]) -> None:
        for t in outs:
            label(t, tuple(_first_multiple(t, p) for p in self.run.primes))


_LOOPS = {"_to_copy", "embedding", "index", "_softmax", "mean", "sum", "native_layer_norm",
          "max_pool2d_with_indices", "avg_pool2d"}  # fmt: skip
_PRODUCTS = {"linear", "mm", "addmm", "bmm"}
_COPIES = {"clone", "_to_copy", "copy", "copy_", "contiguous", "_reshape_copy", "lift_fresh_copy", "alias_copy"}


def _called(node: fx.Node) -> str:
    """The name of what a node calls, without an overload's."""
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "_opname", getattr(target, "__name__", ""))


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _end(func: Any) -> End | None:
    name = _name(func)
    if name in _PRODUCTS:
        return "matmul"
    return "pointwise" if torch.Tag.pointwise in func.tags or name in _LOOPS else None


def _follows_from_sizes(value: Any) -> bool:
    kinds = (int, float, bool, torch.dtype, torch.device, torch.SymInt, type(None))
    return all(isinstance(leaf, kinds) for leaf in _torch.tree_leaves(value))


def _is_batch(value: Any, primes: tuple[int, ...]) -> bool:
    leaves = [v for v in _torch.tree_leaves(value) if isinstance(v, int) and not isinstance(v, bool)]
    return any(v and v % p == 0 for v in leaves for p in primes)


def _same(a: Any, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and _torch.storage_id(a) == _torch.storage_id(b)
        and (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)
    )
