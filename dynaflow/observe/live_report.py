"""A report on given inputs: their plan is recorded now, in turns with its tasks one by one and with the uncut graph."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow.core.device import device_for
from dynaflow.cost.costs import Costs, Profile
from dynaflow.cost.simulate import simulate
from dynaflow.engine.planner import Planner, PlanReady
from dynaflow.engine.snapshot import NoRoom, Snapshot
from dynaflow.errors import RecordingError
from dynaflow.lower.executable import Executable
from dynaflow.observe.recorded_plan import RecordedPlan
from dynaflow.observe.recording import private_recording, report_on
from dynaflow.observe.report import Report
from dynaflow.schedule.base import Sequential
from dynaflow.tune.profile import Profiler

WARM_UP, ROUNDS = 3, 9


def report_now(ready: PlanReady, planner: Planner, profile: Profile | None = None) -> Report:
    plan, trials, device = ready.plan, ready.trials, ready.graph.graph.device
    try:
        snapshot = Snapshot(ready.graph, trials.args)
    except NoRoom as e:
        raise RecordingError(str(e), advice="record calls of your own with df.record(), and report on these") from e
    runs = {"plan": planner.marked(ready.lowered)}
    if not plan.sequential:
        runs["sequence"] = planner.marked(trials.lowered(Sequential()))
        if len(plan.lanes) > 1 and not plan.partitioned:  # with shares no lane has the whole device
            runs["row"] = planner.marked(ready.lowered, row=True)
    found: dict[str, list[RecordedPlan]] = {name: [] for name in runs}
    grad = torch.is_grad_enabled() and ready.graph.graph.phase == "inference"
    cards = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with torch.random.fork_rng(cards), torch.set_grad_enabled(grad):
        try:
            for turn in range(WARM_UP + ROUNDS):  # a recording each: a CUDA graph has the times of its last launch only
                for name, marked in runs.items():
                    snapshot.restore()
                    recorded = _recorded(marked, trials.args, planner)
                    if turn >= WARM_UP:
                        found[name].append(recorded)
        finally:
            snapshot.restore()
    ours = sorted(found["plan"], key=_seconds)[ROUNDS // 2]
    sequence = statistics.median(map(_seconds, found["sequence"])) if "sequence" in found else None
    alone = None
    if "row" in found:
        spans = [r.timed[0].spans for r in found["row"]]
        alone = [statistics.median(s[i][1] - s[i][0] for s in spans) for i in range(len(spans[0]))]
    return report_on(ours, calls=ROUNDS, sequence=sequence, alone=alone, predicted=_predicted(ready, profile))


def _recorded(marked: Executable, args: Sequence[Any], planner: Planner) -> RecordedPlan:
    with private_recording() as recording:
        recording.run(marked, list(args), planner)
    (recorded,) = recording.plans
    if not recorded.timed:
        raise RecordingError(f"the times of tasks are not known: {recorded.calls[0].note}")
    return recorded


def _seconds(recorded: RecordedPlan) -> float:
    return recorded.timed[0].seconds


def _predicted(ready: PlanReady, profile: Profile | None) -> float | None:
    """The simulator's prediction, if the operators were measured before (by `fast.profile` or the tuner)."""
    device = ready.graph.graph.device
    if profile is None:
        profiler = Profiler(device)
        if profiler.missing(ready.plan, ready.graph):
            return None
        profile = profiler.profile
    target = device_for(device)
    costs = Costs(ready.graph, target, profile, sizes=ready.trials.plan().values)
    return simulate(ready.plan, ready.graph, costs, target, cudagraph=ready.trials.cudagraph).busy_seconds
