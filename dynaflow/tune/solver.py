"""The best order of jobs on lanes, by CP-SAT (OR-Tools).

Every job is an interval. Jobs of one lane don't overlap; a job starts after those that it depends on; together, running
jobs use at most all of a resource. The end of the last job is minimised. List scheduling by longest path gives the
solver its starting point, and the answer when time runs out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynaflow.core.critical_path import longest_chains

SCALE = 1000
"""Units of a resource: CP-SAT has integers only."""
STEPS = 20000
"""Ticks that the list schedule is divided into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An operator for one micro-batch, to be scheduled."""

    seconds: float
    lane: str
    after: tuple[int, ...]
    """Pieces, by position, that come before it."""
    uses: Mapping[str, float]
    """Resource -> the fraction that it uses while it runs."""


def list_schedule(jobs: Sequence[Job]) -> list[float]:
    """Returns the start of each job: of those that are ready, always the one with the longest path next."""
    path = longest_chains([j.seconds for j in jobs], [j.after for j in jobs])
    missing = [len(p.after) for p in jobs]
    users = _users(jobs)
    ready = [i for i, n in enumerate(missing) if not n]
    free: dict[str, float] = {}
    start = [0.0] * len(jobs)
    end = [0.0] * len(jobs)
    while ready:

        def begins(i: int) -> float:
            return max([free.get(jobs[i].lane, 0.0), *(end[a] for a in jobs[i].after)])

        i = min(ready, key=lambda i: (begins(i), -path[i], i))
        ready.remove(i)
        start[i] = begins(i)
        end[i] = free[jobs[i].lane] = start[i] + jobs[i].seconds
        for u in users[i]:
            missing[u] -= 1
            if not missing[u]:
                ready.append(u)
    return start


def solve(jobs: Sequence[Job], seconds: float) -> list[float]:
    """Returns the start of each job; the list schedule if OR-Tools is not installed or finds nothing better in time."""
    first = list_schedule(jobs)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return first
    horizon = max(s + p.seconds for s, p in zip(first, jobs, strict=True))
    tick = horizon / STEPS
    model = cp_model.CpModel()
    lengths = [max(1, round(p.seconds / tick)) for p in jobs]
    most = sum(lengths)
    starts = [model.new_int_var(0, most, "") for _ in jobs]
    spans = [model.new_fixed_size_interval_var(s, n, "") for s, n in zip(starts, lengths, strict=True)]
    end = model.new_int_var(0, most, "end")
    for i, job in enumerate(jobs):
        model.add(starts[i] + lengths[i] <= end)
        for a in job.after:
            model.add(starts[i] >= starts[a] + lengths[a])
    for lane in {p.lane for p in jobs}:
        model.add_no_overlap([spans[i] for i, p in enumerate(jobs) if p.lane == lane])
    for resource in {name for p in jobs for name in p.uses}:
        needs = [min(SCALE, round(p.uses.get(resource, 0.0) * SCALE)) for p in jobs]
        model.add_cumulative(spans, needs, SCALE)
    model.minimize(end)
    for variable, at in zip(starts, _feasible_start(jobs, lengths, first), strict=True):
        model.add_hint(variable, at)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1  # the same answer on every rank
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return first
    return [solver.value(s) * tick for s in starts]


def _feasible_start(jobs: Sequence[Job], lengths: Sequence[int], first: Sequence[float]) -> list[int]:
    """Returns the list schedule in ticks, within all resources: a job waits until there is enough of each."""
    placed: list[tuple[int, int, Mapping[str, float]]] = []
    start = [0] * len(jobs)
    free: dict[str, int] = {}
    for i in sorted(range(len(jobs)), key=lambda i: (first[i], i)):
        job = jobs[i]
        at = max([free.get(job.lane, 0), *(start[a] + lengths[a] for a in job.after)])
        for moment in sorted({at, *(end for _, end, _ in placed if end > at)}):
            running = [u for a, b, u in placed if a < moment + lengths[i] and b > moment]
            if all(sum(u.get(r, 0.0) for u in running) + n <= 1.0 for r, n in job.uses.items() if n):
                at = moment
                break
        start[i], free[job.lane] = at, at + lengths[i]
        placed = [p for p in placed if p[1] > at - max(lengths)] + [(at, at + lengths[i], job.uses)]
    return start


def _users(jobs: Sequence[Job]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for a in job.after:
            users[a].append(i)
    return users
