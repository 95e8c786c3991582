"""A timeline as plain data: what ran, or would run, on which lane and when. JSON in and out.

Everything that draws a timeline reads only this, so that a plan, a simulation, a measured run and a trace of another
program can be shown on one page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from dynaflow.core.json_codec import decode, encode
from dynaflow.core.plan import Lane
from dynaflow.errors import TimelineError

KIND = "dynaflow.timeline"
FORMAT = 1

Source = Literal["planned", "simulated", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTask:
    """One execution on a lane. Times are seconds; in a planned timeline, steps."""

    name: str
    lane: str
    start: float
    end: float
    op: str = ""
    """The operator, or several joined by " + "; if empty, the name is used."""
    micro_batches: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    """Indices of the tasks on other lanes that it waits for."""
    tags: tuple[str, ...] = ()
    rows: int | None = None
    """The number of rows of the batch."""
    reads: tuple[str, ...] = ()
    """Values, with their type and shape."""
    writes: tuple[str, ...] = ()
    uses: Mapping[str, float] = field(default_factory=dict)
    """Resource -> the fraction of it that the task uses when it runs alone."""
    bytes: int | None = None
    """Bytes that it reads and writes in device memory."""
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A value that changes over time, such as the memory in use. It is constant between points."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(time, value), in order."""
    unit: Literal["fraction", "bytes", "count"] = "count"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One timeline. It is validated when it is made."""

    title: str
    source: Source
    device: str = ""
    lanes: tuple[Lane, ...]
    tasks: tuple[TimedTask, ...]
    counters: tuple[Counter, ...] = ()
    whole: tuple[float, float] | None = None
    """Start and end, if not those of the tasks: the host may work before the first and after the last one."""

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise _wrong(f"the source is {self.source!r}", f"use one of {', '.join(get_args(Source))}")
        lanes = [lane.name for lane in self.lanes]
        if len(set(lanes)) < len(lanes):
            raise _wrong("two lanes have the same name", "give each its own")
        names = set(lanes)
        for i, task in enumerate(self.tasks):
            if task.lane not in names:
                raise _wrong(f"task {i} ({task.name}) is on a lane {task.lane!r} that is not listed", "list the lane")
            if not (math.isfinite(task.start) and math.isfinite(task.end) and task.start <= task.end):
                found = f"{task.start} to {task.end}"
                raise _wrong(f"task {i} ({task.name}) is from {found}", "no task ends before it starts")
            if any(not 0 <= a < len(self.tasks) or a == i for a in task.after):
                raise _wrong(f"task {i} ({task.name}) waits for {list(task.after)}", "name other tasks by their index")
            if not all(math.isfinite(share) for share in task.uses.values()):
                raise _wrong(f"task {i} ({task.name}) uses {dict(task.uses)}", "pass fractions")
        if not (math.isfinite(self.begin) and math.isfinite(self.end) and self.begin <= self.end):
            raise _wrong(f"it is from {self.begin} to {self.end}", "it can't end before it starts")
        for counter in self.counters:
            if not all(math.isfinite(x) for point in counter.points for x in point):
                raise _wrong(f"the counter {counter.name} has a value that is not finite", "leave such points out")
            if any(later[0] < point[0] for point, later in zip(counter.points, counter.points[1:], strict=False)):
                raise _wrong(f"the counter {counter.name} goes back in time", "sort its points")

    @property
    def unit(self) -> Literal["s", "steps"]:
        return "steps" if self.source == "planned" else "s"

    @cached_property
    def begin(self) -> float:
        return self.whole[0] if self.whole else min((t.start for t in self.tasks), default=0.0)

    @cached_property
    def end(self) -> float:
        return self.whole[1] if self.whole else max((t.end for t in self.tasks), default=0.0)

    @property
    def length(self) -> float:
        return self.end - self.begin

    def to_dict(self) -> dict[str, Any]:
        """The data for JSON."""
        return {"kind": KIND, "format": FORMAT, **encode(self)}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Document:
        if data.get("kind") != KIND or data.get("format") != FORMAT:
            found = f"{data.get('kind')!r}, format {data.get('format')!r}"
            raise _wrong(f"not a {KIND!r} of format {FORMAT} (found {found})", "make it again with this version")
        try:
            return decode(Document, data)
        except ValueError as e:
            raise _wrong(f"malformed timeline: {e}", "pass what Document.to_json() gave, unedited") from e

    @staticmethod
    def from_json(text: str) -> Document:
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as e:
            raise _wrong(f"not a timeline: the text is not JSON ({e})", "pass what Document.to_json() gave") from e
        return Document.from_dict(data if isinstance(data, dict) else {})


def _wrong(what: str, advice: str) -> TimelineError:
    return TimelineError(what, advice=advice)
