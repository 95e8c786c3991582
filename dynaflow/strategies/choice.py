"""A scheduler that chooses another one for each situation, by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable

from dynaflow.errors import ScheduleError, shown, user_line
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext
from dynaflow.strategies import make


class Choice(OpSchedulerBase):
    """Runs each situation under the scheduler that `function` returns or names: see `choose`."""

    def __init__(self, function: Callable[[ScheduleContext], OpSchedulerBase | str]) -> None:
        self.function = function

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        chosen = self.function(ctx)
        return make(chosen) if isinstance(chosen, str) else chosen


def choose(function: Callable[[ScheduleContext], OpSchedulerBase | str]) -> Choice:
    """A scheduler by situation: `choose(lambda ctx: "nanoflow" if ctx.batch_size > 64 else "sequential")`."""
    if not callable(function):
        raise ScheduleError(
            f"choose({shown(function)}): not a function",
            line=user_line(),
            advice="pass a function of the context that returns a scheduler, or the name of a strategy",
        )
    return Choice(function)
