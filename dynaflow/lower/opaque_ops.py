"""Compiled code around operators that are called as they are.

Some operators no compiler should take in: they look at something outside of the graph, and are told where by arguments
that compiled code has no place for. A graph that has such operators is compiled piece by piece, from one to the next.
So layers that are alike are compiled once, too, where the graph as a whole would be compiled layer by layer.
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
from dynaflow.lower.first_call import Untried

_REGION_MARKS = {*REGIONS, *REGIONS.values(), SET_GRAD}
"""Cut off from its marks, what lies in a region would not be compiled for it: a graph with regions stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a graph: the nodes of that graph that it takes and returns, and a graph of its own."""

    module: fx.GraphModule
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    alone: bool
    """It is called as it is."""


def pieces_of(module: fx.GraphModule, is_alone: Callable[[fx.Node], bool] = is_opaque) -> list[Piece]:
    """In order."""
    return [_piece(module, nodes, alone) for nodes, alone in _groups(module.graph, is_alone)]


def _groups(graph: fx.Graph, is_alone: Callable[[fx.Node], bool]) -> list[tuple[list[fx.Node], bool]]:
    found: list[tuple[list[fx.Node], bool]] = []
    group: dict[fx.Node, list[fx.Node]] = {}
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.target in _REGION_MARKS for node in calls):
        return [(calls, True)]
    for node in calls:
        if node.target is operator.getitem and _is_tuple(node.args[0]) and node.args[0] in group:
            nodes = group[node.args[0]]  # pieces return tensors, not tuples
        elif is_alone(node):
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
    """Of tensors and numbers the kind is known."""
    return KIND not in node.meta


def _piece(whole: fx.GraphModule, nodes: list[fx.Node], alone: bool) -> Piece:
    inside = set(nodes)
    reads = tuple(dict.fromkeys(given for node in nodes for given in node.all_input_nodes if given not in inside))
    writes = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = fx.Graph()
    env: Env = {node: graph.placeholder(node.name) for node in reads}
    copy_nodes(nodes, graph, env)
    graph.output(tuple(env[node] for node in writes))
    return Piece(module=fx.GraphModule(whole, graph), reads=reads, writes=writes, alone=alone)


def in_turn(graph: fx.Graph, pieces: Sequence[Piece], calls: Iterable[Boxed]) -> Boxed:
    """A function of the graph's inputs that calls its pieces. Values are let go after their last use."""
    inputs, (output,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    place = {node: i for i, node in enumerate([*inputs, *(node for piece in pieces for node in piece.writes)])}
    last = {node: i for i, piece in enumerate(pieces) for node in piece.reads}
    last |= dict.fromkeys(output.all_input_nodes, len(pieces))
    steps: list[list[Any]] = []
    for i, (piece, call) in enumerate(zip(pieces, calls, strict=True)):
        done = [place[node] for node in piece.reads if last[node] == i]
        step = [call, [place[n] for n in piece.reads], done, [place[n] for n in piece.writes]]
        if isinstance(call, Untried):
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
