"""The graphs that AOTAutograd makes of a captured model, read like one that Dynamo made: forward and backward, or the
one of a model that wants no gradients, but has nodes that can't be looked at one by one.

AOTAutograd traces both passes at once, decomposes them as Inductor wants it, and decides what forward saves for
backward and what is computed again. Either graph then has operators, plans and lanes of its own. Nodes of the
backward graph know the modules whose forward they belong to, so operators have the same names in both.
"""

from __future__ import annotations

import math
import operator
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.annotations import marks_of
from dynaflow.capture.captured_graph import BatchDims, CapturedGraph, Phase, copied, input_name
from dynaflow.capture.node_info import ORIGIN, module_stack, target_names
from dynaflow.capture.optimizer_ops import Updates
from dynaflow.capture.optimizer_steps import Updating, base
from dynaflow.core.memory_layout import overlaps_itself
from dynaflow.errors import DynaFlowError


def wants_gradients(gm: fx.GraphModule) -> bool:
    """Whether a backward pass may follow."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    return torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


def returns_gradients(gm: fx.GraphModule) -> bool:
    """Whether results have a backward pass of their own, though no gradients are wanted of the graph: a region of it
    turns them on."""
    (output,) = gm.graph.find_nodes(op="output")
    examples = (node.meta.get("example_value") for node in output.all_input_nodes if node.op != "placeholder")
    return any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


def declares_regions(gm: fx.GraphModule, rules: Sequence[Any]) -> bool:
    """Whether a mark or a rule says that each row is treated by itself."""
    marked = any(splittable for node in gm.graph.nodes for _, (_, _, splittable) in marks_of(node))
    return marked or any(getattr(rule, "splittable", None) for rule in rules)


def strange_parts(gm: fx.GraphModule) -> str | None:
    """What keeps a graph from being looked at node by node until AOTAutograd has taken it apart, if anything does."""
    if _torch.has_transforms(gm):
        return "transforms of torch.func"
    return "nested tensors" if any(map(_is_nested, gm.graph.nodes)) else None


def takes_nested(gm: fx.GraphModule) -> bool:
    return any(map(_is_nested, gm.graph.find_nodes(op="placeholder")))


def _is_nested(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.is_nested


class Mistraced(Exception):
    """AOTAutograd has made something else of the graph."""


class Passes:
    """The two passes of one captured model."""

    def __init__(
        self,
        gm: fx.GraphModule,
        parameters: Sequence[str],
        declared: BatchDims | None,
        offload_saved: int | None,
        offload_most: int | None,
        updates: Updates | None,
        *,
        training: bool,
        merged_calls: bool,
    ) -> None:
        self._training, self._merged_calls = training, merged_calls
        self._parameters, self._declared = parameters, declared
        self._at_least, self._most = offload_saved, offload_most
        self._partial = _torch.is_part(gm)
        self._inputs = [fx.Graph().node_copy(node) for node in gm.graph.find_nodes(op="placeholder")]
        """Of the graph that Dynamo made, which goes."""
        self._calls = {sources[-1][0]: n.target for n in gm.graph.nodes if (sources := n.meta.get("source_fn_stack"))}
        self._memory = Memory.of(gm)
        self._first, self._bases = 0, dict[int, int]()
        """Which result of the forward pass is the first of the graph's; and which is there for which to be made of."""
        self._forward: CapturedGraph | None = None
        self._stored: dict[str, fx.Node] = {}
        """What the forward pass stores in host memory, by the name that it has in both passes."""
        self._fresh: list[int] = []
        """Results of the forward pass that are views of nothing that the caller knows."""
        self._needs = _results_of_inputs(gm)
        """For each input: which results depend on it."""
        self._own_gradients: list[int] = []
        """Of which results the backward pass gets the gradients."""
        self._several = any(map(_has_several_gradients, gm.graph.nodes))
        """Whether a user's own function gets zeros for the gradients of unused results."""
        self._updating: Updating | None = None
        if updates is not None and training:
            real = [_torch.graph_input(node)[2] for node in self._inputs]
            if any(_torch.wrapped_tensors(tensor) not in (None, 1) for tensor in real):
                raise DynaFlowError(
                    "optimizer=: a weight is made of several tensors",
                    advice="compile without optimizer=, and let the optimizer step by itself",
                )
            # AOTAutograd gives them these names, in both passes.
            named = {f"primals_{i}": tensor for i, tensor in enumerate(real, 1)}
            self._updating = Updating(updates, named, self._partial)

    def read(self, gm: fx.GraphModule, backward: bool) -> CapturedGraph:
        """One of the passes. The forward pass comes first."""
        gm = copied(gm)
        for node in gm.graph.nodes:
            self._name_as_dynamo_does(node)
            if backward and node.op == "call_function" and not node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = _around(node)
        if not backward:
            self._check_saved(gm)
            _check_together(gm, self._memory)
            _keep_apart(gm, self._memory)
            (output,) = gm.graph.find_nodes(op="output")
            results = output.args[0]
            self._fresh = [i for i in _torch.fresh_results() if _is_made(results[i])]
            self._own_gradients = _torch.results_of_gradients()
            self._first, self._bases = _torch.first_result(), _torch.bases_of_results()
        if self._at_least is not None and self._training:
            self._fetch(gm) if backward else self._store(gm, self._at_least)
        if self._updating is not None:
            self._updating.add_to_backward(gm) if backward else self._updating.look_at_forward(gm)
        rows = self._forward.batch_symbols if backward and self._forward is not None else None
        passes: Phase = "backward" if backward else "forward"
        graph = CapturedGraph(
            gm, self._parameters, self._declared if rows is None else None,
            phase=passes if self._training else "inference", partial=self._partial, batch_symbols=rows,
            saved=_saved_alone(gm) if self._training and not backward else frozenset(),
            forward=self._forward if backward else None, merged_calls=self._merged_calls,
        )  # fmt: skip
        for given in graph.inputs:
            given.node.meta.pop(_torch.GIVEN, None)  # it would keep the tensor
        if not backward:
            self._forward = graph
        return graph

    def without_gradients(self) -> list[int]:
        """The results that have none in eager torch. AOTAutograd gives some to copies of what has some later on."""
        return [i for i, wanted in enumerate(self._memory.gradients) if wanted is False]

    def may_leave_some_unused(self) -> bool:
        """Whether a backward pass may come from some results and not from others."""
        return len(self._own_gradients) > 1

    def call(
        self, gm: fx.GraphModule, backward: bool, make: Callable[[fx.GraphModule, bool], _torch.Boxed]
    ) -> _torch.Boxed:
        """What runs a pass, as AOTAutograd calls it. `make` returns what runs a graph."""
        if not backward:
            run = make(gm, False)
            return _without_bases(run, self._fresh) if self._fresh else run

        def made(graph: fx.GraphModule) -> _torch.Boxed:
            run = make(graph, True)
            return run if self._updating is None else self._updating.call(run)

        return self._unless_unused(gm, made) if self.may_leave_some_unused() else made(gm)

    def _made_of(self, gm: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
        """For each node of the backward graph: the places of the results whose gradients it is made of."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        given = [node for node in placeholders if node.name.startswith("tangents_")]  # AOTAutograd's name for them
        if len(given) != len(self._own_gradients):
            return {}  # some are made of several tensors
        known = dict.fromkeys(placeholders, frozenset[int]())
        known |= {node: frozenset({place}) for node, place in zip(given, self._own_gradients, strict=True)}
        for node in gm.graph.nodes:
            if node not in known:
                known[node] = frozenset().union(*(known[n] for n in node.all_input_nodes))
        return known

    def _needed_by_gradients(self, gm: fx.GraphModule, known: Mapping[fx.Node, frozenset[int]]) -> list[frozenset[int]]:
        """For each result of the backward graph: the places of results without whose gradients it is None. Beside what
        it is made of those are results that depend on the input: gradients of zeros need not show."""
        (output,) = gm.graph.find_nodes(op="output")
        if not known or len(output.args[0]) != len(self._needs):
            return [frozenset()] * len(output.args[0])
        made_of = [known[n] if isinstance(n, fx.Node) else frozenset() for n in output.args[0]]
        seen = [self._bases.get(place, place) - self._first for place in self._own_gradients]
        return [  # less than 0: an input that is written
            places | {own for own, i in zip(self._own_gradients, seen, strict=True) if i < 0 or i in needs}
            for places, needs in zip(made_of, self._needs, strict=True)
        ]

    def _unless_unused(self, gm: fx.GraphModule, make: Callable[[fx.GraphModule], _torch.Boxed]) -> _torch.Boxed:
        """Runs the backward graph; where results are unused, one without what is made of their gradients alone."""
        known = self._made_of(gm)
        needed = self._needed_by_gradients(gm, known)
        run = make(gm)
        runs = {frozenset[int](): run}

        def call(args: list[Any]) -> Any:
            unused = _torch.unused_results()
            if unused not in runs:
                less = self._without(gm, unused, known, needed)
                runs[unused] = run if less is None else make(less)
            return runs[unused](args)

        return call

    def _without(
        self,
        gm: fx.GraphModule,
        unused: frozenset[int],
        known: Mapping[fx.Node, frozenset[int]],
        needed: Sequence[frozenset[int]],
    ) -> fx.GraphModule | None:
        """The backward graph as eager torch has it where results are unused: what is made of their gradients alone
        is not computed. AOTAutograd (seen on 2.11 and 2.13) computes it of zeros, and 0 / 0 is nan. So gradients that
        need only such results are None, and others that it would be added to get zeros. None if nothing changes."""
        less = copied(gm)
        (output,) = less.graph.find_nodes(op="output")
        results = tuple(None if n and n <= unused else r for n, r in zip(needed, output.args[0], strict=True))
        changed = results != tuple(output.args[0])
        output.args = (results,)
        zeros = {n.name for n, places in known.items() if places and places <= unused and n.op != "placeholder"}
        for node in [n for n in less.graph.nodes if n.name in zeros and not self._several]:
            others = [user for user in node.users if user.name not in zeros]
            if others and isinstance(node.meta.get("val"), torch.Tensor):
                with less.graph.inserting_after(node):
                    zero = less.graph.call_function(torch.ops.aten.zeros_like.default, (node,))
                zero.meta, changed = dict(node.meta), True
                for user in others:
                    user.replace_input_with(node, zero)
        less.graph.eliminate_dead_code()
        less.recompile()
        return less if changed else None

    def _check_saved(self, gm: fx.GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        for node in output.args[0][_torch.saved_results()]:
            if not isinstance(node, fx.Node):
                continue
            made_of = base(node)
            if _is_written(made_of):
                # AOTAutograd (seen on 2.13) saves what the forward pass has written by then.
                name = input_name(_torch.graph_input(made_of)[0], self._parameters)
                raise Mistraced(f"the backward pass needs the input {name!r} as it is before the model writes to it")

    def _store(self, gm: fx.GraphModule, at_least: int) -> None:
        """What the backward pass gets, and the caller does not, goes to the host: if it is that many bytes."""
        (output,) = gm.graph.find_nodes(op="output")
        results, saved = list(output.args[0]), range(len(output.args[0]))[_torch.saved_results()]
        sizes = {
            node: size
            for node in _saved_alone(gm)
            if base(node).op == "call_function"  # not a view of a weight
            if (size := _bytes(node.meta["val"])) >= max(at_least, 1)
        }
        for node in _chosen(gm, sizes, math.inf if self._most is None else self._most):
            with gm.graph.inserting_after(node):
                stored = gm.graph.call_function(torch.ops.dynaflow.store.default, (node,))
            stored.meta = {**node.meta, "example_value": _on_host(node.meta["val"])}
            results = [stored if i in saved and result is node else result for i, result in enumerate(results)]
            self._stored[node.name] = node
        output.args = (tuple(results),)
        gm.recompile()

    def _fetch(self, gm: fx.GraphModule) -> None:
        """And comes back where it is used first."""
        for node in gm.graph.find_nodes(op="placeholder"):
            made = self._stored.get(node.name)
            if made is None or not node.users:
                continue
            value = node.meta["val"]
            with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n in node.users)):
                fetched = gm.graph.call_function(torch.ops.dynaflow.fetch.default, (node, value.device))
            fetched.meta = {**made.meta, "example_value": value}
            node.replace_all_uses_with(fetched, lambda user, own=fetched: user is not own)
            node.meta["example_value"] = _on_host(value)
        gm.recompile()

    def _name_as_dynamo_does(self, node: fx.Node) -> None:
        meta = node.meta
        if "val" in meta:
            meta["example_value"] = meta["val"]
        if not meta.get("nn_module_stack") and meta.get("fwd_nn_module_stack"):
            meta["nn_module_stack"] = meta["fwd_nn_module_stack"]
        sources = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack")
        if sources and (call := sources[-1][0]) in self._calls:
            meta[ORIGIN] = (call, self._calls[call])
        if node.op == "placeholder" and (given := _torch.traced_input(node)) is not None:
            index, attributes = given
            if attributes:
                meta[_torch.GIVEN] = self._inside(self._inputs[index], attributes)
            elif "grapharg" in self._inputs[index].meta:
                meta["grapharg"] = self._inputs[index].meta["grapharg"]

    def _inside(self, node: fx.Node, attributes: Sequence[str]) -> tuple[str, bool, Any]:
        """As `graph_input` has it, of a tensor that another one wraps."""
        name, owned, real = _torch.graph_input(node)
        owned = owned or isinstance(real, torch.nn.Parameter)
        return ".".join((name, *attributes)), owned, reduce(lambda t, name: getattr(t, name, None), attributes, real)


@dataclass(frozen=True, slots=True)
class Memory:
    """Which tensors of a graph share memory in eager torch: equal numbers do. None for what is no tensor."""

    given: frozenset[int | None]
    results: tuple[int | None, ...]
    gradients: tuple[bool | None, ...]
    """Whether results have some. None for what can't."""

    @staticmethod
    def of(gm: fx.GraphModule) -> Memory:
        (output,) = gm.graph.find_nodes(op="output")
        given = frozenset(map(_memory, gm.graph.find_nodes(op="placeholder")))
        results = output.args[0]
        return Memory(given=given, results=tuple(map(_memory, results)), gradients=tuple(map(_has_gradient, results)))


def untraceable_views(gm: fx.GraphModule) -> str | None:
    """Why AOTAutograd (seen on 2.11 and 2.13) would make something else of tensors that share memory, if it would. It
    makes results that are views anew from what they are views of, and mistakes what of it has gradients and where it
    starts."""
    for node in gm.graph.nodes:
        if node.op.startswith("call") and (name := target_names(node)[0]) in _torch.SHAPE_CHANGES:
            return f"{name} changes a tensor's shape in place"
        if node.op.startswith("call") and name in _SECRET_VIEWS:
            return f"{name} makes views that torch does not take for such"
        if node.op.startswith("call") and name == "unfold" and node.meta["example_value"]._version:
            return "a view by unfold is written"  # what lies between its windows would become zero
    (output,) = gm.graph.find_nodes(op="output")
    inputs: dict[int, list[torch.Tensor]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (memory := _memory(node)) is not None:
            inputs.setdefault(memory, []).append(node.meta["example_value"])
    results: dict[int, list[torch.Tensor]] = {}
    for node in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        if (memory := _memory(node)) is not None:
            results.setdefault(memory, []).append(node.meta["example_value"])
    unseen = _viewed_without_gradients(gm)
    for memory, views in results.items():
        given = inputs.get(memory, [])
        if memory in unseen:
            return "a result shares memory with a view that was taken without gradients"
        if len({t.requires_grad for t in (*views, *given)}) > 1:
            return "results share memory with one another or with an input, and only some have gradients"
        if any(t._version for t in given) and not _is_counter(given, views, inputs):
            return "a result shares memory with an input that is written"
        if any(t.is_complex() or t.is_neg() for t in given):
            return "a result shares memory with an input of complex numbers, or a part of them"
        if not all(isinstance(_torch.hinted(n), int) for t in views for n in (*t.size(), *t.stride())):
            return "the size of a result depends on data"
        if any(map(_is_made_of_windows, views)):
            return "a result is made of windows that overlap"
    return None


_SECRET_VIEWS = {"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}


def _is_counter(given: list[torch.Tensor], views: list[torch.Tensor], inputs: Mapping[int, list[torch.Tensor]]) -> bool:
    """Whether the results are an input itself, without gradients, as after `self.calls += 1`. Where another input that
    is written has gradients, AOTAutograd (2.11 and 2.13) returns it in the place of another result."""
    if len({id(t) for t in (*given, *views)}) > 1 or views[0].requires_grad:
        return False
    return not any(t._version and t.requires_grad for tensors in inputs.values() for t in tensors)


def _viewed_without_gradients(gm: fx.GraphModule) -> set[int | None]:
    """The memory of views that were taken where gradients are off: they say that they have some, and have none."""
    found, enabled = set[int | None](), True
    for node in gm.graph.nodes:
        if node.target is _torch.SET_GRAD:
            enabled = bool(node.args[0])
        elif not enabled and (memory := _memory(node)) is not None and node.meta["example_value"].requires_grad:
            found.add(memory)
    return found


def _is_made_of_windows(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, other than by a stride of 0."""
    size, stride = ([_torch.hinted(n) for n in ns] for ns in (tensor.size(), tensor.stride()))
    return overlaps_itself([n if s else 1 for n, s in zip(size, stride, strict=True)], stride)


def returns_or_writes(gm: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the graph does so with what shares memory with these."""
    if any(tensor._version for tensor in tensors):
        return True
    return bool({_torch.storage_id(tensor) for tensor in tensors} & set(Memory.of(gm).results))


def views_returned(gm: fx.GraphModule) -> set[fx.Node]:
    """The inputs that share memory with a result."""
    returned = set(Memory.of(gm).results) - {None}
    return {node for node in gm.graph.find_nodes(op="placeholder") if _memory(node) in returned}


def _has_gradient(node: Any) -> bool | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    return value.requires_grad


def _memory(node: Any) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return _torch.storage_id(value)
    except NotImplementedError:  # inside of a transform of torch.func
        return None


def _check_together(gm: fx.GraphModule, eager: Memory) -> None:
    """Results that share memory in eager torch must do so here. AOTAutograd (seen on 2.13) copies what is a view by
    nothing but its memory, as the parts of `unsafe_split` are."""
    (output,) = gm.graph.find_nodes(op="output")
    first, made_of = _torch.first_result(), dict[int, Any]()
    for i in _torch.fresh_results():
        node, own = output.args[0][i], eager.results[i - first]
        if own is None or not isinstance(node, fx.Node):
            continue
        shares_input = own in eager.given and base(node).op != "placeholder"
        if shares_input or made_of.setdefault(own, _made_of(node)) != _made_of(node):
            other = "an input" if shares_input else "another"
            raise Mistraced(f"result {i - first} shares memory with {other}, but is no view of it to torch")


def _results_of_inputs(gm: fx.GraphModule) -> list[set[int]]:
    """For each input: which results autograd would go back to it from, be it with a gradient of zeros."""
    placeholders, needs, bases = gm.graph.find_nodes(op="placeholder"), dict[fx.Node, set[int]](), _bases(gm)
    unrecorded = _without_autograd(gm)
    later: dict[fx.Node, set[int]] = {}
    """Which results are made of a base after the node that is looked at: so of what the node writes there."""

    def note(node: fx.Node, results: set[int]) -> None:
        needs.setdefault(node, set()).update(results)
        later.setdefault(bases[node], set()).update(results)

    (output,) = gm.graph.find_nodes(op="output")
    for i, result in enumerate(output.args[0]):
        if isinstance(result, fx.Node):
            note(result, {i})
    for node in reversed(gm.graph.nodes):
        if node in unrecorded:
            continue
        made = node.args[0] if node.target is operator.setitem else node
        value = made.meta.get("example_value")
        if isinstance(value, (tuple, list)) and isinstance(node.target, types.FunctionType):
            continue  # of functions in Python, as nn.MultiheadAttention's, not all results depend on all that they get
        values = _torch.tree_leaves(value)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            results = set(needs.get(node, ()))
            if bases[made] is not node:  # a view, or a write
                results |= later.get(bases[made], set())
            for used in node.all_input_nodes:
                note(used, results)
    return [needs.get(node, set()) for node in placeholders]


def _without_autograd(gm: fx.GraphModule) -> set[fx.Node]:
    """What runs while gradients are off. A view made there of something with gradients may say that it has some: they
    lead nowhere."""
    found, recorded = set[fx.Node](), True
    for node in gm.graph.nodes:
        if node.target is _torch.SET_GRAD:
            recorded = bool(node.args[0])
        elif not recorded:
            found.add(node)
    return found


def _bases(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """What a node looks at or writes, to the end; itself, if it makes memory of its own. Inputs are apart."""
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        memory, given = _memory(node), list(node.all_input_nodes)
        if node.target is operator.getitem:  # one of several views
            given += node.args[0].all_input_nodes
        same = (used for used in given if memory is not None and _memory(used) == memory)
        found[node] = found.get(next(same, node), node)
    return found


def _is_made(node: Any) -> bool:
    """Whether it is a tensor of the pass's own."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and base(node).op != "placeholder"


def _without_bases(run: _torch.Boxed, places: Sequence[int]) -> _torch.Boxed:
    """Results at these places are no views to autograd, which would keep the caller from writing to them: what joins
    the parts of a batch may well be one."""

    def call(args: list[Any]) -> Any:
        results = list(run(args))
        for i in places:
            if results[i]._is_view():
                results[i] = results[i].data
        return results

    return call


def _made_of(node: fx.Node) -> Any:
    """What a node is a view of; of one of several results of a call, that result: equal calls are made once."""
    found = base(node)
    return (found.args[0], found.args[1]) if found.target is operator.getitem else found


def _keep_apart(gm: fx.GraphModule, eager: Memory) -> None:
    """Copies results that share memory with others, or with an input, only since a copy was left out: Inductor's front
    end (seen on 2.11 and 2.13) returns `x` for `x + 0`, and does not look for copies of what became a view by another
    one's going, nor AOTAutograd for what becomes the same by `copy_`.
    """
    (output,) = gm.graph.find_nodes(op="output")
    results, fresh, first = list(output.args[0]), set(_torch.fresh_results()), _torch.first_result()
    bases = _torch.bases_of_results()
    memory: dict[Any, tuple[int, int | None]] = {}
    copies: dict[tuple[fx.Node, int], fx.Node] = {}
    for i, node in list(enumerate(results[: _torch.returned_results()])):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        seen = bases.get(i, i) - first  # of what AOTAutograd returns to make a result of it: that result
        own = eager.results[seen] if 0 <= seen < len(eager.results) else None
        made_of, storage = base(node), _torch.storage_id(value)  # the example is from before that
        other, others = memory.setdefault(_made_of(node), (storage, own))
        apart = other != storage if own is None or others is None else others != own
        if made_of.op == "placeholder" and i in fresh:  # items of `unbind`, which are views, count as fresh
            apart |= own not in eager.given if own is not None else _is_written(made_of)
        if apart:
            key = node, storage if own is None else own  # a tensor that is returned twice is copied once
            if key not in copies:
                with gm.graph.inserting_after(node):
                    copies[key] = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
                copies[key].meta = dict(node.meta)
            results[i] = copies[key]
    if results != list(output.args[0]):
        output.args = (tuple(results),)
        gm.recompile()


def _is_written(node: fx.Node) -> bool:
    """Whether it is an input that the graph writes in the end: until then it is what it was."""
    given = _torch.traced_input(node) if node.op == "placeholder" else None
    return given is not None and given[0] in _torch.written_inputs()


def _has_several_gradients(node: fx.Node) -> bool:
    """Whether it is a call of a user's own function with several results that have gradients."""
    if not isinstance(node.target, torch._ops.OperatorBase) or getattr(node.target, "namespace", "") == "aten":
        return False
    results = _torch.tree_leaves(node.meta.get("example_value"))
    return sum(isinstance(r, torch.Tensor) and r.requires_grad for r in results) > 1


def _saved_alone(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The results of a forward pass that are handed to the backward pass and not to the caller."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    saved = range(len(results))[_torch.saved_results()]
    returned = {id(result) for i, result in enumerate(results) if i not in saved}
    found = (results[i] for i in saved)
    return frozenset(node for node in found if isinstance(node, fx.Node) and id(node) not in returned)


def _chosen(gm: fx.GraphModule, sizes: Mapping[fx.Node, int], most: float) -> list[fx.Node]:
    """Which of them go, `most` bytes together: copies should be spread over the passes, beside all that they compute.

    What is alike in all layers goes as a whole, the largest first; of what is left, the first made, which is used last.
    """
    alike: dict[Any, list[fx.Node]] = {}
    counts: Counter[Any] = Counter()
    for node in (n for n in gm.graph.nodes if n in sizes):
        path = module_stack(node)[-1][0] if module_stack(node) else ""
        kind = (node.target, sizes[node])
        counts[path, kind] += 1
        alike.setdefault((re.sub(r"\d+", "*", path), kind, counts[path, kind]), []).append(node)
    found: list[fx.Node] = []
    for nodes in sorted(alike.values(), key=lambda nodes: -sum(sizes[n] for n in nodes)):
        if (total := sum(sizes[n] for n in nodes)) <= most:
            most -= total
            found += nodes
    for node in (n for n in gm.graph.nodes if n in sizes and n not in found):
        if sizes[node] <= most:
            most -= sizes[node]
            found.append(node)
    return found


def _bytes(value: Any) -> int:
    """Of floating-point data; 0 for what is something else, or spread out in memory, and stays where it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0
    sizes, strides = ([_torch.hinted(n) for n in ns] for ns in (value.size(), value.stride()))
    complete = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != complete:
            return 0
        complete *= size
    return complete * value.element_size()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device="cpu")


def _around(node: fx.Node) -> dict[str, Any]:
    """The modules that have all that goes into a node. Autograd adds gradients up without a word of where."""
    stacks = [a.meta["nn_module_stack"] for a in node.all_input_nodes if a.meta.get("nn_module_stack")]
    if not stacks:
        return {}
    shared = [key for key in stacks[0] if all(key in stack for stack in stacks)]
    return {key: stacks[0][key] for key in shared}
