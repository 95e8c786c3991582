"""How long operators take on the device at hand: measured once for each size, and kept on disk.

A plan's tasks run one after the other on one lane, each by itself, with a clock around it. What their kernels take
longer than in a CUDA graph, since they are launched one by one, is subtracted.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dynaflow.core.device import device_for
from dynaflow.core.disk_cache import DiskCache
from dynaflow.core.plan import Lane, Plan, Task, one_by_one
from dynaflow.cost.costs import Costs, Profile
from dynaflow.cost.simulate import rows_of
from dynaflow.cost.work import operator_key
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.context import Trials
from dynaflow.tune.clock import Clock

RUNS = 5
LANE = Lane(name="profile")
_store = DiskCache("profiles")

Key = tuple[str, int, int | None]
"""An operator, its rows, and the SMs that it has; None: all."""


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
        return self._known

    def missing(self, plan: Plan, graph: OpGraph) -> bool:
        """Is there an operator of the plan that was never measured, here or by an earlier process?"""
        keys = {key for lane in _lanes(plan) for key in self._keys(plan, graph, lane) if key is not None}
        for key in keys - self._known.keys():
            if (seconds := _seconds(_store.get(self._place(key)))) is not None:
                self._known[key] = seconds
        return not keys <= self._known.keys()

    def measure(self, made: Any, trials: Trials, restore: Callable[[], None]) -> None:
        """Runs a plan's tasks one by one, on the share of each lane, and keeps what each operator took."""
        plan, graph = made.plan, made.graph
        launching = self._launching(made)
        for lane in _lanes(plan):
            clock = Clock(self.device)
            run = self._watched(made, lane, trials, clock)
            keys = self._keys(plan, graph, lane)
            found: dict[Key, list[float]] = defaultdict(list)

            def work(run: Callable[..., Any] = run) -> None:
                restore()
                run(list(trials.args))

            clock.warm_up(work)
            for _ in range(RUNS):
                for key, seconds, extra in zip(keys, clock.time(work), launching, strict=True):
                    if key is not None:
                        found[key].append(max(0.0, seconds - extra))
            restore()
            for key, times in found.items():
                self._known[key] = statistics.median(times)
                _store.put(self._place(key), repr(self._known[key]))

    def _watched(self, made: Any, lane: Lane, trials: Trials, clock: Clock) -> Callable[[list[Any]], Any]:
        plan, graph = made.plan, made.graph
        if not plan.sequential or len(graph.ops) > 1:
            return trials.watched(made, one_after_another(plan, graph, lane), clock)
        whole = trials.watched(made, plan, clock)  # which is compiled already, as it runs; as a task it would be anew

        def run(args: list[Any]) -> None:
            clock()
            whole(args)
            clock()

        return run

    def _keys(self, plan: Plan, graph: OpGraph, lane: Lane) -> list[Key | None]:
        """Of each task: what the lane's share tells of it. Of a fusion, and of other lanes' tasks, nothing."""
        sms = plan.shares(device_for(self.device).sms).get(lane.name)
        return [
            (operator_key(graph, graph.by_name[t.items[0].op]), rows_of(plan, graph, t.items[0]), sms)
            if t.replace is None and (not plan.partitioned or t.lane == lane.name)
            else None
            for t in _tasks(plan, graph)
        ]

    def _launching(self, made: Any) -> list[float]:
        """Of each task: the seconds that are its kernels' launches."""
        plan, graph, device = made.plan, made.graph, device_for(self.device)
        costs = Costs(graph, device, sizes=made.values)
        items = [task.items[0] for task in _tasks(plan, graph)]
        return [device.launch * costs.kernels(graph.by_name[i.op], rows_of(plan, graph, i)) for i in items]

    def _place(self, key: Key) -> str:
        return f"{self._where} {key[0]} {key[1]} {key[2]}"


def _seconds(kept: str | None) -> float | None:
    """What an earlier process left; None if that is no time."""
    try:
        seconds = float(kept or "nan")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def one_after_another(plan: Plan, graph: OpGraph, lane: Lane) -> Plan:
    """The plan's tasks one after the other on one lane; if lanes have shares, the others keep theirs."""
    lanes = plan.lanes if plan.partitioned else (lane,)
    tasks = tuple(replace(t, lane=lane.name, after=()) for t in _tasks(plan, graph))
    return replace(plan, lanes=lanes, tasks=tasks, code="")


def _lanes(plan: Plan) -> tuple[Lane, ...]:
    return plan.lanes if plan.partitioned else (LANE,)


def _tasks(plan: Plan, graph: OpGraph) -> tuple[Task, ...]:
    """Of a sequential plan, its operators."""
    return plan.tasks or one_by_one(plan, graph.by_name).tasks
