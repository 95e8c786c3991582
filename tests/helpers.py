"""What several test files share: schedulers, comparisons, and looks inside a compiled model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.engine.engine import Engine
from dynaflow.engine.planner import Planner, PlanReady
from dynaflow.lower.executable import Executable
from dynaflow.lower.lower import Lowerer
from dynaflow.partition.op_graph import OpGraph
from dynaflow.runtime import cuda_graphs
from dynaflow.runtime.arena import BlockPool
from dynaflow.runtime.cuda_graphs import GraphPool
from dynaflow.runtime.cuda_lanes import CaptureStreams, RunOrder


def randn(*shape: int) -> Tensor:
    """The same numbers for the same shape, in any order of tests."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Each(df.OpSchedulerBase):
    """Splits as told and executes what is ready, in order: micro-batch i on lane i modulo `lanes`."""

    def __init__(
        self, rules: Sequence[Any] = (), split: int | Sequence[int] | Callable[[int], Any] | None = 2, lanes: int = 1
    ) -> None:
        self.rules, self.parts, self.lanes = list(rules), split, lanes
        self.calls = 0

    def partition(self) -> list[Any]:
        return self.rules

    def schedule(self, ctx: df.ScheduleContext) -> None:
        self.calls += 1
        parts = self.parts(ctx.batch_size) if callable(self.parts) else self.parts
        if parts is not None:
            ctx.split(parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch.index % self.lanes}")


CUTS = (df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp", optional=True))
"""Of the transformers that the tests have."""


class TwoBatches(df.OpSchedulerBase):
    """The README's."""

    def partition(self) -> list[Any]:
        return list(CUTS)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if ctx.batch_size < 4:
            return ctx.sequential()
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="memory" if "attention" in op.tags else "compute")


class Scheduler(df.OpSchedulerBase):
    """A scheduler made of a function, for tests of what happens inside `schedule`."""

    def __init__(self, schedule: Callable[[df.ScheduleContext], Any], rules: Sequence[Any] = ()) -> None:
        self.function, self.rules = schedule, list(rules)
        self.calls = 0

    def partition(self) -> list[Any]:
        return self.rules

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        self.calls += 1
        return self.function(ctx)


def run_rest(ctx: df.ScheduleContext, lane: str = "main") -> None:
    """Executes whatever is left."""
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, lane=lane)


def uneven(batch: int) -> list[int]:
    """Three parts, no two alike for a batch of 7 or more, one of them of size 1."""
    return [1, batch - 3, 2]


def compiled(
    model: Callable[..., Any], scheduler: df.OpSchedulerBase | None = None, **options: Any
) -> df.CompiledModel:
    return df.compile(model, scheduler or Each(), **{"operators": "eager", **options})


def run_both(
    model: Callable[..., Any], inputs: tuple[Any, ...], scheduler: df.OpSchedulerBase | None = None, **options: Any
) -> tuple[df.CompiledModel, df.Plan]:
    """Runs the model plainly and under the scheduler, compares, and gives the compiled model and its plan."""
    fast = compiled(model, scheduler, **options)
    with torch.no_grad():
        expected = model(*inputs)
        assert_equal(fast(*inputs), expected)
        return fast, fast.plan(*inputs)


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal structure, and equal tensors within the tolerance."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_equal(found[name], expected[name], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            assert_equal(f, e, tolerance)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name), tolerance)
    else:
        assert found == expected


def parts_of(plan: df.Plan, op: str) -> list[tuple[int, ...]]:
    """The micro-batches of each execution of an operator, in the plan's order."""
    found = [item.micro_batches for task in plan.tasks for item in task.items if item.op == op]
    assert found, f"{op} is not in the plan: {names(plan)}"
    return found


def names(plan: df.Plan) -> list[str]:
    """The operators of a plan, each once, in the plan's order."""
    return list(dict.fromkeys(item.op for task in plan.tasks for item in task.items))


def whole(plan: df.Plan) -> list[str]:
    """The operators that run once for all micro-batches."""
    assert len(plan.micro_batches) > 1, "nothing was split"
    return [name for name in names(plan) if len(parts_of(plan, name)) == 1]


def lines_run(function: Callable[[], Any]) -> int:
    """How many lines of dynaflow a call runs, in this thread: what it costs, whatever the machine is."""
    count, root = 0, str(Path(df.__file__).parent)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.startswith(root) else None)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


# What is inside a compiled model. No other test file looks at `planner.cache`, so a change there is one here.


def planner_of(fast: df.CompiledModel | Engine) -> Planner:
    return (fast if isinstance(fast, Engine) else engine_of(fast)).planner


def graphs_of(fast: df.CompiledModel | Engine) -> list[OpGraph]:
    """The partitioned graphs of the present scheduler."""
    return list(planner_of(fast).cache.graphs.values())


def graph_of(fast: df.CompiledModel | Engine) -> OpGraph:
    """The partitioned graph of a compiled model that has only one."""
    (graph,) = graphs_of(fast)
    return graph


def plans_of(fast: df.CompiledModel | Engine) -> list[df.Plan]:
    """The plans of the present scheduler, and of those that it has chosen."""
    return planner_of(fast).plans()


def lowered_of(fast: df.CompiledModel | Engine) -> list[Executable]:
    """The same, lowered; without those that other schedulers have made."""
    return list(planner_of(fast).cache.plans.values())


def elastic_of(fast: df.CompiledModel | Engine) -> list[Any]:
    """The functions that serve all sizes."""
    return list(planner_of(fast).cache.elastic.values())


def notes_of(fast: df.CompiledModel | Engine) -> list[Any]:
    """What a scheduler that chooses others has to say about each of its choices."""
    return [choice.note for choice in planner_of(fast).cache.choices.values()]


def scheduler_of(fast: df.CompiledModel | Engine) -> df.OpSchedulerBase:
    return planner_of(fast).cache.scheduler


def ready_for(fast: df.CompiledModel, *args: Any) -> PlanReady:
    """What a call would run, lowered and not run."""
    ready = planner_of(fast).planned(lambda: fast(*args))
    assert ready is not None
    return ready


def write_results(fast: df.CompiledModel) -> None:
    """Has operators that are not compiled write into the buffers of a plan, as compiled ones do."""
    engine_of(fast).operators.writes_into = True


def set_chains(fast: df.CompiledModel | Engine, on: bool) -> None:
    """Whether neighbours on a lane become one call."""
    planner_of(fast).lowerer.chains = on


def blocks_of(fast: df.CompiledModel) -> BlockPool:
    """The memory of a model's plans."""
    return planner_of(fast).lowerer.blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Stack(nn.Module):
    """Two blocks and a head: the smallest model with repeated layers."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


STACK_RULES = (df.SplitModule("*.attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp"))


def count_elastic(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each function for all sizes that is made from now on."""
    made: list[Any] = []
    make = Lowerer.elastic
    monkeypatch.setattr(Lowerer, "elastic", lambda *args: made.append(args) or make(*args))
    return made


class PretendedGraph:
    """Stands for a CUDA graph where there is no CUDA: knows the addresses that it was made for, and runs the code."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], moving: Any, still: Any, *_: Any) -> None:
        self.used = 0
        self._function, self._still, self._places = function, still, [args[i].data_ptr() for i in still]

    def fits(self, args: Sequence[Any]) -> bool:
        return [args[i].data_ptr() for i in self._still] == self._places

    def results_are_held(self) -> bool:
        return False

    def replay(self, args: Sequence[Any]) -> None:
        self._results = self._function(args)

    def results(self, args: Sequence[Any], copy: bool) -> Any:
        return self.__dict__.pop("_results")


def pretend_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cudagraph="plan"` then counts captures and replays on a CPU as it would on a GPU."""
    monkeypatch.setattr(cuda_graphs, "GraphCapture", PretendedGraph)
    monkeypatch.setattr(Lowerer, "captures", lambda self, job: self.cudagraph is not None)
    for kind, name in ((GraphPool, "segments"), (GraphPool, "handle"), (CaptureStreams, "main"),
                       (CaptureStreams, "settle"), (RunOrder, "enter"), (RunOrder, "leave")):  # fmt: skip
        monkeypatch.setattr(kind, name, lambda self, device: None)


class Pinned:
    """As CUDA graphs of pieces: one reads and writes where it did when it first saw a size, whatever it is given."""

    def __init__(self) -> None:
        self.pieces, self.replays = 0, 0

    def __call__(self, calls: list[Any]) -> list[Any]:
        self.pieces += len(calls)
        return [self._pinned(call) for call in calls]

    def _pinned(self, call: Any) -> Any:
        seen: dict[Any, tuple[list[Any], Any]] = {}

        def run(box: list[Any]) -> Any:
            size = tuple(given.shape if isinstance(given, Tensor) else given for given in box)
            if size not in seen:
                seen[size] = list(box), call(box)
                return seen[size][1]
            self.replays += 1
            given, results = seen[size]
            for result, found in zip(results, call(list(given)), strict=True):
                if isinstance(result, Tensor):  # a number depends on the size alone
                    result.copy_(found)
            return results

        return run
