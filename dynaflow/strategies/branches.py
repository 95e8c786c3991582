"""Independent operators of one graph side by side, the longest path first. The batch is not split.

Branches of a convolutional network, Q, K and V, shared experts beside routed ones, the two streams of a diffusion
block: kernels that leave much of a device idle when they run one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import dynaflow as df

CUTS = tuple(
    re.compile(rf"(^|\.)({names})$")
    for names in (
        r"branch(?!es$)\w*|branches\.\d+|downsample|(conv_)?shortcut",  # GoogLeNet, Inception, HRNet, ResNet
        r"[qkv](_proj)?|query|key|value",  # Llama and most others; T5; BERT
        r"[qkv]+_a_proj\w*|[qkv]+_b_proj",  # DeepSeek
        r"experts(\.\d+)?|shared_experts?",
        r"(to|add)_[qkv](_proj)?|to_out\.0|to_add_out|ff|ff_context|proj_mlp",  # Flux, Stable Diffusion 3, Wan
    )
)
"""Modules that are cut by default, where a model has them."""
FULL = 0.8
"""Two operators that both use more than this fraction of a resource gain nothing side by side."""


class Branches(df.OpSchedulerBase):
    """`cuts`: rules, or patterns on module paths. `wait`: seconds that a lane loses when it waits for another lane."""

    def __init__(
        self,
        lanes: int = 4,
        cuts: Sequence[str | re.Pattern[str] | df.SplitModule | df.SplitFunc] = CUTS,
        wait: float = 5e-6,
    ) -> None:
        self.at_least(1, lanes=lanes)
        advice = 'list rules, or patterns on module paths: cuts=["image", "text"]'
        self.cuts = self.listed("cuts", cuts, advice)
        self.lanes, self.wait = lanes, wait

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            df.SplitModule(cut, optional=cut in CUTS) if isinstance(cut, (str, re.Pattern)) else cut
            for cut in self.cuts
        ]

    def cache_key(self) -> Any:
        return self.lanes, self.wait

    def schedule(self, ctx: df.ScheduleContext) -> None:
        if min(self.lanes, len(ctx.ops)) < 2:
            return ctx.sequential()
        cost = {op.index: ctx.cost(op) for op in ctx.ops}
        filled = {op.index: [r for r, part in ctx.uses(op).items() if part > FULL] for op in ctx.ops}
        before = {op.index: [a for a in op.after if a in cost] for op in ctx.ops}
        path = dict(cost)  # from an operator's start to the end of the longest chain after it
        for i in reversed(cost):
            for a in before[i]:
                path[a] = max(path[a], cost[a] + path[i])
        free = dict.fromkeys(["main", *(f"branch{n}" for n in range(1, self.lanes))], 0.0)
        busy: dict[str, float] = {}  # resource -> when the operator that fills it ends
        begin: dict[int, float] = {}
        end: dict[int, float] = {}
        at: dict[int, str] = {}
        for i in sorted(cost, key=lambda i: (-path[i], i)):  # predecessors first: their paths are longer
            full = max((busy.get(r, 0.0) for r in filled[i]), default=0.0)
            ready = {lane: [end[a] + (self.wait if at[a] != lane else 0.0) for a in before[i]] for lane in free}
            start = {lane: max([free[lane], full, *ready[lane]]) for lane in free}
            latest = max(before[i], key=lambda a: end[a], default=i)
            # After its predecessor on the same lane if possible: no wait, and the two become one call.
            lane = min(free, key=lambda lane: (start[lane], lane != at.get(latest)))
            begin[i], at[i], end[i] = start[lane], lane, start[lane] + cost[i]
            free[lane] = end[i]
            busy |= dict.fromkeys(filled[i], end[i])
        if max(end.values()) >= sum(cost.values()):
            return ctx.sequential()
        for op in sorted(ctx.ops, key=lambda op: (begin[op.index], -path[op.index], op.index)):
            ctx.execute(ctx.items(op), lane=at[op.index])
