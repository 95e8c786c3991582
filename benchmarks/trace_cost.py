"""What a recording costs: while it is on, and when there is none.

When there is none, a plan's function is the object that it always was, and each call reads one flag. So a model that
was recorded is timed beside one that never was. While one is on, calls are timed with the recording already begun:
events are read when it ends, which is no part of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import dynaflow as df
from benchmarks.host import Layer, Layers
from benchmarks.llama import TWO_BATCHES
from benchmarks.measure import Timed, Trial, agree, once, ratio, rounds_for, side_by_side
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants
from dynaflow.api import engine_of

OFF, ON = 1.02, 1.03
LAYERS = 12
WIDTH, ROWS = {"cuda": 4096, "cpu": 256}, {"cuda": 4096, "cpu": 128}

Times = Mapping[str, list[float]]


def layers(settings: Settings) -> Iterator[Trial]:
    device = settings.device.type
    count, width, rows = (4, 64, 64) if settings.tiny else (settings.layers or LAYERS, WIDTH[device], ROWS[device])
    for parts, lanes in ((2, 1), (2, 2)):
        situation = f"{count} layers of {width}, {rows} rows, {parts} micro-batches, {lanes} lanes"
        times = once(lambda parts=parts, lanes=lanes: _layers(settings, count, width, rows, parts, lanes))
        yield _trial(times, "no recording, after one", "never recorded", situation, OFF)
        yield _trial(times, "a recording is on", "no recording, after one", situation, ON)


def llama(v: Variants) -> Iterator[Trial]:
    lanes = 2 if v.settings.cuda else 1
    for graph in (None, "plan") if v.settings.cuda else (None,):
        times = once(lambda graph=graph: _llama(v, lanes, graph))
        situation = f"{v.case.name}, two micro-batches, {lanes} lanes{', one graph' if graph else ''}"
        yield _trial(times, "a recording is on", "no recording, after one", situation, ON)


def _trial(times: Callable[[], Times], what: str, baseline: str, situation: str, limit: float) -> Trial:
    return Trial(what=what, baseline=baseline, situation=situation, limit=limit,
                 run=lambda: ratio(times()[what], times()[baseline]))  # fmt: skip


def _layers(settings: Settings, count: int, width: int, rows: int, parts: int, lanes: int) -> Times:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(width) for _ in range(count)]).eval().to(settings.device)
    x = torch.randn(rows, width, device=settings.device)
    with torch.inference_mode():
        never, ours = (df.compile(model, Layers(parts, lanes), operators=settings.operators) for _ in range(2))
        for fast in (never, ours):
            engine_of(fast).planner.lowerer.chains = False  # or a call has nothing to mark inside
            agree([model(x)], [fast(x)], 1e-3)
        return _times(lambda: ours(x), lambda: None, settings, {"never recorded": lambda: never(x)})


def _llama(v: Variants, lanes: int, graph: str | None) -> Times:
    ours = v.two_batches(lanes=lanes, cudagraph=graph)
    v.check(ours, v.sequential(graph))
    return _times(ours.timed.run, ours.timed.prepare, v.settings, {})


def _times(call: Callable[[], Any], prepare: Callable[[], Any], settings: Settings, more: Mapping[str, Any]) -> Times:
    on = contextlib.ExitStack()

    def timed(run: Callable[[], Any], recorded: bool = False) -> Timed:
        def before() -> None:
            on.close()
            if recorded:
                on.enter_context(df.record())
            prepare()
            run()  # the first call of a recording looks at both clocks
            prepare()

        return Timed(run=run, prepare=before)

    runs = {name: timed(run) for name, run in more.items()}
    runs |= {"no recording, after one": timed(call), "a recording is on": timed(call, recorded=True)}
    with on:
        for _ in range(2):  # a graph may have to be captured
            runs["a recording is on"].prepare()
        return side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds, most=200), "idle")


BENCHMARK = Benchmark(
    name="trace_cost",
    title="What df.record() costs: a call while a recording is on, and while there is none.",
    suites=("core",),
    trials=layers,
    in_situation=llama,
    situations=("decode8",),
    possible=TWO_BATCHES,
)
