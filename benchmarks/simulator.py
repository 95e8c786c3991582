"""The simulator against the clock: plans of the suite, predicted from the measured times of their operators.

Each operator is timed alone; the simulator says what the plan takes with its lanes, shares and waits; the plan runs.
Both count the device's time, from the first kernel to the last. Without the operators' times, from the cost model
alone, stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cells import Cell
from benchmarks.measure import Figure, Trial, figure
from benchmarks.settings import Settings
from benchmarks.strategies import Contest, contests_in
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants
from dynaflow.tune.clock import Clock

HEAT = 1.0
"""Seconds."""
ROUNDS = 20


def in_cell(cell: Cell, variants: Variants) -> Iterator[Trial]:
    for contest in contests_in(cell):
        yield Trial(
            what=f"{contest.name}, predicted",
            baseline="measured",
            situation=cell.name,
            run=lambda c=contest: _error(c, variants, variants.settings),  # type: ignore[misc]
        )


def _error(contest: Contest, variants: Variants, settings: Settings) -> Figure:
    ours = variants.ours(contest.scheduler(), contest.name, "plan" if settings.cuda else None)
    assert ours.fast is not None
    ours.prepare()
    inputs = variants.case.inputs
    clock = Clock(settings.device)

    def work() -> None:
        ours.prepare()
        clock()
        ours.run()
        clock()

    clock.warm_up(work, HEAT)  # operators are timed on a card as warm as that which runs the plan
    profile = ours.fast.profile(**inputs)
    predicted = ours.fast.simulate(profile=profile, **inputs)
    guessed = ours.fast.simulate(**inputs)
    ours.prepare()
    clock.warm_up(work)
    times = [clock.time(work)[0] for _ in range(settings.rounds or ROUNDS)]
    return figure(
        [predicted.busy_seconds / t for t in times],
        predicted_ms=predicted.busy_seconds * 1e3,
        measured_ms=figure(times).value * 1e3,
        guessed_ms=guessed.busy_seconds * 1e3,
        limited_by=predicted.limit,
        rounds=len(times),
    )


BENCHMARK = Benchmark(
    name="simulator",
    title="Plans predicted by the simulator from the times of their operators, against the clock.",
    suites=("strategies",),
    in_cell=in_cell,
    fits=lambda cell: bool(contests_in(cell)),
)
