"""The schedulers that are measured: written with the public API alone."""

from __future__ import annotations

import dynaflow as df

LLAMA_CUTS = (df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp"))


class OneLane(df.OpSchedulerBase):
    """Cut, but in sequence all the same."""

    def __init__(self, cuts: tuple[df.SplitModule, ...] = LLAMA_CUTS) -> None:
        self.cuts = cuts

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return list(self.cuts)

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)


class TwoBatches(df.OpSchedulerBase):
    """Attention of one half of the batch beside the matrix products of the other."""

    def __init__(self, lanes: int = 2) -> None:
        self.aside = "memory" if lanes > 1 else "compute"

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return list(LLAMA_CUTS)

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        turn = 0
        while ops := ctx.get_ready_ops():
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            ctx.execute(op, lane=self.aside if "attention" in op.tags else "compute")
            if "attention" in op.tags:  # while it runs, the other half goes on
                turn = 1 - turn
