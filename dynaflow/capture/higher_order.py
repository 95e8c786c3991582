"""Higher-order operators: calls that take subgraphs.

*Contract.* Both passes change the graph in place, before the analysis, and keep its results. `inline_subgraphs`
replaces calls that only call their subgraph (checkpointing in inference, a region that is compiled once) by its body;
calls whose results are not unpacked stay. `drop_unused_numbers` removes unused size arguments of flex_attention's
functions, which would otherwise tie the call to the batch size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.core.fx_graphs import copy_nodes, results_of


def inline_subgraphs(gm: fx.GraphModule, *, training: bool) -> None:
    """Inlines calls that only call their subgraph. In training, checkpoints stay."""
    wrappers = {**_torch.SUBGRAPHS, **({} if training else _torch.CHECKPOINTS)}
    waiting = list(gm.graph.nodes)
    calls = [n for n in waiting if n.op == "call_function" and n.target in wrappers]
    for node in calls:
        if all(user.target is operator.getitem for user in node.users):
            new = _inline(gm, node, node.args[wrappers[node.target] :])
            calls.extend(n for n in new if n.op == "call_function" and n.target in wrappers)
    if calls:
        gm.graph.eliminate_dead_code(lambda n: n.op != "get_attr")
        gm.recompile()


def _inline(gm: fx.GraphModule, node: fx.Node, operands: Sequence[Any]) -> list[fx.Node]:
    """Inlines one call. Returns the new nodes."""
    body = _graph_at(gm, node.args[0])
    env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "get_attr":
                name = str(inner.target)
                env[inner] = gm.graph.get_attr(_adopt(gm, name, operator.attrgetter(name)(body)))
                env[inner].meta = inner.meta
        copy_nodes((n for n in body.graph.nodes if n not in env and n.op != "output"), gm.graph, env)
    results = fx.map_arg(results_of(body.graph), env.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return [env[n] for n in body.graph.nodes if n.op not in ("placeholder", "output")]


def _adopt(gm: fx.GraphModule, name: str, value: Any) -> str:
    """Adds an attribute to a graph module. Returns its name there."""
    number = 0
    while getattr(gm, free := f"{name.replace('.', '_')}_{number}", value) is not value:
        number += 1
    setattr(gm, free, value)
    return free


def _without(body: fx.GraphModule, places: Collection[fx.Node]) -> fx.GraphModule:
    """The same function without some arguments, which it does not use."""
    graph = fx.Graph()
    copy_nodes((node for node in body.graph.nodes if node not in places), graph, {})
    return fx.GraphModule(body, graph)


def drop_unused_numbers(gm: fx.GraphModule) -> None:
    """Removes numbers, such as the batch size, that flex_attention passes to functions that don't use them."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in ATTENTION:
            start, mask = ATTENTION[node.target]
            args = list(node.args)
            *blocks, mask_mod = args[mask]
            args[start:mask], args[-2] = _without_unused(gm, node, args[start:mask], args[-2])
            (mask_mod,), args[-1] = _without_unused(gm, node, [mask_mod], args[-1])
            args[mask] = (*blocks, mask_mod)
            node.args = tuple(args)


def _without_unused(
    gm: fx.GraphModule, node: fx.Node, mods: list[fx.Node], captured: Sequence[Any]
) -> tuple[list[fx.Node], tuple[Any, ...]]:
    """The functions and their captured arguments, without the numbers that none of the functions uses."""
    graphs = [_graph_at(gm, mod) for mod in mods]
    given = list(zip(captured, *(captured_arguments(graph, captured) for graph in graphs), strict=True))
    unused = [(value, *places) for value, *places in given if _is_number(value) and not any(p.users for p in places)]
    if not unused:
        return mods, tuple(captured)
    used = tuple(value for value, *places in given if (value, *places) not in unused)
    with gm.graph.inserting_before(node):
        reduced = [
            gm.graph.get_attr(_adopt(gm, str(mod.target), _without(graph, [places[1 + i] for places in unused])))
            for i, (mod, graph) in enumerate(zip(mods, graphs, strict=True))
        ]
    return reduced, used


def captured_arguments(mod: fx.GraphModule, captured: Sequence[Any]) -> list[fx.Node]:
    """The placeholders of a function for its captured arguments, which are the last."""
    given = mod.graph.find_nodes(op="placeholder")
    return given[len(given) - len(captured) :]


def _graph_at(gm: fx.GraphModule, node: Any) -> fx.GraphModule:
    found: fx.GraphModule = operator.attrgetter(str(node.target))(gm)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), int | torch.SymInt)


ATTENTION = {_torch.FLEX_ATTENTION: (3, 4), _torch.FLEX_ATTENTION_BACKWARD: (7, 9)}
"""Positions among the arguments: of the first score function, and of the block mask."""
