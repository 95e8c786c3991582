"""Any scheduler in a system that serves requests, whose batches are different at every step."""

from __future__ import annotations

from typing import Any

import dynaflow as df
from dynaflow.schedule.base import defines
from dynaflow.strategies.auto import Auto


class Serving(df.WrappingScheduler):
    """One plan for all batches of about the same size: of a phase, and up to the same power of two of rows.

    The system tells by its facts what a batch is: the "phase" it is in, and if it has to stay "whole". `most`: into how
    many parts it may be cut. `in_turns`: on CPU tasks take turns, in the order of the plan, since the system's kernels
    share memory there.
    """

    elastic = True
    bucket = df.OpSchedulerBase.bucket  # elastic plans serve all sizes as they are

    def __init__(self, inner: df.OpSchedulerBase, most: int, in_turns: bool = False) -> None:
        super().__init__(inner)
        self.most, self.in_turns = most, in_turns

    def key(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return None
        parts = min(ctx.max_parts, self.most)
        if isinstance(self.inner, Auto):
            parts = parts.bit_length()  # a decision takes its time: it is made for about as many parts
        return ctx.facts["phase"], parts, ctx.batch_size.bit_length(), self.inner.key(ctx)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return ctx.sequential()
        plan = self.inner.schedule(ctx)
        return (plan or ctx.finish()).on_one_lane() if self.in_turns and ctx.device.type == "cpu" else plan


class ServingChoice(Serving):
    """The same for a scheduler that leaves each situation to another."""

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        if ctx.facts["whole"]:
            return self
        # Auto decides now: in the background it would run on the caches of a later step.
        inner = self.inner
        chosen = inner.decide(ctx, self.around) if isinstance(inner, Auto) else inner.choose(ctx)
        return self if chosen is self.inner else self.around(chosen)

    def around(self, inner: df.OpSchedulerBase) -> Serving:
        return inner if isinstance(inner, Serving) else serving(inner, self.most, self.in_turns)


def serving(scheduler: df.OpSchedulerBase, most: int, in_turns: bool = False) -> Serving:
    return (ServingChoice if defines(scheduler, "choose") else Serving)(scheduler, most, in_turns)
