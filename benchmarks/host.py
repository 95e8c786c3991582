"""Host time of replaying a plan, against a hand-written loop over the same compiled operators.

The loop calls what the plan called, with the same tensors, on its lanes: on CUDA the same streams with the same
waits, on CPU a thread of a pool for each further lane. Slices are cut beforehand. First many tiny layers, so that the
time is the host's own; then Llama.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import dynaflow as df
from benchmarks.llama import TWO_BATCHES
from benchmarks.measure import Figure, Timed, Trial, agree, once, ratio, rounds_for, side_by_side
from benchmarks.recording import record
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants
from dynaflow.api import engine_of

LIMIT = 1.10
LAYERS, ROUNDS, INNER = 48, 60, 5


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(df.OpSchedulerBase):
    """Every layer an operator; micro-batches in turn on the lanes."""

    def __init__(self, parts: int, lanes: int) -> None:
        self.parts, self.lanes = parts, lanes

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return [df.SplitModule(Layer)]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch % self.lanes}")


def tiny_layers(settings: Settings) -> Iterator[Trial]:
    layers = settings.layers or (4 if settings.tiny else LAYERS)
    for parts, lanes in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)):
        times = once(lambda parts=parts, lanes=lanes: layer_times(settings, layers, parts, lanes))
        for what, which, limit in (("replay", "ours", LIMIT), ("whole call, guards included", "whole", None)):
            yield Trial(
                what=what,
                baseline="the same operators in a loop by hand",
                situation=f"{layers} tiny layers, {parts} micro-batches, {lanes} lanes",
                limit=limit if parts == 2 else None,
                run=lambda times=times, which=which: _per_task(times(), which),
            )


def layer_times(settings: Settings, layers: int, parts: int, lanes: int) -> tuple[dict[str, list[float]], int]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(16) for _ in range(layers)]).eval().to(settings.device)
    x = torch.randn(8, 16, device=settings.device)
    try:
        with torch.inference_mode():
            fast = df.compile(model, Layers(parts, lanes), operators=settings.operators)
            engine_of(fast).planner.lowerer.chains = False  # or one micro-batch would be a single operator
            agree([model(x)], [fast(x)], 1e-3)
            lowered, arguments = lowered_plan(fast, x)
            recorded = record(lowered, arguments)
            recorded.check(0.0)
            runs = {"by hand": recorded.loop(), "ours": lambda: lowered(list(arguments)), "whole": lambda: fast(x)}
            timed = {name: Timed(run=run) for name, run in runs.items()}
            return side_by_side(timed, settings.rounds or ROUNDS, "return", INNER), len(lowered.plan.tasks)
    finally:
        torch.set_num_threads(threads)


def _per_task(measured: tuple[dict[str, list[float]], int], which: str) -> Figure:
    times, tasks = measured
    found = ratio(times[which], times["by hand"])
    each = {"ours_us_per_task": which, "by_hand_us_per_task": "by hand"}
    details = {name: statistics.median(times[of]) / tasks * 1e6 for name, of in each.items()}
    return Figure(value=found.value, low=found.low, high=found.high, details={"tasks": tasks, **details})


def lowered_plan(fast: df.CompiledModel, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
    """The plan's own function and the arguments that Dynamo calls it with."""
    lowered = next(iter(engine_of(fast).planner.cache.plans.values()))
    run, seen = lowered.entry.call, []
    lowered.entry.call = lambda given: seen.append(tuple(given)) or run(given)
    try:
        fast(*args, **kwargs)
    finally:
        lowered.entry.call = run
    return lowered, seen[0]


def llama(v: Variants) -> Iterator[Trial]:
    lanes = 2 if v.settings.cuda else 1  # threads can't be recorded in order
    times = once(lambda: _llama_times(v, lanes))
    for what, which, limit in (("replay", "ours", LIMIT), ("whole call, guards included", "whole", None)):
        yield Trial(
            what=f"{what}, two micro-batches, {lanes} lanes",
            baseline="the same operators in a loop by hand",
            situation=v.case.name,
            limit=limit,
            run=lambda which=which: _per_task(times(), which),
        )


def _llama_times(v: Variants, lanes: int) -> tuple[dict[str, list[float]], int]:
    ours = v.two_batches(lanes=lanes)
    v.check(ours, v.sequential())
    ours.prepare()
    lowered, arguments = lowered_plan(ours.fast, **v.case.inputs)
    ours.prepare()
    recorded = record(lowered, arguments)
    ours.prepare()
    recorded.check(v.case.limit)
    runs = {
        "by hand": Timed(run=recorded.loop(), prepare=ours.prepare),
        "ours": Timed(run=lambda: lowered(list(arguments)), prepare=ours.prepare),
        "whole": ours.timed,
    }
    rounds = v.settings.rounds or rounds_for(runs, v.settings.seconds)
    return side_by_side(runs, rounds, "return"), len(lowered.plan.tasks)


BENCHMARK = Benchmark(
    name="host",
    title="Host time of a forward under a plan, no CUDA graphs, until the call returns.",
    suites=("core", "fast"),
    trials=tiny_layers,
    in_situation=llama,
    situations=("decode8",),
    possible=TWO_BATCHES,
)
