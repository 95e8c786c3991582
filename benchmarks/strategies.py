"""Single strategies where they should gain, each against what people have: Inductor in one CUDA graph, or sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import dynaflow as df
from benchmarks import copies
from benchmarks.cells import LINK, Cell, few_layers
from benchmarks.measure import Figure, Timed, Trial, agree, figure, once, rounds_for, side_by_side
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants
from dynaflow.strategies import Branches, CommOverlap, DualBatch, NanoFlow, Prefetch


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A strategy in the cells of one kind."""

    kind: str
    scheduler: Callable[[], df.OpSchedulerBase]
    name: str
    compiled: bool = True
    """The baseline is torch.compile with CUDA graphs; else our own sequence, the same kernels in one graph."""


CONTESTS = (
    Contest(kind="branches", name="branches, 2 lanes", scheduler=lambda: Branches(lanes=2)),
    Contest(kind="branches", name="branches, 4 lanes", scheduler=lambda: Branches(lanes=4)),
    Contest(kind="moe", name="branches, 2 lanes", scheduler=lambda: Branches(lanes=2)),
    Contest(kind="moe", name="dual_batch", scheduler=lambda: DualBatch()),
    Contest(kind="mixed", name="nanoflow", scheduler=lambda: NanoFlow(), compiled=False),
    Contest(kind="mixed", name="nanoflow, attention on 64 SMs", scheduler=lambda: NanoFlow(sms=64), compiled=False),
    Contest(kind="mixed", name="nanoflow, attention on 80 SMs", scheduler=lambda: NanoFlow(sms=80), compiled=False),
    Contest(kind="link", name="comm_overlap", compiled=False,
            scheduler=lambda: CommOverlap(collectives=LINK, by_rows=True)),
    Contest(kind="link", name="nanoflow with the link", compiled=False,
            scheduler=lambda: NanoFlow(collectives=LINK, by_rows=True)),
    Contest(kind="prefetch", name="prefetch", scheduler=lambda: Prefetch(), compiled=False),
)  # fmt: skip


def contests_in(cell: Cell) -> list[Contest]:
    return [contest for contest in CONTESTS if contest.kind in cell.kinds]


def in_cell(cell: Cell, variants: Variants) -> Iterator[Trial]:
    settings = variants.settings
    for contest in contests_in(cell):
        yield Trial(
            what=f"speed-up by {contest.name}",
            baseline="torch.compile with CUDA graphs" if contest.compiled else "sequence, one graph",
            situation=cell.name,
            at_least=True,
            run=lambda c=contest: _speed_up(c, variants, settings),  # type: ignore[misc]
        )
    if "link" in cell.kinds:
        yield from _bound(cell, variants, settings)
    if "prefetch" in cell.kinds:
        yield Trial(
            what="prefetch: fraction of the bound",
            baseline="the larger of compute and the copies, each alone",
            situation=cell.name,
            at_least=True,
            skip="" if settings.cuda else "copy engines beside compute need CUDA",
            run=lambda: _fetched(variants, settings),
        )


def _speed_up(contest: Contest, variants: Variants, settings: Settings) -> Figure:
    graph = "plan" if settings.cuda else None
    ours = variants.ours(contest.scheduler(), contest.name, graph)
    mode = "reduce-overhead" if settings.cuda else None
    theirs = variants.baseline(mode) if contest.compiled else variants.sequential(graph)
    away = variants.check(ours, theirs)
    assert ours.fast is not None
    ours.prepare()
    plan = ours.fast.plan(**variants.case.inputs)
    runs = {"ours": ours.timed, "baseline": theirs.timed}
    times = side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds))
    ratios = [b / a for a, b in zip(times["ours"], times["baseline"], strict=True)]
    return figure(
        ratios,
        ours_ms=figure(times["ours"]).value * 1e3,
        baseline_ms=figure(times["baseline"]).value * 1e3,
        tasks=len(plan.tasks),
        lanes=len(plan.lanes),
        difference=away,
        rounds=len(ratios),
    )


def _bound(cell: Cell, variants: Variants, settings: Settings) -> Iterator[Trial]:
    """How near `comm_overlap` comes to the largest of what can't overlap with itself: see copies.py."""
    x = variants.case.inputs["input"]
    model: Any = variants.case.model
    times = once(lambda: _component_times(model, x, settings))
    yield Trial(
        what="comm_overlap: fraction of the bound",
        baseline="the larger of compute and the link, each alone",
        situation=cell.name,
        at_least=True,
        skip="" if settings.cuda else "copy engines beside compute need CUDA",
        run=lambda: _fraction(times()),
    )


def _component_times(model: Any, x: torch.Tensor, settings: Settings) -> dict[str, list[float]]:
    graph = "plan" if settings.cuda else None
    both = df.compile(model, CommOverlap(collectives=LINK, by_rows=True), cudagraph=graph, operators=settings.operators)  # type: ignore[arg-type]
    alone = df.compile(model, CommOverlap(collectives=LINK, by_rows=True), operators=settings.operators)
    for fast in (both, alone):
        agree([model(x)], [fast(x).clone()], 0.1)
        for _ in range(3):
            fast(x)
    host = copies.HOST
    halves = [b[: len(x) // 2] for b in host.buffers[: 2 * len(model)]]
    back = torch.empty_like(x[: len(x) // 2])

    def reach(yes: bool) -> None:
        host.reached = yes

    def link() -> None:
        for buffer in halves:
            buffer.copy_(back, non_blocking=True)
            back.copy_(buffer, non_blocking=True)

    runs = {
        "both": Timed(run=lambda: both(x), prepare=lambda: reach(True)),
        "compute": Timed(run=lambda: alone(x), prepare=lambda: reach(False)),
        "link": Timed(run=link),
    }
    try:
        return side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds))
    finally:
        reach(True)


def _fetched(variants: Variants, settings: Settings) -> Figure:
    """Compute alone: a twin whose weights are on the device. Copies alone: all weights into one place."""
    ours = variants.ours(Prefetch(), "prefetch", "plan")
    weights = [p.data for p in variants.case.model.parameters() if p.device.type == "cpu"]
    places = {w.shape: torch.empty_like(w, device=settings.device) for w in weights}
    alone = df.compile(few_layers(settings), cudagraph="plan")
    for _ in range(3):
        alone(**variants.case.inputs)

    def fetch() -> None:
        for weight in weights:
            places[weight.shape].copy_(weight, non_blocking=True)

    runs = {
        "both": ours.timed,
        "compute": Timed(run=lambda: alone(**variants.case.inputs)),
        "copies": Timed(run=fetch),
    }
    return _fraction(side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds)))


def _fraction(times: dict[str, list[float]]) -> Figure:
    """How near "both" comes to the largest of the others, each alone."""
    medians = {f"{name}_ms": figure(found).value * 1e3 for name, found in times.items()}
    alone = zip(*(found for name, found in times.items() if name != "both"), strict=True)
    return figure([max(parts) / both for both, parts in zip(times["both"], alone, strict=True)], **medians)


BENCHMARK = Benchmark(
    name="strategies",
    title="Single strategies where they should gain: how many times faster than the baseline.",
    suites=("strategies",),
    in_cell=in_cell,
    fits=lambda cell: bool(contests_in(cell)),
)
