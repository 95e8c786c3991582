"""Collectives of one micro-batch beside the compute of another.

Micro-batches take turns: one computes until it reaches a collective, and during the collective the next one computes.
All collectives go to one lane, so they have the same order on all ranks.
"""

from __future__ import annotations

from typing import Any

import dynaflow as df


class CommOverlap(df.OpSchedulerBase):
    """`collectives`: a glob on the calls that use the link; `by_rows`: declares that they treat each row by itself, for
    custom operators that analysis does not know. `min_rows`: the smallest micro-batch.
    """

    def __init__(
        self,
        parts: int = 2,
        min_rows: int = 1,
        collectives: str = "collective::*",
        by_rows: bool | None = None,
    ) -> None:
        self.at_least(1, parts=parts, min_rows=min_rows)
        self.parts, self.min_rows, self.collectives, self.by_rows = parts, min_rows, collectives, by_rows

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [df.SplitFunc(self.collectives, tag="network", splittable=self.by_rows, optional=True)]

    def cache_key(self) -> Any:
        return self.parts, self.min_rows

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts, ctx.batch_size // self.min_rows)
        if parts < 2 or not any("network" in op.tags for op in ctx.ops):
            return ctx.sequential()
        ctx.split(parts)
        turn = 0
        while ops := ctx.get_ready_ops():
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            # Groups: other operators may contain collectives too, and all of them have to keep one order.
            ctx.execute(op, lane="network" if "network" in op.tags or op.op.groups else "compute")
            if "network" in op.tags:
                turn = (turn + 1) % parts
