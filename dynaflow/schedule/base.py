"""The base classes of schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dynaflow.core import validate
from dynaflow.errors import ScheduleError, shown
from dynaflow.partition.rules import Rule
from dynaflow.schedule.context import ScheduleContext


class OpSchedulerBase:
    """Decides where the model may be cut and, for each situation, what runs where and when.

    `schedule` runs once per situation: it records decisions on the context and launches nothing. The resulting plan is
    checked, lowered, cached under `key(ctx)` and replayed from then on.
    """

    elastic: bool = False
    """Under one key (which has to be defined), one function serves batches of all sizes: nothing is recompiled when the
    size changes. In return, joining micro-batches copies, and operators are compiled with dynamic shapes. For batches
    that are different every time. No effect where plans are captured in CUDA graphs."""
    functions: Sequence[Callable[..., Any]] = ()
    """Functions that a Plan which `schedule` returns, such as one from JSON, may call by name in place of operators.
    Nothing is imported for a plan, since its file may not be trusted. Functions that the same call of `schedule` passes
    to `ctx.execute` need not be listed."""

    @staticmethod
    def at_least(least: int, **numbers: Any) -> None:
        """For options of a scheduler: raises unless each is an integer of at least `least`."""
        for name, value in numbers.items():
            validate.integer(value, name, f"pass {least} or more", least=least, error=ScheduleError)

    @staticmethod
    def listed(name: str, value: Any, advice: str) -> tuple[Any, ...]:
        """For options of a scheduler: the members of a list. Raises for anything else, strings included."""
        return tuple(validate.sequence(value, name, advice, ScheduleError))

    @staticmethod
    def listed_names(name: str, value: Any, advice: str) -> tuple[str, ...]:
        """The same, for a list of strings."""
        return tuple(validate.names(value, name, advice, ScheduleError))

    def partition(self) -> list[Rule]:
        """Where the graph may be cut."""
        return []

    def schedule(self, ctx: ScheduleContext) -> Any:
        """Calls `ctx.split`, `ctx.get_ready_ops`, `ctx.execute`; or returns `ctx.sequential()`, or a Plan."""
        return ctx.sequential()

    def key(self, ctx: ScheduleContext) -> Hashable:
        """What the plan depends on. By default: the sizes of the inputs and the facts that were read."""
        return None

    def cache_key(self) -> Any:
        """Everything but the context that `schedule` depends on, as plain data: usually its options.

        With a cache key, plans are stored on disk and reused by other processes. The default, None, disables that. The
        source files of the scheduler's classes are part of the key already; if it depends on code elsewhere, add a
        version number. A subclass with an `__init__` or a `schedule` of its own needs a `cache_key` of its own too.
        """
        return None

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        """The scheduler that plans this situation: another one, with cuts of its own, or this one.

        Called once per situation, or once per `key(ctx)` if that is defined, with the uncut graph. The `key` and
        `bucket` of the chosen scheduler apply to its plans.
        """
        return self

    def bucket(self, batch_size: int) -> int:
        """The number of rows to which a batch is padded, so that few plans (and CUDA graphs) serve many sizes."""
        return batch_size


class Sequential(OpSchedulerBase):
    """Runs the uncut graph."""

    def cache_key(self) -> Any:
        return ()


class WrappingScheduler(OpSchedulerBase):
    """Schedules some operators and delegates the rest, and all methods that a subclass does not define, to `inner`.

    `key` is not delegated, since `inner` may see another graph. Neither is `cache_key`; that of `inner` is added to it.
    """

    def __init__(self, inner: OpSchedulerBase | None = None) -> None:
        self.inner = inner or Sequential()

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
        return self.inner.functions

    def partition(self) -> list[Rule]:
        return self.inner.partition()

    def schedule(self, ctx: ScheduleContext) -> Any:
        return self.inner.schedule(ctx)

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        chosen = self.inner.choose(ctx)
        return self if chosen is self.inner else self.around(chosen)

    def bucket(self, batch_size: int) -> int:
        return self.inner.bucket(batch_size)

    def around(self, inner: OpSchedulerBase) -> OpSchedulerBase:
        """A copy of this scheduler that wraps another one."""
        made = copy.copy(self)
        made.inner = inner
        return made


def defines(scheduler: OpSchedulerBase, method: str) -> bool:
    """Whether a scheduler overrides a method of OpSchedulerBase; of a wrapper, whether a scheduler inside it does."""
    own = getattr(WrappingScheduler, method)
    while isinstance(scheduler, WrappingScheduler) and getattr(type(scheduler), method) is own:
        scheduler = scheduler.inner
    return getattr(type(scheduler), method) is not getattr(OpSchedulerBase, method)


def checked_scheduler(scheduler: Any) -> OpSchedulerBase:
    if not isinstance(scheduler, OpSchedulerBase):
        raise ScheduleError(
            f"{shown(scheduler)} is not a scheduler",
            advice="pass an instance of a subclass of dynaflow.OpSchedulerBase",
        )
    return scheduler
