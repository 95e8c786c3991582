"""Simulates a plan: its timeline on a device model.

The host issues tasks in the plan's order. A lane runs its tasks one after the other. A task starts when it is issued,
its lane is free, and the tasks that it waits for have ended. Concurrent tasks share the device (`contention`). Power is
limited over the whole run: a run that draws more than the card sustains is stretched as a whole.

1. jobs:   the phases of each task.
2. issue:  when the host has launched each job.
3. run:    advances from event to event, with rates from `contention`, until all jobs have ended.
4. power:  stretches the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from dynaflow.core.device import Device
from dynaflow.core.plan import Item, Plan, Task
from dynaflow.cost.contention import Needs, share
from dynaflow.cost.costs import POWER, RESOURCES, SMS, Costs, Phase, Uses
from dynaflow.cost.simulation import Load, Simulation, TaskSpan
from dynaflow.errors import PlanError
from dynaflow.partition.op_graph import OpGraph

ENOUGH = 1e-12
"""Remaining work, in seconds, that counts as none."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """A task in the simulation."""

    index: int
    name: str
    lane: str
    after: tuple[int, ...]
    phases: tuple[Phase, ...]
    issued: float = 0.0
    """When the host has launched its first kernel."""
    issued_all: float = 0.0
    """When the host has launched its last kernel."""
    start: float = math.inf
    end: float = math.inf


_Use = tuple[float, float, dict[int, float]]
"""(start, end, utilization), with the resource numbers of `_needs`."""


class _Part(NamedTuple):
    """A part of the SMs. Equal numbers mean the same SMs."""

    number: int
    share: float
    """The fraction of them that a lane may use."""


@dataclass(slots=True, kw_only=True)
class _Lane:
    """The state of a stream: its jobs, and its progress."""

    part: _Part
    priority: int
    jobs: list[_Job] = field(default_factory=list)
    at: int = 0
    phase: int = 0
    left: float = 0.0
    """Remaining seconds of the current phase, if it ran alone."""
    running: bool = False


def simulate(plan: Plan, graph: OpGraph, costs: Costs, device: Device, *, cudagraph: bool = False) -> Simulation:
    """The plan's timeline. With `cudagraph` the host launches all tasks at once."""
    sms, parts = _shares(plan, device)
    jobs = _sequence(plan, graph, costs) if plan.sequential else _jobs(plan, graph, costs, sms)
    host = _issue(plan, graph, costs, jobs, device, cudagraph)
    lanes = {lane.name: _Lane(part=parts[lane.name], priority=lane.priority) for lane in plan.lanes}
    for job in jobs:
        lanes.setdefault(job.lane, _Lane(part=_Part(0, 1.0), priority=0)).jobs.append(job)
    loads = _slowed(_run(list(lanes.values()), jobs, device), jobs)
    spans = tuple(TaskSpan(j.index, j.name, j.lane, j.start, j.end) for j in jobs)
    seconds = max([host, *(s.end for s in spans)])
    sizes = {part.number: round((sms[name] or device.sms) / part.share) for name, part in parts.items()}
    return Simulation(
        plan=plan,
        device=device.name,
        seconds=seconds,
        spans=spans,
        loads=_weighted(loads, sizes, device.sms),
        host=host,
    )


def rows_of(plan: Plan, graph: OpGraph, item: Item) -> int:
    """Number of the batch's rows that the item covers."""
    op = graph.by_name[item.op]
    return sum(plan.micro_batches[m].size for m in item.micro_batches) if op.splittable else plan.batch_size


# 1. jobs


def _jobs(plan: Plan, graph: OpGraph, costs: Costs, sms: dict[str, int | None]) -> list[_Job]:
    jobs = []
    for i, task in enumerate(plan.tasks):
        phases = _phases(plan, graph, costs, task, sms[task.lane])
        jobs.append(_Job(index=i, name=str(task), lane=task.lane, after=task.after, phases=phases))
    return jobs


def _phases(plan: Plan, graph: OpGraph, costs: Costs, task: Task, sms: int | None) -> tuple[Phase, ...]:
    missing = next((item.op for item in task.items if item.op not in graph.by_name), None)
    if missing is not None:
        raise PlanError(f"the plan has an operator {missing!r}, and the graph has none of that name", op=missing,
                        advice="simulate a plan with the graph that it was made for")  # fmt: skip
    found = [p for i in task.items for p in costs.phases(graph.by_name[i.op], rows_of(plan, graph, i), sms)]
    measured = costs.function(task.replace, rows_of(plan, graph, task.items[0]), sms) if task.replace else None
    estimated = math.fsum(p.seconds for p in found)
    if measured is None or not estimated:
        return tuple(found)
    return tuple(p.stretched(measured / estimated) for p in found)


def _sequence(plan: Plan, graph: OpGraph, costs: Costs) -> list[_Job]:
    """The uncut graph: its operators in sequence."""
    rows = plan.batch_size
    return [
        _Job(index=i, name=op.name, lane="main", after=(), phases=costs.phases(op, rows))
        for i, op in enumerate(graph.ops)
    ]


def _shares(plan: Plan, device: Device) -> tuple[dict[str, int | None], dict[str, _Part]]:
    """For each lane: its number of SMs (None: all), and which part of the device they are."""
    sms = plan.shares(device.sms)
    taken = sum(lane.sms for lane in plan.lanes if lane.sms and lane.sms != device.sms)
    if any(n is not None and n < 1 for n in sms.values()) or taken > device.sms:
        raise PlanError(
            f"lanes take {taken} SMs, of {device.sms} that {device.name} has",
            advice="give the lanes smaller shares, or simulate a larger device",
        )
    if None in sms.values():  # a lane with all SMs overlaps the parts of the others
        return sms, {name: _Part(0, (n or device.sms) / device.sms) for name, n in sms.items()}
    return sms, {lane.name: _Part(n if lane.sms else 0, 1.0) for n, lane in enumerate(plan.lanes, 1)}


# 2. issue


def _issue(plan: Plan, graph: OpGraph, costs: Costs, jobs: list[_Job], device: Device, cudagraph: bool) -> float:
    """Sets when the host issues each job. Returns when it has issued all."""
    clock = device.graph_launch if cudagraph else device.host_call
    for job in jobs:
        job.issued = job.issued_all = clock
        if cudagraph:
            continue
        if plan.sequential:
            kernels = costs.kernels(graph.ops[job.index], plan.batch_size)
        else:
            clock += device.host_task
            items = plan.tasks[job.index].items
            kernels = sum(costs.kernels(graph.by_name[i.op], rows_of(plan, graph, i)) for i in items)
        job.issued = clock + device.host_kernel * min(kernels, 1)
        clock += device.host_kernel * kernels
        job.issued_all = clock
    return clock


# 3. run


def _run(lanes: list[_Lane], jobs: list[_Job], device: Device) -> list[_Use]:
    """Sets the start and end of each job."""
    now = 0.0
    loads: list[_Use] = []
    known: dict[tuple[tuple[int, int], ...], tuple[list[float], dict[int, float]]] = {}
    while True:
        wake = _start(lanes, jobs, now, device.wait)
        running = [lane for lane in lanes if lane.running]
        if not running:
            if wake == math.inf:
                break
            now = wake
            continue
        key = tuple([(id(lane), id(lane.jobs[lane.at].phases[lane.phase])) for lane in running])
        if key not in known:
            rates, used = share([_needs(lane) for lane in running], [lane.priority for lane in running])
            drawn = math.fsum(rate * _uses(lane)[POWER] for rate, lane in zip(rates, running, strict=True))
            known[key] = rates, {**used, POWER: drawn / device.sustained}
        rates, used = known[key]
        step = min([wake - now, *(lane.left / rate for lane, rate in zip(running, rates, strict=True) if rate)])
        loads.append((now, now + step, used))
        now += step
        for lane, rate in zip(running, rates, strict=True):
            lane.left -= rate * step
            if lane.left <= ENOUGH:
                _advance(lane, now)
    left = [job for job in jobs if job.end == math.inf]
    if left:
        raise PlanError(f"{left[0].name} never starts: a cycle of waits", advice="check(plan, graph) names the tasks")
    return loads


def _start(lanes: list[_Lane], jobs: list[_Job], now: float, wait: float) -> float:
    """Starts the jobs that can start now. Returns the earliest known start of another one."""
    wake = math.inf
    changed = True
    while changed:  # a job without work ends at once, which may unblock another
        changed = False
        for lane in lanes:
            if lane.running or lane.at == len(lane.jobs):
                continue
            job = lane.jobs[lane.at]
            if _ready(lane, jobs, wait) > now + ENOUGH:
                continue
            job.start = now
            if job.phases:
                lane.running, lane.phase, lane.left = True, 0, job.phases[0].seconds
            else:
                job.end = max(now, job.issued_all)
                lane.at += 1
                changed = True
    for lane in lanes:
        if not lane.running and lane.at < len(lane.jobs):
            wake = min(wake, _ready(lane, jobs, wait))
    return wake


def _ready(lane: _Lane, jobs: list[_Job], wait: float) -> float:
    """The earliest known start of the lane's next job."""
    job = lane.jobs[lane.at]
    before = lane.jobs[lane.at - 1].end if lane.at else 0.0
    return max([job.issued, before, *(jobs[a].end + wait for a in job.after)])


def _advance(lane: _Lane, now: float) -> None:
    """Moves to the next phase, or ends the job, but not before its last kernel is issued."""
    job = lane.jobs[lane.at]
    lane.phase += 1
    if lane.phase < len(job.phases):
        lane.left = job.phases[lane.phase].seconds
    else:
        job.end = max(now, job.issued_all)
        lane.at += 1
        lane.running = False


# 4. power


def _slowed(loads: list[_Use], jobs: list[_Job]) -> list[_Use]:
    """Stretches the run until it draws no more power than the card sustains."""
    drawn = math.fsum((end - start) * used[POWER] for start, end, used in loads)
    first, last = (loads[0][0], loads[-1][1]) if loads else (0.0, 0.0)
    if drawn <= last - first:
        return loads
    scale = drawn / (last - first)

    def later(moment: float) -> float:
        return first + (moment - first) * scale if moment > first else moment

    for job in jobs:
        job.start, job.end = later(job.start), later(job.end)
    return [
        (later(start), later(end), {r: u / scale if r < SMS else u for r, u in used.items()})
        for start, end, used in loads
    ]


def _uses(lane: _Lane) -> Uses:
    return lane.jobs[lane.at].phases[lane.phase].uses


def _needs(lane: _Lane) -> Needs:
    """Utilization of the lane's current phase. Parts of the SMs are numbered after all resources."""
    uses = _uses(lane)
    found = {r: u for r, u in enumerate(uses) if u > 0 and r not in (POWER, SMS)}
    if uses[SMS] > 0:
        found[len(RESOURCES) + lane.part.number] = uses[SMS] * lane.part.share
    return found


def _weighted(loads: list[_Use], sizes: dict[int, int], sms: int) -> tuple[Load, ...]:
    """Sums up the parts of the SMs, weighted by their size."""
    found = []
    for start, end, used in loads:
        whole = {RESOURCES[r]: u for r, u in used.items() if r < len(RESOURCES)}
        parts = [u * sizes.get(r - len(RESOURCES), sms) / sms for r, u in used.items() if r >= len(RESOURCES)]
        if parts:
            whole["sms"] = math.fsum(parts)
        found.append(Load(start, end, whole))
    return tuple(found)
