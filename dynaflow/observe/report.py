"""A report on a measured run: what was busy, what overlapped, how close it is to the bound, and what it loses.

A lane is busy or idle. Ideally, the uncut sequence would be spread evenly over the lanes. A run takes longer because
of time in which no lane runs (the host); time before a lane's first task and after its last one (fill and drain); time
in which a lane has less to do than others, or waits for them (imbalance); and because tasks take longer: side by side
than alone (contention), alone in pieces than uncut (cut cost). If nothing of that is lost and the bound is still far,
it needs more lanes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dynaflow.core.critical_path import longest_chains
from dynaflow.core.plan_text import Span, on_cpu, resource_label
from dynaflow.observe.document import Document, TimedTask
from dynaflow.observe.summary import kind, union

FILL, IMBALANCE, CONTENTION = "fill and drain", "imbalance between lanes", "contention"
HOST, CUTS, LONGER = "the host", "cut cost", "contention or cut cost"
FEW = "too few lanes"

ADVICE = {
    FILL: "Lanes start late and end early: split into more micro-batches, or give the first and the last operators of"
    " each to a lane that would be idle.",
    IMBALANCE: "Some lanes have less to do, or wait for others: move operators between lanes, or issue first those"
    " that others wait for.",
    CONTENTION: "Tasks take longer side by side than alone, since they want the same resource: pair operators that use"
    " different ones, hold one lane to a share of the SMs, or stay in sequence.",
    HOST: "Lanes wait for the host: cut less, use larger batches, or, on a GPU, replay the plan as one CUDA graph"
    " (cudagraph=\"plan\").",
    CUTS: "The pieces take longer than the uncut graph: cut at fewer operators, or split into fewer micro-batches.",
    LONGER: "All tasks together take longer than the uncut graph, because of contention or cuts: fast.report(**inputs)"
    " distinguishes them, unless lanes have shares of the SMs.",
    FEW: "All lanes are busy all the time, and tasks that need nothing of each other still run one after the other:"
    " spread them over more lanes, unless they want the same resource.",
}  # fmt: skip

AT_THE_BOUND = 0.03
"""A run within this fraction of the bound is at the bound."""
HOST_BOUND = 0.93
"""If the host needs this fraction of the time to issue the work, the device waits for it."""
PAIRS = 5
"""Overlaps that are printed."""


class Reason(NamedTuple):
    """Why a run takes longer than the bound."""

    name: str
    seconds: float


class Overlap(NamedTuple):
    """Two tags, or kinds of operators, that ran at the same time on different lanes."""

    one: str
    other: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `report_of` found. Times are seconds."""

    title: str
    device: str
    seconds: float
    """From the start of the first task to the end of the last one, in the median call."""
    calls: int
    lanes: Mapping[str, float]
    """The fraction of the time in which each lane was busy."""
    resources: Mapping[str, float]
    """The fraction of each resource that was in use on average, by the cost model."""
    overlaps: tuple[Overlap, ...]
    """The longest first."""
    sequence: float | None
    """The time of the uncut graph."""
    path: float
    """The critical path: the longest chain of tasks that need each other's results."""
    reasons: tuple[Reason, ...]
    """The largest first; none if it is at the bound."""
    host: float | None
    """The time that the host needs to issue the work; None on a CPU, where it does the work."""
    predicted: float | None = None
    """The simulator's prediction, from measured times of the operators."""

    @property
    def overlap(self) -> float:
        """The sum of the lanes' busy times divided by the run time."""
        return math.fsum(self.lanes.values())

    @property
    def speedup(self) -> float | None:
        return self.sequence / self.seconds if self.sequence and self.seconds else None

    @property
    def bound(self) -> float:
        """The larger of the critical path and the busiest resource's time; the sequence's time, if that is shorter."""
        tasks = max([self.path, *(share * self.seconds for share in self.resources.values())])
        return tasks if self.sequence is None else min(tasks, self.sequence)

    @property
    def limit(self) -> str:
        """What the bound is."""
        if self.bound == self.sequence:
            return "the sequence"
        busiest = max(self.resources, key=lambda name: self.resources[name], default="")
        return busiest if busiest and self.resources[busiest] * self.seconds > self.path else "critical path"

    @property
    def advice(self) -> str:
        text = ADVICE[self.reasons[0].name] if self.reasons else ""
        return text.replace("SMs", "cores") if on_cpu(self.device) else text

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        of = "of one call" if self.calls == 1 else f"the median of {self.calls} calls"
        lines = [f"{self.title}{where}: {_ms(self.seconds)}, {of}."]
        lanes = ", ".join(f"{name} {share:.0%}" for name, share in self.lanes.items())
        lines.append(f"Lanes were busy: {lanes}; together {self.overlap:.2f} of the time.")
        most_used = sorted(self.resources.items(), key=lambda r: -r[1])
        used = [f"{resource_label(n, self.device)} {u:.0%}" for n, u in most_used if u >= 0.005]
        if used:
            lines.append(f"In use by the cost model, on average: {', '.join(used)}.")
        pairs = [f"{o.one} with {o.other} for {_ms(o.seconds)}" for o in self.overlaps[:PAIRS]]
        lines.append(f"At the same time ran: {'; '.join(pairs)}." if pairs else "Nothing ran at the same time.")
        if self.speedup is not None:
            assert self.sequence is not None
            lines.append(f"The uncut graph in sequence takes {_ms(self.sequence)}: a speed-up of {self.speedup:.2f}x.")
        if self.predicted is not None:
            lines.append(f"The simulator says {_ms(self.predicted)}.")
        if self.seconds:
            most = f", a speed-up of {self.sequence / self.bound:.2f}x" if self.sequence and self.bound else ""
            reached = f"{self.bound / self.seconds:.0%} of that speed is reached"
            limit = resource_label(self.limit, self.device)
            lines.append(f"The bound is {_ms(self.bound)} ({limit}){most}; {reached}.")
        if self.reasons:
            losses = ", ".join(f"{reason.name} {_ms(reason.seconds)}" for reason in self.reasons)
            lines += [f"What keeps it from there: {losses}.", f"To try: {self.advice}"]
        elif self.seconds:
            lines.append("It is at the bound, as far as these times tell: only faster operators would help.")
        return "\n".join(lines)


def report_of(
    document: Document,
    *,
    after: Sequence[Sequence[int]] | None = None,
    calls: int = 1,
    host: float | None = None,
    sequence: float | None = None,
    alone: Sequence[float] | None = None,
    predicted: float | None = None,
) -> Report:
    """Reports on a timeline.

    after: for each task, those whose results it needs; by default those it waits for and the last one on its lane.
    host: seconds that the host needed to issue the work, if it doesn't do the work itself.
    sequence: seconds of the uncut graph. alone: seconds of each task when it runs alone.
    predicted: the simulator's prediction.
    """
    seconds = document.length
    lengths = [t.seconds for t in document.tasks] if alone is None else [
        min(a, t.seconds) for a, t in zip(alone, document.tasks, strict=True)
    ]  # fmt: skip
    busy = {lane.name: _length(_running(document.tasks, lane.name)) for lane in document.lanes}
    made = Report(
        title=document.title,
        device=document.device,
        seconds=seconds,
        calls=calls,
        lanes={name: length / seconds if seconds else 0.0 for name, length in busy.items()},
        resources=_resources(document.tasks, lengths, seconds),
        overlaps=_overlaps(document.tasks),
        sequence=sequence,
        path=_path(document.tasks, lengths, after),
        reasons=(),
        host=host,
        predicted=predicted,
    )
    rest = seconds - made.bound
    if rest <= AT_THE_BOUND * seconds:
        return made
    found = _reasons(document, busy, host, sequence, alone)
    losses = [Reason(name, min(lost, rest)) for name, lost in found.items() if lost > 0.01 * seconds]
    reasons = tuple(sorted(losses, key=lambda reason: -reason.seconds))
    return replace(made, reasons=reasons or (Reason(FEW, rest),))


def _reasons(
    document: Document,
    busy: Mapping[str, float],
    host: float | None,
    sequence: float | None,
    alone: Sequence[float] | None,
) -> dict[str, float]:
    """The seconds lost to each cause, on average over the lanes that have work."""
    lanes = [name for name in busy if busy[name] > 0]
    if not lanes:
        return {HOST: document.length}
    tasks, whole = document.tasks, (document.begin, document.end)
    all_idle = _gaps(union((t.start, t.end) for t in tasks), whole)
    most, count = max(busy[name] for name in lanes), len(lanes)
    found = {HOST: _length(all_idle)}
    if host is not None and host >= HOST_BOUND * document.length:
        found[HOST] = document.length  # tasks seem longer than they are: each ends when the next one is issued
    idle = fill = 0.0
    for name in lanes:
        runs = _running(tasks, name)
        outside = [(whole[0], runs[0][0]), (runs[-1][1], whole[1])]
        ends = _length(outside) - math.fsum(_common(a, b) for a in outside for b in all_idle)
        idle += document.length - busy[name] - _length(all_idle)
        fill += max(0.0, ends - (most - busy[name]))  # a lane with less to do has to start late or end early
    found[FILL] = fill / count
    found[IMBALANCE] = max(0.0, idle - fill) / count
    total = math.fsum(busy.values())
    if alone is not None:
        apart = math.fsum(alone)
        found[CONTENTION] = max(0.0, total - apart) / count
        if sequence is not None:
            found[CUTS] = max(0.0, apart - sequence) / count
    elif sequence is not None:
        found[LONGER if count > 1 else CUTS] = max(0.0, total - sequence) / count
    return found


def _path(tasks: Sequence[TimedTask], lengths: Sequence[float], after: Sequence[Sequence[int]] | None) -> float:
    if after is None:
        last: dict[str, int] = {}
        orders: list[list[int]] = []
        for i, task in enumerate(tasks):
            orders.append([*task.after, *([last[task.lane]] if task.lane in last else [])])
            last[task.lane] = i
        after = orders
    return max(longest_chains(lengths, after), default=0.0)


def _resources(tasks: Sequence[TimedTask], lengths: Sequence[float], seconds: float) -> dict[str, float]:
    used: dict[str, float] = defaultdict(float)
    for task, length in zip(tasks, lengths, strict=True):
        for name, share in task.uses.items():
            used[name] += share * length
    return {name: min(1.0, time / seconds) for name, time in used.items()} if seconds else {}


def _overlaps(tasks: Sequence[TimedTask]) -> tuple[Overlap, ...]:
    """The overlaps by tags, or by kinds of operators that have no tags."""
    moments = sorted(
        [(t.start, 1, i) for i, t in enumerate(tasks) if t.seconds] + [(t.end, 0, i) for i, t in enumerate(tasks)]
    )
    times: dict[tuple[str, str], float] = defaultdict(float)
    running: set[int] = set()
    before = 0.0
    for moment, starts, i in moments:
        if moment > before and len(running) > 1:
            pairs = {
                (min(_label(tasks[a]), _label(tasks[b])), max(_label(tasks[a]), _label(tasks[b])))
                for a in running for b in running if tasks[a].lane < tasks[b].lane
            }  # fmt: skip
            for pair in pairs:
                times[pair] += moment - before
        before = moment
        (running.add if starts else running.discard)(i)
    return tuple(sorted((Overlap(*pair, time) for pair, time in times.items()), key=lambda o: (-o.seconds, o)))


def _label(task: TimedTask) -> str:
    return ", ".join(task.tags) or kind(task)


def _running(tasks: Sequence[TimedTask], lane: str) -> list[Span]:
    return union((t.start, t.end) for t in tasks if t.lane == lane)


def _gaps(spans: Sequence[Span], whole: Span) -> list[Span]:
    edges = [whole[0], *(x for span in spans for x in span), whole[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _common(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _length(spans: Iterable[Span]) -> float:
    return math.fsum(end - start for start, end in spans)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
