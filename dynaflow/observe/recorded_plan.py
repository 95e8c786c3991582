"""RecordedPlan calls, plan by plan."""

from __future__ import annotations

import statistics
import weakref
from collections import Counter as Counts
from dataclasses import dataclass, replace
from functools import cached_property

from dynaflow.core.device import device_for
from dynaflow.core.plan import Plan
from dynaflow.core.plan_text import Span, draw
from dynaflow.cost.costs import Costs
from dynaflow.engine.planner import Planner
from dynaflow.lower.timing import Marks
from dynaflow.observe.document import Counter, Document
from dynaflow.observe.timelines import of_spans


@dataclass(frozen=True, kw_only=True)
class Call:
    """One run of a plan. Times are seconds since the recording began."""

    model: str
    phase: str
    """"inference", "forward" or "backward"."""
    plan: Plan
    """As it was compiled: tasks that run as one call are one task."""
    thread: str
    begin: float
    end: float
    """When the host was done: on CUDA, when all work was issued."""
    spans: tuple[Span, ...] = ()
    """Start and end of each task, or of the whole uncut graph. Empty if they are not known: `note` says why."""
    memory: int | None = None
    """Bytes that torch's allocator had allocated when the host was done; None on a CPU."""
    note: str = ""

    @property
    def host(self) -> float:
        return self.end - self.begin

    @property
    def seconds(self) -> float:
        """From the start of the first task to the end of the last."""
        return max(e for _, e in self.spans) - min(s for s, _ in self.spans) if self.spans else 0.0

    @property
    def overlap(self) -> float:
        """The sum of the lanes' busy times divided by the run time: 1 is a sequence without gaps."""
        return sum(e - s for s, e in self.spans) / self.seconds if self.seconds else 0.0


class RecordedPlan:
    """The calls of one plan."""

    def __init__(self, calls: list[Call], marks: Marks, owner: weakref.ref[Planner]) -> None:
        first = calls[0]
        self.owner = owner
        self.model, self.phase, self.plan, self.calls = first.model, first.phase, first.plan, tuple(calls)
        self.graph, self.device, self._sizes = marks.graph, marks.device, marks.sizes

    @property
    def title(self) -> str:
        sizes = ", ".join(str(m.size) for m in self.plan.micro_batches)
        how = "in sequence" if self.plan.sequential else f"as [{sizes}]"
        phase = "" if self.phase == "inference" else f", {self.phase}"
        return f"{self.model}{phase}: batch of {self.plan.batch_size} {how}"

    @cached_property
    def timed(self) -> list[Call]:
        """The calls with known task times, the fastest first."""
        return sorted((call for call in self.calls if call.spans), key=lambda call: call.seconds)

    @property
    def median(self) -> Call | None:
        return self.timed[(len(self.timed) - 1) // 2] if self.timed else None

    @property
    def overlap(self) -> float:
        """The overlap of the median call."""
        return self.median.overlap if self.median is not None else 0.0

    @property
    def seconds(self) -> float:
        """The time of all calls. Calls of a CUDA graph without known times are counted as the median."""
        return self.median.seconds * len(self.calls) if self.median is not None else 0.0

    @property
    def host(self) -> float:
        return statistics.median(call.host for call in self.calls)

    def document(self, call: Call) -> Document:
        """Returns a call as a timeline; 0 is the start of the recording."""
        pairs = zip(self._template.tasks, call.spans, strict=True)
        tasks = tuple(replace(task, start=start, end=end) for task, (start, end) in pairs)
        made = replace(self._template, tasks=tasks)
        counters = [self._sms(made)]
        if call.memory is not None:
            counters.append(Counter(name="allocated", points=((call.end, float(call.memory)),), unit="bytes"))
        return replace(made, counters=tuple(counters))

    @property
    def timeline(self) -> Document:
        """The median call as a timeline; 0 is its start."""
        assert self.median is not None, "no call's times are known"
        return from_zero(self.document(self.median))

    def draw(self, width: int = 110) -> str:
        """The median call in the terminal."""
        if self.median is None or self.plan.sequential:
            return draw(self.plan, None, width)
        return draw(self.plan, [(s * 1e3, e * 1e3) for s, e in self.median.spans], width)

    @cached_property
    def _template(self) -> Document:
        """The timeline without times: it is the same for all calls."""
        graph = None if self.plan.sequential else self.graph
        spans = [(0.0, 0.0)] * max(1, len(self.plan.tasks))
        device = str(self.device)
        try:
            costs = Costs(self.graph, device_for(self.device), sizes=self._sizes)
            return of_spans(self.plan, spans, graph, title=self.title, device=device, costs=costs)
        except Exception:  # best effort: the resources that a task uses
            return of_spans(self.plan, spans, graph, title=self.title, device=device)

    def _sms(self, document: Document) -> Counter:
        """The fraction of the SMs that the running lanes may use."""
        there = device_for(self.device).sms
        shares = {lane: 1.0 if n is None else n / there for lane, n in self.plan.shares(there).items()}
        running: Counts[str] = Counts()
        points: dict[float, float] = {}
        moments = [(t.start, 1, t.lane) for t in document.tasks] + [(t.end, -1, t.lane) for t in document.tasks]
        for moment, change, lane in sorted(moments):
            running[lane] += change
            used = sum(shares.get(lane, 1.0) for lane, n in running.items() if n > 0)
            points[moment] = round(min(1.0, used), 4)
        return Counter(name="sms", points=tuple(points.items()), unit="fraction")

    def __str__(self) -> str:
        text = f"{self.title}: {count_of(len(self.calls), 'call')}"
        if self.median is not None:
            text += f", {self.median.seconds * 1e3:.3f} ms, lanes busy {self.median.overlap:.2f} of it"
        text += f", host {self.host * 1e3:.3f} ms"
        notes = Counts(call.note for call in self.calls if call.note)
        return text + "".join(f"\n  {n} without the times of tasks: {note}" for note, n in notes.items())


def from_zero(document: Document) -> Document:
    start = document.begin
    return replace(
        document,
        tasks=tuple(replace(t, start=t.start - start, end=t.end - start) for t in document.tasks),
        counters=tuple(replace(c, points=tuple((t - start, v) for t, v in c.points)) for c in document.counters),
    )


def count_of(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
