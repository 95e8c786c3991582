"""A plan's timeline: by hand for small plans, by properties for random ones, and on a captured model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dynaflow as df
from dynaflow.cli.plan_for_device import in_sequence
from dynaflow.core.device import B200, DEVICES, H200, Device, device_for, device_named, planned_for
from dynaflow.core.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.cost.costs import RESOURCES, Costs, Phase, operator_key
from dynaflow.cost.simulate import simulate
from dynaflow.cost.simulation import Simulation
from dynaflow.errors import DynaFlowError, PlanError
from tests.helpers import STACK_RULES, Each, Stack, compiled, graph_of, lines_run

FREE = replace(H200, host_call=0.0, host_task=0.0, host_kernel=0.0, graph_launch=0.0, wait=0.0)
"""A device whose host takes no time, so that times can be told by hand."""


def phase(seconds: float = 1.0, **uses: float) -> Phase:
    return Phase(seconds, tuple(uses.get(name, 0.0) for name in RESOURCES))


class Given:
    """Costs that a test makes up: phases by operator; a number of rows takes that many times as long."""

    def __init__(self, phases: dict[str, list[Phase]], kernels: int = 1) -> None:
        self.given, self.count = phases, kernels

    def phases(self, op: Any, rows: int, sms: int | None = None) -> tuple[Phase, ...]:
        return tuple(Phase(p.seconds * rows, p.uses) for p in self.given[op.name])

    def kernels(self, op: Any, rows: int) -> int:
        return self.count

    def function(self, name: str, rows: int, sms: int | None = None) -> float | None:
        return None


def graph_with(*names: str) -> Any:
    ops = tuple(SimpleNamespace(index=i, name=name, splittable=True) for i, name in enumerate(names))
    return SimpleNamespace(ops=ops, by_name={op.name: op for op in ops})


def plan_of(*tasks: tuple[str, str, tuple[int, ...]], lanes: tuple[Lane, ...] = ()) -> Plan:
    """Tasks as (operator, lane, waits), for a batch of one row."""
    made = tuple(Task(items=(Item(op=op, micro_batches=(0,)),), lane=lane, after=after) for op, lane, after in tasks)
    known = {lane.name: lane for lane in lanes}
    used = tuple(known.get(n, Lane(name=n)) for n in dict.fromkeys(t.lane for t in made))
    whole = (MicroBatch(index=0, start=0, stop=1),)
    return Plan(graph="", micro_batches=whole, lanes=used, tasks=made)


def run(plan: Plan, phases: dict[str, list[Phase]], device: Device = FREE, **options: Any) -> Simulation:
    kernels = options.pop("kernels", 1)
    return simulate(plan, graph_with(*phases), Given(phases, kernels), device, **options)  # type: ignore[arg-type]


def ends(found: Simulation) -> list[float]:
    return [round(span.end, 9) for span in found.spans]


# By hand


def test_a_sequence_is_the_sum_of_its_operators() -> None:
    phases = {"a": [phase(1, compute=1, sms=1)], "b": [phase(2, memory=1, sms=1), phase(3, compute=0.5, sms=1)]}
    found = run(in_sequence(plan_of(("a", "x", ()))), phases)
    assert found.seconds == pytest.approx(6)
    assert [s.name for s in found.spans] == ["a", "b"]
    assert found.busy["compute"] == pytest.approx((1 + 1.5) / 6)
    assert found.limit == "sms"


def test_copies_and_compute_take_as_long_as_the_longer() -> None:
    phases = {"copy": [phase(2, to_host=1)], "product": [phase(3, compute=1, sms=1)]}
    found = run(plan_of(("copy", "copies", ()), ("product", "compute", ())), phases)
    assert ends(found) == [2, 3]
    assert found.limit == "compute" and found.busy["to_host"] == pytest.approx(2 / 3)


def test_both_directions_of_the_host_link_work_at_once() -> None:
    phases = {"out": [phase(2, to_host=1)], "back": [phase(2, from_host=1)], "more": [phase(2, to_host=1)]}
    found = run(plan_of(("out", "a", ()), ("back", "b", ()), ("more", "c", ())), phases)
    assert ends(found) == [4, 2, 4]


def test_kernels_that_fill_the_device_run_in_turn() -> None:
    phases = {"attention": [phase(2, memory=1, sms=1)], "product": [phase(3, compute=1, sms=1)]}
    found = run(plan_of(("attention", "a", ()), ("product", "b", ())), phases)
    assert ends(found) == [4, 5], "half speed until the shorter is done, then alone"


def test_kernels_that_leave_room_run_side_by_side() -> None:
    phases = {"a": [phase(2, compute=0.4, sms=0.4)], "b": [phase(2, compute=0.5, sms=0.5)]}
    assert run(plan_of(("a", "a", ()), ("b", "b", ())), phases).seconds == pytest.approx(2)


def test_a_small_user_is_not_held_up_by_a_large_one() -> None:
    phases = {"reduce": [phase(2, link=1, sms=0.1)], "product": [phase(4, compute=1, sms=1)]}
    found = run(plan_of(("reduce", "link", ()), ("product", "compute", ())), phases)
    assert ends(found)[0] == pytest.approx(2)
    assert ends(found)[1] == pytest.approx(4.2), "a tenth of the SMs is gone for as long as the collective runs"


def test_urgent_lanes_come_first() -> None:
    phases = {"a": [phase(1, sms=1)], "b": [phase(1, sms=1)]}
    lanes = (Lane(name="a"), Lane(name="b", priority=-1))
    assert ends(run(plan_of(("a", "a", ()), ("b", "b", ()), lanes=lanes), phases)) == [2, 1]


def test_lanes_with_a_share_keep_to_it() -> None:
    """On SMs of their own two kernels do not wait for each other, but both may want all of the memory."""
    phases = {"a": [phase(2, memory=0.4, sms=1)], "b": [phase(2, compute=0.5, sms=1)]}
    tasks = (("a", "a", ()), ("b", "b", ()))
    lanes = (Lane(name="a", sms=32), Lane(name="b"))
    assert run(plan_of(*tasks, lanes=lanes), phases).seconds == pytest.approx(2)
    assert run(plan_of(*tasks), phases).seconds == pytest.approx(4)
    found = run(plan_of(*tasks, lanes=lanes), phases)
    assert found.busy["sms"] == pytest.approx(1) and found.limit == "sms"
    greedy = {"a": [phase(2, memory=1, sms=1)], "b": [phase(2, memory=1, sms=1)]}
    assert run(plan_of(*tasks, lanes=lanes), greedy).seconds == pytest.approx(4)


def test_a_lane_with_all_sms_gives_way_to_one_that_is_held_to_a_part() -> None:
    phases = {"a": [phase(2, memory=0.4, sms=1)], "b": [phase(2, compute=0.5, sms=1)]}
    lanes = (Lane(name="a", sms=FREE.sms // 2), Lane(name="b", sms=FREE.sms))
    found = run(plan_of(("a", "a", ()), ("b", "b", ()), lanes=lanes), phases)
    assert ends(found) == [2, 3], "half of the SMs are left while the other runs"
    assert found.busy["sms"] == pytest.approx(1)


def test_shares_must_fit_the_device() -> None:
    with pytest.raises(PlanError, match="200 SMs"):
        run(plan_of(("a", "a", ()), lanes=(Lane(name="a", sms=200),)), {"a": [phase()]})


def test_phases_contend_one_by_one() -> None:
    """A round trip to the host uses one direction after the other: two of them follow each other through both."""
    trip = [phase(1, to_host=1), phase(1, from_host=1)]
    phases = {"a": trip, "b": trip, "wait": [phase(1)]}
    staggered = run(plan_of(("a", "x", ()), ("wait", "y", ()), ("b", "y", ())), phases)
    assert staggered.seconds == pytest.approx(3)
    together = run(plan_of(("a", "x", ()), ("b", "y", ())), phases)
    assert together.seconds == pytest.approx(4)


def test_waits_take_their_time_and_lanes_keep_their_order() -> None:
    phases = {"a": [phase(1)], "b": [phase(1)], "c": [phase(1)]}
    found = run(plan_of(("a", "x", ()), ("b", "y", (0,)), ("c", "x", (1,))), phases, replace(FREE, wait=0.25))
    assert [s.start for s in found.spans] == pytest.approx([0, 1.25, 2.5])
    assert found.limit == "chain"


def test_the_host_limits_small_kernels_unless_all_is_one_launch() -> None:
    phases = {"a": [phase(1e-6, sms=0.1)]}
    plan = plan_of(*[("a", "x", ())] * 10)
    slow = replace(H200, host_call=0.0, host_task=2e-6, host_kernel=5e-6, graph_launch=3e-6)
    found = run(plan, phases, slow, kernels=4)
    assert found.seconds == pytest.approx(10 * (2e-6 + 4 * 5e-6))
    assert found.limit == "host"
    graphed = run(plan, phases, slow, kernels=4, cudagraph=True)
    assert graphed.seconds == pytest.approx(3e-6 + 10e-6) and graphed.limit == "chain"


def test_a_task_does_not_end_before_its_last_kernel_is_launched() -> None:
    found = run(plan_of(("a", "x", ())), {"a": [phase(1e-6)]}, replace(FREE, host_kernel=1e-5), kernels=3)
    assert found.spans[0].start == pytest.approx(1e-5) and found.spans[0].end == pytest.approx(3e-5)


def test_an_operator_without_kernels_takes_no_time() -> None:
    found = run(plan_of(("a", "x", ()), ("b", "y", (0,)), ("c", "x", (1,))), {"a": [], "b": [], "c": [phase(1)]})
    assert found.seconds == pytest.approx(1)


def test_what_the_graph_does_not_have() -> None:
    with pytest.raises(PlanError, match="'b'"):
        run(plan_of(("b", "x", ())), {"a": [phase()]})


def test_tasks_that_wait_in_a_cycle() -> None:
    with pytest.raises(PlanError, match="a cycle of waits"):
        run(plan_of(("a", "x", (1,)), ("b", "y", (0,))), {"a": [phase()], "b": [phase()]})


def test_rows_of_merged_micro_batches_add_up() -> None:
    parts = tuple(MicroBatch(index=i, start=3 * i, stop=3 * i + 3) for i in range(2))
    tasks = (Task(items=(Item(op="a", micro_batches=(0,)),), lane="x"), Task(items=(Item(op="a", micro_batches=(1,)),),
             lane="x"), Task(items=(Item(op="b", micro_batches=(0, 1)),), lane="x"))  # fmt: skip
    plan = Plan(graph="", micro_batches=parts, lanes=(Lane(name="x"),), tasks=tasks)
    assert ends(run(plan, {"a": [phase(1)], "b": [phase(1)]})) == [3, 6, 12]


# To be seen


def test_text_and_trace() -> None:
    phases = {"copy": [phase(2e-3, to_host=1)], "product": [phase(3e-3, compute=1, sms=1)]}
    found = run(plan_of(("copy", "copies", ()), ("product", "compute", ())), phases)
    head, first, second, *_ = str(found).splitlines()
    assert head.startswith("3.000 ms on h200, limited by compute; in use: compute 100%")
    assert first.strip().startswith("copies |[A0") and second.strip().startswith("compute |[B0")
    trace = json.loads(found.to_json())
    (copy,) = [e for e in trace["traceEvents"] if e.get("name") == "copy[0]"]
    assert (copy["ph"], copy["ts"], copy["dur"]) == ("X", 0, pytest.approx(2000))
    curves = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert curves[0]["args"] == {"compute": 1.0, "to_host": 1.0, "sms": 1.0}
    assert "in sequence" in str(run(in_sequence(found.plan), phases))


# Random plans

fractions = st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.9, 1.0])
some_phases = st.lists(
    st.builds(
        lambda seconds, uses: Phase(seconds, tuple(uses)),
        st.sampled_from([1e-4, 1e-3, 3e-3, 1e-2]),
        st.lists(fractions, min_size=len(RESOURCES), max_size=len(RESOURCES)),
    ),
    max_size=3,
)


@st.composite
def random_plans(draw: st.DrawFn) -> tuple[Plan, dict[str, list[Phase]]]:
    count = draw(st.integers(1, 12))
    lanes = [Lane(name=f"lane{i}", priority=draw(st.sampled_from([0, 0, -1])),
                  sms=draw(st.sampled_from([None, 16, 32]))) for i in range(draw(st.integers(1, 4)))]  # fmt: skip
    tasks = []
    for i in range(count):
        waits = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        tasks.append((f"op{i}", draw(st.sampled_from(lanes)).name, tuple(sorted(waits))))
    return plan_of(*tasks, lanes=tuple(lanes)), {f"op{i}": draw(some_phases) for i in range(count)}


TWO_WITHOUT_WORK_FIRST = (
    plan_of(("op0", "x", ()), ("op1", "x", ()), ("op2", "x", ()), ("op3", "y", ())),
    {"op0": [], "op1": [], "op2": [phase(1e-4, power=0.5)], "op3": [phase(1e-4, power=0.9)]},
)
"""A run that draws too much power is stretched, but not what comes before the first kernel."""


@settings(max_examples=150, deadline=None)
@given(random_plans(), st.booleans())
@example(TWO_WITHOUT_WORK_FIRST, False)
def test_every_timeline_is_possible(made: tuple[Plan, dict[str, list[Phase]]], cudagraph: bool) -> None:
    plan, phases = made
    device = replace(FREE, wait=1e-5, host_task=1e-6, host_kernel=2e-6, graph_launch=5e-6)
    found = run(plan, phases, device, cudagraph=cudagraph)
    alone = [sum(p.seconds for p in phases[t.items[0].op]) for t in plan.tasks]
    pool = {lane.name: (lane.name if lane.sms else "rest") for lane in plan.lanes}
    last: dict[str, float] = {}
    for span, task, least in zip(found.spans, plan.tasks, alone, strict=True):
        assert span.end - span.start >= least - 1e-9, "nothing is faster than alone"
        assert span.start >= max([last.get(task.lane, 0.0), *(found.spans[a].end for a in task.after)]) - 1e-9
        last[task.lane] = span.end
    for load in found.loads:
        most = max((use for name, use in load.uses.items() if name != "power"), default=0)
        assert most <= 1 + 1e-6, "there is no more than all of a resource"
    for r, name in enumerate(RESOURCES[:-1]):
        needed = sum(p.seconds * p.uses[r] for t in plan.tasks for p in phases[t.items[0].op])
        needed /= device.sustained if name == "power" else 1
        assert found.busy[name] * found.seconds == pytest.approx(needed, abs=1e-8), "what is used is what was needed"
        assert found.seconds >= needed - 1e-9
    for part in set(pool.values()):
        mine = [t for t in plan.tasks if pool[t.lane] == part]
        assert found.seconds >= sum(p.seconds * p.uses[-1] for t in mine for p in phases[t.items[0].op]) - 1e-9
    assert found.seconds >= _longest(plan, alone) - 1e-9, "nor than the longest chain"
    under_way = max(1, 1 / device.sustained) * sum(alone) + (2 * len(alone) + 2) * 2e-5
    assert found.seconds <= under_way, "and something is always under way"
    again = run(plan, phases, device, cudagraph=cudagraph)
    assert again.spans == found.spans and again.loads == found.loads


def _longest(plan: Plan, alone: list[float]) -> float:
    until: list[float] = []
    last: dict[str, float] = {}
    for task, seconds in zip(plan.tasks, alone, strict=True):
        until.append(seconds + max([last.get(task.lane, 0.0), *(until[a] for a in task.after)]))
        last[task.lane] = until[-1]
    return max(until)


# Costs


def stack_costs(width: int = 8, **options: Any) -> Costs:
    fast = compiled(Stack(width=width), Each(STACK_RULES, split=2))
    with torch.no_grad():
        fast.plan(torch.empty(8, width))
    return Costs(graph_of(fast), H200, **options)


def test_measured_times_count_and_between_them_the_estimate_is_bent() -> None:
    plain = stack_costs()
    op = plain.graph.by_name["layers.0.mlp"]
    key = operator_key(plain.graph, op)
    measured = Costs(plain.graph, H200, {(key, 4, None): 1e-3, (key, 8, None): 2e-3, (key, 4, 32): 5e-3})
    twin = plain.graph.by_name["layers.1.mlp"]
    assert measured.seconds(twin, 4) == pytest.approx(1e-3), "equal operators are measured once"
    assert measured.seconds(op, 8) == pytest.approx(2e-3)
    assert 1e-3 < measured.seconds(op, 6) < 2e-3
    assert measured.seconds(op, 16) == pytest.approx(2e-3 / plain.seconds(op, 8) * plain.seconds(op, 16))
    assert measured.seconds(op, 4, sms=32) == pytest.approx(5e-3)
    other = plain.graph.by_name["layers.0.attn"]
    assert measured.seconds(other, 4) == plain.seconds(other, 4)
    scale = measured.seconds(op, 4) / plain.seconds(op, 4)
    uses, usual = measured.uses(op, 4), plain.uses(op, 4)
    assert uses["memory"] == pytest.approx(usual["memory"] / scale), "the same bytes in a longer time"
    assert uses["sms"] > usual["sms"] > 0, "kernels that take longer hold their SMs for longer"


class Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def product_costs(device: Device, width: int = 4096) -> tuple[Costs, Any]:
    fast = compiled(Product(width), Each(split=None))
    with torch.no_grad():
        fast.plan(torch.empty(64, width, device="meta", dtype=torch.bfloat16))
    graph = graph_of(fast)
    return Costs(graph, device), graph.ops[0]


def test_a_product_is_bound_by_memory_for_few_rows_and_by_arithmetic_for_many() -> None:
    costs, op = product_costs(H200)
    few, many = costs.uses(op, 8), costs.uses(op, 16384)
    weights, flops = 2 * 4096 * 4096, 2 * 16384 * 4096 * 4096
    assert few["memory"] > 0.6 and few["compute"] < 0.1
    assert many["compute"] > 0.9 and many["memory"] < 0.3
    assert costs.seconds(op, 8) == pytest.approx(weights / H200.bytes_per_second + H200.kernel, rel=0.02)
    assert costs.seconds(op, 16384) == pytest.approx(flops / H200.flops("bfloat16"), rel=0.06)


def test_fewer_sms_cost_a_product_more_than_their_share_and_a_sweep_less() -> None:
    costs, op = product_costs(H200)
    assert costs.seconds(op, 16384, sms=66) > 2 * costs.seconds(op, 16384)
    assert costs.seconds(op, 16384, sms=132) == costs.seconds(op, 16384)
    kept = [round(H200.memory_speed(n / 132), 2) for n in (16, 32, 48, 64, 80, 132)]
    assert kept == [0.24, 0.47, 0.69, 0.89, 0.96, 1]


def test_a_product_too_small_for_the_device_does_not_fill_it() -> None:
    costs, op = product_costs(H200, width=512)
    assert costs.uses(op, 64)["sms"] < 0.2
    assert costs.seconds(op, 64) < 3 * H200.kernel


def test_two_kernels_on_their_own_sms_still_share_the_power() -> None:
    """Measured: attention on 64 SMs beside a product on the others gives 0.97 to 1.07 of both in turn."""
    attention = [phase(1.05 / 0.89, memory=0.89, power=0.89 * H200.memory_power, sms=1)]
    product = [phase(1 / 0.53, compute=0.53, power=0.53, sms=1)]
    lanes = (Lane(name="a", sms=64), Lane(name="b", sms=68))
    phases = {"attention": attention, "product": product}
    found = run(plan_of(("attention", "a", ()), ("product", "b", ()), lanes=lanes), phases)
    in_turn = run(
        plan_of(("attention", "a", ()), ("product", "a", ())),
        {"attention": [phase(1.05, memory=1, power=H200.memory_power, sms=1)],
         "product": [phase(1, compute=1, power=1, sms=1)]},
    )  # fmt: skip
    assert 0.97 < in_turn.seconds / found.seconds < 1.07


def test_a_product_that_makes_pauses_is_faster_than_one_that_makes_none() -> None:
    """Measured: 742 TFLOP/s between copies, 650 beside them."""
    phases = {"product": [phase(1, compute=1, power=1, sms=1)], "copy": [phase(1, to_host=1)]}
    in_turn = run(plan_of(("product", "a", ()), ("copy", "a", ())), phases)
    assert in_turn.seconds == pytest.approx(2)
    beside = run(plan_of(("product", "a", ()), ("copy", "b", ())), phases)
    assert beside.seconds == pytest.approx(1 / H200.sustained) and beside.limit == "power"
    assert ends(beside) == [pytest.approx(beside.seconds)] * 2


# A captured model


def test_a_captured_model_under_two_lanes() -> None:
    fast = compiled(Stack(blocks=8), Each(STACK_RULES, split=2, lanes=2))
    with torch.no_grad():
        plan = fast.plan(torch.empty(8, 8))
    graph = graph_of(fast)
    costs = Costs(graph, FREE)
    in_turn = simulate(in_sequence(plan), graph, costs, FREE)
    assert in_turn.seconds == pytest.approx(sum(costs.seconds(op, 8) for op in graph.ops))
    found = simulate(plan, graph, costs, FREE)
    assert len(found.spans) == len(plan.tasks)
    # Tiny operators, which take no less for half of the rows, and leave room for each other: splitting gains nothing.
    assert 0.95 * in_turn.seconds <= found.seconds <= 1.05 * in_turn.seconds


def test_a_simulation_costs_as_much_as_the_plan_is_long() -> None:
    lines = {}
    for blocks in (8, 16):
        fast = compiled(Stack(blocks=blocks), Each(STACK_RULES, split=2, lanes=2))
        with torch.no_grad():
            plan = fast.plan(torch.empty(8, 8))
        costs = Costs(graph_of(fast), FREE)
        simulate(plan, graph_of(fast), costs, FREE)
        lines[len(plan.tasks)] = lines_run(partial(simulate, plan, graph_of(fast), costs, FREE))
    (few, some), (many, more) = lines.items()
    assert many == 2 * few and more < 2.2 * some


# Devices


def test_a_scheduler_plans_for_a_device_that_is_not_at_hand() -> None:
    asked: list[tuple[int, float]] = []

    class Asks(df.OpSchedulerBase):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            asked.append((ctx.sms, ctx.cost(ctx.ops[0])))
            ctx.sequential()

    def plan() -> None:
        df.compile(torch.nn.Linear(512, 512), Asks(), operators="eager").plan(torch.ones(512, 512))

    with torch.no_grad():
        plan()
        with planned_for(H200):
            plan()
    (here, slow), (there, fast) = asked
    assert here == torch.get_num_threads() and there == H200.sms and fast < slow / 10
    assert device_for(torch.device("cpu")).name == "cpu", "and only there"


def test_devices_by_name() -> None:
    assert device_named("H200") is not None and device_named("b200x4").ranks == 4
    assert device_named("b200", 8) == DEVICES["b200x8"] and B200.ranks == 1
    with pytest.raises(DynaFlowError, match="h300"):
        device_named("h300")
    assert all(0.5 < d.bandwidth < 1 and d.flops("bfloat16") > 2e14 for d in DEVICES.values())
    cpu = device_for(torch.device("cpu"))
    assert cpu.sms == torch.get_num_threads() and cpu.flops("float64") > 0


def test_collectives_take_the_link_and_grow_with_the_ranks() -> None:
    def reduce(x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", "tp"))

    fast = compiled(reduce, Each([df.SplitFunc("*all_reduce*", splittable=True)], split=None))
    with torch.no_grad():
        fast.plan(torch.empty(64, 1 << 20, device="meta"))
    graph = graph_of(fast)
    (op,) = [op for op in graph.ops if Costs(graph, H200).work(op, 64).collectives]
    seconds = {n: Costs(graph, H200.with_ranks(n)).seconds(op, 64) for n in (1, 2, 8)}
    assert H200.link is not None
    assert seconds[1] <= H200.kernel
    sent = 2 * 7 / 8 * 64 * (1 << 20) * 4
    assert seconds[8] == pytest.approx(H200.link.latency + sent / H200.link.bandwidth)
    assert seconds[2] < seconds[8]
    assert Costs(graph, H200.with_ranks(8)).uses(op, 64)["link"] > 0.9
