"""What two micro-batches cost in memory: bytes copied to join them, the peak of a call, and what graphs hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch

import dynaflow as df
from benchmarks.llama import TWO_BATCHES
from benchmarks.measure import Figure, Trial, agree, once, synchronize
from benchmarks.schedulers import TwoBatches
from benchmarks.suite import Benchmark
from benchmarks.variants import Variant, Variants

PEAK_LIMIT, GRAPH_LIMIT = 1.05, 1.3
GIB = 2**30


def trials(v: Variants) -> Iterator[Trial]:
    name, cuda = v.case.name, v.settings.cuda
    skip = "" if cuda else "the allocator's counters need CUDA"
    peaks = once(lambda: (_peak(v, TwoBatches), _peak(v, df.Sequential)))
    yield Trial(
        what="bytes copied to join two micro-batches",
        baseline="",
        situation=name,
        unit="bytes",
        limit=0,
        run=lambda: _joined(v, None),
    )
    yield Trial(
        what="bytes copied to join two micro-batches, one graph",
        baseline="",
        situation=name,
        unit="bytes",
        limit=0,
        skip="" if cuda else "CUDA graphs need CUDA",
        run=lambda: _joined(v, "plan"),
    )
    for what, held in (("peak of a call, weights and cache included", True), ("peak of a call beyond those", False)):
        yield Trial(
            what=f"two micro-batches: {what}",
            baseline="sequential",
            situation=name,
            limit=PEAK_LIMIT,
            skip=skip,
            run=lambda held=held: _ratio(*peaks(), v.case.bytes if held else 0),
        )
    yield Trial(
        what="two micro-batches: memory that the graph holds",
        baseline="sequential, one graph",
        situation=name,
        limit=GRAPH_LIMIT,
        skip=skip,
        run=lambda: _ratio(_graph_bytes(v, TwoBatches), _graph_bytes(v, df.Sequential), 0),
    )


def _joined(v: Variants, cudagraph: str | None) -> Figure:
    ours = v.two_batches(cudagraph)
    away = v.check(ours, v.sequential(cudagraph))
    ours.results()
    assert ours.fast is not None
    return Figure(value=ours.fast.stats.joined_bytes, details={"difference": away})


def _peak(v: Variants, scheduler: Callable[[], df.OpSchedulerBase]) -> int:
    """The most that is held during a call, beyond what was there before the model was compiled.

    A model of its own: what it keeps from call to call, such as buffers for values, counts as well.
    """
    variant, expected = _fresh(v, scheduler, None), v.expected()
    gc.collect()
    synchronize()
    before = torch.cuda.memory_allocated()
    variant.warm_up()
    agree(expected, variant.results(), v.case.limit)
    variant.prepare()
    gc.collect()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    variant.run()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def _graph_bytes(v: Variants, scheduler: Callable[[], df.OpSchedulerBase]) -> int:
    """What stays reserved once a plan has been captured. A model of its own: plans may share a pool."""
    variant, expected = _fresh(v, scheduler, "plan"), v.expected()
    before = _reserved()
    variant.warm_up()
    held = _reserved() - before
    agree(expected, variant.results(), v.case.limit)
    if not held:
        raise RuntimeError("no memory was reserved: was a graph captured?")
    return held


def _fresh(v: Variants, scheduler: Callable[[], df.OpSchedulerBase], cudagraph: str | None) -> Variant:
    fast = v.fresh(scheduler(), cudagraph)
    return Variant(v.case, f"{scheduler.__name__}, for its memory", fast, fast)


def _reserved() -> int:
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()  # what the warm-up left is no part of the graph
    return torch.cuda.memory_reserved()


def _ratio(ours: int, baseline: int, besides: int) -> Figure:
    ours, baseline = ours + besides, baseline + besides
    return Figure(value=ours / baseline, details={"ours_GiB": ours / GIB, "baseline_GiB": baseline / GIB})


BENCHMARK = Benchmark(
    name="memory",
    title="Two micro-batches on two lanes: bytes copied to join them, peak of a call, memory that graphs hold.",
    suites=("fast",),
    in_situation=trials,
    situations=("prefill8x512", "decode8"),
    possible=TWO_BATCHES,
)
