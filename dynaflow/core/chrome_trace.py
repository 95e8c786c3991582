"""The one writer of traces in Chrome's format, which Perfetto, chrome://tracing and torch.profiler's tools open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, int]
"""A process and a thread, by number: one row of the trace."""


class ChromeTrace:
    """Collects events. Times are given in seconds; the format has microseconds."""

    def __init__(self, *processes: str) -> None:
        self._threads: dict[str, dict[str, int]] = {name: {} for name in processes}
        self._events: list[dict[str, Any]] = []
        self._flows = 0

    def row(self, process: str, thread: str) -> Row:
        """Returns the row of a thread, by names."""
        threads = self._threads.setdefault(process, {})
        tid = threads.setdefault(thread, len(threads) + 1)
        return {"pid": 1 + list(self._threads).index(process), "tid": tid}

    def slice(self, row: Row, name: str, category: str, start: float, end: float, args: Mapping[str, Any]) -> None:
        """Adds something that runs from `start` to `end`."""
        self._add("X", row, start, name=name, cat=category, dur=(end - start) * 1e6, args=dict(args))

    def flow(self, source: Row, start: float, target: Row, end: float) -> None:
        """Adds an arrow between two slices. Its ends have to lie inside of them."""
        flow = {"id": self._flows, "name": "after", "cat": "dependency"}
        self._add("s", source, start, **flow)
        self._add("f", target, end, bp="e", **flow)
        self._flows += 1

    def counter(self, row: Row, name: str, time: float, values: Mapping[str, float]) -> None:
        """Adds the values of a process's curves from `time` on."""
        self._add("C", {"pid": row["pid"]}, time, name=name, args=dict(values))

    def to_dict(self, **other: Any) -> dict[str, Any]:
        """The trace, for JSON. `other`: what else a reader of the file can learn."""
        return {"traceEvents": [*self._names(), *self._events], "displayTimeUnit": "ms", "otherData": other}

    def _add(self, phase: str, row: Row, time: float, **event: Any) -> None:
        self._events.append({"ph": phase, **row, "ts": time * 1e6, **event})

    def _names(self) -> Iterable[dict[str, Any]]:
        for pid, (process, threads) in enumerate(self._threads.items(), 1):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid - 1000}}
            for thread, tid in threads.items():
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
