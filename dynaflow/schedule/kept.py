"""Plans kept on disk, so that a new process need not ask the scheduler again.

A plan is found again when all that it depends on is the same: the scheduler's code and state, the graph, the sizes, the
facts that were read, the device, and the versions. Which facts are read is only known once the scheduler has run, so
their names lie under one key, and the plan under another that has their values in it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from dynaflow.capture.ops import OpGraph
from dynaflow.errors import PlanError
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.check import check
from dynaflow.schedule.context import FACT_NAMES, ScheduleContext
from dynaflow.schedule.identity import graph_identity, identity, plan_key
from dynaflow.schedule.plan import Plan
from dynaflow.store import Store, enabled
from dynaflow.tune.device import device_for

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
        self._who = identity(scheduler) if enabled() else None
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
            functions = {t.replace: imported(t.replace) for t in plan.tasks if t.replace}
        except Exception:  # its functions may be gone, and an import may raise anything: the scheduler is asked
            return None
        ctx.facts.read.update(names)
        return plan, functions

    def keep(self, plan: Plan, functions: Functions) -> bool:
        if self._who is None or plan.sequential or not all(_importable(name, f) for name, f in functions.items()):
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


def _importable(name: str, function: Callable[..., Any]) -> bool:
    """Will another process find it by its name?"""
    try:
        return not name.startswith("__main__:") and imported(name) is function
    except PlanError:
        return False


def imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as e:
        raise PlanError(
            f"the plan calls {name}, which can't be imported",
            advice="keep functions given as replace_func at the top level of a module",
        ) from e


def frozen(fact: Any) -> Any:
    """A fact as a dictionary key."""
    if isinstance(fact, torch.Tensor):
        return tuple(fact.flatten().tolist()), tuple(fact.shape)
    if isinstance(fact, Mapping):
        return tuple(sorted((k, frozen(v)) for k, v in fact.items()))
    if isinstance(fact, (list, tuple)):
        return tuple(frozen(v) for v in fact)
    if isinstance(fact, (set, frozenset)):
        return frozenset(frozen(v) for v in fact)
    return fact


def fact_value(facts: Mapping[str, Any], name: str) -> Any:
    return frozen(list(facts) if name == FACT_NAMES else facts.get(name))
