"""Nano-batches: compute-bound operators beside memory-bound ones and beside collectives.

Attention of a decoding batch reads the cache and computes little; matmuls compute much and read little. Nano-batches
take turns: when one reaches its attention, or a collective, the next one computes.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import dynaflow as df


class NanoFlow(df.OpSchedulerBase):
    """`attention`, `collectives`: globs on the calls that are bound by memory, and by the link. `sms`: the SMs that
    attention may use; `exclusive`: matmuls get only the others, instead of all. `merged`: globs on modules that run
    once for all nano-batches, while others run split. `by_rows`: declares that the collectives treat each row by
    itself, for custom operators that analysis does not know.
    """

    def __init__(
        self,
        parts: int = 2,
        min_rows: int = 1,
        attention: str = "*attention*",
        collectives: str = "collective::*",
        sms: int | None = None,
        exclusive: bool = False,
        merged: tuple[str, ...] = (),
        by_rows: bool | None = None,
    ) -> None:
        self.at_least(1, parts=parts, min_rows=min_rows)
        self.parts, self.min_rows, self.sms, self.exclusive = parts, min_rows, sms, exclusive
        self.merged = self.listed_names("merged", merged, 'list the globs: merged=["*.mlp"]')
        self.attention, self.collectives, self.by_rows = attention, collectives, by_rows

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            df.SplitFunc(self.attention, tag="memory", optional=True),
            df.SplitFunc(self.collectives, tag="network", splittable=self.by_rows, optional=True),
            *(df.SplitModule(path) for path in self.merged),
        ]

    def cache_key(self) -> Any:
        return self.parts, self.min_rows, self.sms, self.exclusive, self.merged

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts, ctx.batch_size // self.min_rows)
        if parts < 2 or not any(op.tags for op in ctx.ops):
            return ctx.sequential()
        ctx.split(parts)
        if self.sms:
            ctx.lane("memory", sms=self.sms)
            ctx.lane("compute", sms=None if self.exclusive else ctx.sms)
        turn = 0
        waiting: set[df.OpItem] = set()
        while ops := [op for op in ctx.get_ready_ops() if op not in waiting]:
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            if op.op.splittable and any(fnmatchcase(op.name, path) for path in self.merged):
                all_of_it = ctx.items(op.op)
                if ctx.is_ready(all_of_it):
                    ctx.execute(all_of_it, lane="compute")
                    waiting.difference_update(all_of_it)
                else:
                    waiting.add(op)
            else:
                usual = "network" if op.op.groups else "compute"
                ctx.execute(op, lane=next(iter(op.tags & {"memory", "network"}), usual))
            if op.tags or op in waiting:
                turn = (op.micro_batch.index + 1) % parts
