"""Which results of a graph share memory, with one another or with inputs: it must be as in eager mode.

*Contract.* `untraceable_views` reads Dynamo's graph and recognizes cases that AOTAutograd gets wrong, for which the
caller needs another way to run. `check_views` and `copy_aliases` take AOTAutograd's forward graph, with the eager
`Aliasing`: the first raises TraceMismatch, the second inserts missing copies in place. `without_bases` wraps a call.
Values don't change.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.node_info import target_names
from dynaflow.capture.optimizer_steps import base
from dynaflow.core.fx_graphs import results_of
from dynaflow.core.memory_layout import overlaps_itself


class TraceMismatch(Exception):
    """AOTAutograd's graph would not do what the model does."""


@dataclass(frozen=True, slots=True)
class Aliasing:
    """Which tensors of a graph share memory in eager mode: those with equal numbers. None for other values."""

    given: frozenset[int | None]
    """The inputs."""
    results: tuple[int | None, ...]
    gradients: tuple[bool | None, ...]
    """Whether each result requires gradients. None if it can't."""

    @staticmethod
    def of(gm: fx.GraphModule) -> Aliasing:
        given = frozenset(map(memory_of, gm.graph.find_nodes(op="placeholder")))
        results = results_of(gm.graph)
        gradients = tuple(map(_requires_grad, results))
        return Aliasing(given=given, results=tuple(map(memory_of, results)), gradients=gradients)


def memory_of(node: Any) -> int | None:
    """Identifies the storage of a node's example; None if it is no strided tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return _torch.storage_id(value)
    except NotImplementedError:  # inside a transform of torch.func
        return None


def _requires_grad(node: Any) -> bool | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    return value.requires_grad


def returns_or_writes(gm: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the graph writes, or returns, something that shares memory with these tensors."""
    if any(map(_torch.is_mutated, tensors)):
        return True
    return bool({_torch.storage_id(tensor) for tensor in tensors} & set(Aliasing.of(gm).results))


def views_returned(gm: fx.GraphModule) -> set[fx.Node]:
    """The inputs that share memory with a result."""
    returned = set(Aliasing.of(gm).results) - {None}
    return {node for node in gm.graph.find_nodes(op="placeholder") if memory_of(node) in returned}


# Before the trace


def untraceable_views(gm: fx.GraphModule) -> str | None:
    """Why AOTAutograd (2.11 and 2.13) would return wrong views of shared memory; None if it would not.

    It regenerates results that are views from their bases, and gets their gradients and storage offsets wrong in the
    cases that this function recognizes.
    """
    for node in gm.graph.nodes:
        if node.op.startswith("call") and (name := target_names(node)[0]) in _torch.SHAPE_CHANGES:
            return f"{name} changes a tensor's shape in place"
        if node.op.startswith("call") and name in _HIDDEN_VIEWS:
            return f"{name} makes views that torch does not take for such"
        if node.op.startswith("call") and name == "unfold" and _torch.is_mutated(node.meta["example_value"]):
            return "a view by unfold is written"  # elements between its windows would become zero
    inputs: dict[int, list[torch.Tensor]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (memory := memory_of(node)) is not None:
            inputs.setdefault(memory, []).append(node.meta["example_value"])
    results: dict[int, list[torch.Tensor]] = {}
    for node in dict.fromkeys(n for n in results_of(gm.graph) if isinstance(n, fx.Node)):
        if (memory := memory_of(node)) is not None:
            results.setdefault(memory, []).append(node.meta["example_value"])
    without_grad = _viewed_without_gradients(gm)
    for memory, views in results.items():
        given = inputs.get(memory, [])
        if memory in without_grad:
            return "a result shares memory with a view that was taken without gradients"
        if len({t.requires_grad for t in (*views, *given)}) > 1:
            return "results share memory with one another or with an input, and only some have gradients"
        if any(map(_torch.is_mutated, given)) and not _is_counter(given, views, inputs):
            return "a result shares memory with an input that is written"
        if any(t.is_complex() or t.is_neg() for t in given):
            return "a result shares memory with an input of complex numbers, or a part of them"
        if not all(isinstance(_torch.hint_of(n), int) for t in views for n in (*t.size(), *t.stride())):
            return "the size of a result depends on data"
        if any(map(_has_overlapping_windows, views)):
            return "a result is made of windows that overlap"
    return None


_HIDDEN_VIEWS = {"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}


def _is_counter(given: list[torch.Tensor], views: list[torch.Tensor], inputs: Mapping[int, list[torch.Tensor]]) -> bool:
    """Whether the results are an input itself, without gradients, as after `self.calls += 1`. If another mutated input
    has gradients, AOTAutograd (2.11 and 2.13) returns it in place of another result."""
    if len({id(t) for t in (*given, *views)}) > 1 or views[0].requires_grad:
        return False
    return not any(_torch.is_mutated(t) and t.requires_grad for tensors in inputs.values() for t in tensors)


def _viewed_without_gradients(gm: fx.GraphModule) -> set[int | None]:
    """The memory of views that were taken while grad mode was off. They say that they require gradients, and have
    none."""
    found, enabled = set[int | None](), True
    for node in gm.graph.nodes:
        if node.target is _torch.SET_GRAD:
            enabled = bool(node.args[0])
        elif not enabled and (memory := memory_of(node)) is not None and node.meta["example_value"].requires_grad:
            found.add(memory)
    return found


def _has_overlapping_windows(tensor: torch.Tensor) -> bool:
    """Whether elements share memory by strides other than 0."""
    size, stride = ([_torch.hint_of(n) for n in ns] for ns in (tensor.size(), tensor.stride()))
    return overlaps_itself([n if s else 1 for n, s in zip(size, stride, strict=True)], stride)


# A traced forward graph


def check_views(gm: fx.GraphModule, eager: Aliasing) -> None:
    """Raises TraceMismatch if results that share memory in eager mode don't in the traced graph: AOTAutograd (2.13)
    copies results that share memory without being views to autograd, such as the parts of `unsafe_split`."""
    results, first, made_of = results_of(gm.graph), _torch.first_result(), dict[int, Any]()
    for i in _torch.fresh_results():
        node, own = results[i], eager.results[i - first]
        if own is None or not isinstance(node, fx.Node):
            continue
        shares_input = own in eager.given and base(node).op != "placeholder"
        if shares_input or made_of.setdefault(own, _source(node)) != _source(node):
            other = "an input" if shares_input else "another"
            raise TraceMismatch(f"result {i - first} shares memory with {other}, but is no view of it to torch")


def copy_aliases(gm: fx.GraphModule, eager: Aliasing) -> None:
    """Copies results that share memory with others, or with an input, only because a copy was removed.

    Inductor's front end (2.11 and 2.13) returns `x` for `x + 0`, and keeps no copy of what thereby becomes a view.
    AOTAutograd does not see what becomes equal by `copy_`.
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
        position = bases.get(i, i) - first  # a base that AOTAutograd returns stands for the result made of it
        own = eager.results[position] if 0 <= position < len(eager.results) else None
        made_of, storage = base(node), _torch.storage_id(value)  # the example predates the removal of copies
        other, others = memory.setdefault(_source(node), (storage, own))
        apart = other != storage if own is None or others is None else others != own
        if made_of.op == "placeholder" and i in fresh:  # items of `unbind`, which are views, count as fresh
            apart |= own not in eager.given if own is not None else is_written_input(made_of)
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


def is_written_input(node: fx.Node) -> bool:
    """Whether a node is an input that the graph writes at its end."""
    given = _torch.traced_input(node) if node.op == "placeholder" else None
    return given is not None and given[0] in _torch.written_inputs()


def _source(node: fx.Node) -> Any:
    """The base of a view. For an item of a call's results: the call and the item, as equal calls are merged."""
    found = base(node)
    return (found.args[0], found.args[1]) if found.target is operator.getitem else found


# A call


def without_bases(run: _torch.Boxed, positions: Sequence[int]) -> _torch.Boxed:
    """Detaches the results at these positions if they are views to autograd, as joined parts of a batch may be:
    autograd would forbid the caller to write to them."""

    def call(args: list[Any]) -> Any:
        results = list(run(args))
        for i in positions:
            if _torch.is_autograd_view(results[i]):
                results[i] = results[i].data
        return results

    return call
