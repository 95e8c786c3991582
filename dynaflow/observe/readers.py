"""Timelines read from files: plans, timelines, and traces in Chrome's format."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter as Counts
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dynaflow.core.plan import Lane, Plan
from dynaflow.errors import DynaFlowError, TimelineError
from dynaflow.observe.document import KIND, Counter, Document, Source, TimedTask
from dynaflow.observe.timelines import of_plan

_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""torch.profiler's categories of events that run on a GPU."""

_ACCEPTED = "pass what Plan.to_json() or Document.to_json() gave, or a trace in Chrome's format (traceEvents)"


def read(path: str | Path) -> Document:
    """Reads a timeline from a file of any of the three kinds."""
    data = load(path)
    try:
        return _parsed(data, Path(path))
    except DynaFlowError as e:
        raise TimelineError(f"{path}: {e}", advice="" if e.advice else _ACCEPTED) from e


def load(path: str | Path) -> Any:
    """Reads JSON from a file, which may be gzipped."""
    try:
        raw = Path(path).read_bytes()
        return json.loads((gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode())
    except OSError as e:
        reason = e.strerror or str(e)
        raise TimelineError(f"{path} can't be read: {reason}", advice="name an existing file") from e
    except (EOFError, zlib.error) as e:
        raise TimelineError(f"{path} is truncated or damaged: {e}", advice="write it again") from e
    except (ValueError, RecursionError) as e:  # not JSON, or not text
        raise TimelineError(f"{path} is not JSON: {e}", advice=_ACCEPTED) from e


def _parsed(data: Any, path: Path) -> Document:
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if isinstance(data, list):  # Chrome's format as a bare list of events
        data = {"traceEvents": data}
    if isinstance(data, dict) and "traceEvents" in data:
        return of_trace(data, title=name)
    if isinstance(data, dict) and data.get("kind") == KIND:
        return Document.from_dict(data)
    if isinstance(data, dict) and "micro_batches" in data:
        return of_plan(Plan.from_dict(data), title=name)
    raise TimelineError("neither a plan, nor a timeline, nor a trace", advice=_ACCEPTED)


def of_trace(trace: Mapping[str, Any], *, title: str = "") -> Document:
    """Converts a trace in the format of Chrome, Perfetto and torch.profiler: its complete events, a lane per thread.

    If it has tasks of a recording of ours, only those are used; otherwise, if it has events on a GPU, only those, and
    no calls of the host.
    """
    events = [e for e in _list(trace.get("traceEvents")) if isinstance(e, dict)]
    complete = [e for e in events if e.get("ph") == "X" and e.get("cat") != "Trace"]  # without the profiler's own
    ours = [e for e in complete if e.get("cat") == "task"]
    work = ours or [e for e in complete if e.get("cat") in _DEVICE_WORK] or complete
    if not work:
        raise TimelineError("the trace has no complete event", advice='record events with the phase "X"')
    work.sort(key=lambda e: _number(e, "ts"))
    lanes = _lanes(work, events)
    other = trace.get("otherData")
    simulated = isinstance(other, dict) and other.get("source") == "simulated"
    seconds = _number(other, "seconds", math.nan) if isinstance(other, dict) and simulated else None
    began = 0.0 if simulated else _number(work[0], "ts")  # a simulation starts with the host, before any task
    places = {e["args"]["task"]: i for i, e in enumerate(work) if isinstance(_args(e).get("task"), int)}
    tasks = tuple(_task(e, lanes[_thread(e)], began, places) for e in work)
    source: Source = "simulated" if simulated else "measured"
    return Document(
        title=title or "trace",
        source=source,
        device=_process(events, work[0].get("pid")),
        lanes=tuple(Lane(name=name) for name in lanes.values()),
        tasks=tasks,
        counters=_counters(events, began),
        whole=None if seconds is None else (0.0, seconds),
    )


Thread = tuple[str, str]


def _thread(event: Mapping[str, Any]) -> Thread:
    return str(event.get("pid")), str(event.get("tid"))


def _lanes(work: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[Thread, str]:
    """Returns a unique name for each thread, from the trace's own names."""
    named = {_thread(e): str(_args(e).get("name")).strip() for e in events if e.get("name") == "thread_name"}
    found: dict[Thread, str] = {}
    for thread in sorted({_thread(e) for e in work}, key=lambda t: (t[0], len(t[1]), t[1])):  # 2 before 10
        name = named.get(thread) or f"thread {thread[1]}"
        found[thread] = name if name not in found.values() else f"{name} ({thread[0]}, {thread[1]})"
    return found


def _task(event: Mapping[str, Any], lane: str, began: float, places: Mapping[int, int]) -> TimedTask:
    args = _args(event)
    start, length = _number(event, "ts") - began, _number(event, "dur", 0.0)
    name = str(event.get("name", "?"))
    ours = {"task", "call", "op", "micro_batches", "after", "tags", "rows", "bytes"} if "task" in args else {"op"}
    rows, moved = (args.get(k) if "task" in args else None for k in ("rows", "bytes"))
    note = "; ".join(f"{k} {v}" for k, v in args.items() if k not in ours and isinstance(v, str | int | float))
    return TimedTask(
        name=name,
        op=str(args.get("op") or _function(name)),
        lane=lane,
        start=start / 1e6,
        end=(start + max(length, 0.0)) / 1e6,
        micro_batches=tuple(m for m in _list(args.get("micro_batches")) if isinstance(m, int)),
        after=tuple(places[a] for a in _list(args.get("after")) if isinstance(a, int) and a in places),
        tags=(event["cat"],) if event.get("cat") in _DEVICE_WORK else tuple(map(str, _list(args.get("tags")))),
        rows=rows if isinstance(rows, int) else None,
        bytes=moved if isinstance(moved, int) else None,
        note=note,
    )


def _function(name: str) -> str:
    """A kernel's name without its template arguments: they would make it a kind of its own."""
    return re.split(r"[<(]", name.removeprefix("void "))[0].strip() or name


def _process(events: list[dict[str, Any]], pid: Any) -> str:
    names = [str(_args(e).get("name", "")) for e in events if e.get("name") == "process_name" and e.get("pid") == pid]
    return names[0] if names else ""


def _counters(events: list[dict[str, Any]], began: float) -> tuple[Counter, ...]:
    """The counters of each process."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in (e for e in events if e.get("ph") == "C"):
        for name, value in _args(event).items():
            if isinstance(value, int | float) and math.isfinite(value):
                moment = (_number(event, "ts") - began) / 1e6
                curves.setdefault((name, str(event.get("pid"))), []).append((moment, float(value)))
    many = Counts(name for name, _ in curves)
    return tuple(
        Counter(name=f"{name} ({pid})" if many[name] > 1 else name, points=tuple(sorted(points)),
                unit=_unit(name, points)) for (name, pid), points in curves.items()
    )  # fmt: skip


def _unit(name: str, points: list[tuple[float, float]]) -> Literal["fraction", "bytes", "count"]:
    if name == "allocated":  # its name in our recordings
        return "bytes"
    return "fraction" if all(0.0 <= value <= 1.0 + 1e-6 for _, value in points) else "count"


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(event: Mapping[str, Any], key: str, usual: float | None = None) -> float:
    try:
        found = float(event.get(key, usual))
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise TimelineError(
            f"the event {event.get('name')!r} has {key!r}: {event.get(key)!r}", advice="write times as microseconds"
        )
    return found
