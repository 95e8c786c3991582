"""Rebuilding and comparing fx graphs.

`copy_graph` and `copy_module` copy a whole graph, `copy_nodes` some nodes of one, `inline` its body into another graph.
`canonical` is a graph without its names, for keys and comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

Env = dict[fx.Node, Any]
"""What stands in a new graph for each node of an old one: a node, or a constant."""


def results_of(graph: fx.Graph) -> Any:
    """What the graph returns, as the output node has it."""
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, which may be changed freely. Parameters and submodules are shared."""
    return fx.GraphModule(gm, copy_graph(gm.graph))


def copy_nodes(nodes: Iterable[fx.Node], graph: fx.Graph, env: Env) -> Env:
    """Copies nodes to where `graph` inserts, and adds the copies to `env`, which has what they use from elsewhere."""
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return env


def inline(body: fx.Graph, graph: fx.Graph, args: Sequence[Any]) -> Any:
    """Copies a graph's body into another, with `args` for its placeholders. Returns what stands for its results."""
    env: Env = dict(zip(body.find_nodes(op="placeholder"), args, strict=True))
    copy_nodes((node for node in body.nodes if node.op not in ("placeholder", "output")), graph, env)
    return fx.map_arg(results_of(body), env.__getitem__)


def canonical(graph: fx.Graph, target: Callable[[fx.Node], Any]) -> Iterator[tuple[str, Any, str]]:
    """The nodes as (op, target, arguments) without their names: equal for graphs that differ in names alone.

    `target`: what identifies what a node calls or reads; the caller knows how precise that has to be.
    """
    number = {node: _Bare(f"%{i}") for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        args = fx.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        yield node.op, target(node), repr(args)


class _Bare(str):
    """A string without quotes in a repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
