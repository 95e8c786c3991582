"""How long operators take on this device: measured once for each size, and stored on disk.

A plan's tasks run one after the other on one lane, each timed by itself. The launch time of their kernels, which a CUDA
graph would not have, is subtracted.
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
from dynaflow.core.plan import Lane, Plan, Task, operator_by_operator
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
"""An operator, its rows, and the SMs that it may use; None: all."""


class Profiler:
    """Times the operators of one model on one device."""

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
        """Whether an operator of the plan was never measured, here or by an earlier process."""
        keys = {key for lane in _lanes(plan) for key in self._keys(plan, graph, lane) if key is not None}
        for key in keys - self._known.keys():
            if (seconds := _seconds(_store.get(self._place(key)))) is not None:
                self._known[key] = seconds
        return not keys <= self._known.keys()

    def measure(self, made: Any, trials: Trials, restore: Callable[[], None]) -> None:
        """Runs a plan's tasks one by one, on each lane's share of the SMs, and stores each operator's time."""
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
        whole = trials.watched(made, plan, clock)  # compiled already; as a task it would be compiled again

        def run(args: list[Any]) -> None:
            clock()
            whole(args)
            clock()

        return run

    def _keys(self, plan: Plan, graph: OpGraph, lane: Lane) -> list[Key | None]:
        """The key of each task; None for fused tasks and for tasks of other lanes with shares."""
        sms = plan.shares(device_for(self.device).sms).get(lane.name)
        return [
            (operator_key(graph, graph.by_name[t.items[0].op]), rows_of(plan, graph, t.items[0]), sms)
            if t.replace is None and (not plan.partitioned or t.lane == lane.name)
            else None
            for t in _tasks(plan, graph)
        ]

    def _launching(self, made: Any) -> list[float]:
        """The seconds that each task's kernel launches take."""
        plan, graph, device = made.plan, made.graph, device_for(self.device)
        costs = Costs(graph, device, sizes=made.values)
        items = [task.items[0] for task in _tasks(plan, graph)]
        return [device.launch * costs.kernels(graph.by_name[i.op], rows_of(plan, graph, i)) for i in items]

    def _place(self, key: Key) -> str:
        return f"{self._where} {key[0]} {key[1]} {key[2]}"


def _seconds(text: str | None) -> float | None:
    """Parses a time that an earlier process stored; None if it isn't valid."""
    try:
        seconds = float(text or "nan")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def one_after_another(plan: Plan, graph: OpGraph, lane: Lane) -> Plan:
    """Returns the plan's tasks one after the other on one lane; if lanes have shares, the others keep theirs."""
    lanes = plan.lanes if plan.partitioned else (lane,)
    tasks = tuple(replace(t, lane=lane.name, after=()) for t in _tasks(plan, graph))
    return replace(plan, lanes=lanes, tasks=tasks, code="")


def _lanes(plan: Plan) -> tuple[Lane, ...]:
    return plan.lanes if plan.partitioned else (LANE,)


def _tasks(plan: Plan, graph: OpGraph) -> tuple[Task, ...]:
    """The plan's tasks; of a sequential plan, one for each operator."""
    return plan.tasks or operator_by_operator(plan, graph.by_name).tasks
