"""Lanes with shares and priorities: how they are declared, kept, divided, and run on CPU."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dynaflow as df
from dynaflow.core.plan import Lane
from dynaflow.lower.compile_ops import Operators
from dynaflow.lower.emit import emit
from dynaflow.lower.passes import make_program
from dynaflow.runtime.sm_partitions import CtypesDriver, Resource, carve
from dynaflow.schedule.check import check
from tests.helpers import STACK_RULES, Scheduler, Stack, compiled, graph_of, randn, run_rest

X = randn(6, 8)


def lanes_of(**declared: dict[str, int]) -> Callable[[df.ScheduleContext], None]:
    """Splits in two; attention on lane "memory", everything else by micro-batch on "main" and "side"."""

    def schedule(ctx: df.ScheduleContext) -> None:
        for name, values in declared.items():
            assert ctx.lane(name, **values) == name
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="memory" if "attention" in op.tags else ("main", "side")[op.micro_batch])

    return schedule


def plan_of(schedule: Callable[[df.ScheduleContext], None]) -> df.Plan:
    with torch.no_grad():
        return compiled(Stack(), Scheduler(schedule, STACK_RULES)).plan(X)


# Declaring


def test_declared_lanes_are_in_the_plan() -> None:
    plan = plan_of(lanes_of(unused={"sms": 4}, side={"priority": -1}, memory={"sms": 48}))
    memory, main, side = Lane(name="memory", sms=48), Lane(name="main"), Lane(name="side", priority=-1)
    assert plan.lanes == (main, memory, side), "main, then in the order of first use, and only those that are used"
    assert plan.partitioned
    assert "on lanes main, memory (48 SMs), side (priority -1)" in str(plan)
    assert str(replace(memory, priority=-2)) == "memory (48 SMs, priority -2)"


def test_undeclared_lanes_have_no_share() -> None:
    plan = plan_of(lanes_of())
    assert all(lane == Lane(name=lane.name) for lane in plan.lanes)
    assert not plan.partitioned


def test_same_declaration_twice() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        memory = ctx.lane("memory", sms=2)
        ctx.execute(ctx.get_ready_ops()[0], lane=memory)
        ctx.lane("memory", sms=2)
        run_rest(ctx)
        ctx.lane("main")

    assert [lane.sms for lane in plan_of(schedule).lanes] == [None, 2]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda ctx: ctx.lane(""), r"lane\(''\)"),
        (lambda ctx: ctx.lane(3), r"lane\(3\)"),
        (lambda ctx: ctx.lane("memory", sms=0), "'memory': sms=0"),
        (lambda ctx: ctx.lane("memory", sms=1.5), "'memory': sms=1.5"),
        (lambda ctx: ctx.lane("memory", sms=True), "'memory': sms=True"),
        (lambda ctx: ctx.lane("memory", priority=None), "'memory': priority=None"),
        (lambda ctx: (ctx.lane("memory", sms=8), ctx.lane("memory", sms=16)), r"memory \(16 SMs\) is declared before"),
        (lambda ctx: (run_rest(ctx), ctx.lane("main", sms=8)), r"main \(8 SMs\) is in use, undeclared"),
    ],
)
def test_wrong_declarations(declare: Callable[[Any], Any], message: str) -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        declare(ctx)
        run_rest(ctx)

    with pytest.raises(df.ScheduleError, match=message) as caught:
        plan_of(schedule)
    assert caught.value.line and "test_cpu_lanes.py" in caught.value.line and caught.value.advice


def test_what_can_be_shared_on_cpu() -> None:
    found = []

    def schedule(ctx: df.ScheduleContext) -> None:
        found.append(ctx.sms)
        run_rest(ctx)

    before = torch.cuda.is_initialized()
    plan_of(schedule)
    assert found == [torch.get_num_threads()]
    assert torch.cuda.is_initialized() == before


# As data


def test_json_keeps_shares_and_priorities() -> None:
    plan = plan_of(lanes_of(memory={"sms": 48}, side={"priority": -1}))
    assert df.Plan.from_json(plan.to_json()) == plan


def test_json_without_shares_still_loads() -> None:
    plan = plan_of(lanes_of())
    data = json.loads(plan.to_json())
    data["lanes"] = [{"name": lane["name"]} for lane in data["lanes"]]
    assert df.Plan.from_json(json.dumps(data)) == plan


@pytest.mark.parametrize("wrong", [{"sms": "48"}, {"sms": 1.5}, {"sms": True}, {"priority": None}, {"priority": "-1"}])
def test_malformed_lanes(wrong: dict[str, Any]) -> None:
    data = json.loads(plan_of(lanes_of()).to_json())
    data["lanes"][1].update(wrong)
    with pytest.raises(df.PlanError, match=r"malformed plan: lanes\[1\]"):
        df.Plan.from_json(json.dumps(data))


def test_shares_are_positive() -> None:
    fast = compiled(Stack(), Scheduler(lanes_of(), STACK_RULES))
    with torch.no_grad():
        plan = fast.plan(X)
    lanes = [replace(lane, sms=0) if lane.name == "memory" else lane for lane in plan.lanes]
    with pytest.raises(df.PlanError, match="lane 'memory' has a share of 0 SMs"):
        check(replace(plan, lanes=tuple(lanes)), graph_of(fast), 6)


# On CPU: numbers of threads


class Threads:
    """An on_task hook: the number of threads that torch has in each lane; fails in `broken`, if told to."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}
        self.broken: str | None = None

    def __call__(self, task: df.Task, moment: str) -> None:
        if moment == "start":
            (torch.ones(1 << 16) + 1).sum()  # a parallel region, which is where a thread may take another number
            self.seen.setdefault(task.lane, set()).add(torch.get_num_threads())
        if task.lane == self.broken:
            raise ValueError("on purpose")


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def usual() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("shares", [{"memory": 3, "side": 1}, {"main": 3, "side": 1}, {"main": 1}])
def test_lanes_have_their_threads(usual: int, shares: dict[str, int]) -> None:
    """Those without a share have the caller's number, new workers too. The first lane, memory, is the caller's."""
    hook = Threads()
    model = Stack()
    declared = {name: {"sms": threads} for name, threads in shares.items()}
    fast = compiled(model, Scheduler(lanes_of(**declared), STACK_RULES), on_task=hook)
    everywhere = {"memory": {usual}, "side": {usual}, "main": {usual}}
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(fast(X), model(X))
            assert torch.get_num_threads() == usual
            assert threads_of_a_new_thread() == usual
        assert hook.seen == {**everywhere, **{name: {threads} for name, threads in shares.items()}}
        hook.seen.clear()
        fast.set_scheduler(Scheduler(lanes_of(), STACK_RULES))
        fast(X)
    assert hook.seen == everywhere, "the workers are as before"


@pytest.mark.parametrize("broken", ["memory", "main", "side"])
def test_threads_after_a_failure(usual: int, broken: str) -> None:
    hook = Threads()
    fast = compiled(Stack(), Scheduler(lanes_of(memory={"sms": 1}, main={"sms": 3}), STACK_RULES), on_task=hook)
    with torch.no_grad():
        fast(X)
        hook.broken = broken
        with pytest.raises(ValueError, match="on purpose") as caught:
            fast(X)
        assert any(f"on lane {broken}" in note for note in caught.value.__notes__)
        assert torch.get_num_threads() == usual
        assert threads_of_a_new_thread() == usual
        hook.broken = None
        hook.seen.clear()
        fast(X)
    assert hook.seen == {"memory": {1}, "main": {3}, "side": {usual}}


def test_one_lane_with_a_share(usual: int) -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.lane("main", sms=1)
        run_rest(ctx)

    hook = Threads()
    model = Stack()
    fast = compiled(model, Scheduler(schedule, STACK_RULES), on_task=hook)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    assert hook.seen == {"main": {1}}
    assert torch.get_num_threads() == usual


# On CUDA, as far as it goes without one


def cuda_code(schedule: Callable[[df.ScheduleContext], None]) -> list[str]:
    fast = compiled(Stack(), Scheduler(schedule, STACK_RULES))
    with torch.no_grad():
        plan = fast.plan(X)
    graph = graph_of(fast)
    sizes = {**graph.graph.hints, **dict.fromkeys(graph.batch_axes[0], 6)}
    source = emit(make_program(plan, graph, sizes, Operators("eager"), {}), cuda=True, hook=False).source
    return [line.strip() for line in source.splitlines()]


def test_partitioned_lanes_all_join_the_caller() -> None:
    code = cuda_code(lanes_of(memory={"sms": 48}))
    assert "caller, s0, s1, s2, = streams" in code
    first = next(i for i, line in enumerate(code) if line.startswith("# 0:"))
    assert code[first + 1] == "set_stream(s1)", "the caller's stream is current at first"
    end = code.index("set_stream(caller)")
    joins = [line for i in range(3) for line in (f"j_s{i}.record(s{i})", f"caller.wait_event(j_s{i})")]
    assert code[end + 1 : end + 7] == joins


def test_results_of_a_partition_are_recorded() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.lane("main", sms=8)
        run_rest(ctx)

    code = cuda_code(schedule)
    end = code.index("set_stream(caller)")
    assert code[end + 1 : end + 3] == ["j_s0.record(s0)", "caller.wait_event(j_s0)"]
    assert code[end + 3].endswith(".record_stream(caller)"), "the only lane's result is the caller's from here on"
    assert not any("stream" in line for line in cuda_code(run_rest))


class FakeDriver:
    """What is used of cuda.bindings.driver, for a device that grants SMs in groups, as Hopper does."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)

    def __init__(self, sms: int = 132, group: int = 8) -> None:
        self.device, self.group = tuple(range(sms)), group
        self.contexts: list[tuple[int, ...]] = []

    @staticmethod
    def resource(sms: tuple[int, ...], may_split: bool) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=len(sms)), sms=sms, may_split=may_split)

    def cuInit(self, flags: int) -> Any:
        return (0,)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return 0, ordinal

    def cuDeviceGetDevResource(self, device: int, kind: int) -> Any:
        return 0, self.resource(self.device, True)

    def cuDevSmResourceSplitByCount(self, count: int, resource: Any, flags: int, sms: int) -> Any:
        granted = -(-sms // self.group) * self.group
        if not resource.may_split or granted > len(resource.sms):
            return 915, None, None, None
        parts = resource.sms[:granted], resource.sms[granted:]
        return 0, [self.resource(parts[0], False)], 1, self.resource(parts[1], False)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> Any:
        return 0, resources[0].sms

    def cuGreenCtxCreate(self, desc: Any, device: int, flags: int) -> Any:
        assert desc and flags == 1
        self.contexts.append(desc)
        return 0, desc

    def cuGreenCtxGetDevResource(self, context: Any, kind: int) -> Any:
        return 0, self.resource(context, True)


def lanes(*shares: int | None) -> tuple[Lane, ...]:
    return tuple(Lane(name=f"lane{i}", sms=sms) for i, sms in enumerate(shares))


@pytest.mark.parametrize(
    ("shares", "granted"),
    [
        ((24, 48, None), [24, 48, 60]),
        ((None, 48, None), [84, 48, 84]),
        ((20, 48), [24, 48]),
        ((64, 68), [64, 68]),
        ((None, 1), [124, 8]),
    ],
)
def test_partitions_are_disjoint_and_make_the_device(shares: tuple[int | None, ...], granted: list[int]) -> None:
    parts = [p for p in carve(FakeDriver(), 0, lanes(*shares)) if p]
    assert [p.sms for p in parts] == granted
    assert [len(p.context) for p in parts] == granted
    different = set(parts)
    assert len(different) == len([s for s in shares if s]) + (None in shares)
    together = [sm for p in different for sm in p.context]
    assert len(together) == len(set(together))
    if None in shares:
        assert sorted(together) == list(range(132))


@pytest.mark.parametrize(
    ("shares", "granted"),
    [
        ((132,), [None]),
        ((132, None), [None, None]),
        ((132, 72), [None, 72]),
        ((None, 132, 72), [60, None, 72]),
        ((132, 132, 64, 68), [None, None, 64, 68]),
    ],
)
def test_a_lane_with_all_sms_has_no_partition(shares: tuple[int | None, ...], granted: list[int | None]) -> None:
    parts = carve(FakeDriver(), 0, lanes(*shares))
    assert [p and p.sms for p in parts] == granted


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((100, 48, None), r"lanes lane0 \(100 SMs\), lane1 \(48 SMs\), lane2 request 148 SMs .* the device has 132"),
        ((64, 68, None), r"lane 'lane2' requests what the others leave, but 0 SMs .*lane0 64, lane1 68"),
        ((60, 70), r"lane 'lane1' requests 70 SMs, but 68 SMs are left \(granted so far: lane0 64\)"),
        ((64, 66), r"lane 'lane1' .*cuDevSmResourceSplitByCount failed \(915\)"),
    ],
)
def test_shares_that_do_not_fit(shares: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(df.DynaFlowError, match=message) as caught:
        carve(FakeDriver(), 0, lanes(*shares))
    assert caught.value.advice


def test_old_driver() -> None:
    class Old(FakeDriver):
        cuDevSmResourceSplitByCount = property()  # type: ignore[assignment]

    with pytest.raises(df.DynaFlowError, match=r"lane 'lane0' .* has no cuDevSmResourceSplitByCount") as caught:
        carve(Old(), 0, lanes(8, None))
    assert "newer than CUDA 12.4" in caught.value.advice


class FakeLibrary:
    """libcuda as ctypes sees it, on top of the fake driver: a handle is a place in a list."""

    def __init__(self) -> None:
        self.driver, self.kept = FakeDriver(), [None]

    def _fill(self, target: Any, resource: Any) -> None:
        self.kept.append(resource)
        target.type, target.sm.smCount = len(self.kept) - 1, resource.sm.smCount

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out._obj.value = ordinal
        return 0

    def cuDeviceGetDevResource(self, device: Any, out: Any, kind: int) -> int:
        error, resource = self.driver.cuDeviceGetDevResource(device.value, kind)
        self._fill(out._obj, resource)
        return error

    def cuGreenCtxGetDevResource(self, context: Any, out: Any, kind: int) -> int:
        error, resource = self.driver.cuGreenCtxGetDevResource(self.kept[context.value], kind)
        self._fill(out._obj, resource)
        return error

    def cuDevSmResourceSplitByCount(self, out: Any, made: Any, given: Any, rest: Any, flags: int, sms: int) -> int:
        taken = self.kept[given._obj.type]
        error, groups, made._obj.value, left = self.driver.cuDevSmResourceSplitByCount(1, taken, flags, sms)
        self._fill(out[0], groups[0])
        self._fill(rest._obj, left)
        return error

    def cuDevResourceGenerateDesc(self, out: Any, array: Any, count: int) -> int:
        self.kept.append(self.kept[array[0].type].sms)  # type: ignore[union-attr]
        out._obj.value = len(self.kept) - 1
        return 0

    def cuGreenCtxCreate(self, out: Any, desc: Any, device: Any, flags: int) -> int:
        error, context = self.driver.cuGreenCtxCreate(self.kept[desc.value], device.value, flags)
        self.kept.append(context)
        out._obj.value = len(self.kept) - 1
        return error


def test_ctypes_stand_in() -> None:
    """The same partitions without cuda.bindings; and the struct is as in the header."""
    assert ctypes.sizeof(Resource) == 144
    assert Resource.sm.offset == 96
    library = FakeLibrary()
    parts = carve(CtypesDriver(library), 0, lanes(24, 48, None))
    assert [p.sms for p in parts] == [24, 48, 60]
    held = [library.kept[p.context.value] for p in parts]
    assert sorted(sm for sms in held for sm in sms) == list(range(132))  # type: ignore[attr-defined]


def test_what_the_caller_gave_goes_where_it_is_used() -> None:
    """The lane `main` is the caller's stream, though another one is used first: there arguments can go at once."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.execute(ctx.get_ready_ops()[0], lane="side")
        run_rest(ctx)

    plan = plan_of(schedule)
    assert [lane.name for lane in plan.lanes] == ["main", "side"] and plan.tasks[0].lane == "side"
    code = cuda_code(schedule)
    first = next(i for i, line in enumerate(code) if line.startswith("# 0:"))
    assert "set_stream(s1)" in code[first : first + 3]
