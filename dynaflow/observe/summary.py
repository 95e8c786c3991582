"""What a timeline shows: which task delayed each task, the critical path, and why lanes were idle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from dynaflow.core.plan_text import Span, kind_of
from dynaflow.observe.document import Document, TimedTask

SAME = 1e-9
"""Times that differ by less than this fraction of the timeline's length are equal: sums have rounding errors."""

BEFORE, BETWEEN, AFTER = "before its first task", "between tasks", "after its last task"


class Share(NamedTuple):
    """A name and the time that goes to it."""

    name: str
    seconds: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """A lane's time: busy if any task runs on it."""

    lane: str
    tasks: int
    busy: float
    idle: float
    causes: tuple[Share, ...]
    """Why it was idle, the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times are in the document's unit."""

    blocked_by: tuple[int, ...]
    """For each task, the one whose end let it start; -1 if there is none."""
    path: tuple[int, ...]
    """The critical path: each task was delayed by the one before, and the last one ends the run."""
    on_path: tuple[Share, ...]
    """Its time by kinds of operators, the longest first."""
    waiting: float
    """The time in which no task of the path runs: launches, or something that the timeline does not contain."""
    lanes: tuple[LaneUse, ...]


def kind(task: TimedTask) -> str:
    return kind_of(task.op or task.name)


def summarize(document: Document) -> Summary:
    blocked_by = _blocked_by(document)
    path = _path(document, blocked_by)
    on_path = _shares([(kind(document.tasks[i]), document.tasks[i].seconds) for i in path])
    running = math.fsum(end - start for start, end in union(_span(document.tasks[i]) for i in path))
    return Summary(
        blocked_by=blocked_by,
        path=path,
        on_path=on_path,
        waiting=max(0.0, document.length - running) if path else 0.0,
        lanes=tuple(_use(document, lane.name, blocked_by) for lane in document.lanes),
    )


def _blocked_by(document: Document) -> tuple[int, ...]:
    """For each task: of those that it waits for and the one before it on its lane, the one that ended last."""
    tasks, near = document.tasks, SAME * document.length

    def earlier(a: int, b: int) -> bool:
        return (tasks[a].start, a) < (tasks[b].start, b)  # no path can be a cycle, even with wrong clocks

    blocked_by = [-1] * len(tasks)
    running: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    ended: dict[str, tuple[float, float, int]] = {}
    for i in sorted(range(len(tasks)), key=lambda i: (tasks[i].start, i)):
        task = tasks[i]
        on = running[task.lane]
        while on and on[0][0] <= task.start + near:
            ended[task.lane] = max(ended.get(task.lane, on[0]), heappop(on))
        best = ended[task.lane][-1] if task.lane in ended else -1
        for a in task.after:
            if earlier(a, i) and (best < 0 or tasks[a].end > tasks[best].end + near):
                best = a
        blocked_by[i] = best
        heappush(on, (task.end, task.start, i))
    return tuple(blocked_by)


def _path(document: Document, blocked_by: Sequence[int]) -> tuple[int, ...]:
    if not document.tasks:
        return ()
    at = max(range(len(blocked_by)), key=lambda i: (document.tasks[i].end, i))
    found = []
    while at >= 0:
        found.append(at)
        at = blocked_by[at]
    return tuple(reversed(found))


def _use(document: Document, lane: str, blocked_by: Sequence[int]) -> LaneUse:
    tasks = document.tasks
    own = sorted((i for i, t in enumerate(tasks) if t.lane == lane), key=lambda i: (tasks[i].start, i))
    busy = math.fsum(end - start for start, end in union(_span(tasks[i]) for i in own))
    gaps: list[tuple[str, float]] = []
    now = document.begin
    for i in own:
        if tasks[i].start - now > SAME * document.length:
            cause = tasks[blocked_by[i]] if blocked_by[i] >= 0 else None
            if cause is not None and cause.lane != lane:
                name = f"waiting for {kind(cause)} on {cause.lane}"
            else:
                name = BEFORE if i == own[0] else BETWEEN
            gaps.append((name, tasks[i].start - now))
        now = max(now, tasks[i].end)
    if document.end - now > SAME * document.length:
        gaps.append((AFTER, document.end - now))
    idle = math.fsum(seconds for _, seconds in gaps)
    return LaneUse(lane=lane, tasks=len(own), busy=busy, idle=idle, causes=_shares(gaps))


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the union of the spans, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _span(task: TimedTask) -> Span:
    return task.start, task.end


def _shares(parts: Sequence[tuple[str, float]]) -> tuple[Share, ...]:
    times: dict[str, list[float]] = defaultdict(list)
    for name, seconds in parts:
        times[name].append(seconds)
    found = [Share(name, math.fsum(all_of), len(all_of)) for name, all_of in times.items()]
    return tuple(sorted(found, key=lambda share: -share.seconds))
