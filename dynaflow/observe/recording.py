"""What ran, and when: `with df.record() as recording:` around any calls.

During a recording, plans run as code that marks the start and the end of each task: with the host's clock on a CPU,
with events on CUDA, which are read when the recording ends. The code that runs otherwise is another function and has no
overhead.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter as Counts
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynaflow import _torch
from dynaflow.core import forks, validate
from dynaflow.core.plan_text import Span
from dynaflow.engine import recorder
from dynaflow.engine.planner import Planner
from dynaflow.errors import RecordingError, shown
from dynaflow.lower.executable import Executable
from dynaflow.lower.timing import Marks
from dynaflow.observe.document import Document
from dynaflow.observe.recorded_plan import Call, RecordedPlan, count_of
from dynaflow.observe.recording_trace import Shown, join, trace_of
from dynaflow.observe.report import Report, report_of

CALLS_PER_PLAN = 64
MAX_SPARE_EVENTS = 1 << 14

_one = threading.Lock()

LAST_LAUNCH_ONLY = "a CUDA graph has the times of its last launch only"


@contextmanager
def record(keep: int = CALLS_PER_PLAN) -> Iterator[Recording]:
    """Records calls of all compiled models, in all threads, until the block ends: the last `keep` of each plan."""
    keep = validate.integer(keep, "keep", "keep at least one call of each plan", least=1, error=RecordingError)
    with private_recording(keep) as recording:
        recorder.now = recording
        try:
            yield recording
        finally:
            recorder.now = None


@contextmanager
def private_recording(keep: int = CALLS_PER_PLAN) -> Iterator[Recording]:
    """A recording of only what is run through `Recording.run`: calls of models, also in other threads, don't see it."""
    if not _one.acquire(blocking=False):  # a CUDA graph has one set of events: two recordings would share it
        raise RecordingError("a recording is on already", advice="one serves all models and threads: let it end first")
    try:
        recording = Recording(keep)
        try:
            yield recording
        finally:
            recording._end()
    finally:
        _one.release()


class RawCall(NamedTuple):
    """A call as it was recorded, before its events are read."""

    marks: Marks
    moments: list[Any]
    begin: float
    end: float
    thread: str
    model: str
    owner: weakref.ref[Planner]
    """Identifies the model. An id() could be reused after the model is deleted."""
    memory: int | None


class Recording:
    """The result of `record`. Its calls can be read when it has ended."""

    def __init__(self, keep: int = CALLS_PER_PLAN) -> None:
        self.began, self._wall = time.perf_counter(), time.time()
        self.ended: float | None = None
        self.others: Counts[str] = Counts()
        """Calls that could not be recorded, by the reason."""
        self._keep = keep
        self._lock = forks.lock()
        self.raw_calls: dict[object, deque[RawCall]] = {}
        self.clock_events: dict[torch.device, tuple[Any, float]] = {}
        """By device: an event, and the host's time when it happened."""
        self._plans: list[RecordedPlan] = []

    # While it is on

    def run(self, marked: Executable, args: list[Any], planner: Planner) -> Any:
        """Runs a plan that takes marks, and records them."""
        marks = marked.marks
        assert marks is not None
        device = marks.device
        if marks.cuda and device not in self.clock_events:
            self.clock_events[device] = _clock_event(device)
        moments = [] if marks.own else take_events(marks.count, device) if marks.cuda else [0.0] * marks.count
        args.append(moments)
        begin = time.perf_counter()
        results = marked(args)
        end = time.perf_counter()
        memory = _allocated(device) if marks.cuda else None
        thread, owner = threading.current_thread().name, weakref.ref(planner)
        raw = RawCall(marks, moments, begin, end, thread, planner.name, owner, memory)
        with self._lock:
            if self.ended is None:
                latest = self.raw_calls.setdefault(marks.key, deque())
                latest.append(raw)
                if len(latest) > self._keep:
                    _return_events(latest.popleft())
        return results

    def missed(self, reason: str) -> None:
        with self._lock:
            self.others[reason] += 1

    def _end(self) -> None:
        with self._lock:
            self.ended = time.perf_counter()
        for device in tuple(self.clock_events):  # a call that began before may still add one
            torch.cuda.synchronize(device)
        groups: dict[Any, tuple[list[Call], RawCall]] = {}
        read: set[int] = set()
        for raw in sorted((raw for latest in self.raw_calls.values() for raw in latest), key=lambda raw: -raw.begin):
            call = self._call(raw, read)
            groups.setdefault((id(raw.owner), call.phase, call.plan), ([], raw))[0].append(call)
        self._plans = [RecordedPlan(calls[::-1], raw.marks, raw.owner) for calls, raw in groups.values()]
        self._plans.sort(key=lambda plan: plan.calls[0].begin)
        for latest in self.raw_calls.values():
            for raw in latest:
                _return_events(raw)
        self.raw_calls.clear()
        self.clock_events.clear()

    def _call(self, raw: RawCall, read: set[int]) -> Call:
        """Reads the events of a call. `read`: marks that later calls have used, since launches of a graph share
        them."""
        spans: tuple[Span, ...] = ()
        note = ""
        if id(raw.moments[0]) in read and raw.marks.own:
            note = LAST_LAUNCH_ONLY
        else:
            read.add(id(raw.moments[0]))
            try:
                times = self._times(raw)
                spans = tuple((times[a], max(times[a], times[b])) for a, b in raw.marks.spans)
            except (RuntimeError, ValueError) as e:  # an event that can't be read
                note = str(e).split("\n")[0]
        return Call(
            model=raw.model, phase=raw.marks.graph.graph.phase, plan=raw.marks.plan, thread=raw.thread, spans=spans,
            begin=raw.begin - self.began, end=raw.end - self.began, memory=raw.memory, note=note,
        )  # fmt: skip

    def _times(self, raw: RawCall) -> list[float]:
        if isinstance(raw.moments[0], float):
            return [moment - self.began for moment in raw.moments]
        base, at = self.clock_events[raw.marks.device]
        first = raw.moments[raw.marks.spans[0][0]]  # differences are float32: only small ones are exact
        start = at - self.began + base.elapsed_time(first) / 1e3
        return [start + first.elapsed_time(moment) / 1e3 for moment in raw.moments]

    # When it has ended

    @property
    def plans(self) -> tuple[RecordedPlan, ...]:
        """The calls, plan by plan, in the order of their first ones."""
        if self.ended is None:
            raise RecordingError("the recording is still on", advice="read it after the `with` block")
        return tuple(self._plans)

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(sorted((c for plan in self.plans for c in plan.calls), key=lambda c: c.begin))

    @property
    def documents(self) -> tuple[Document, ...]:
        """A timeline for each plan: its median call, from its start."""
        return tuple(plan.timeline for plan in self.plans if plan.timed)

    def trace(self, profile: str | Path | Mapping[str, Any] | Any = None) -> dict[str, Any]:
        """All calls as a trace in Chrome's format; see `save`."""
        shown = [Shown(c, plan.document(c) if c.spans else None, plan.title) for plan in self.plans for c in plan.calls]
        made = trace_of(sorted(shown, key=lambda s: s.call.begin))
        return made if profile is None else join(made, profile, self._wall)

    def save(self, path: str | Path, *, profile: str | Path | Mapping[str, Any] | Any = None) -> None:
        """Writes a trace for ui.perfetto.dev or `dynaflow view`: tasks by lane, their dependencies, the host's calls.

        profile: a finished torch.profiler.profile, or a trace that it has exported. Its events are added, in separate
        processes, on the same clock as ours: the wall clock, to some tens of microseconds.
        """
        text = json.dumps(self.trace(profile))
        try:
            Path(path).write_text(text)
        except (OSError, TypeError) as e:
            advice = "name a file in an existing folder"
            raise RecordingError(f"{shown(path)} can't be written: {e}", advice=advice) from e

    def report(self, planner: Planner | None = None) -> Report:
        """Reports on the plan that took the most time, of all models or of one.

        It compares with the uncut graph if that was recorded too.
        """
        found = [p for p in self.plans if p.timed and (planner is None or p.owner() is planner)]
        if not found:
            raise RecordingError(f"no times of tasks were recorded: {self}", advice="call a compiled model inside")
        most = max(found, key=lambda p: (not p.plan.sequential, p.seconds))
        like = (most.plan.graph, most.plan.batch_size)
        uncut = [p for p in found if p.plan.sequential and (p.plan.graph, p.plan.batch_size) == like]
        sequence = uncut[0].median.seconds if uncut and uncut[0].median else None
        return report_on(most, sequence=sequence)

    def __str__(self) -> str:
        if self.ended is None:
            return "a recording that is still on"
        plans, calls = self.plans, sum(len(plan.calls) for plan in self.plans)
        took = (self.ended - self.began) * 1e3
        head = f"{count_of(calls, 'call')} of {count_of(len(plans), 'plan')} in {took:.1f} ms"
        missed = [f"{count_of(n, 'call')} not recorded: {reason}" for reason, n in self.others.items()]
        return "\n".join([head, *map(str, plans), *missed])


def report_on(recorded: RecordedPlan, **known: Any) -> Report:
    """Reports on a plan's median call."""
    issued = recorded.host if recorded.device.type != "cpu" else None
    known = {"calls": len(recorded.calls), **known}
    return report_of(recorded.timeline, after=_data_order(recorded), host=issued, **known)


def _data_order(recorded: RecordedPlan) -> list[list[int]] | None:
    """For each task, the tasks on any lane whose results it needs."""
    if recorded.plan.sequential:
        return None
    graph, tasks = recorded.graph, recorded.plan.tasks
    makers: dict[int, list[int]] = {}
    found = []
    for i, task in enumerate(tasks):
        ops = {graph.by_name[item.op].index for item in task.items}
        parts = {m for item in task.items for m in item.micro_batches}
        before = {a for op in ops for a in graph.ops[op].after}
        found.append(
            [
                j
                for a in before - ops
                for j in makers.get(a, ())
                if parts & {m for item in tasks[j].items for m in item.micro_batches}
            ]
        )
        for op in ops:
            makers.setdefault(op, []).append(i)
    return found


def _clock_event(device: torch.device) -> tuple[Any, float]:
    """Returns an event on an idle device, which happens when it is recorded, and the host's time then."""
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        event = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        event.record()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2


spare_events: dict[torch.device, list[Any]] = {}
"""Spare events: creating one takes longer than recording it."""
_spare = forks.lock()


def take_events(count: int, device: torch.device) -> list[Any]:
    """Takes events for the marks of a call."""
    with _spare:
        events = spare_events.setdefault(device, [])
        at = max(0, len(events) - count)
        taken, events[at:] = events[at:], []
    return taken + [_torch.timing_event() for _ in range(count - len(taken))]


def _return_events(raw: RawCall) -> None:
    """Returns a call's events to the spare ones, except a CUDA graph's, which records them again."""
    device = raw.marks.device
    if raw.marks.cuda and not raw.marks.own:
        with _spare:
            if len(spare_events[device]) < MAX_SPARE_EVENTS:
                spare_events[device].extend(raw.moments)


def _allocated(device: torch.device) -> int:
    """torch.cuda.memory_allocated, without computing all other statistics."""
    found: Any = torch.cuda.memory.memory_stats_as_nested_dict(device)
    for name in ("allocated_bytes", "all", "current"):
        found = found.get(name, {})
    return found or 0
