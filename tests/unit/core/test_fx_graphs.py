"""Graphs copied, inlined and compared."""

from __future__ import annotations

import operator

import torch
from torch import fx

from dynaflow.core.fx_graphs import canonical, copy_graph, copy_module, copy_nodes, inline, results_of


def sums(first: str = "x", second: str = "y") -> fx.Graph:
    """(x + y, (x + y) * 2)."""
    graph = fx.Graph()
    x, y = graph.placeholder(first), graph.placeholder(second)
    total = graph.call_function(operator.add, (x, y), name=f"{first}_plus")
    graph.output((total, graph.call_function(operator.mul, (total, 2))))
    return graph


def run(graph: fx.Graph, *args: object) -> object:
    return fx.GraphModule({}, graph)(*args)


def names(node: fx.Node) -> object:
    return None if node.op == "placeholder" else str(node.target)


def test_a_copy_may_be_changed() -> None:
    module = fx.GraphModule({"weight": torch.nn.Parameter(torch.ones(2))}, sums())
    copy = copy_module(module)
    copy.graph.find_nodes(op="call_function", target=operator.mul)[0].args = (3, 3)
    copy.recompile()
    assert copy(1, 2) == (3, 9) and module(1, 2) == (3, 6)
    assert run(copy_graph(module.graph), 1, 2) == (3, 6)


def test_some_nodes_are_copied() -> None:
    body, graph = sums(), fx.Graph()
    total, product = results_of(body)
    given = graph.placeholder("given")
    env = copy_nodes([product], graph, {total: given})
    graph.output(env[product])
    assert run(graph, 5) == 10


def test_a_body_is_inlined_twice_and_with_a_constant() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total, product = inline(sums(), graph, [x, 10])
    graph.output(inline(sums(), graph, [product, total]))
    assert run(graph, 1) == (33, 66)


def test_names_make_no_difference() -> None:
    assert [*canonical(sums(), names)] == [*canonical(sums("a", "b"), names)]


def test_arguments_and_targets_do() -> None:
    other, third = sums(), sums()
    other.find_nodes(op="call_function", target=operator.mul)[0].update_arg(1, 3)
    third.find_nodes(op="call_function", target=operator.mul)[0].target = operator.sub
    assert len({tuple(canonical(graph, names)) for graph in (sums(), other, third)}) == 3
