"""Names, groups and waits, from a graph alone; ranks that do meet are in tests/distributed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from dynaflow.capture.collectives import awaited_collective, group_of, is_collective, make_contiguous, name_of

ops = torch.ops._c10d_functional


def graph() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    made = fx.Graph()
    x = made.placeholder("x")
    summed = made.call_function(ops.all_reduce.default, (x, "sum", "team"))
    nodes = {
        "relu": made.call_function(torch.relu, (x,)),
        "sum": summed,
        "wait": made.call_function(ops.wait_tensor.default, (summed,)),
        "gather": made.call_function(ops.all_gather_into_tensor, (x, 2), {"group_name": "other"}),
    }
    nodes["wait for it"] = made.call_function(ops.wait_tensor, (nodes["gather"],))
    made.output((nodes["wait"], nodes["wait for it"], nodes["relu"]))
    return fx.GraphModule({}, made), nodes


def test_names() -> None:
    _, nodes = graph()
    names = {what: name_of(node) for what, node in nodes.items()}
    assert names == {
        "relu": None,
        "sum": "all_reduce",
        "wait": "wait_tensor",
        "gather": "all_gather_into_tensor",
        "wait for it": "wait_tensor",
    }
    assert {what for what, node in nodes.items() if is_collective(node.target)} == names.keys() - {"relu"}


def test_groups() -> None:
    _, nodes = graph()
    assert {what: group_of(node) for what, node in nodes.items()} == {
        "relu": None, "sum": "team", "wait": None, "gather": "other", "wait for it": None,
    }  # fmt: skip


def test_a_wait_knows_what_it_waits_for() -> None:
    _, nodes = graph()
    assert awaited_collective(nodes["wait"]) is nodes["sum"]
    assert awaited_collective(nodes["wait for it"]) is nodes["gather"]
    assert awaited_collective(nodes["sum"]) is None and awaited_collective(nodes["relu"]) is None


def test_a_wait_for_one_of_several_results() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    several = made.call_function(ops.all_reduce_coalesced.default, ([x, x], "sum", "team"))
    one = made.call_function(operator.getitem, (several, 0))
    assert awaited_collective(made.call_function(ops.wait_tensor.default, (one,))) is several


@pytest.mark.parametrize("target", [ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default])
def test_what_is_exchanged_is_contiguous(target: Any) -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["example_value"] = torch.empty(2)
    args = (x, 2, "team") if "gather" in str(target) else (x, "sum", 2, "team")
    node = made.call_function(target, args)
    made.output((node,))
    gm = fx.GraphModule({}, made)
    make_contiguous(gm)
    given = node.args[0]
    assert isinstance(given, fx.Node) and given.target == "contiguous" and given.args == (x,)
    assert "contiguous" in gm.code


def test_what_is_summed_may_lie_as_it_likes() -> None:
    gm, nodes = graph()
    make_contiguous(gm)
    assert nodes["sum"].args[0].op == "placeholder"  # type: ignore[union-attr]
