"""How long operators take on the device at hand: measured once for each size, and kept on disk.

A plan's tasks run one after the other on one lane, each by itself, with a clock around it. On CUDA the device is held
back until the host has issued them all, so that the clocks show the device's time and not the host's.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynaflow.capture.ops import OpGraph
from dynaflow.capture.work import operator_key
from dynaflow.schedule.plan import Item, Lane, Plan, Task
from dynaflow.store import Store
from dynaflow.tune.cost import Profile
from dynaflow.tune.simulate import rows_of

RUNS = 5
LANE = Lane(name="profile")
_store = Store("profiles")

Key = tuple[str, int]
Lower = Callable[[Plan, Callable[[Task, str], None]], Callable[[Sequence[Any]], Any]]
"""Makes a plan runnable, with a function that is called around each task."""


class Profiler:
    """The operators of one model on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        card = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        self._where = f"{card} {torch.__version__}"
        self._known: dict[Key, float] = {}

    @property
    def profile(self) -> Profile:
        return {(name, rows, None): seconds for (name, rows), seconds in self._known.items()}

    def missing(self, plan: Plan, graph: OpGraph) -> bool:
        """Is there an operator of the plan that was never measured, here or by an earlier process?"""
        keys = {key for key in _keys(in_a_row(plan, graph), graph) if key is not None}
        for key in keys - self._known.keys():
            if (kept := _store.get(self._place(key))) is not None:
                self._known[key] = float(kept)
        return not keys <= self._known.keys()

    def measure(
        self, plan: Plan, graph: OpGraph, args: Sequence[Any], lower: Lower, restore: Callable[[], None]
    ) -> None:
        """Runs the plan's tasks one by one, and keeps what each operator took."""
        clock = _Clock(self.device)
        plan = in_a_row(plan, graph)
        run = lower(plan, clock)
        found: dict[Key, list[float]] = defaultdict(list)
        for turn in range(RUNS + 1):
            restore()
            clock.start()
            run(args)
            if turn:  # the first one loads and tunes kernels
                for key, seconds in zip(_keys(plan, graph), clock.seconds(), strict=True):
                    if key is not None:
                        found[key].append(seconds)
        restore()
        for key, times in found.items():
            self._known[key] = statistics.median(times)
            _store.put(self._place(key), repr(self._known[key]))

    def _place(self, key: Key) -> str:
        return f"{self._where} {key[0]} {key[1]}"


def in_a_row(plan: Plan, graph: OpGraph) -> Plan:
    """The plan's tasks one after the other; of a sequential plan, the operators."""
    everything = tuple(range(len(plan.micro_batches)))
    tasks = plan.tasks or tuple(Task(items=(Item(op=op.name, micro_batches=everything),), lane="") for op in graph.ops)
    return replace(plan, lanes=(LANE,), tasks=tuple(replace(t, lane=LANE.name, after=()) for t in tasks), code="")


def _keys(plan: Plan, graph: OpGraph) -> list[Key | None]:
    """Of each task: its operator and its rows; of a fusion, nothing."""
    return [
        None if t.replace else (operator_key(graph, graph.by_name[t.items[0].op]), rows_of(plan, graph, t.items[0]))
        for t in plan.tasks
    ]


class _Clock:
    """Called around each task; keeps the moments in order."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []
        self.host = 0.05

    def start(self) -> None:
        self.moments = []
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self.host * 2e9))  # about two cycles a nanosecond: longer than the host needs
        self._begun = time.perf_counter()

    def __call__(self, task: Task, moment: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        self.host = min(1.0, 1.5 * (time.perf_counter() - self._begun))
        pairs = list(zip(self.moments[::2], self.moments[1::2], strict=True))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]
