"""Operators declared to work by rows; and those that need something of earlier rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow import strategies
from dynaflow.capture import op_registry
from dynaflow.cost.work import work_of
from dynaflow.strategies import Comet, CommOverlap, DualBatch, NanoFlow, Solver, TokenWeave
from tests.helpers import Each, Scheduler, assert_equal, compiled, graph_of, randn

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
    CACHE.zero_()
    with op_registry.declarations_restored(), torch.no_grad():
        yield


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
    with pytest.raises(df.PartitionError, match="is not an operator"):
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


@pytest.mark.parametrize("attention", ["*look_back", "*remember"])
def test_a_searched_order_waits_for_earlier_rows(attention: str) -> None:
    df.by_rows("dynaflow_tests::remember")
    df.by_rows("dynaflow_tests::look_back", follows=["cache"])
    inputs = (torch.arange(9), torch.randn(9, 4))
    expected = Causal()(*inputs)
    CACHE.zero_()
    fast = compiled(Causal(), Solver(parts=3, attention=attention, seconds=1.0))
    torch.testing.assert_close(fast(*inputs), expected)
    assert len(fast.plan(*inputs).micro_batches) == 3


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


# States

STATE: dict[str, Tensor] = {}
"""By layer: what the rows so far have left, as a recurrent layer has it."""


@torch.library.custom_op("dynaflow_tests::recur", mutates_args=())
def recur(x: Tensor, layer: str) -> Tensor:
    """Each row depends on all before it."""
    rows = []
    for row in x:
        STATE[layer] = STATE.get(layer, torch.zeros_like(row)) * 0.5 + row
        rows.append(STATE[layer])
    return torch.stack(rows)


@recur.register_fake
def _(x: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaflow_tests::stir", mutates_args=())
def stir(x: Tensor, layer: str) -> Tensor:
    """Changes what the rows have left."""
    STATE[layer] = STATE[layer].roll(1) + x[-1]
    return x * 2


@stir.register_fake
def _(x: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


class Mixer(nn.Module):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return recur(x + 1, self.layer)


class Recurrent(nn.Module):
    """Two layers with a state each, and something to send after each."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(map(Mixer, ("first", "second")))
        self.o_proj, self.mlp, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = team_sum(self.o_proj(mixer(x)), "red") + x
            x = team_sum(self.mlp(torch.tanh(self.norm(x))), "red")
        return x


def afresh(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    STATE.clear()
    return model(x)


def ordered(pick: Callable[[Sequence[df.OpItem]], df.OpItem], parts: int = 3) -> Scheduler:
    """In an order of its own, each micro-batch on its own lane; what sends is on one."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(parts)
        while ops := ctx.get_ready_ops():
            op = pick(ops)
            ctx.execute(op, lane="network" if op.op.groups else f"lane{op.micro_batch.index}")

    return Scheduler(schedule, [df.SplitFunc("*recur", optional=True), df.SplitFunc("*stir", optional=True)])


def last_first(ops: Sequence[df.OpItem]) -> df.OpItem:
    return max(ops, key=lambda item: (item.micro_batch.index, -item.op.index))


ORDERS: dict[str, Callable[[], df.OpSchedulerBase]] = {
    "last first": lambda: ordered(last_first),
    **{f"random {seed}": lambda seed=seed: ordered(random.Random(seed).choice) for seed in range(5)},  # type: ignore[misc]
    "uncut": lambda: Each(split=3, lanes=3),
    "nanoflow": lambda: NanoFlow(parts=3, attention="*recur"),
    "nanoflow, merged": lambda: NanoFlow(parts=3, attention="*stir", merged=("mlp", "o_proj")),
    "nanoflow, merged states": lambda: NanoFlow(parts=3, attention="*tanh", merged=("mixers.*",)),
    "comm_overlap": lambda: CommOverlap(parts=3),
    "dual_batch": lambda: DualBatch(parts=3),
    "comet": lambda: Comet(parts=3),
    "token_weave": lambda: TokenWeave(parts=3),
    "solver": lambda: Solver(parts=3, attention="*recur", seconds=1.0),
    "solver in one operator": lambda: Solver(parts=3, attention="*nothing", seconds=1.0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_calls_on_a_state_run_in_the_order_of_the_rows(teams: None, order: str) -> None:
    df.by_rows("dynaflow_tests::recur", state=["layer"])
    model, x = Recurrent(), torch.randn(9, 4)
    fast = compiled(model, ORDERS[order]())
    torch.testing.assert_close(afresh(fast, x), afresh(model, x))
    graph, plan = graph_of(fast), fast.plan(x)
    assert [op for op in graph.ops if "recur" in op.functions and op.splittable and op.index in op.serial_after]
    assert len(plan.micro_batches) == 3, "it was not cut"
    df.check(plan, graph, 9)


def test_without_a_state_the_last_rows_would_come_first(teams: None) -> None:
    df.by_rows("dynaflow_tests::recur")
    model, x = Recurrent(), torch.randn(9, 4)
    found = afresh(compiled(model, ordered(last_first)), x)
    assert not torch.allclose(found, afresh(model, x)), "the test sees the difference"


class Stirred(nn.Module):
    """Two operators on one state, and nothing in the graph that orders them."""

    def forward(self, x: Tensor) -> Tensor:
        y = recur(x + 1, "layer")
        return y + stir(x * 3, "layer") + recur(x * 0.5, "other")


@pytest.mark.parametrize("seed", range(6))
def test_several_operators_on_a_state_keep_the_order_of_the_model(seed: int) -> None:
    df.by_rows("dynaflow_tests::recur", "dynaflow_tests::stir", state=["layer"])
    x = torch.randn(6, 4)
    expected = afresh(lambda x: torch.cat([Stirred()(part) for part in x.chunk(3)]), x)  # one after the other
    fast = compiled(Stirred(), ordered(random.Random(seed).choice if seed else last_first))
    torch.testing.assert_close(afresh(fast, x), expected)
    plan, graph = fast.plan(x), graph_of(fast)
    touching = [i for i, task in enumerate(plan.tasks) if task.items[0].op.endswith(("recur", "stir"))]
    refused = 0
    for i, j in itertools.pairwise(touching):  # a lane for each: now nothing orders them
        tasks = [replace(t, lane=f"{n}", after=()) if n in (i, j) else t for n, t in enumerate(plan.tasks)]
        lanes = [replace(plan.lanes[0], name=name) for name in {t.lane for t in tasks}]
        with pytest.raises(df.PlanError):
            df.check(replace(plan, tasks=tuple(tasks), lanes=tuple(lanes)), graph, 6)
        refused += 1
    assert refused > 4


@torch.library.custom_op("dynaflow_tests::sweep", mutates_args=())
def sweep(at: Tensor, x: Tensor) -> Tensor:
    """Halves what was left so far."""
    CACHE.mul_(0.5)
    return x + CACHE.sum()


@sweep.register_fake
def _(at: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Swept(nn.Module):
    def forward(self, at: Tensor, x: Tensor) -> Tensor:
        y = sweep(at, x)
        return look_back(at, x + 1, remember(at, x)) + y


def test_calls_that_only_read_or_write_a_state_wait_for_those_that_do_both() -> None:
    df.by_rows("dynaflow_tests::remember", "dynaflow_tests::sweep", state=["at"])
    df.by_rows("dynaflow_tests::look_back", follows=["cache"], state=["at"])
    at, x = torch.arange(6), torch.randn(6, 4)
    parts = zip(at.chunk(3), x.chunk(3), strict=True)
    expected = torch.cat([Swept()(*part) for part in parts])  # one after the other
    CACHE.zero_()
    names = ("sweep", "remember", "look_back")
    rules = [df.SplitFunc(f"dynaflow_tests::{name}") for name in names]
    fast = compiled(Swept(), backwards(rules))
    torch.testing.assert_close(fast(at, x), expected)
    ops = graph_of(fast).ops
    found = {op.name: {ops[a].name for a in op.serial_after} for op in ops if op.name in names}
    assert found == {"sweep": set(names), "remember": {"sweep"}, "look_back": {"remember", "sweep"}}


def test_a_scheduler_is_told_what_comes_before() -> None:
    df.by_rows("dynaflow_tests::recur", "dynaflow_tests::stir", state=["layer"])
    seen = {}

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        first, second = ctx.items(next(op for op in ctx.ops if "stir" in op.functions))
        seen["before"] = {str(item).rpartition(".")[2] for item in ctx.before(second)}
        seen["ready"] = ctx.is_ready([first]), ctx.is_ready([first, second])
        for op in ctx.ops:
            if op is not first.op and ctx.is_ready(ctx.items(op)):
                ctx.execute(ctx.items(op))
        seen["ready behind"] = ctx.is_ready([first]), ctx.is_ready([second]), ctx.is_ready([first, second])
        ctx.execute([first, second])
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0])

    x = torch.randn(6, 4)
    fast = compiled(Stirred(), Scheduler(schedule, [df.SplitFunc("*recur"), df.SplitFunc("*stir")]))
    torch.testing.assert_close(afresh(fast, x), afresh(Stirred(), x))
    assert {"recur[0]", "recur[1]", "stir[0]"} <= seen["before"]
    assert seen["ready"] == (False, False) and seen["ready behind"] == (True, False, True)


def test_what_keeps_a_state_is_not_run_to_be_measured_or_compared() -> None:
    df.by_rows("dynaflow_tests::recur", state=["layer"])
    model, x = Mixer("layer"), torch.randn(6, 4)
    fast = compiled(model, strategies.make("auto", seconds=0.2, among=[("halves", Each(split=2))]))
    torch.testing.assert_close(afresh(lambda x: fast(fast(x)), x), afresh(lambda x: model(model(x)), x))
    assert "can't be put back" in str(fast.explain(x))
    with pytest.raises(df.RecordingError, match="keeps can't be put back"):
        fast.profile(x)
    with pytest.raises(df.VerifyError, match="has state"):
        compiled(model, Each(split=2), verify=True)(x)


# Dims before the rows


class Beside(nn.Module):
    """The rows are on dim 1."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled(out, x + 1)
        return torch.relu(out)


@pytest.mark.parametrize(("flat", "lead", "split"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_dims_of_size_1_make_no_difference_to_flat_operators(flat: bool, lead: int, split: bool) -> None:
    df.by_rows("dynaflow_tests::scaled", flat=flat)
    x = torch.randn(lead, 6, 4)
    fast = compiled(Beside(), Each(split=2), batch_dims={"x": 1})
    torch.testing.assert_close(fast(x), Beside()(x))
    refusals = [op.refusal for op in graph_of(fast).ops if op.refusal]
    assert bool(refusals) is not split and all("dim 0" in refusal for refusal in refusals)


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
def teams() -> None:
    df.collective(torch.ops.dynaflow_tests.team_sum, group="team", named=lambda team: f"torch's {team}")
    df.collective("dynaflow_tests::team_sc*", group="team", dim="dim")


def test_an_operator_that_nobody_declared_is_no_collective() -> None:
    fast = compiled(Summing(), "comm_overlap")
    assert fast.plan(torch.randn(6, 4)).sequential
    assert not any(op.groups for op in graph_of(fast).ops)


@pytest.mark.parametrize("strategy", ["comm_overlap", "nanoflow", "dual_batch", "comet", "token_weave", "solver"])
def test_strategies_give_declared_collectives_the_lane_of_the_link(teams: None, strategy: str) -> None:
    x = torch.randn(6, 4)
    fast = compiled(Summing(), strategy)
    torch.testing.assert_close(fast(x), Summing()(x))
    ops = [op for op in graph_of(fast).ops if op.groups]
    assert [op.groups for op in ops] == [("torch's red",), ("torch's blue",), ("torch's red",)]
    assert all("network" in op.tags and op.splittable for op in ops)
    plan, names = fast.plan(x), {op.name for op in ops}
    if strategy != "solver":  # which has lanes of its own
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
    with pytest.raises(df.PartitionError, match=r"collective: .* is not an operator"):
        df.collective(torch.relu, group="group")


@torch.library.custom_op("dynaflow_tests::small", mutates_args=("state",))
def small(state: Tensor, x: Tensor) -> Tensor:
    state.add_(x.sum(0))
    return x.sum(0)


@small.register_fake
def _(state: Tensor, x: Tensor) -> Tensor:
    assert x.shape[0] < 100, "no batch is that large"
    return torch.empty_like(state)


def test_what_fails_in_the_probe_is_taken_to_write() -> None:
    """Else whoever reads what it writes would not wait for it."""

    def last_first(ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[-1])

    def model(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dynaflow_tests.small(state, x), state.sin()

    rules = [df.SplitFunc("*small"), df.SplitFunc("sin")]
    fast = compiled(model, Scheduler(last_first, rules), batch_dims={"x": 0})
    states = torch.ones(4), torch.ones(4)
    with torch.no_grad():
        for call, state in zip((fast, model), states, strict=True):
            torch.testing.assert_close(call(state, torch.ones(6, 4))[1], torch.full((4,), 7.0).sin())
    torch.testing.assert_close(*states)


@torch.enable_grad()
def test_equal_calls_of_two_regions_in_training() -> None:
    """AOTAutograd makes them once, so the second region goes on from inside of the first."""
    weight = randn(4, 4)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        with df.mark("a", splittable=True):
            one = torch.tanh(x.flip(0) @ weight).flip(0)
        with df.mark("b", splittable=True):
            other = (torch.tanh(x.flip(0) @ weight) * 3).flip(0)
        return one + 1, other + 2

    fast = compiled(model, Each(split=[2, 4]))
    found = []
    for call in (model, fast):
        x = randn(6, 4).requires_grad_()
        results = call(x)
        found.append((results, torch.autograd.grad(sum((r * r).sum() for r in results), x)))
    assert_equal(found[1], found[0])
