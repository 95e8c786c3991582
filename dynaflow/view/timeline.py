"""When each task of a plan really ran."""

from __future__ import annotations

import time
from typing import Any

import torch

from dynaflow.schedule.plan import Plan, Task
from dynaflow.view.text import Span, draw


class Timeline:
    """Pass it as `on_task=` to compile. It keeps the times of the last run of every task, by its lane's clock."""

    def __init__(self) -> None:
        self._marks: dict[tuple[Task, str], Any] = {}

    def __call__(self, task: Task, moment: str) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[task, moment] = event
        else:
            self._marks[task, moment] = time.perf_counter()

    def spans(self, plan: Plan) -> list[Span]:
        """Start and end of each task in ms, from the start of the first."""
        marks = [(self._marks[t, "start"], self._marks[t, "stop"]) for t in plan.tasks]
        first = marks[0][0]
        if isinstance(first, float):
            return [((a - first) * 1e3, (b - first) * 1e3) for a, b in marks]
        torch.cuda.synchronize()
        return [(first.elapsed_time(a), first.elapsed_time(b)) for a, b in marks]

    def draw(self, plan: Plan, width: int = 110) -> str:
        return draw(plan, self.spans(plan), width)
