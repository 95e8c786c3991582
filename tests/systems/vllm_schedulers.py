"""A scheduler of one's own, which vLLM finds by name."""

from __future__ import annotations

from typing import ClassVar

import dynaflow as df


class Uneven(df.OpSchedulerBase):
    """One request alone, two at the end, the rest between; all side by side, each on a lane of its own."""

    asked: ClassVar[set[tuple[str, int]]] = set()
    """In which phases, and for how many requests."""

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [df.SplitFunc("*attention*", tag="attention")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        requests = len(ctx.facts["num_tokens"])
        self.asked.add((ctx.facts["phase"], requests))
        if requests < 3:
            return ctx.sequential()
        ctx.split([1, requests - 3, 2] if requests > 3 else [2, 1])
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch.index}")
