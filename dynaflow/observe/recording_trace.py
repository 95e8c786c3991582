"""RecordedPlan calls as a trace that ui.perfetto.dev and the tools of torch.profiler open."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynaflow.errors import TimelineError
from dynaflow.observe.document import Document
from dynaflow.observe.readers import load
from dynaflow.observe.recorded_plan import Call

HOST = 1
"""The process of the host's threads; those of devices come behind it."""


class Shown(NamedTuple):
    """A call, and its timeline if it is known."""

    call: Call
    document: Document | None
    title: str


Event = dict[str, Any]


def trace_of(calls: Sequence[Shown]) -> dict[str, Any]:
    """A process for the host and one for each model, a thread for each lane. Times are microseconds."""
    rows = _Rows()
    events: list[Event] = []
    many = len({call.thread for call, *_ in calls}) > 1
    first = flows = 0
    for number, (call, document, title) in enumerate(calls):
        at = rows.of("host", call.thread)
        told: Event = {"call": number, "plan": title, **({"note": call.note} if call.note else {})}
        events.append({"ph": "X", **at, "name": title, "cat": "call", "ts": call.begin * 1e6,
                       "dur": call.host * 1e6, "args": told})  # fmt: skip
        if document is None:
            continue
        process = f"{call.model} on {document.device}"
        places = [rows.of(process, f"{t.lane} ({call.thread})" if many else t.lane) for t in document.tasks]
        for i, task in enumerate(document.tasks):
            told = {"task": first + i, "call": number, "op": task.op, "micro_batches": list(task.micro_batches),
                    "after": [first + a for a in task.after], "tags": list(task.tags), "rows": task.rows,
                    "bytes": task.bytes}  # fmt: skip
            told = {name: value for name, value in told.items() if value is not None}
            events.append({"ph": "X", **places[i], "name": task.name, "cat": "task", "ts": task.start * 1e6,
                           "dur": task.seconds * 1e6, "args": told})  # fmt: skip
            for a in task.after:
                flow = {"id": flows, "name": "after", "cat": "dependency"}
                # A flow goes from slice to slice: its ends have to lie inside of them.
                earlier = document.tasks[a]
                leaves = min(earlier.end, task.start)
                events.append({"ph": "s", **flow, **places[a], "ts": max(earlier.start, leaves) * 1e6})
                events.append({"ph": "f", "bp": "e", **flow, **places[i], "ts": task.start * 1e6})
                flows += 1
        for counter in document.counters:
            own = many and counter.unit == "fraction"  # threads that call at the same time have a share each
            name = f"{counter.name} ({call.thread})" if own else counter.name
            events += [{"ph": "C", "pid": places[0]["pid"], "name": name, "ts": t * 1e6, "args": {name: v}}
                       for t, v in counter.points]  # fmt: skip
        first += len(document.tasks)
    return {"traceEvents": [*rows.names(), *events], "displayTimeUnit": "ms", "otherData": {"source": "measured"}}


class _Rows:
    """Numbers for processes and their threads, as they come."""

    def __init__(self) -> None:
        self._threads: dict[str, dict[str, int]] = {"host": {}}

    def of(self, process: str, thread: str) -> dict[str, int]:
        threads = self._threads.setdefault(process, {})
        tid = threads.setdefault(thread, len(threads) + 1)
        return {"pid": HOST + list(self._threads).index(process), "tid": tid}

    def names(self) -> Iterable[Event]:
        for pid, (process, threads) in enumerate(self._threads.items(), HOST):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid - 1000}}
            for thread, tid in threads.items():
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}


def join(ours: dict[str, Any], profile: Any, began: float) -> dict[str, Any]:
    """Both traces in one, by the clock of the profile. `began`: when our times were 0, by the wall clock."""
    theirs = _profile(profile)
    base = float(theirs.get("baseTimeNanoseconds", 0)) / 1e3  # since then their times count, by the wall clock
    shift = began * 1e6 - base
    events = [e for e in theirs["traceEvents"] if isinstance(e, dict)]
    pids = [e["pid"] for e in events if isinstance(e.get("pid"), int)]
    above = max(pids, default=0)
    moved = []
    for event in ours["traceEvents"]:
        event = event | {"pid": event["pid"] + above}
        moved.append(event | {"ts": event["ts"] + shift} if "ts" in event else event)
    return {**theirs, **ours, "traceEvents": [*moved, *events]}


def _profile(given: Any) -> Mapping[str, Any]:
    if hasattr(given, "export_chrome_trace"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            given.export_chrome_trace(str(path))
            return _profile(path)
    if isinstance(given, str | Path):
        given = load(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("traceEvents"), list):
        raise TimelineError("the profile has no traceEvents", advice="pass a torch.profiler.profile, or its trace")
    return given
