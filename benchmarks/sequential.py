"""What it costs to go through DynaFlow when the schedule is to change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.llama import SITUATIONS
from benchmarks.measure import Trial
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants

LIMIT = 1.01


def trials(v: Variants) -> Iterator[Trial]:
    name, cuda = v.case.name, v.settings.cuda
    yield Trial(
        what="sequential",
        baseline="torch.compile(model)",
        situation=name,
        limit=LIMIT,
        run=lambda: v.compare(v.sequential(), v.baseline()),
    )
    yield Trial(
        what="sequential, one CUDA graph",
        baseline="torch.compile(mode=reduce-overhead)",
        situation=name,
        limit=LIMIT,
        skip="" if cuda else "CUDA graphs need CUDA",
        run=lambda: v.compare(v.sequential("plan"), v.baseline("reduce-overhead")),
    )


BENCHMARK = Benchmark(
    name="sequential",
    title="A sequential schedule against torch.compile: time of a call until the device is idle.",
    suites=("fast",),
    in_situation=trials,
    situations=tuple(SITUATIONS),
)
