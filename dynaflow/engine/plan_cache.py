"""One scheduler and what it has decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy

from dynaflow.core import validate
from dynaflow.core.plan import Plan
from dynaflow.errors import ScheduleError
from dynaflow.lower.executable import Lowered
from dynaflow.lower.padding import Padding
from dynaflow.lower.shape_polymorphic import Elastic
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase


@dataclass(slots=True)
class Schedules:
    """One scheduler and the plans it has made. Swapped as a whole, so a running call keeps what it started with."""

    scheduler: OpSchedulerBase
    rules: tuple[Any, ...] | None = None
    graphs: dict[Any, OpGraph] = field(default_factory=dict)
    plans: dict[Any, Lowered] = field(default_factory=dict)
    facts_read: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    own_keys: dict[Any, Any] = field(default_factory=dict)
    """By sizes and facts: what the scheduler's `key` said."""
    key_facts: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    """By sizes: the facts that it read."""
    paddings: dict[Any, Padding] = field(default_factory=dict)
    patterns: dict[Any, tuple[Plan, Mapping[str, Any]]] = field(default_factory=dict)
    """By a scheduler's own key: a plan of equal parts, which serves other batch sizes too."""
    elastic: dict[Any, Elastic] = field(default_factory=dict)
    """By the same: its function, if the scheduler is elastic."""
    chosen: dict[Any, Schedules] = field(default_factory=dict)
    """By situation: the scheduler that took it over, and its plans."""
    others: dict[OpSchedulerBase, Schedules] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)
    """By situation: what the scheduler has to say about its choice."""

    chooses: bool = field(init=False)
    has_key: bool = field(init=False)
    has_buckets: bool = field(init=False)
    is_elastic: bool = field(init=False)

    def __post_init__(self) -> None:
        kind = type(self.scheduler)
        self.chooses = kind.choose is not OpSchedulerBase.choose
        self.has_key = kind.key is not OpSchedulerBase.key
        self.has_buckets = kind.bucket is not OpSchedulerBase.bucket
        elastic = validate.flag(self.scheduler.elastic, f"{kind.__name__}.elastic", ScheduleError)
        self.is_elastic = elastic and self.has_key

    def of(self, scheduler: OpSchedulerBase) -> Schedules:
        """Those of another scheduler that takes situations over."""
        if scheduler is self.scheduler:
            return self
        return self.others.setdefault(scheduler, Schedules(scheduler))

    def all_plans(self) -> list[Plan]:
        """Its own, and those of schedulers that it has chosen."""
        chosen = {id(c): c for c in self.chosen.values() if c is not self}
        made = [lowered.plan for lowered in self.plans.values()] + [elastic.plan for elastic in self.elastic.values()]
        return list(dict.fromkeys([*made, *(p for c in chosen.values() for p in c.all_plans())]))

    def choose(self, situation: Any, scheduler: OpSchedulerBase) -> None:
        """From now on it decides there. Plans of those that were only tried go, with their memory and graphs."""
        self.chosen[situation] = self.of(scheduler)
        used = {id(chosen) for chosen in self.chosen.values()}
        for other in self.others.values():
            if id(other) not in used:
                other.plans.clear()


class Situation(NamedTuple):
    """Who decides about a call, and what the decision depends on."""

    schedules: Schedules
    sizes: tuple[int, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A scheduler's decision for some arguments, not yet lowered."""

    plan: Plan
    graph: OpGraph
    functions: Mapping[str, Any]
    values: Mapping[sympy.Symbol, int]
