"""Other schedulers tried on the arguments of a call: what they would plan, and how fast that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.plan_cache import Planned, Schedules
from dynaflow.lower.executable import Lowered
from dynaflow.lower.lower import Lowerer, OnTask
from dynaflow.schedule.base import OpSchedulerBase, checked_scheduler

if TYPE_CHECKING:
    from dynaflow.engine.engine import Engine
    from dynaflow.engine.runner import GraphRunner


class Trials:
    """Other schedulers for the arguments at hand: see `ScheduleContext.trials`."""

    def __init__(
        self,
        engine: Engine,
        schedules: Schedules,
        runner: GraphRunner,
        sizes: tuple[int, ...],
        args: Sequence[Any],
        facts: Mapping[str, Any],
    ) -> None:
        self._engine, self._schedules, self._runner = engine, schedules, runner
        self._sizes, self.args, self._facts = sizes, args, facts
        self.cudagraph = engine.lowerer.cudagraph is not None and runner.graph.device.type == "cuda"
        self._planned: dict[OpSchedulerBase, Planned] = {}
        self.owned = frozenset(n for n, i in enumerate(runner.graph.inputs) if i.owned)

    def plan(self, scheduler: OpSchedulerBase | None = None) -> Planned:
        """By default, of the scheduler that decides here."""
        scheduler = scheduler or self._schedules.scheduler
        if scheduler not in self._planned:
            with self._engine.lock:
                made = self._engine.plan(self._of(scheduler), self._runner, self._sizes, self.args, self._facts)
            assert made is not None, "someone is asked to choose only where there is something to schedule"
            self._planned[scheduler] = made
        return self._planned[scheduler]

    def lowered(self, scheduler: OpSchedulerBase) -> Lowered:
        """The plan, compiled: call it with a list of `args`."""
        with self._engine.lock:
            made = self._engine.make(self._of(scheduler), self._runner, self._sizes, self.args, self._facts)
        assert made is not None
        return made

    def watched(self, planned: Planned, plan: Plan, on_task: OnTask) -> Lowered:
        """Another plan for the same graph, each task by itself, with a function that is called around it."""
        lowerer = Lowerer(self._engine.operators, on_task, Stats())
        sizes = {**self._runner.graph.hints, **planned.values}
        with self._engine.lock:
            return lowerer.lower(plan, planned.graph, sizes, planned.functions)

    def _of(self, scheduler: OpSchedulerBase) -> Schedules:
        return self._schedules.of(checked_scheduler(scheduler))
