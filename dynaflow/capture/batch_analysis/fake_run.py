"""Runs a captured graph on fake tensors, and derives the facts of each node.

1. call:    run the node under an `Observer`, or replay an identical call (`probe_memo`).
2. rows:    numbers that follow from the batch size, and dims that carry the batch only by chance.
3. storage: which storages the result has, and which of them are new.
4. refuse:  uses of the batch size as a number, and rows that can't be identified any more.
5. kind:    whether the node computes, views, or makes numbers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.aten_calls import Dims, dims_of, label, tensors_in
from dynaflow.capture.batch_analysis.batch_sizes import BatchNumbers, evaluated, with_other_sizes
from dynaflow.capture.batch_analysis.node_facts import NodeFacts
from dynaflow.capture.batch_analysis.observer import Observer, first_multiple
from dynaflow.capture.batch_analysis.probe_memo import FakeCall, MemoEntry, NotMemoizable
from dynaflow.capture.batch_analysis.signatures import dim_in
from dynaflow.capture.captured_graph import CapturedGraph, concrete
from dynaflow.capture.node_info import source_line

_SIZED = {"view", "reshape", "expand", "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty",
          "new_full", "repeat", "unflatten", "broadcast_to", "tile", "_unsafe_view", "resize"}  # fmt: skip
"""Calls with size arguments, which are recomputed for each micro-batch. In other calls a batch size is a number."""

_WHOLE: dict[Any, Any] = {_torch.LINEAR: torch.ops.aten.linear}
"""Calls that are analyzed undecomposed: aten would flatten all dims but the last, the batch among them."""

_REGION = {*_torch.REGIONS, *_torch.REGIONS.values(), _torch.SET_GRAD}


class ProbeFailed(Exception):
    """The graph can't run on fake tensors with this batch size."""


class FakeRun(fx.Interpreter):
    """One run of a graph. `facts` is the result."""

    def __init__(
        self,
        graph: CapturedGraph,
        values: dict[sympy.Symbol, int],
        primes: tuple[int, ...],
        numbers: BatchNumbers,
        mode: Any,
        saved: Mapping[str, Dims],
    ) -> None:
        """`saved`: dims of merged values that the forward pass saved, by name."""
        super().__init__(graph.gm, garbage_collect_values=False)
        self.captured, self.values, self.primes, self.mode = graph, values, primes, mode
        self.batch_numbers, self.saved = numbers, saved
        self.node: fx.Node
        self.facts: dict[fx.Node, NodeFacts] = {}
        self.reshaped: str | None = None
        """A call that changes a tensor's shape in place, which in eager mode all users of the tensor see."""
        self._numbers: dict[int, int] = {}
        """Storage -> its number."""
        self._count = 0
        self._alive: list[torch.Tensor] = []
        """Keeps storages alive, so that their ids are not reused."""
        self._inputs: set[int] = set()
        """Storages of the graph's inputs."""
        self._size_sources: dict[fx.Node, set[int]] = {}
        """Number, or view with a number as argument -> storages, except those of inputs, of the tensors whose sizes it
        is computed from. Users of the node need these tensors."""
        self._regrouped: set[int] = set()
        """Storages with a view that mixes rows."""
        self._scrambled: set[int] = set()
        """Those of them that were written since."""
        self._observer = Observer(self)
        self._memo: dict[Any, tuple[MemoEntry, NodeFacts]] = {}
        """Key of a call -> what it did."""

    def inputs(self) -> list[Any]:
        """Fake arguments, labelled with the dims that carry the batch."""
        made: list[Any] = []
        shared: dict[int, int] = {}
        for given in self.captured.inputs:
            if given.shape is None:
                made.append(evaluated(given.node.meta["example_value"], self.values))
                continue
            tensor = given.shape.empty(self.values)
            if given.node.name in self.saved:
                label(tensor, self.saved[given.node.name])
            elif not given.owned:
                label(tensor, tuple(_batch_dim(tensor, p, given.batch_dim) for p in self.primes))
            number = self.number(tensor)
            if given.alias_set is not None:  # writes to one are seen through the other
                self._numbers[_torch.storage_id(tensor)] = shared.setdefault(given.alias_set, number)
            made.append(tensor)
        return made

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage."""
        key = _torch.storage_id(tensor)
        if key not in self._numbers:
            self._numbers[key] = self.new_number()
            self._alive.append(tensor)
        return self._numbers[key]

    def new_number(self) -> int:
        self._count += 1
        return self._count - 1

    def run_node(self, node: fx.Node) -> Any:
        facts = self.facts[node] = NodeFacts()
        self.node, self._observer.facts = node, facts
        before = self._count
        # 1. call
        if node.op in ("placeholder", "output", "get_attr"):
            facts.value = super().run_node(node)
            for tensor in tensors_in(facts.value):
                self._inputs.add(self.number(tensor))
                facts.merged |= node.name not in self.saved and self._shares_its_dim(tensor)
        else:
            self.call_memoized(node, facts)
            if isinstance(facts.value, (torch.SymInt, torch.SymFloat, torch.SymBool)):  # read from a tensor's data
                facts.value = _torch.hint_of(node.meta.get("example_value"))
        # 2. rows
        self.batch_numbers.visit(node, facts.value, not tensors_in(facts.value) and self._reads_other_dims(node))
        self._drop_chance_labels(node, facts.value)
        # 3. storage
        result = tensors_in(facts.value)
        facts.storages = {self.number(t) for t in result}
        facts.made = {n for n in facts.storages if n >= before}
        if node.op in ("placeholder", "get_attr", "output"):
            return facts.value
        # 4. refuse
        self._refuse_numbers(node, facts)
        self._refuse_choice_by_size(node, facts)
        self._lose_rows(node, facts, result)
        # 5. kind
        self._classify(node, facts, result)
        return facts.value

    # 1. call

    def call_memoized(self, node: fx.Node, facts: NodeFacts) -> None:
        """Runs the node, or replays an identical call: most of a model's layers are equal."""
        if node.target in _REGION:
            self._memo.clear()  # the same call may do something else in another region
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        try:
            call = FakeCall(node.target, args, kwargs, self.number)
        except NotMemoizable:
            self._call(node, facts)
            return
        if call.key in self._memo:
            entry, known = self._memo[call.key]
            facts.value, facts.reads, facts.writes = entry.replay(call, self.mode, self.new_number)
            facts.refusals, facts.out_variant, facts.copied = dict(known.refusals), known.out_variant, known.copied
        elif self._call(node, facts):
            with contextlib.suppress(NotMemoizable):
                # Only if the call left its arguments as they were.
                if FakeCall(node.target, args, kwargs, self.number).key == call.key:
                    entry = MemoEntry.of(call, facts.value, facts.reads, facts.writes)
                    known = NodeFacts(refusals=dict(facts.refusals), out_variant=facts.out_variant, copied=facts.copied)
                    self._memo[call.key] = (entry, known)

    def _call(self, node: fx.Node, facts: NodeFacts) -> bool:
        """Runs the node. If that fails at this batch size only, assumes the worst and returns False."""
        whole = _WHOLE.get(node.target)
        try:
            with self._observer:
                if whole is None:
                    facts.value = super().run_node(node)
                    self._note_out(node, facts)
                else:
                    args, kwargs = self.fetch_args_kwargs_from_env(node)
                    func = whole.default if kwargs.get("out") is None else whole.out
                    call = lambda: super(FakeRun, self).run_node(node)  # noqa: E731
                    facts.value = self._observer.observe(func, args, kwargs, call)
            return True
        except Exception as e:
            shape = self.captured.shapes.get(node)
            if shape is None:
                raise ProbeFailed(f"{node.format_node()}: {e}") from e
            # The node ran in the capture, so the probe's batch size must be at fault.
            if any(s.free_symbols & set(self.values) for s in shape.size) or _is_view_when_captured(node):
                raise ProbeFailed(f"{node.format_node()}: {e}") from e
            facts.value = shape.empty(self.values)
            given = self._storages_of_arguments(node)
            facts.reads |= given
            facts.writes |= given
            facts.refuse(len(self.primes), f"{node.target} could not be analysed ({type(e).__name__})")
            return False

    def _note_out(self, node: fx.Node, facts: NodeFacts) -> None:
        """A call returns its `out=` argument. `linalg.matrix_rank` does not write it on fake tensors."""
        out = self.fetch_args_kwargs_from_env(node)[1].get("out")
        given = {self.number(t) for t in tensors_in(out)}
        if given <= facts.writes or isinstance(node.target, (_torch.OpOverload, _torch.OpOverloadPacket)):
            return
        facts.value, facts.writes = out, facts.writes | given
        facts.refuse(len(self.primes), f"{_called(node)} can't be followed with out=; leave out= away")

    # 2. rows

    def _reads_other_dims(self, node: fx.Node) -> bool:
        """Whether numbers are read from a tensor with dims that have the batch's size and don't carry it: of [B, 2 * B]
        only one dim is cut."""
        dim = next((n for n in node.args[1:2] if isinstance(n, int)), None)
        for tensor in (t for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)):
            asked = range(tensor.dim()) if dim is None or not tensor.dim() else [dim % tensor.dim()]
            for place, prime in zip(self._dims(tensor), self.primes, strict=True):
                if any(tensor.shape[d] and not tensor.shape[d] % prime and d != dim_in(place) for d in asked):
                    return True
        return False

    def _drop_chance_labels(self, node: fx.Node, value: Any) -> None:
        """Removes dims that have the batch's size by chance, such as twice half the batch, which is less if that is
        odd."""
        shape = self.captured.shapes.get(node)
        if shape is None or not isinstance(value, torch.Tensor) or len(shape.size) != value.dim():
            return
        dims = self._dims(value)
        real = tuple(
            place if (dim := dim_in(place)) is not None and self._is_proportional(shape.size[dim], prime) else None
            for place, prime in zip(dims, self.primes, strict=True)
        )
        if real != dims:
            label(value, real)

    def _is_proportional(self, size: sympy.Expr, prime: int) -> bool:
        """Whether a size grows in proportion to the rows."""
        if size.is_Symbol:
            return True
        rows = 2 * prime
        batch = frozenset(s for s, n in self.values.items() if n == rows)
        for values in with_other_sizes(self.values, batch):
            more = {**values, **dict.fromkeys(batch, rows + 1)}
            if concrete(size, values) * (rows + 1) != concrete(size, more) * rows:
                return False
        return True

    def _dims(self, tensor: Any) -> Dims:
        return dims_of(tensor) or (None,) * len(self.primes)

    def _has_rows(self, tensor: Any) -> bool:
        return any(dim is not None for dim in dims_of(tensor))

    def _shares_its_dim(self, tensor: torch.Tensor) -> bool:
        """Whether a dim that carries the batch has more than the batch."""
        dims = zip(map(dim_in, self._dims(tensor)), self.primes, strict=True)
        return any(dim is not None and tensor.shape[dim] != 2 * prime for dim, prime in dims)

    # 4. refuse

    def _refuse_numbers(self, node: fx.Node, facts: NodeFacts) -> None:
        """A batch size that is used as a number, not as a size, can't be recomputed for a part of the batch."""
        args = [a for a in node.all_input_nodes if self.batch_numbers.follows(a)]
        if not args or not (tensors_in(facts.value) or facts.writes):
            return
        facts.sized = True
        name = _called(node)
        sizes_only = name in _SIZED and all(self.batch_numbers.is_multiple(a) for a in args)
        if name in ("full", "new_full"):
            fill = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
            sizes_only = sizes_only and not any(fill is a for a in args)
        if not sizes_only:
            for axis in sorted({axis for a in args for axis in self.batch_numbers.follows(a)}):
                facts.refusals.setdefault(axis, f"{name} uses the size of the batch as a number")

    def _refuse_choice_by_size(self, node: fx.Node, facts: NodeFacts) -> None:
        """Without `dim`, `cross` uses the first dim of size 3, which is the batch in a micro-batch of three rows."""
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if _called(node) == "cross" and dim is None:
            facts.refuse(len(self.primes), "cross without a dim looks for one of size 3; pass dim=")

    def _lose_rows(self, node: fx.Node, facts: NodeFacts, result: list[torch.Tensor]) -> None:
        """Records whether position still identifies the rows of a result after the node has run on a part of them."""
        given = [self.facts[a] for a in node.all_input_nodes]
        if facts.refusals:
            self._regrouped |= facts.storages
        self._scrambled |= facts.writes & self._regrouped
        lost = facts.refusals or facts.storages & self._scrambled or any(f.merged for f in given)
        facts.merged = bool(lost) and any(self._shares_its_dim(t) for t in result)
        facts.reduced = not all(map(self._has_rows, result)) and any(
            f.reduced or any(map(self._has_rows, tensors_in(f.value))) for f in given
        )

    # 5. kind

    def _classify(self, node: fx.Node, facts: NodeFacts, result: list[torch.Tensor]) -> None:
        inputs = self._storages_of_arguments(node)
        accesses = facts.reads | facts.writes
        facts.scalar = not result and not accesses and node.target not in _REGION and _follows_from_sizes(facts.value)
        facts.view = bool(result) and not accesses and all(self.number(t) in inputs for t in result)
        sources = set[int]().union(*(self._size_sources.get(a, ()) for a in node.all_input_nodes))
        if facts.scalar or facts.view:
            self._size_sources[node] = sources | (inputs - self._inputs if facts.scalar else set())
        else:
            facts.reads |= sources
        call = self._call_of_item(node)
        if self.facts[call].writes and len(result) == 1:
            facts.returns = next((a for a in call.all_input_nodes if _is_same(self.facts[a].value, result[0])), None)

    def _storages_of_arguments(self, node: fx.Node) -> set[int]:
        return {self.number(t) for a in node.all_input_nodes for t in tensors_in(self.facts[a].value)}

    def _call_of_item(self, node: fx.Node) -> fx.Node:
        """The call whose results the node takes an item of; any other node itself."""
        while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            if isinstance(self.facts[node.args[0]].value, torch.Tensor):  # it indexes a tensor
                break
            node = node.args[0]
        return node

    # For the observer

    def note_reshape(self, name: str) -> None:
        line = source_line(self.node)
        where = f" at {line}" if line else ""
        self.reshaped = self.reshaped or (
            f"{name}{where} changes a tensor's shape in place; use a call that returns another tensor instead"
        )

    def is_argument(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor itself is an argument of the current node, so that other nodes may use it."""
        given = (self.facts[a].value for a in self.node.all_input_nodes)
        return any(tensor is t for value in given for t in tensors_in(value))


def _batch_dim(tensor: torch.Tensor, prime: int, declared: int | None) -> int | None:
    if declared is not None and tensor.shape[declared] % prime == 0:
        return declared
    return first_multiple(tensor, prime)


def _is_view_when_captured(node: fx.Node) -> bool:
    """Whether the node's result shared memory with its arguments in the capture."""
    given = (t for a in node.all_input_nodes for t in tensors_in(a.meta.get("example_value")))
    memory = {_torch.storage_id(t) for t in given if t.layout is torch.strided}
    made = (t for t in tensors_in(node.meta.get("example_value")) if t.layout is torch.strided)
    return any(_torch.storage_id(t) in memory for t in made)


def _called(node: fx.Node) -> str:
    """The name of what a node calls, without the overload's."""
    target: Any = node.target
    return target if isinstance(target, str) else _torch.op_name(target) or getattr(target, "__name__", "")


def _follows_from_sizes(value: Any) -> bool:
    kinds = (int, float, bool, torch.dtype, torch.device, torch.SymInt, type(None))
    return all(isinstance(leaf, kinds) for leaf in _torch.tree_leaves(value))


def _is_same(a: Any, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and _torch.storage_id(a) == _torch.storage_id(b)
        and (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)
    )
