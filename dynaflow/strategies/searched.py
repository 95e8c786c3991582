"""Micro-batches in the order that a solver finds best, each operator on the lane of what it uses most."""

from __future__ import annotations

import dynaflow as df
from dynaflow.tune.order import Piece, solve


class Searched(df.OpSchedulerBase):
    """`attention`, `collectives`: globs on the calls to cut at. `seconds`: for the solver."""

    def __init__(
        self,
        parts: int = 2,
        attention: str = "*attention*",
        collectives: str = "collective::*",
        seconds: float = 5.0,
    ) -> None:
        self.parts, self.attention, self.collectives, self.seconds = parts, attention, collectives, seconds

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            df.SplitFunc(self.attention, tag="memory", optional=True),
            df.SplitFunc(self.collectives, tag="network", optional=True),
        ]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts)
        if not any(op.tags for op in ctx.ops):
            return ctx.sequential()
        if parts > 1:
            ctx.split(parts)
        items = [item for op in ctx.ops for item in ctx.items(op)]
        place = {(i.op.index, m): n for n, i in enumerate(items) for m in i.micro_batches}
        pieces = [
            Piece(
                seconds=ctx.cost(item),
                lane=next(iter(item.tags & {"memory", "network"}), "compute"),
                after=tuple(sorted({place[a, m] for a in item.op.after for m in item.micro_batches})),
                uses={name: share for name, share in ctx.uses(item).items() if name not in ("power", "sms")},
            )
            for item in items
        ]
        starts = solve(pieces, self.seconds)
        for n in sorted(range(len(items)), key=lambda n: (starts[n], n)):
            ctx.execute(items[n], lane=pieces[n].lane)
