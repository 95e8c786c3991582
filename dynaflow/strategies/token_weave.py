"""Two halves of the tokens: the all-reduce of one, with the residual and the norm after it, beside the other's compute.

Where a collective is followed by a residual add and a norm, the three become one call: the norm runs right after the
all-reduce, and the compute lane does not wait for it. Other collectives run as in `comm_overlap`.
"""

from __future__ import annotations

import re

import dynaflow as df
from dynaflow.strategies.fused import Fusions, find_chains

NORMS = re.compile(r"(^|\.)[^.]*(norm|ln_)[^.]*$")
"""Matches the last part of a norm's path: input_layernorm, norm1, ln_2."""


class TokenWeave(df.OpSchedulerBase):
    """`norms`, `collectives`: patterns on the paths of norms, and on the calls that use the link. `experts`: a glob on
    layers that are declared to treat each token by itself. `sms`: the SMs that the lane of collectives may use.
    `compiled`: compile what follows a collective; None: on CUDA only.
    """

    def __init__(
        self,
        parts: int = 2,
        min_rows: int = 1,
        norms: str | re.Pattern[str] = NORMS,
        collectives: str = "collective::*",
        experts: str = "*.experts",
        sms: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.at_least(1, parts=parts, min_rows=min_rows)
        self.parts, self.min_rows, self.sms = parts, min_rows, sms
        self.norms, self.collectives, self.experts = norms, collectives, experts
        self.fusions = Fusions(compiled=compiled)

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            df.SplitModule(self.norms, tag="norm", optional=True),
            df.SplitFunc("*_norm", tag="norm", optional=True),
            df.SplitModule(self.experts, splittable=True, optional=True),
            df.SplitFunc(self.collectives, tag="network", optional=True),
        ]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts, ctx.batch_size // self.min_rows)
        if parts < 2 or not any("network" in op.tags for op in ctx.ops):
            return ctx.sequential()
        ctx.split(parts)
        if self.sms:
            ctx.lane("network", sms=self.sms)
        chains = find_chains(ctx.ops, "network", "norm")
        fused = {name: self.fusions.make(ctx, chain) for name, chain in chains.items()}
        turn = 0
        while ops := ctx.get_ready_ops():
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            if op.name in fused:
                chain = [ctx.items(link)[op.micro_batch] for link in chains[op.name]]
                ctx.execute(chain, lane="network", replace_func=fused[op.name])
            else:
                ctx.execute(op, lane="network" if op.op.groups else "compute")
            if "network" in op.tags:
                turn = (turn + 1) % parts
