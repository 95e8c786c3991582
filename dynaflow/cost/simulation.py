"""The result of a simulation: when each task runs, what is in use, and what limits the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dynaflow.core.chrome_trace import ChromeTrace
from dynaflow.core.plan import Plan
from dynaflow.core.plan_text import draw, resource_label
from dynaflow.cost.costs import RESOURCES

BUSY = 0.93
"""A resource, or the host, that is busy for this fraction of the time limits the run."""


class TaskSpan(NamedTuple):
    """One task, or one operator of a sequential plan. Times are in seconds."""

    task: int
    name: str
    lane: str
    start: float
    end: float


class Load(NamedTuple):
    """A span of constant utilization."""

    start: float
    end: float
    uses: Mapping[str, float]
    """Resource -> fraction."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of `simulate`."""

    plan: Plan
    device: str
    seconds: float
    spans: tuple[TaskSpan, ...]
    loads: tuple[Load, ...]
    host: float
    """When the host has issued all tasks."""

    @property
    def busy_seconds(self) -> float:
        """From the start of the first task to the end of the last, without host time before and after."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @cached_property
    def busy(self) -> dict[str, float]:
        """Mean utilization of each resource."""
        total = max(self.seconds, 1e-12)
        return {
            name: math.fsum((load.end - load.start) * load.uses.get(name, 0.0) for load in self.loads) / total
            for name in RESOURCES
        }

    @property
    def limit(self) -> str:
        """The resource that is always in use; "host" if kernels wait to be launched; "chain" if neither: tasks wait for
        one another, and other work could overlap with them."""
        if self.host >= BUSY * self.seconds:
            return "host"
        name = max(RESOURCES, key=lambda r: (self.busy[r], -RESOURCES.index(r)))
        return name if self.busy[name] >= BUSY else "chain"

    def __str__(self) -> str:
        used = {resource_label(name, self.device): share for name, share in self.busy.items() if share >= 0.005}
        uses = ", ".join(f"{name} {share:.0%}" for name, share in used.items())
        limit = resource_label(self.limit, self.device)
        head = f"{self.seconds * 1e3:.3f} ms on {self.device}, limited by {limit}; in use: {uses or 'nothing'}"
        if self.plan.sequential:
            return f"{head}\n(the uncut graph, in sequence: {len(self.spans)} operators)"
        return f"{head}\n{self.draw()}"

    def draw(self, width: int = 110) -> str:
        """The timeline in the terminal."""
        spans = None if self.plan.sequential else [(s.start * 1e3, s.end * 1e3) for s in self.spans]
        return draw(self.plan, spans, width)

    def to_chrome_trace(self) -> dict[str, Any]:
        """For Perfetto or chrome://tracing: a row for each lane, a curve for each resource."""
        trace = ChromeTrace(self.device)
        for span in self.spans:
            trace.slice(trace.row(self.device, span.lane), span.name, "task", span.start, span.end, self._args(span))
        names = [name for name in RESOURCES if self.busy[name] > 0]
        for load in self.loads:
            used = {name: round(load.uses.get(name, 0.0), 4) for name in names}
            trace.counter({"pid": 1}, "in use", load.start, used)
        return trace.to_dict(limit=self.limit, source="simulated", seconds=self.seconds)

    def _args(self, span: TaskSpan) -> dict[str, Any]:
        """Details of a task that its name and times don't show."""
        if self.plan.sequential:
            return {"task": span.task, "op": span.name}
        task = self.plan.tasks[span.task]
        parts = sorted({m for item in task.items for m in item.micro_batches})
        op = " + ".join(item.op for item in task.items)
        return {"task": span.task, "op": op, "micro_batches": parts, "after": list(task.after)}

    def to_json(self) -> str:
        """The trace as JSON text."""
        return json.dumps(self.to_chrome_trace())
