"""Plans as data, the proofs of `check`, and the code that a plan becomes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.lower.compile_ops import Operators
from dynaflow.lower.emit import emit
from dynaflow.lower.passes import make_program
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, compiled, graph_of, lines_run, run_rest

GOLDEN = pathlib.Path(__file__).parents[1] / "lower" / "golden"
X = torch.ones(6, 8)


class Ping(df.OpSchedulerBase):
    """Attention on one lane, the rest on another: every layer crosses lanes."""

    def __init__(self, lanes: tuple[str, str] = ("memory", "compute")) -> None:
        self.lanes = lanes

    def partition(self) -> list[Any]:
        return list(STACK_RULES)

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=self.lanes["attention" not in op.tags])


@functools.cache
def stack() -> tuple[df.CompiledModel, df.Plan]:
    fast = compiled(Stack(), Ping())
    with torch.no_grad():
        return fast, fast.plan(X)


@pytest.fixture
def plan() -> df.Plan:
    return stack()[1]


# --- data ------------------------------------------------------------------------------------------------


def test_plans_are_immutable(plan: df.Plan) -> None:
    for thing, field in [
        (plan, "tasks"),
        (plan.tasks[0], "lane"),
        (plan.tasks[0].items[0], "op"),
        (plan.micro_batches[0], "start"),
        (plan.lanes[0], "name"),
    ]:
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(thing, field, None)
    for name in ("tasks", "lanes", "micro_batches"):
        assert isinstance(getattr(plan, name), tuple)


def test_equal_plans_are_equal_and_hash_alike(plan: df.Plan) -> None:
    with torch.no_grad():
        again = compiled(Stack(), Ping()).plan(X)
    assert again == plan
    assert again is not plan
    assert hash(again) == hash(plan)
    assert len({again, plan}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"graph": "another"},
        lambda p: {"tasks": p.tasks[:-1]},
        lambda p: {"lanes": p.lanes[::-1]},
        lambda p: {"micro_batches": (replace(p.micro_batches[0], requests=(0, 1)), *p.micro_batches[1:])},
    ],
)
def test_other_plans_are_not_equal(plan: df.Plan, change: Callable[[df.Plan], dict[str, Any]]) -> None:
    assert replace(plan, **change(plan)) != plan


def test_print(plan: df.Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == "Plan: batch of 6 as [3, 3], 16 tasks on lanes memory, compute"
    assert len(lines) == 1 + len(plan.tasks)
    assert lines[1].split() == ["0", "memory", "layers.0.attn[0]"]
    assert lines[3].split() == ["2", "compute", "layers.0:add[0]", "after", "0"]


def test_print_sequential() -> None:
    text = str(df.compile(Stack(), operators="eager").plan(X))
    assert "batch of 6" in text
    assert "uncut" in text


def test_json_round_trip(plan: df.Plan) -> None:
    for indent in (None, 2):
        again = df.Plan.from_json(plan.to_json(indent))
        assert again == plan
        assert hash(again) == hash(plan)
    assert "code" not in json.loads(plan.to_json())


def test_json_round_trip_of_requests_fusions_and_no_tasks() -> None:
    made = df.Plan(
        graph="g",
        micro_batches=(df.MicroBatch(index=0, start=0, stop=3, requests=(0, 2)),),
        lanes=(df.Lane(name="a"),),
        tasks=(df.Task(items=(df.Item(op="x", micro_batches=(0,)),) * 2, lane="a", after=(0,), replace="m:f"),),
    )
    assert df.Plan.from_json(made.to_json()) == made
    empty = replace(made, tasks=(), lanes=())
    assert df.Plan.from_json(empty.to_json()) == empty
    assert empty.sequential


def _edit(edit: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        data = json.loads(text)
        edit(data)
        return json.dumps(data)

    return apply


MALFORMED: dict[str, Callable[[str], Any]] = {
    "not JSON": lambda text: text[:-5],
    "empty": lambda text: "",
    "not text": lambda text: None,
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "no format": _edit(lambda d: d.pop("format")),
    "another format": _edit(lambda d: d.update(format=2)),
    "no tasks": _edit(lambda d: d.pop("tasks")),
    "no graph": _edit(lambda d: d.pop("graph")),
    "graph a number": _edit(lambda d: d.update(graph=7)),
    "tasks a number": _edit(lambda d: d.update(tasks=7)),
    "tasks an object": _edit(lambda d: d.update(tasks={"a": 1})),
    "a task is text": _edit(lambda d: d["tasks"].__setitem__(0, "x")),
    "no micro-batch": _edit(lambda d: d.update(micro_batches=[])),
    "start is text": _edit(lambda d: d["micro_batches"][0].update(start="0")),
    "stop is true": _edit(lambda d: d["micro_batches"][0].update(stop=True)),
    "half a range of requests": _edit(lambda d: d["micro_batches"][0].update(requests=[1])),
    "lane without a name": _edit(lambda d: d["lanes"][0].pop("name")),
    "after is fractional": _edit(lambda d: d["tasks"][3].update(after=[0.5])),
    "after is text": _edit(lambda d: d["tasks"][3].update(after="0")),
    "items missing": _edit(lambda d: d["tasks"][3].pop("items")),
    "op is null": _edit(lambda d: d["tasks"][3]["items"][0].update(op=None)),
    "micro_batches is a number": _edit(lambda d: d["tasks"][3]["items"][0].update(micro_batches=0)),
    "replace is a list": _edit(lambda d: d["tasks"][3].update(replace=["f"])),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_json(plan: df.Plan, case: str) -> None:
    with pytest.raises(df.PlanError) as caught:
        df.Plan.from_json(MALFORMED[case](plan.to_json()))
    assert caught.value.advice


def test_malformed_json_says_where(plan: df.Plan) -> None:
    text = MALFORMED["op is null"](plan.to_json())
    with pytest.raises(df.PlanError, match=r"tasks\[3\]"):
        df.Plan.from_json(text)


def test_json_of_another_graph(plan: df.Plan) -> None:
    text = plan.to_json()
    fast = compiled(Stack(blocks=3), Scheduler(lambda ctx: df.Plan.from_json(text), STACK_RULES))
    with pytest.raises(df.PlanError, match="another graph") as caught:
        fast(X)
    assert caught.value.advice


def test_fingerprint_is_of_the_cut_graph(plan: df.Plan) -> None:
    text = plan.to_json()
    fast = compiled(Stack(), Scheduler(lambda ctx: df.Plan.from_json(text), [df.SplitModule("*.mlp")]))
    with pytest.raises(df.PlanError, match="another graph"):
        fast(X)


# --- check -----------------------------------------------------------------------------------------------


def check(plan: df.Plan, fast: df.CompiledModel | None = None) -> None:
    df.check(plan, graph_of(fast or stack()[0]), plan.batch_size)


def with_task(plan: df.Plan, index: int, **changes: Any) -> df.Plan:
    tasks = list(plan.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return replace(plan, tasks=tuple(tasks))


def named(plan: df.Plan, text: str) -> int:
    return next(i for i, task in enumerate(plan.tasks) if str(task) == text)


def test_good_plan_passes(plan: df.Plan) -> None:
    check(plan)


def test_check_another_graph(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="another graph"):
        check(replace(plan, graph="0123"))


def test_check_another_batch_size(plan: df.Plan) -> None:
    with pytest.raises(df.SplitError, match="6 rows, but the batch has 7"):
        df.check(plan, graph_of(stack()[0]), 7)


@pytest.mark.parametrize(
    "ranges",
    [[(0, 3), (4, 6)], [(0, 3), (2, 6)], [(0, 0), (0, 6)], [(1, 3), (3, 6)], [(3, 6), (0, 3)], [(0, 3), (6, 6)]],
)
def test_check_micro_batches(plan: df.Plan, ranges: list[tuple[int, int]]) -> None:
    parts = tuple(df.MicroBatch(index=i, start=a, stop=b) for i, (a, b) in enumerate(ranges))
    with pytest.raises(df.SplitError) as caught:
        df.check(replace(plan, micro_batches=parts), graph_of(stack()[0]), 6)
    assert caught.value.advice


@pytest.mark.parametrize(
    "requests", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 0), (0, 3)], [(1, 2), (2, 3)], [(0, 1), None]]
)
def test_check_requests(plan: df.Plan, requests: list[Any]) -> None:
    parts = tuple(replace(m, requests=r) for m, r in zip(plan.micro_batches, requests, strict=True))
    with pytest.raises(df.SplitError):
        check(replace(plan, micro_batches=parts))


def test_check_missing_operator(plan: df.Plan) -> None:
    last = len(plan.tasks) - 1
    with pytest.raises(df.PlanError, match="never runs for micro-batch 1") as caught:
        check(replace(plan, tasks=plan.tasks[:last]))
    assert caught.value.op == plan.tasks[last].items[0].op


def test_check_operator_twice(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="runs twice for micro-batch 1") as caught:
        check(replace(plan, tasks=(*plan.tasks, plan.tasks[-1])))
    assert caught.value.op == plan.tasks[-1].items[0].op


def test_check_operator_twice_in_one_item(plan: df.Plan) -> None:
    last = len(plan.tasks) - 1
    item = replace(plan.tasks[last].items[0], micro_batches=(1, 1))
    with pytest.raises(df.PlanError, match="twice"):
        check(with_task(plan, last, items=(item,)))


def test_check_unknown_operator(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="'nothing'"):
        check(with_task(plan, 0, items=(df.Item(op="nothing", micro_batches=(0,)),)))


def test_check_unknown_micro_batch(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="not there"):
        check(with_task(plan, 0, items=(replace(plan.tasks[0].items[0], micro_batches=(2,)),)))


@pytest.mark.parametrize("count", [0, 2])
def test_check_items_without_a_function(plan: df.Plan, count: int) -> None:
    with pytest.raises(df.PlanError, match=f"{count} operators and no function"):
        check(with_task(plan, 0, items=plan.tasks[0].items * count))


def test_check_unknown_lane(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="'elsewhere'"):
        check(with_task(plan, 0, lane="elsewhere"))


def test_check_lanes_of_one_name(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="one name"):
        check(replace(plan, lanes=(*plan.lanes, plan.lanes[0])))


@pytest.mark.parametrize("after", [-1, 99])
def test_check_wait_for_a_task_that_does_not_exist(plan: df.Plan, after: int) -> None:
    with pytest.raises(df.PlanError, match="does not exist"):
        check(with_task(plan, 3, after=(after,)))


def test_check_wait_cycle(plan: df.Plan) -> None:
    """Task 2 waits for task 0 by itself; now task 0 waits for task 2 as well."""
    assert plan.tasks[2].after == (0,)
    with pytest.raises(df.PlanError, match="wait cycle") as caught:
        check(with_task(plan, 0, after=(2,)))
    assert caught.value.op == "layers.0.attn"


def test_check_wait_cycle_through_the_order_of_lanes(plan: df.Plan) -> None:
    """Nobody waits for task 0 in turn, but task 4 comes behind task 2 on its lane, which waits for task 0."""
    assert plan.tasks[4].lane == plan.tasks[2].lane
    with pytest.raises(df.PlanError, match="wait cycle"):
        check(with_task(plan, 0, after=(4,)))


def test_check_wait_for_itself(plan: df.Plan) -> None:
    with pytest.raises(df.PlanError, match="cycle"):
        check(with_task(plan, 5, after=(5,)))


def test_check_input_not_yet_produced(plan: df.Plan) -> None:
    """A dropped wait: the adding lane no longer knows that attention has ended."""
    task = named(plan, "layers.0:add[0]")
    with pytest.raises(df.PlanError, match="race") as caught:
        check(with_task(plan, task, after=()))
    assert caught.value.op == "layers.0:add"
    assert "layers.0.attn" in str(caught.value)
    assert f"task {task}" in caught.value.advice


def test_check_order_on_one_lane(plan: df.Plan) -> None:
    with torch.no_grad():
        single = compiled(Stack(), Each(STACK_RULES)).plan(X)
    tasks = list(single.tasks)
    first, second = named(single, "layers.0.mlp[0]"), named(single, "layers.0:add#2[0]")
    tasks[first], tasks[second] = tasks[second], tasks[first]
    with pytest.raises(df.PlanError, match="race"):
        check(replace(single, tasks=tuple(tasks)))


def test_check_wait_for_the_wrong_micro_batch(plan: df.Plan) -> None:
    task = named(plan, "layers.0:add[1]")
    with pytest.raises(df.PlanError, match="race"):
        check(with_task(plan, task, after=(named(plan, "layers.0.attn[0]"),)))


class Writes(nn.Module):
    """`write` and `read` share no value, only the memory of `y`; each micro-batch has its own rows of it."""

    def forward(self, x: Tensor) -> Tensor:
        with df.mark("make"):
            y = x + 1
        view = y[:, :4]
        with df.mark("early"):
            early = view * 2
        with df.mark("write"):
            y.mul_(10)
        with df.mark("late"):
            return view + early


def _writes(lanes: dict[str, str]) -> tuple[df.CompiledModel, df.Plan]:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=lanes[op.name])

    fast = compiled(Writes(), Scheduler(schedule))
    with torch.no_grad():
        return fast, fast.plan(X)


@pytest.mark.parametrize(("first", "second"), [("early", "write"), ("write", "late")], ids=["read-write", "write-read"])
def test_check_race_on_memory(first: str, second: str) -> None:
    """No value goes from one to the other: only the check of memory can see the missing wait."""
    fast, plan = _writes({"make": "a", "early": "b" if second == "write" else "a", "write": "a", "late": "b"})
    check(plan, fast)
    task = named(plan, f"{second}[0]")
    assert plan.tasks[task].after
    with pytest.raises(df.PlanError, match="race") as caught:
        check(with_task(plan, task, after=()), fast)
    assert caught.value.op == second
    assert first in str(caught.value)


def test_check_two_writers() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            with df.mark("one"):
                cache.add_(x)
            with df.mark("two"):
                cache.mul_(2)
            return x

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=op.name)

    fast = compiled(Net(), Scheduler(schedule))
    with torch.no_grad():
        plan = fast.plan(X, X.clone())
    check(plan, fast)
    task = named(plan, "two[1]")
    with pytest.raises(df.PlanError, match=r"race.*'cache'"):
        check(with_task(plan, task, after=()), fast)


def test_check_random_generator() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("one"):
                a = torch.rand_like(x)
            with df.mark("two"):
                b = torch.rand_like(x)
            with df.mark("sum"):
                return a + b

    def schedule(ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=op.name)

    fast = compiled(Net(), Scheduler(schedule))
    with torch.no_grad():
        plan = fast.plan(X)
    with pytest.raises(df.PlanError, match=r"race.*random generator"):
        check(with_task(plan, named(plan, "two[0]"), after=()), fast)


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with df.mark("rows"):
            x = x + 1
        with df.mark("mix"):
            x = x.softmax(0)
        with df.mark("more"):
            return x * 2


def test_check_illegal_split() -> None:
    fast = compiled(Mixed())
    with torch.no_grad():
        plan = fast.plan(X)
    at = named(plan, "mix[0,1]")
    task = plan.tasks[at]
    halves = tuple(replace(task, items=(df.Item(op="mix", micro_batches=(m,)),)) for m in (0, 1))
    with pytest.raises(df.SplitError, match="softmax") as caught:
        check(replace(plan, tasks=(*plan.tasks[:at], *halves, *plan.tasks[at + 1 :])), fast)
    assert caught.value.op == "mix"
    assert caught.value.line and "test_plan.py" in caught.value.line
    assert "splittable=True" in caught.value.advice


def test_check_whole_operator_waits_for_all_parts() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"{op.name}{op.micro_batch.index}")

    fast = compiled(Mixed(), Scheduler(schedule))
    with torch.no_grad():
        plan = fast.plan(X)
    at = named(plan, "mix[0,1]")
    assert len(plan.tasks[at].after) == 2
    for kept in plan.tasks[at].after:
        with pytest.raises(df.PlanError, match="race"):
            check(with_task(plan, at, after=(kept,)), fast)


def test_check_runs_by_default_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("dynaflow.engine.plan_maker.check", lambda *args: calls.append(args))
    compiled(Stack())(X)
    assert len(calls) == 1
    compiled(Stack(), check=False)(X)
    assert len(calls) == 1


def test_a_check_costs_as_much_as_the_plan_is_long() -> None:
    """What share of planning it takes: see the benchmark plan_cost."""
    lines = {}
    for blocks in (8, 16):
        fast = compiled(Stack(blocks=blocks), Ping())
        with torch.no_grad():
            plan = fast.plan(X)
        lines[len(plan.tasks)] = lines_run(lambda fast=fast, plan=plan: check(plan, fast))
    (few, some), (many, more) = lines.items()
    assert many == 2 * few and more < 2.2 * some


def test_check_stops_a_bad_plan_before_it_runs(plan: df.Plan) -> None:
    bad = with_task(plan, named(plan, "layers.0:add[0]"), after=())
    ran: list[Any] = []
    fast = compiled(Stack(), Scheduler(lambda ctx: bad, STACK_RULES), on_task=lambda *a: ran.append(a))
    for _ in range(2):  # a refused plan is not kept
        with torch.no_grad(), pytest.raises(df.PlanError, match="race"):
            fast(X)
    assert ran == []


# --- code ------------------------------------------------------------------------------------------------


def test_code_is_shown(plan: df.Plan) -> None:
    assert plan.code.startswith("def run(")
    for i, task in enumerate(plan.tasks):
        assert f"# {i}: {task}" in plan.code
    assert df.compile(Stack(), operators="eager").plan(X).code == "", "the uncut graph has no code of ours"


class Tiny(nn.Module):
    """A parameter, an operator that mixes rows, a value that crosses lanes and one that dies early."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        with df.mark("mix"):
            z = y.softmax(0)
        with df.mark("last"):
            return z + x


def _tiny(lanes: int) -> tuple[df.CompiledModel, df.Plan]:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 2])
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="ab"[op.micro_batch.index % lanes])

    fast = compiled(Tiny(), Scheduler(schedule, [df.SplitModule("lin")]))
    with torch.no_grad():
        return fast, fast.plan(torch.ones(3, 2))


@pytest.mark.parametrize(("name", "lanes", "cuda"), [("cpu_1", 1, False), ("cpu_2", 2, False), ("cuda_2", 2, True)])
def test_golden_code(name: str, lanes: int, cuda: bool) -> None:
    """The generated code, to the letter. UPDATE_GOLDEN=1 writes what is found: then read the difference."""
    fast, plan = _tiny(lanes)
    graph = graph_of(fast)
    sizes = {**graph.graph.hints, **dict.fromkeys(graph.batch_axes[0], 3)}
    source = emit(make_program(plan, graph, sizes, Operators("eager"), {}), cuda=cuda, hook=False).source
    file = GOLDEN / f"{name}.py.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(source)
    assert source == file.read_text()
    if not cuda:
        assert source == plan.code


def test_code_calls_the_hook_only_when_asked() -> None:
    moments: list[tuple[str, str]] = []
    fast = compiled(Tiny(), Each([df.SplitModule("lin")]), on_task=lambda t, m: moments.append((str(t), m)))
    with torch.no_grad():
        fast(torch.ones(3, 2))
        plan = fast.plan(torch.ones(3, 2))
    assert moments == [(str(t), m) for t in plan.tasks for m in ("start", "stop")]
    assert "on_task(0" in plan.code
    assert "on_task(0" not in _tiny(1)[1].code


def test_one_lane_needs_no_waits() -> None:
    code = _tiny(1)[1].code
    assert "acquire" not in code
    assert "call.run" not in code


def test_plan_in_a_note_of_the_model(plan: df.Plan) -> None:
    """A plan answers without the model or the device that it was made with."""
    before = plan.happens_before
    assert len(before) == len(plan.tasks)
    last = len(plan.tasks) - 1
    assert before[last] >> named(plan, "layers.0.attn[1]") & 1
    assert not before[0]


def test_rest_of_a_fused_plan_prints_its_function() -> None:
    def fused(*given: Tensor) -> Tensor:
        return given[0]

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.execute(ctx.items("rows"), replace_func=fused)
        run_rest(ctx)

    with torch.no_grad():
        plan = compiled(Mixed(), Scheduler(schedule)).plan(X)
    assert "rows[0] -> " in str(plan)
    assert "fused" in str(plan).splitlines()[1]


def test_micro_batch_stands_for_its_index() -> None:
    first, second = (df.MicroBatch(index=i, start=2 * i, stop=2 * i + 2) for i in range(2))
    assert first == 0 and second == 1 and second != first and second > first and sorted([second, first]) == [0, 1]
    assert second % 2 == 1 and f"lane{second}" == "lane1" and ["a", "b"][second] == "b"
    assert first != df.MicroBatch(index=0, start=0, stop=3), "equal only with equal rows"
    assert {first: "x"}[df.MicroBatch(index=0, start=0, stop=2)] == "x"
