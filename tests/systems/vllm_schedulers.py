"""Schedulers of one's own, which vLLM finds by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
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


class LastFirst(df.OpSchedulerBase):
    """Of what may run, always the last micro-batch: whatever needs earlier ones, and does not say so, finds nothing. It
    cuts at every operator that asks vLLM for its part of the batch."""

    def __init__(self, parts: int = 3) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [df.SplitFunc("dynaflow_row_aware::*")]

    def pick(self, ready: Sequence[df.OpItem]) -> df.OpItem:
        return max(ready, key=lambda item: (item.micro_batch.index, -item.op.index))

    def schedule(self, ctx: df.ScheduleContext) -> None:
        parts = min(self.parts, ctx.max_parts)
        if parts < 2:
            return ctx.sequential()
        ctx.split(parts)
        while ready := ctx.get_ready_ops():
            ctx.execute(self.pick(ready))


class Shuffled(LastFirst):
    """Of what may run, any."""

    def __init__(self, parts: int = 3, seed: int = 0) -> None:
        super().__init__(parts)
        self.dice = random.Random(seed)

    def pick(self, ready: Sequence[df.OpItem]) -> df.OpItem:
        return self.dice.choice(ready)
