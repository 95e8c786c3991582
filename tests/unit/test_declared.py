"""Operators declared to work by rows; and those that need something of earlier rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.capture import declared
from dynaflow.capture.work import work_of
from tests.helpers import Each, compiled, graph_of

CACHE = torch.zeros(64)
"""What the operators below leave and find without a word in their schemas, as an attention cache is."""


@torch.library.custom_op("dynaflow_tests::scaled", mutates_args=("out",))
def scaled(out: Tensor, x: Tensor) -> None:
    out.copy_(x * 3)


@scaled.register_fake
def _(out: Tensor, x: Tensor) -> None:
    return None


@torch.library.custom_op("dynaflow_tests::remember", mutates_args=())
def remember(at: Tensor, x: Tensor) -> Tensor:
    CACHE[at] = x.sum(1)
    return x.new_empty(0)


@remember.register_fake
def _(at: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(0)


@torch.library.custom_op("dynaflow_tests::look_back", mutates_args=())
def look_back(at: Tensor, x: Tensor, cache: Tensor) -> Tensor:
    """Each row adds up all that earlier rows have left, and its own."""
    return x + torch.stack([CACHE[: int(i) + 1].sum() for i in at])[:, None]


@look_back.register_fake
def _(at: Tensor, x: Tensor, cache: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    known = dict(declared._globs)
    CACHE.zero_()
    with torch.no_grad():
        yield
    declared._globs.clear()
    declared._globs.update(known)


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled(out, x + 1)
        return torch.relu(out)


def test_an_undeclared_operator_runs_whole_and_a_declared_one_is_split() -> None:
    x = torch.randn(6, 4)
    fast = compiled(Scaling(), Each(split=2))
    fast(x)
    assert any(op.refusal and "scaled" in op.refusal for op in graph_of(fast).ops)
    df.by_rows("dynaflow_tests::sca*")
    fast = compiled(Scaling(), Each(split=2))
    torch.testing.assert_close(fast(x), Scaling()(x))
    assert all(op.splittable for op in graph_of(fast).ops)


def test_rows_must_be_on_dim_0() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x.t())
            scaled(out, x.t())
            return out.t().relu()

    df.by_rows(torch.ops.dynaflow_tests.scaled)
    fast = compiled(Turned(), Each(split=2))
    x = torch.randn(6, 4)
    torch.testing.assert_close(fast(x), Turned()(x))
    assert any(op.refusal and "dim 0" in op.refusal for op in graph_of(fast).ops)


def test_only_operators_can_be_declared() -> None:
    with pytest.raises(df.PartitionError, match="no operator"):
        df.by_rows(torch.relu)


class Causal(nn.Module):
    def forward(self, at: Tensor, x: Tensor) -> Tensor:
        x = x * 2
        left = remember(at, x)
        return look_back(at, torch.tanh(x), left) + 1


CUT = [df.SplitFunc("dynaflow_tests::look_back", tag="look")]


def backwards(cuts: list[Any]) -> Any:
    """As far as it is allowed, the last micro-batch first."""

    class Backwards(df.OpSchedulerBase):
        def partition(self) -> list[Any]:
            return cuts

        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.split(3)
            while ops := ctx.get_ready_ops():
                op = max(ops, key=lambda op: op.micro_batch.index)
                ctx.execute(op, lane="look" if "look" in op.tags else "main")

    return Backwards()


@pytest.mark.parametrize("cuts", [CUT, []], ids=["cut", "in one operator"])
def test_what_follows_waits_for_earlier_rows(cuts: list[Any]) -> None:
    df.by_rows("dynaflow_tests::remember")
    df.by_rows("dynaflow_tests::look_back", follows=["cache"])
    inputs = (torch.arange(9), torch.randn(9, 4))
    expected = Causal()(*inputs)
    for _ in range(20):
        CACHE.zero_()
        fast = compiled(Causal(), backwards(cuts))
        torch.testing.assert_close(fast(*inputs), expected)
    plan = fast.plan(*inputs)
    assert len(plan.micro_batches) == 3


def test_without_it_the_last_would_look_too_early() -> None:
    df.by_rows("dynaflow_tests::remember", "dynaflow_tests::look_back")
    inputs = (torch.arange(9), torch.randn(9, 4))
    expected = Causal()(*inputs)
    CACHE.zero_()
    assert not torch.allclose(compiled(Causal(), backwards(CUT))(*inputs), expected), "the test sees the difference"


def test_a_plan_that_does_not_wait_is_refused() -> None:
    df.by_rows("dynaflow_tests::remember")
    df.by_rows("dynaflow_tests::look_back", follows=["cache"])
    fast = compiled(Causal(), backwards(CUT))
    inputs = (torch.arange(9), torch.randn(9, 4))
    fast(*inputs)
    plan, graph = fast.plan(*inputs), graph_of(fast)
    df.check(plan, graph, 9)
    looks = [i for i, t in enumerate(plan.tasks) if t.lane == "look"]
    refused = 0
    for i in looks:
        for a in plan.tasks[i].after:
            tasks = list(plan.tasks)
            tasks[i] = replace(tasks[i], after=tuple(x for x in tasks[i].after if x != a))
            try:
                df.check(replace(plan, tasks=tuple(tasks)), graph, 9)
            except df.PlanError:
                refused += 1
    assert refused == sum(len(plan.tasks[i].after) for i in looks) > 0
    swapped = [replace(t, lane="main") if t.lane == "look" else t for t in plan.tasks]
    df.check(replace(plan, tasks=tuple(swapped), lanes=plan.lanes[:1]), graph, 9)


# Collectives


@torch.library.custom_op("dynaflow_tests::team_sum", mutates_args=())
def team_sum(x: Tensor, team: str) -> Tensor:
    return x.clone()


@team_sum.register_fake
def _(x: Tensor, team: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaflow_tests::team_scatter", mutates_args=())
def team_scatter(x: Tensor, dim: int, team: str) -> Tensor:
    return x.chunk(2, dim)[0].clone()


@team_scatter.register_fake
def _(x: Tensor, dim: int, team: str) -> Tensor:
    return x.chunk(2, dim)[0].clone()


class Summing(nn.Module):
    """In two teams, by turns."""

    def forward(self, x: Tensor) -> Tensor:
        x = team_sum(x * 2, "red")
        x = team_sum(x * 3, team="blue")
        return team_sum(x + 1, "red") - 1


@pytest.fixture
def teams() -> Iterator[None]:
    known = dict(declared._collectives)
    df.collective(torch.ops.dynaflow_tests.team_sum, group="team", named=lambda team: f"torch's {team}")
    df.collective("dynaflow_tests::team_sc*", group="team", dim="dim")
    yield
    declared._collectives.clear()
    declared._collectives.update(known)


def test_an_operator_that_nobody_declared_is_no_collective() -> None:
    fast = compiled(Summing(), "comm_overlap")
    assert fast.plan(torch.randn(6, 4)).sequential
    assert not any(op.groups for op in graph_of(fast).ops)


@pytest.mark.parametrize("strategy", ["comm_overlap", "nanoflow", "dual_batch", "comet", "token_weave", "searched"])
def test_strategies_give_declared_collectives_the_lane_of_the_link(teams: None, strategy: str) -> None:
    x = torch.randn(6, 4)
    fast = compiled(Summing(), strategy)
    torch.testing.assert_close(fast(x), Summing()(x))
    ops = [op for op in graph_of(fast).ops if op.groups]
    assert [op.groups for op in ops] == [("torch's red",), ("torch's blue",), ("torch's red",)]
    assert all("network" in op.tags and op.splittable for op in ops)
    plan, names = fast.plan(x), {op.name for op in ops}
    if strategy != "searched":  # which has lanes of its own
        lanes = {task.lane for task in plan.tasks if names & {item.op for item in task.items}}
        assert lanes == {"network"} or plan.sequential


def test_declared_collectives_of_a_group_keep_one_order(teams: None) -> None:
    """Each micro-batch has a lane of its own, so nothing orders the sums of one before those of the other."""
    rules = [df.SplitFunc("collective::team_sum", tag="network")]
    with pytest.raises(df.PlanError, match="wait for each other forever"):
        compiled(Summing(), Each(rules, split=2, lanes=2))(torch.randn(6, 4))


@pytest.mark.parametrize(("dim", "legal"), [(0, False), (-2, False), (1, True), (-1, True)])
def test_what_is_exchanged_may_not_be_rows(teams: None, dim: int, legal: bool) -> None:
    class Scattering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return team_scatter(x + 1, dim, "red") * 2

    x = torch.randn(6, 4)
    fast = compiled(Scattering(), Each([df.SplitFunc("collective::*")], split=2))
    torch.testing.assert_close(fast(x), Scattering()(x))
    (op,) = (op for op in graph_of(fast).ops if op.groups)
    assert op.groups == ("red",) and op.splittable is legal
    assert legal or "moves rows of the batch between ranks" in str(op.refusal)


def test_the_cost_of_a_declared_collective_is_that_of_one(teams: None) -> None:
    fast = compiled(Summing(), "comm_overlap")
    fast(torch.randn(6, 4))
    op = next(op for op in graph_of(fast).ops if op.groups)
    work = work_of(graph_of(fast), op, 6)
    assert work.collectives == (("team_sum", 6 * 4 * 4, "red"),)


def test_only_operators_can_be_collectives() -> None:
    with pytest.raises(df.PartitionError, match=r"collective: .* is no operator"):
        df.collective(torch.relu, group="group")
