"""Which operator each node is to belong to, before anything is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynaflow as df
from dynaflow.capture.batch_analysis.probe import probe
from dynaflow.partition.claims import Claim, claim, is_inside
from dynaflow.partition.rules import Rule
from tests.helpers import Stack, compiled, graph_of, randn


def claims_of(
    model: Any, rules: Sequence[Rule] = (), *inputs: Tensor, complete: bool = True
) -> dict[fx.Node, Claim | None]:
    """Of all calls of the captured graph, in order."""
    fast = compiled(model)
    with torch.no_grad():
        fast.plan(*(inputs or (randn(4, 8),)))
    graph, axes = graph_of(fast).graph, graph_of(fast).batch_axes
    work = [n for n in graph.gm.graph.nodes if n.op in ("call_function", "call_method")]
    return claim(work, probe(graph, axes), rules, complete)


def names(claims: dict[fx.Node, Claim | None]) -> list[str]:
    return [found.name if found else "-" for found in claims.values()]


def test_without_rules_nothing_is_claimed() -> None:
    assert set(names(claims_of(Stack()))) == {"-"}


def test_nodes_of_one_call_of_a_module_have_one_key() -> None:
    claims = claims_of(Stack(), [df.SplitModule("*.mlp", tag="m")])
    found = [c for c in claims.values() if c is not None]
    assert [c.name for c in found] == ["layers.0.mlp"] * 3 + ["layers.1.mlp"] * 3
    assert len({c.key for c in found}) == 2 and all(c.tags == {"m"} for c in found)


def test_a_module_that_is_called_twice_has_two_keys() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.relu(self.a(x)))

    first, between, second = claims_of(Twice(), [df.SplitModule("a")]).values()
    assert between is None and first and second and first.name == second.name == "a" and first.key != second.key


def test_the_innermost_rule_names_and_all_rules_tag() -> None:
    rules = [df.SplitModule("layers.?.mlp.0", tag="inner"), df.SplitModule("layers.0", tag=("outer", "block"))]
    claims = claims_of(Stack(), rules)
    inner = next(c for c in claims.values() if c and c.name == "layers.0.mlp.0")
    assert inner.tags == {"inner", "outer", "block"}
    assert next(c.tags for c in claims.values() if c and c.name == "layers.0") == {"outer", "block"}
    inside = [node for node, c in claims.items() if c is inner]
    outer = next(c for c in claims.values() if c and c.name == "layers.0")
    assert inside and all(is_inside(node, outer.key) for node in inside), "though another rule has cut it out"
    assert not any(is_inside(node, outer.key) for node, c in claims.items() if c and c.name == "layers.1.mlp.0")


def test_a_mark_around_a_module_and_one_inside() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with df.mark("region"):
                x = torch.relu(self.a(x))
            return x * 2

    assert names(claims_of(Marked())) == ["region", "region", "-"]
    assert names(claims_of(Marked(), [df.SplitModule("a")])) == ["a", "region", "-"]
    by_root = claims_of(Marked(), [df.SplitModule(Marked, tag="all")])
    assert names(by_root) == ["region", "region", "Marked"]
    assert all(c and "all" in c.tags for c in by_root.values())


def test_each_call_of_a_function_is_one() -> None:
    claims = claims_of(lambda x: torch.sin(torch.sin(x)) + 1, [df.SplitFunc(torch.sin, splittable=True)])
    first, second, rest = claims.values()
    assert rest is None and first and second and first.key != second.key
    assert (first.name, first.splittable) == ("sin", True)


def test_what_is_promised_ends_where_another_operator_mixes_rows() -> None:
    def model(x: Tensor) -> Tensor:
        with df.mark("all", splittable=True):
            return torch.softmax(torch.cumsum(x * 2, 0), -1)

    promised = claims_of(model)
    assert all(c and c.splittable for c in promised.values())
    cut = claims_of(model, [df.SplitFunc("*cumsum*")])
    assert [(c.name, c.splittable) for c in cut.values() if c] == [("all", None), ("cumsum", None), ("all", None)]


def test_counters_are_operators_of_their_own() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x)

    claims = claims_of(Counting(), [df.SplitModule("*", tag="x")])
    (state,) = [c for c in claims.values() if c and "state" in c.tags]
    assert state.name.endswith(".state") and state.splittable is None


@pytest.mark.parametrize(
    ("rule", "near"), [(df.SplitModule("layers.0.attm"), "layers.0.attn"), (df.SplitFunc("lineal"), "linear")]
)
def test_a_rule_that_matches_nothing(rule: Rule, near: str) -> None:
    with pytest.raises(df.PartitionError, match="matches nothing in the graph") as caught:
        claims_of(Stack(), [rule])
    assert near in str(caught.value.advice)
    assert set(names(claims_of(Stack(), [rule], complete=False))) == {"-"}, "a part of a model may lack it"
