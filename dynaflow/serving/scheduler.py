"""Any scheduler in a system that serves requests, whose batches are different at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dynaflow as df
from dynaflow.strategies.auto import Auto


class Serving(df.OpSchedulerBase):
    """One plan for all batches of about the same size: of a phase, and up to the same power of two of rows.

    The system tells by its facts what a batch is: the "phase" it is in, and if it has to stay "whole". `most`: into how
    many parts it may be cut. `in_turns`: on CPU tasks take turns, in the order of the plan, since the system's kernels
    share memory there.
    """

    elastic = True

    def __init__(self, scheduler: df.OpSchedulerBase, most: int, in_turns: bool = False) -> None:
        self.scheduler, self.most, self.in_turns = scheduler, most, in_turns

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
        return self.scheduler.functions

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return self.scheduler.partition()

    def key(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return None
        return ctx.facts["phase"], min(ctx.max_parts, self.most), ctx.batch_size.bit_length(), self.scheduler.key(ctx)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return ctx.sequential()
        plan = self.scheduler.schedule(ctx)
        return (plan or ctx.finish()).on_one_lane() if self.in_turns and ctx.device.type == "cpu" else plan


class ServingChoice(Serving):
    """The same for a scheduler that leaves each situation to another."""

    def key(self, ctx: df.ScheduleContext) -> Any:
        found = super().key(ctx)
        if found is None or not isinstance(self.scheduler, Auto):
            return found
        phase, parts, *rest = found
        return phase, parts.bit_length(), *rest  # a decision takes its time: it is made for about as many parts

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        if ctx.facts["whole"]:
            return self
        if isinstance(self.scheduler, Auto):  # now: in the background it would run on the caches of a later step
            chosen = self.scheduler.decide(ctx, self._serving)
        else:
            chosen = self.scheduler.choose(ctx)
        return self if chosen is self.scheduler else self._serving(chosen)

    def _serving(self, scheduler: df.OpSchedulerBase) -> Serving:
        return scheduler if isinstance(scheduler, Serving) else serving(scheduler, self.most, self.in_turns)


def serving(scheduler: df.OpSchedulerBase, most: int, in_turns: bool = False) -> Serving:
    chooses = type(scheduler).choose is not df.OpSchedulerBase.choose
    return (ServingChoice if chooses else Serving)(scheduler, most, in_turns)
