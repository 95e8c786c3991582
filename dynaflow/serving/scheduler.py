"""Any scheduler in a system that serves requests, where every step has another batch."""

from __future__ import annotations

from typing import Any

import dynaflow as df
from dynaflow.schedule.base import defines
from dynaflow.strategies.auto import Auto


class Serving(df.WrappingScheduler):
    """One plan for all batches of about the same size: of one phase, up to the same power of two of rows.

    The system describes a batch by its facts: "phase", and "whole" if the batch must not be split. `max_parts`: the
    most parts that it may be split into. `in_turns`: on CPU, tasks run one at a time in the order of the plan, because
    the system's kernels share memory there.
    """

    elastic = True
    bucket = df.OpSchedulerBase.bucket  # elastic plans serve all sizes as they are

    def __init__(self, inner: df.OpSchedulerBase, max_parts: int, in_turns: bool = False) -> None:
        super().__init__(inner)
        self.max_parts, self.in_turns = max_parts, in_turns

    def key(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return None
        parts = min(ctx.max_parts, self.max_parts)
        if isinstance(self.inner, Auto):
            parts = parts.bit_length()  # a decision is slow: make one for about as many parts
        return ctx.facts["phase"], parts, ctx.batch_size.bit_length(), self.inner.key(ctx)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return ctx.sequential()
        plan = self.inner.schedule(ctx)
        return (plan or ctx.finish()).on_one_lane() if self.in_turns and ctx.device.type == "cpu" else plan


class ServingChoice(Serving):
    """The same for a scheduler that chooses another one for each situation."""

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        if ctx.facts["whole"]:
            return self
        # Auto decides now: in the background it would run on the caches of a later step.
        inner = self.inner
        chosen = inner.decide(ctx, self.around) if isinstance(inner, Auto) else inner.choose(ctx)
        return self if chosen is self.inner else self.around(chosen)

    def around(self, inner: df.OpSchedulerBase) -> Serving:
        return inner if isinstance(inner, Serving) else serving(inner, self.max_parts, self.in_turns)


def serving(scheduler: df.OpSchedulerBase, max_parts: int, in_turns: bool = False) -> Serving:
    return (ServingChoice if defines(scheduler, "choose") else Serving)(scheduler, max_parts, in_turns)
