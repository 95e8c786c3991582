"""Micro-batches in the order that a solver finds best, each operator on the lane of the resource it uses most."""

from __future__ import annotations

from typing import Any

import dynaflow as df
from dynaflow.tune.solver import Job, solve


class Solver(df.OpSchedulerBase):
    """`attention`, `collectives`: globs on the calls to cut at. `seconds`: time limit of the solver."""

    def __init__(
        self,
        parts: int = 2,
        attention: str = "*attention*",
        collectives: str = "collective::*",
        seconds: float = 5.0,
    ) -> None:
        self.at_least(1, parts=parts)
        if not seconds >= 0:
            raise df.ScheduleError(f"seconds={seconds}", advice="pass 0 or more")
        self.parts, self.attention, self.collectives, self.seconds = parts, attention, collectives, seconds

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            df.SplitFunc(self.attention, tag="memory", optional=True),
            df.SplitFunc(self.collectives, tag="network", optional=True),
        ]

    def cache_key(self) -> Any:
        return self.parts, self.seconds

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts)
        if not any(op.tags for op in ctx.ops):
            return ctx.sequential()
        if parts > 1:
            ctx.split(parts)
        items = [item for op in ctx.ops for item in ctx.items(op)]
        place = {item: n for n, item in enumerate(items)}
        jobs = [
            Job(
                seconds=ctx.cost(item),
                lane=next(iter(item.tags & {"memory", "network"}), "network" if item.op.groups else "compute"),
                after=tuple(sorted({place[before] for before in ctx.before(item) if before in place})),
                uses={name: share for name, share in ctx.uses(item).items() if name not in ("power", "sms")},
            )
            for item in items
        ]
        starts = solve(jobs, self.seconds)
        while ready := ctx.get_ready_ops():
            first = min(ready, key=lambda item: starts[place[item]])
            ctx.execute(first, lane=jobs[place[first]].lane)
