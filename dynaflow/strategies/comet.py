"""Overlap inside layers: collectives and the computation next to them run in chunks, everything else merged.

Expert layers: while the tokens of one chunk are sent to their experts, or back, the experts compute another chunk.
Row-parallel layers: while the result of one chunk is reduced over the ranks, by all-reduce or reduce-scatter, the next
chunk is multiplied. Matmuls outside of these run on the whole batch, the size at which they are fastest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import dynaflow as df

GEMMS = re.compile(
    r"^(?!.*experts)(.*\.)?(o_proj|out_proj|c_proj|down_proj|linear_proj|linear_fc2|fc2|dense|dense_4h_to_h|wo|w2)$"
)
"""Row-parallel layers, by the names they have in models. They run in chunks if a collective follows directly."""


class Comet(df.OpSchedulerBase):
    """`experts`: a glob on the paths of expert layers; `gemms`: a pattern on those of row-parallel layers; None: these
    don't run in chunks. `collectives`: a glob on the calls that use the link. `min_rows`: the smallest chunk.
    """

    def __init__(
        self,
        parts: int = 4,
        min_rows: int = 1,
        experts: str | None = "*.experts",
        gemms: str | re.Pattern[str] | None = GEMMS,
        collectives: str = "collective::*",
    ) -> None:
        self.at_least(1, parts=parts, min_rows=min_rows)
        self.parts, self.min_rows = parts, min_rows
        self.experts, self.gemms, self.collectives = experts, gemms, collectives

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        rules: list[df.SplitFunc | df.SplitModule] = [df.SplitFunc(self.collectives, tag="network", optional=True)]
        if self.gemms is not None:
            rules.append(df.SplitModule(self.gemms, tag="gemm", optional=True))
        if self.experts is not None:
            # Tokens are sorted by expert inside, and back: the result is row by row, which analysis can't find out.
            rules.append(df.SplitModule(self.experts, tag="experts", splittable=True, optional=True))
        return rules

    def cache_key(self) -> Any:
        return self.parts, self.min_rows

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts, ctx.batch_size // self.min_rows)
        chunked = in_chunks(ctx.ops)
        if parts < 2 or not chunked:
            return ctx.sequential()
        ctx.split(parts)
        links = {op.index for op in ctx.ops if "network" in op.tags}

        def urgency(item: df.OpItem) -> tuple[bool, bool, int, int]:
            """Collectives first; operators that wait for the link last, so that something runs beside it."""
            waits = not links.isdisjoint(item.op.after)
            return item.op.index not in links, waits, item.micro_batch.index, item.op.index

        while ready := ctx.get_ready_ops():
            able = [item for item in ready if item.op in chunked or ctx.is_ready(ctx.items(item.op))]
            item = min(able or ready, key=urgency)  # if none can run merged, one runs in chunks
            lane = "network" if item.op.index in links or item.op.groups else "compute"
            ctx.execute(ctx.items(item.op) if able and item.op not in chunked else item, lane=lane)


def in_chunks(ops: Sequence[df.Op]) -> set[df.Op]:
    """Returns the operators that run one chunk at a time; none if no collective would overlap with them."""
    before: dict[df.Op, set[df.Op]] = {}
    for op in ops:
        before[op] = {a for direct in op.after for a in (ops[direct], *before[ops[direct]])}
    links = [op for op in ops if "network" in op.tags and op.splittable]
    sent = {ops[a] for link in links for a in link.after}
    found = {op for op in sent if "gemm" in op.tags and op.splittable}
    exchanges = [op for op in links if any("all_to_all" in name for name in op.functions)]
    for experts in (op for op in ops if "experts" in op.tags):
        found.add(experts)
        # Between dispatch and experts, or experts and combine, there may be other operators: a copy, a permutation.
        there = [op for op in exchanges if op in before[experts]][-1:]
        back = [op for op in exchanges if experts in before[op]][:1]
        for first, last in [(op, experts) for op in there] + [(experts, op) for op in back]:
            found |= {op for op in before[last] if first in before[op] and op.splittable}
    used = {ops[a] for op in found for a in op.after}
    with_link = {link for link in links if link in used or not found.isdisjoint(ops[a] for a in link.after)}
    return found | with_link if with_link else set()
