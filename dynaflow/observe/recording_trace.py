"""RecordedPlan calls as a trace that ui.perfetto.dev and the tools of torch.profiler open."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynaflow.core.chrome_trace import ChromeTrace
from dynaflow.errors import TimelineError
from dynaflow.observe.document import Document
from dynaflow.observe.readers import load
from dynaflow.observe.recorded_plan import Call


class Shown(NamedTuple):
    """A call, and its timeline if its times are known."""

    call: Call
    document: Document | None
    title: str


def trace_of(calls: Sequence[Shown]) -> dict[str, Any]:
    """A process for the host and one for each model, a thread for each lane."""
    trace = ChromeTrace("host")
    many = len({call.thread for call, *_ in calls}) > 1
    first = 0
    for number, (call, document, title) in enumerate(calls):
        args: dict[str, Any] = {"call": number, "plan": title, **({"note": call.note} if call.note else {})}
        trace.slice(trace.row("host", call.thread), title, "call", call.begin, call.end, args)
        if document is None:
            continue
        process = f"{call.model} on {document.device}"
        rows = [trace.row(process, f"{t.lane} ({call.thread})" if many else t.lane) for t in document.tasks]
        for i, task in enumerate(document.tasks):
            args = {"task": first + i, "call": number, "op": task.op, "micro_batches": list(task.micro_batches),
                    "after": [first + a for a in task.after], "tags": list(task.tags), "rows": task.rows,
                    "bytes": task.bytes}  # fmt: skip
            args = {name: value for name, value in args.items() if value is not None}
            trace.slice(rows[i], task.name, "task", task.start, task.end, args)
            for a in task.after:
                earlier = document.tasks[a]
                trace.flow(rows[a], max(earlier.start, min(earlier.end, task.start)), rows[i], task.start)
        for counter in document.counters:
            own = many and counter.unit == "fraction"  # threads that call at the same time have a share each
            name = f"{counter.name} ({call.thread})" if own else counter.name
            for time, value in counter.points:
                trace.counter(rows[0], name, time, {name: value})
        first += len(document.tasks)
    return trace.to_dict(source="measured")


def join(ours: dict[str, Any], profile: Any, began: float) -> dict[str, Any]:
    """Merges both traces, on the clock of the profile. `began`: the wall-clock time of our 0."""
    theirs = _profile(profile)
    base = float(theirs.get("baseTimeNanoseconds", 0)) / 1e3  # the wall-clock time of their 0
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
