"""Which results the gradient of an input comes from.

*Contract.* Reads Dynamo's graph (`results_of_inputs`), and then the backward graph (`sources_of_gradients`). Changes
neither; `without_unused` returns another backward graph. If a loss depends on none of the returned results, the
gradient is None in eager mode, where AOTAutograd returns zeros.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.result_aliasing import memory_of
from dynaflow.core.fx_graphs import copy_module, results_of


def results_of_inputs(gm: fx.GraphModule) -> list[set[int]]:
    """For each input, the results from which autograd reaches it, be it with a gradient of zeros."""
    reached, bases = dict[fx.Node, set[int]](), _bases(gm)
    unrecorded = _without_autograd(gm)
    later: dict[fx.Node, set[int]] = {}
    """Base -> results that use it after the current node, and thus what the node writes there."""

    def note(node: fx.Node, results: set[int]) -> None:
        reached.setdefault(node, set()).update(results)
        later.setdefault(bases[node], set()).update(results)

    for i, result in enumerate(results_of(gm.graph)):
        if isinstance(result, fx.Node):
            note(result, {i})
    for node in reversed(gm.graph.nodes):
        if node in unrecorded:
            continue
        made = node.args[0] if node.target is operator.setitem else node
        value = made.meta.get("example_value")
        if isinstance(value, (tuple, list)) and isinstance(node.target, types.FunctionType):
            continue  # not all results of a Python function, as nn.MultiheadAttention's, depend on all its arguments
        values = _torch.tree_leaves(value)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            results = set(reached.get(node, ()))
            if bases[made] is not node:  # a view, or a write
                results |= later.get(bases[made], set())
            for used in node.all_input_nodes:
                note(used, results)
    return [reached.get(node, set()) for node in gm.graph.find_nodes(op="placeholder")]


def sources_of_nodes(gm: fx.GraphModule, results: list[int]) -> dict[fx.Node, frozenset[int]]:
    """For each node of a backward graph, the forward results whose gradients it is computed from. Empty if unknown.

    `results`: for each gradient that the graph takes, the position of its result in the forward graph.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if node.name.startswith("tangents_")]  # AOTAutograd's name
    if len(tangents) != len(results):
        return {}  # some consist of several tensors
    known = dict.fromkeys(placeholders, frozenset[int]())
    known |= {node: frozenset({position}) for node, position in zip(tangents, results, strict=True)}
    for node in gm.graph.nodes:
        if node not in known:
            known[node] = frozenset().union(*(known[n] for n in node.all_input_nodes))
    return known


def sources_of_gradients(
    gm: fx.GraphModule,
    sources: Mapping[fx.Node, frozenset[int]],
    results: list[int],
    own: list[int],
    reached: list[set[int]],
) -> list[frozenset[int]]:
    """For each gradient that a backward graph returns: the forward results without whose gradients it is None. Empty if
    that is unknown.

    These are the results whose gradients it is computed from (`sources_of_nodes`), and those that depend on the input,
    as `reached` says, whose gradients of zeros the graph need not show. `own`: the positions of `results` in the
    model's graph, or less than 0 for an input that is written.
    """
    gradients = results_of(gm.graph)
    if not sources or len(gradients) != len(reached):
        return [frozenset()] * len(gradients)
    computed_from = [sources[n] if isinstance(n, fx.Node) else frozenset() for n in gradients]
    return [
        found | {position for position, i in zip(results, own, strict=True) if i < 0 or i in from_results}
        for found, from_results in zip(computed_from, reached, strict=True)
    ]


def without_unused(
    gm: fx.GraphModule,
    unused: frozenset[int],
    sources: Mapping[fx.Node, frozenset[int]],
    needed: Sequence[frozenset[int]],
    *,
    zeros: bool,
) -> fx.GraphModule | None:
    """The backward graph of eager mode if the results `unused` are unused: it does not compute what depends on their
    gradients only. None if it is the same graph.

    AOTAutograd (seen on 2.11 and 2.13) computes it from zeros, and 0 / 0 is nan. So gradients that need only such
    results are None; and, if `zeros`, values computed from such gradients only are zero where they are added to others.
    """
    smaller = copy_module(gm)
    (output,) = smaller.graph.find_nodes(op="output")
    results = tuple(None if n and n <= unused else r for n, r in zip(needed, output.args[0], strict=True))
    changed = results != tuple(output.args[0])
    output.args = (results,)
    computed = (n for n in sources if n.op not in ("placeholder", "output"))
    dropped = {n.name for n in computed if sources[n] and sources[n] <= unused}
    for node in [n for n in smaller.graph.nodes if zeros and n.name in dropped]:
        others = [user for user in node.users if user.name not in dropped]
        if others and isinstance(node.meta.get("val"), torch.Tensor):
            with smaller.graph.inserting_after(node):
                zero = smaller.graph.call_function(torch.ops.aten.zeros_like.default, (node,))
            zero.meta, changed = dict(node.meta), True
            for user in others:
                user.replace_input_with(node, zero)
    smaller.graph.eliminate_dead_code()
    smaller.recompile()
    return smaller if changed else None


def has_several_gradients(node: fx.Node) -> bool:
    """Whether it calls a user's own function with several results that have gradients. Eager mode gives such a function
    zeros for the gradients of unused results."""
    if not isinstance(node.target, _torch.OperatorBase) or getattr(node.target, "namespace", "") == "aten":
        return False
    results = _torch.tree_leaves(node.meta.get("example_value"))
    return sum(isinstance(r, torch.Tensor) and r.requires_grad for r in results) > 1


def _without_autograd(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that run while grad mode is off. Views made there may say that they require gradients; autograd does
    not go through them."""
    found, recorded = set[fx.Node](), True
    for node in gm.graph.nodes:
        if node.target is _torch.SET_GRAD:
            recorded = bool(node.args[0])
        elif not recorded:
            found.add(node)
    return found


def _bases(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """The last base of what each node views or writes; the node itself, if it makes memory. Each input is its own
    base."""
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        memory, given = memory_of(node), list(node.all_input_nodes)
        if node.target is operator.getitem:  # one of several views
            given += node.args[0].all_input_nodes
        same = (used for used in given if memory is not None and memory_of(used) == memory)
        found[node] = found.get(next(same, node), node)
    return found
