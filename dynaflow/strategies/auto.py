"""Runs each situation under the strategy that is measured to be fastest, or in sequence if none is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import dynaflow as df
from dynaflow.core import validate
from dynaflow.strategies import named
from dynaflow.strategies.candidates import candidates
from dynaflow.tune.progress import progress_bar
from dynaflow.tune.tuner import Among, Tuner


class Auto(df.OpSchedulerBase):
    """Tunes each new situation once.

    `seconds`: for tuning, after the sequence is compiled; a measurement in progress is completed. 0: the cost model
    decides alone. `when`: in the first call, or in the background, running in sequence until it is done. `most`: the
    number of schedules that are measured, those with the best predictions. `among`: names, schedulers, or pairs of both
    to choose from; by default all strategies. `progress`: shows a progress bar.
    """

    def __init__(
        self,
        seconds: float = 60.0,
        when: Literal["first call", "background"] = "first call",
        most: int = 4,
        among: Sequence[str | df.OpSchedulerBase | tuple[str, df.OpSchedulerBase]] | None = None,
        progress: bool = False,
    ) -> None:
        self.at_least(1, most=most)
        if not isinstance(when, str) or when not in ("first call", "background"):
            raise validate.invalid("Auto(when)", when, 'say "first call" or "background"', df.ScheduleError)
        if not (validate.is_integer(seconds) or isinstance(seconds, float)) or not seconds >= 0:
            raise validate.invalid("Auto(seconds)", seconds, "pass 0 or more", df.ScheduleError)
        if among is not None:
            advice = 'list names of strategies, or schedulers: among=["nanoflow", "branches"]'
            among = validate.sequence(among, "Auto(among)", advice, df.ScheduleError)
        self.seconds, self.when, self.most, self.among, self.progress = seconds, when, most, among, progress

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        if self.when == "background" and self.seconds:
            ctx.decide_later(self.decide)
            return df.Sequential()
        return self.decide(ctx)

    def decide(
        self, ctx: df.ScheduleContext, wrap: Callable[[df.OpSchedulerBase], df.OpSchedulerBase] | None = None
    ) -> df.OpSchedulerBase:
        """Tunes now. `wrap`: applied to each candidate before it is tried."""
        among: Among = partial(candidates, ctx) if self.among is None else [named(s) for s in self.among]
        if wrap is not None:
            among = [(name, wrap(s)) for name, s in (among() if callable(among) else among)]
        with progress_bar(self.seconds if self.progress else 0) as say:
            chosen, ctx.note = Tuner(ctx, seconds=self.seconds, most=self.most, among=among, say=say).decide()
        return chosen
