"""How long vLLM takes to be up under a schedule, against stock vLLM: started in turns, one at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.measure import Figure, Trial, figure, once, rotated
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.vllm_servers import SCHEDULERS, compare, folder_of, for_each_model, server

LIMIT = 1.1
ROUNDS = 3
"""A start takes a minute and more; but the same start took a machine 1.25 times as long as a few minutes before."""
KINDS = (None, *SCHEDULERS)
TIMES = ("", ", again", ", the third time")
"""Of a model that was never there before; and of one that was, whose compiled code is kept. The second start of stock
vLLM compiles some kernels once more, and keeps them in another folder than the first: so a third one is to be seen."""
ASKED = ((3, 40, 1), (16, 200, 1))
"""Once it is up, each is asked the same: a graph that was read from disk has to be the one that was written."""
Starts = dict[str | None, list[dict[str, float]]]
"""By scheduler, None being stock vLLM: the seconds of each start."""


def trials(settings: Settings) -> Iterator[Trial]:
    return for_each_model(settings, partial(_of_model, settings))


def _of_model(settings: Settings, name: str, shape: dict[str, Any]) -> Iterator[Trial]:
    starts = once(partial(_starts, shape, settings))
    for time in TIMES:
        for scheduler in SCHEDULERS:
            yield Trial(
                what=f"start-up with {scheduler}{time}",
                baseline="stock vLLM",
                situation=name,
                limit=LIMIT,
                run=lambda time=time, scheduler=scheduler: _ratio(starts()[time], scheduler),
            )


def _starts(shape: dict[str, Any], settings: Settings) -> dict[str, Starts]:
    """All of them in the last round, of the others the first alone."""
    found: dict[str, Starts] = {time: {kind: [] for kind in KINDS} for time in TIMES}
    answers: list[tuple[str, list[float]]] = []
    # Who is first on a machine reads all libraries from the disk, and looks at the model's class, which vLLM remembers.
    with folder_of({**shape, "num_hidden_layers": 1}) as folder, server(folder, None, settings):
        pass
    rounds = settings.rounds or ROUNDS
    for turn in range(rounds):
        for kind in rotated(KINDS, turn):
            with folder_of(shape) as folder:
                for time in TIMES if turn == rounds - 1 else TIMES[:1]:
                    with server(folder, kind, settings) as up:
                        found[time][kind].append(up.seconds)
                        answers.append((up.name + time, [p for few in ASKED for p in up.serve(few, 0)["first"]]))
    (expected, *_) = (first for name, first in answers if name == "stock")
    for name, first in answers:
        compare(name, expected, first)
    return found


def _ratio(starts: Starts, scheduler: str) -> Figure:
    ours, usual = starts[scheduler], starts[None]
    seconds = {
        f"{whose}_{until}_s": statistics.median(start[until] for start in found)
        for until in ("ready", "imported")
        for whose, found in (("ours", ours), ("baseline", usual))
    }
    ratios = [a["ready"] / b["ready"] for a, b in zip(ours, usual, strict=True)]
    return figure(ratios, **seconds, rounds=len(ratios))


BENCHMARK = Benchmark(
    name="vllm_start",
    title="vLLM under a schedule: seconds until it is up, imports included, against stock vLLM, started in turns.",
    suites=("systems",),
    trials=trials,
)
