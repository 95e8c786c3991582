"""Calls of the user's code: what it raises becomes a ScheduleError that names the user's line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from dynaflow.core import validate
from dynaflow.errors import DynaFlowError, PartitionError, ScheduleError, raised_at, shown
from dynaflow.partition.rules import SplitFunc, SplitModule
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.plan_store import hashable


def call_method(scheduler: OpSchedulerBase, method: str, *args: Any) -> Any:
    """Calls a scheduler's method."""

    def call() -> Any:
        found = getattr(scheduler, method)(*args)
        return list(found) if method == "partition" and isinstance(found, Iterator) else found

    advice = f"fix {method}(), or the options that were passed to it"
    return call_user(call, f"the scheduler {type(scheduler).__name__}", advice)


def call_user(code: Callable[[], Any], name: str, advice: str) -> Any:
    """What the user's code returns. Errors name the user's line."""
    try:
        return code()
    except DynaFlowError:
        raise
    except Exception as e:
        raise ScheduleError(f"{name} raised {type(e).__name__}: {e}", line=raised_at(e), advice=advice) from e


def key_of(scheduler: OpSchedulerBase, ctx: ScheduleContext) -> Hashable:
    """What a scheduler's `key` returns. Raises unless it is hashable."""
    own: Hashable = hashable(call_method(scheduler, "key", ctx), f"what {type(scheduler).__name__}.key() returned")
    return own


def rules_of(scheduler: OpSchedulerBase) -> tuple[Any, ...]:
    """What a scheduler's `partition` returns. Raises unless it is a list of rules."""
    found = call_method(scheduler, "partition")
    rules = tuple([found] if (listed := validate.members(found)) is None else listed)
    for rule in rules:
        if not isinstance(rule, (SplitModule, SplitFunc)):
            raise PartitionError(
                f"{type(scheduler).__name__}.partition() returned {shown(rule)}",
                advice="return a list of SplitModule and SplitFunc; an empty one, if there is nothing to cut",
            )
    return rules
