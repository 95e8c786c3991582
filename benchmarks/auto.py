"""`auto` in every cell of the suite, against the better of torch.compile with and without CUDA graphs.

`--cells NAME,NAME` measures some of them; the geometric mean over all that are known stands in the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dynaflow as df
from benchmarks.cells import Cell
from benchmarks.measure import Figure, Trial, figure, rounds_for, side_by_side
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants

LIMIT = 1 / 0.99
"""Of the time, at most: no cell is under 0.99 of the baseline's speed."""
SECONDS = 15.0
"""For tuning a cell."""


def in_cell(cell: Cell, variants: Variants) -> Iterator[Trial]:
    yield Trial(
        what="auto",
        baseline="the better of torch.compile, with and without CUDA graphs",
        situation=cell.name,
        limit=LIMIT,
        run=lambda: _compare(cell, variants, variants.settings),
    )


def _compare(cell: Cell, variants: Variants, settings: Settings) -> Figure:
    """In the same rounds: ours as one CUDA graph where there are any, theirs with and without."""
    options: dict[str, Any] = {"seconds": 2.0 if settings.tiny else SECONDS}
    if cell.schedulers:
        options["among"] = [s if isinstance(s, str) else s[1] for s in cell.schedulers]
    tuner = df.strategies.make("auto", **options)
    auto = variants.ours(tuner, "auto", "plan" if settings.cuda else None, tries=True)
    modes = (None, "reduce-overhead") if settings.cuda else (None,)
    theirs = [variants.baseline(mode) for mode in modes]
    away = variants.check(auto, theirs[0])
    assert auto.fast is not None
    auto.prepare()
    decision = auto.fast.explain(**variants.case.inputs).decision
    progress(str(decision))
    runs = {variant.name: variant.timed for variant in (auto, *theirs)}
    times = side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds / 2))
    medians = {name: figure(found).value for name, found in times.items()}
    best = min((variant.name for variant in theirs), key=medians.__getitem__)
    details = {f"{name}_ms": seconds * 1e3 for name, seconds in medians.items()}
    ratios = [a / b for a, b in zip(times[auto.name], times[best], strict=True)]
    return figure(ratios, **details, chosen=decision.chosen, difference=away, rounds=len(ratios))


BENCHMARK = Benchmark(
    name="auto",
    title="`auto` in every cell: time of a call until the device is idle, as a ratio.",
    suites=("strategies",),
    in_cell=in_cell,
)
