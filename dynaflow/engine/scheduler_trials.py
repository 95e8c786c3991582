"""Other schedulers tried on the arguments of a call: their plans, compiled for measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.plan_cache import PlanCache, PlanRequest, ScheduledPlan
from dynaflow.lower.executable import Executable
from dynaflow.lower.lower import Lowerer, OnTask
from dynaflow.schedule.base import OpSchedulerBase, checked_scheduler

Plans = Callable[[PlanCache, PlanRequest], ScheduledPlan | None]
Makes = Callable[[PlanCache, PlanRequest, ScheduledPlan | None], Executable | None]


class SchedulerTrials:
    """Other schedulers for the arguments at hand: see `ScheduleContext.trials`."""

    def __init__(
        self, cache: PlanCache, request: PlanRequest, lowerer: Lowerer, lock: Any, plans: Plans, makes: Makes
    ) -> None:
        """`plans` makes a scheduler's plan for a request; `makes` also lowers it."""
        self._cache, self.request, self._lowerer, self._lock = cache, request, lowerer, lock
        self._plans, self._makes = plans, makes
        graph = request.graph.graph
        self.cudagraph = lowerer.cudagraph is not None and graph.device.type == "cuda"
        self._planned: dict[OpSchedulerBase, ScheduledPlan] = {}
        self.owned = frozenset(n for n, i in enumerate(graph.inputs) if i.owned)

    @property
    def args(self) -> Sequence[Any]:
        return self.request.args

    def plan(self, scheduler: OpSchedulerBase | None = None) -> ScheduledPlan:
        """A scheduler's plan; by default, of the one that plans this request."""
        scheduler = scheduler or self._cache.scheduler
        if scheduler not in self._planned:
            with self._lock:
                made = self._plans(self._of(scheduler), self.request)
            assert made is not None, "choose() is only called for graphs that can be scheduled"
            self._planned[scheduler] = made
        return self._planned[scheduler]

    def lowered(self, scheduler: OpSchedulerBase) -> Executable:
        """A scheduler's plan, compiled. Call it with a list of `args`."""
        with self._lock:
            made = self._makes(self._of(scheduler), self.request, self._planned.get(scheduler))
        assert made is not None
        return made

    def watched(self, planned: ScheduledPlan, plan: Plan, on_task: OnTask) -> Executable:
        """Another plan for the same graph, without fused tasks, and with a function that is called around each task."""
        lowerer = Lowerer(self._lowerer.operators, on_task, Stats())
        sizes = {**self.request.graph.graph.hints, **planned.values}
        with self._lock:
            return lowerer.lower(plan, planned.graph, sizes, planned.functions)

    def _of(self, scheduler: OpSchedulerBase) -> PlanCache:
        return self._cache.of(checked_scheduler(scheduler))
