"""Splits a graph at its opaque operators, which are called and not compiled.

An opaque operator accesses state outside of the graph, by arguments that compiled code can't pass. What lies between
two of them is compiled as a subgraph. Equal subgraphs, as of equal layers, share one compilation.

Contract
    `split_at_opaque` takes a graph and returns its subgraphs in order, each either opaque or free of opaque operators;
    together they have every call once. A graph with regions (gradient modes, autocast) becomes one opaque subgraph.
    `run_in_order` takes the graph, its subgraphs and a function for each. Returns a function of the graph's inputs
    that frees each value after its last use.
    The given graph is unchanged. Neither raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from dynaflow._torch import REGIONS, SET_GRAD, Boxed
from dynaflow.capture.captured_graph import KIND
from dynaflow.capture.op_registry import is_opaque
from dynaflow.core.fx_graphs import Env, copy_nodes
from dynaflow.lower.first_call import FirstCall

_REGION_MARKS = {*REGIONS, *REGIONS.values(), SET_GRAD}
"""A subgraph would lose the region that it lies in, so a graph with one of these is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """A part of a graph, as a module. `reads`, `writes`: the nodes of the whole graph that it takes and returns."""

    module: fx.GraphModule
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    opaque: bool
    """It is called, not compiled."""


def split_at_opaque(module: fx.GraphModule, must_stay: Callable[[fx.Node], bool] = is_opaque) -> list[Subgraph]:
    """The subgraphs, in order. `must_stay`: whether a node is opaque."""
    return [_subgraph(module, nodes, opaque) for nodes, opaque in _groups(module.graph, must_stay)]


def _groups(graph: fx.Graph, must_stay: Callable[[fx.Node], bool]) -> list[tuple[list[fx.Node], bool]]:
    found: list[tuple[list[fx.Node], bool]] = []
    group: dict[fx.Node, list[fx.Node]] = {}
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.target in _REGION_MARKS for node in calls):
        return [(calls, True)]
    for node in calls:
        if node.target is operator.getitem and _is_tuple(node.args[0]) and node.args[0] in group:
            nodes = group[node.args[0]]  # subgraphs return tensors, not tuples
        elif must_stay(node):
            nodes = []
            found.append((nodes, True))
        elif found and not found[-1][1]:
            nodes = found[-1][0]
        else:
            nodes = []
            found.append((nodes, False))
        nodes.append(node)
        group[node] = nodes
    return found


def _is_tuple(node: fx.Node) -> bool:
    """Tensors and numbers have a kind; tuples do not."""
    return KIND not in node.meta


def _subgraph(whole: fx.GraphModule, nodes: list[fx.Node], opaque: bool) -> Subgraph:
    inside = set(nodes)
    reads = tuple(dict.fromkeys(given for node in nodes for given in node.all_input_nodes if given not in inside))
    writes = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = fx.Graph()
    env: Env = {node: graph.placeholder(node.name) for node in reads}
    copy_nodes(nodes, graph, env)
    graph.output(tuple(env[node] for node in writes))
    return Subgraph(module=fx.GraphModule(whole, graph), reads=reads, writes=writes, opaque=opaque)


def run_in_order(graph: fx.Graph, parts: Sequence[Subgraph], calls: Iterable[Boxed]) -> Boxed:
    """A function of the graph's inputs that calls the subgraphs. Values are freed after their last use."""
    inputs, (output,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    place = {node: i for i, node in enumerate([*inputs, *(node for part in parts for node in part.writes)])}
    last = {node: i for i, part in enumerate(parts) for node in part.reads}
    last |= dict.fromkeys(output.all_input_nodes, len(parts))
    steps: list[list[Any]] = []
    for i, (part, call) in enumerate(zip(parts, calls, strict=True)):
        done = [place[node] for node in part.reads if last[node] == i]
        step = [call, [place[n] for n in part.reads], done, [place[n] for n in part.writes]]
        if isinstance(call, FirstCall):
            call.then(partial(step.__setitem__, 0))
        steps.append(step)
    idle = [place[node] for node in inputs if node not in last]
    results = [(place[given] if isinstance(given, fx.Node) else None, given) for given in output.args[0]]
    more = len(place) - len(inputs)

    def run(args: list[object]) -> list[object]:
        values = [*args, *[None] * more]
        args.clear()
        for i in idle:
            values[i] = None
        for call, reads, done, writes in steps:
            box = [values[i] for i in reads]
            for i in done:
                values[i] = None
            for i, value in zip(writes, call(box)):
                values[i] = value
        return [constant if i is None else values[i] for i, constant in results]

    return run
