"""A whole plan, all its lanes, as one CUDA graph: what its launch costs the host."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.llama import TWO_BATCHES
from benchmarks.measure import Trial
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants

LIMIT = 1.10


def trials(v: Variants) -> Iterator[Trial]:
    skip = "" if v.settings.cuda else "CUDA graphs need CUDA"
    yield Trial(
        what="two micro-batches on two lanes, one graph: host time of a call",
        baseline="sequential, one graph",
        situation=v.case.name,
        limit=LIMIT,
        skip=skip,
        run=lambda: v.compare(v.two_batches("plan"), v.sequential("plan"), until="return"),
    )
    yield Trial(
        what="the same, until the device is idle",
        baseline="sequential, one graph",
        situation=v.case.name,
        skip=skip,
        run=lambda: v.compare(v.two_batches("plan"), v.sequential("plan")),
    )


BENCHMARK = Benchmark(
    name="graph_launch",
    title="A two-lane plan launched as one CUDA graph, against the same model's single-stream graph.",
    suites=("fast",),
    in_situation=trials,
    situations=("decode8", "decode64"),
    possible=TWO_BATCHES,
)
