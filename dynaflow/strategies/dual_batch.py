"""Two micro-batches of a mixture of experts: one dispatches its tokens to the experts while the other computes.

Dispatch and combine of one micro-batch run beside attention and experts of the other; shared experts, which need no
dispatch, run beside the routed ones.
"""

from __future__ import annotations

from typing import Any

import dynaflow as df


class DualBatch(df.OpSchedulerBase):
    """`experts`, `shared`: globs on module paths. `collectives`: a glob on the calls that use the link."""

    def __init__(
        self,
        parts: int = 2,
        min_rows: int = 1,
        experts: str = "*.experts",
        shared: str = "*.shared_expert*",
        collectives: str = "collective::*",
    ) -> None:
        self.at_least(1, parts=parts, min_rows=min_rows)
        self.parts, self.min_rows = parts, min_rows
        self.experts, self.shared, self.collectives = experts, shared, collectives

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            # Tokens are sorted by expert inside, and back: the result is row by row, which analysis can't find out.
            df.SplitModule(self.experts, tag="experts", splittable=True, optional=True),
            df.SplitModule(self.shared, tag="shared", optional=True),
            df.SplitFunc(self.collectives, tag="network", optional=True),
        ]

    def cache_key(self) -> Any:
        return self.parts, self.min_rows

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts, ctx.batch_size // self.min_rows)
        if not any(op.tags & {"experts", "network"} for op in ctx.ops):
            return ctx.sequential()
        if parts > 1:
            ctx.split(parts)
        turn = 0
        while ops := ctx.get_ready_ops():
            mine = [op for op in ops if op.micro_batch == turn] or ops
            op = min(mine, key=lambda op: "shared" in op.tags)  # the routed experts first: their path is longer
            usual = "network" if op.op.groups else "compute"
            lane = next((lane for lane in ("network", "shared") if lane in op.tags), usual)
            ctx.execute(op, lane=lane)
            if "network" in op.tags:
                turn = (op.micro_batch.index + 1) % parts
