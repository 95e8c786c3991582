"""Plans kept on disk, so that a new process need not ask the scheduler again.

A plan is found again when all that it depends on is the same: the scheduler's code and state, the graph, the sizes, the
facts that were read, the device, and the versions. Which facts are read is only known once the scheduler has run, so
their names lie under one key, and the plan under another that has their values in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from dynaflow.core.device import device_for
from dynaflow.core.disk_cache import Store, enabled
from dynaflow.core.plan import Plan
from dynaflow.errors import PlanError, ScheduleError, shown
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.check import check
from dynaflow.schedule.context import FACT_NAMES, ScheduleContext, function_name
from dynaflow.schedule.identity import graph_identity, judged, plan_key

PLAIN = frozenset((int, str, bool, float, NoneType))
"""Kinds of facts that are keys as they are."""
Functions = Mapping[str, Callable[..., Any]]
_store = Store("plans")


class KeptPlan:
    """The place on disk of the plan for one situation. Made before the scheduler runs, which may change it."""

    def __init__(
        self,
        scheduler: OpSchedulerBase,
        graph: OpGraph,
        sizes: tuple[int, ...],
        ctx: ScheduleContext,
        facts: Mapping[str, Any],
    ) -> None:
        self._graph, self._sizes, self._ctx, self._facts = graph, sizes, ctx, facts
        self._who, reached = judged(scheduler) if enabled() else (None, [])
        self._functions = registered(reached)
        self._what = graph_identity(graph) if self._who else ""

    def load(self) -> tuple[Plan, Functions] | None:
        """The plan that another process left; proved like any other, and dropped if it is no good."""
        if self._who is None:
            return None
        ctx, facts = self._ctx, self._facts
        try:
            names = json.loads(_store.get(self._key(None) or "") or "null")
            if names is None:
                return None
            plan = Plan.from_json(_store.get(self._key(names) or "") or "null")
            check(plan, self._graph, ctx.batch_size, facts.get("num_tokens") if len(plan.micro_batches) > 1 else None)
            functions = functions_of(plan, self._functions)
        except Exception:  # whatever is wrong with it: the scheduler is asked
            return None
        ctx.facts.read.update(names)
        return plan, functions

    def keep(self, plan: Plan, functions: Functions) -> bool:
        known = all(self._functions.get(name) is f for name, f in functions.items())
        if self._who is None or plan.sequential or not known:
            return False
        first = self._key(None) or ""
        names = sorted({*json.loads(_store.get(first) or "[]"), *self._ctx.facts.read})
        second = self._key(names)
        if second is None:
            return False
        _store.put(second, plan.to_json())
        _store.put(first, json.dumps(names))
        return True

    def _key(self, names: Sequence[str] | None) -> str | None:
        read = None if names is None else tuple((name, fact_value(self._facts, name)) for name in names)
        assert self._who is not None
        ctx = self._ctx
        device = f"{ctx.device} as {device_for(ctx.device).name}"
        return plan_key(self._who, self._what, self._sizes, ctx.batch_size, read, device, ctx.sms)


def registered(functions: Iterable[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """By the names that plans have for them. A name that two of them have stands for neither."""
    if not isinstance(functions, Iterable) or not all(map(callable, functions := list(functions))):
        raise ScheduleError(f"functions={shown(functions)} are no functions", advice="list them: functions = (fused,)")
    found: dict[str, Callable[..., Any]] = {}
    twice: set[str] = set()
    for function in functions:
        name = function_name(function)
        if found.setdefault(name, function) is not function:
            twice.add(name)
    return {name: function for name, function in found.items() if name not in twice}


def functions_of(plan: Plan, known: Functions) -> Functions:
    """What a plan calls by name. A plan may come from a file that anybody wrote: only what is known is called."""
    for name in (task.replace for task in plan.tasks):
        if name is not None and name not in known:
            raise PlanError(
                f"the plan calls {name!r}, which its scheduler does not know",
                advice="list the function in the scheduler's `functions`; its module is not imported for a plan",
            )
    return {task.replace: known[task.replace] for task in plan.tasks if task.replace is not None}


def frozen(fact: Any) -> Any:
    """A fact as a dictionary key."""
    if type(fact) in PLAIN:
        return fact
    if isinstance(fact, torch.Tensor) or type(fact).__module__ == "numpy":
        return tuple(fact.reshape(-1).tolist()), tuple(fact.shape)
    if isinstance(fact, Mapping):
        return tuple(sorted(((k, frozen(v)) for k, v in fact.items()), key=repr))
    if isinstance(fact, (list, tuple)):
        return tuple(fact) if PLAIN.issuperset(map(type, fact)) else tuple(map(frozen, fact))
    if isinstance(fact, (set, frozenset)):
        return frozenset(frozen(v) for v in fact)
    return hashable(fact, "a fact")


def hashable(value: Any, what: str) -> Any:
    """What plans are kept under has to be."""
    try:
        hash(value)
    except TypeError:
        advice = "a tuple can be, a list or a dict can't"
        raise ScheduleError(f"{what} is {shown(value)}, which can't be part of a key", advice=advice) from None
    return value


def fact_value(facts: Mapping[str, Any], name: str) -> Any:
    return frozen(list(facts) if name == FACT_NAMES else facts.get(name))
