"""The plan cache: bounded tables of what one scheduler has decided, and the requests that they are looked up with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import sympy

from dynaflow.core import validate
from dynaflow.core.bounded import BoundedDict
from dynaflow.core.plan import Plan
from dynaflow.engine.analyzed_graph import AnalyzedGraph, BatchAxes
from dynaflow.errors import ScheduleError
from dynaflow.lower.executable import Executable
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase, defines
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.plan_store import PLAIN, fact_value
from dynaflow.schedule.split import Requests, requests_of

MAX_ENTRIES = 1024
"""Entries of each table."""


def _table() -> BoundedDict:
    return BoundedDict(MAX_ENTRIES)


class PlanRequest:
    """A request for a plan: a graph, the arguments of a call, and the facts that the plan may depend on."""

    def __init__(self, graph: AnalyzedGraph, args: Sequence[Any], facts: Mapping[str, Any]) -> None:
        self.graph, self.args, self.facts = graph, args, facts
        self.sizes = graph.sizes(args)
        self.own_keys: dict[PlanCache, Hashable] = {}
        """What schedulers' `key` methods returned for it."""
        self.contexts: dict[PlanCache, ScheduleContext] = {}
        """The contexts that were passed to them."""
        self._requests: Requests | None = None

    @cached_property
    def batch(self) -> tuple[BatchAxes, dict[sympy.Symbol, int]]:
        """The symbols that stand for the batch, and the values of all symbols."""
        return self.graph.batch_axes(self.args, self.facts)

    @cached_property
    def values(self) -> dict[sympy.Symbol, int]:
        """The values of all symbols of the graph, including those that no argument determines."""
        return {**self.graph.graph.hints, **self.batch[1]}

    def with_args(self, args: Sequence[Any]) -> PlanRequest:
        """The same request for other arguments."""
        return PlanRequest(self.graph, args, self.facts)

    def context(self, cache: PlanCache, graph: OpGraph) -> ScheduleContext:
        """The context for all of a scheduler's methods that do not record a plan."""
        if cache not in self.contexts:
            self.contexts[cache] = self.new_context(graph)
        return self.contexts[cache]

    def new_context(self, graph: OpGraph) -> ScheduleContext:
        batch_axes, values = graph.batch_axes, self.batch[1]
        rows = values[next(iter(batch_axes[0]))] if batch_axes else 1
        return ScheduleContext(
            graph, batch_size=rows, has_batch=bool(batch_axes), device=graph.graph.device, facts=self.facts,
            sizes=values, requests_of=self._requests_of,
        )  # fmt: skip

    def _requests_of(self, tokens: Any) -> Requests | None:
        """Validated once: a server passes hundreds of requests in each step."""
        if self._requests is None:
            self._requests = requests_of(tokens)
        return self._requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPlan:
    """A scheduler's decision for a request, not yet lowered."""

    plan: Plan
    graph: OpGraph
    functions: Mapping[str, Any]
    values: Mapping[sympy.Symbol, int]


class Choice(NamedTuple):
    """The scheduler that was chosen for a situation, by its cache, and the note of the one that chose it."""

    cache: PlanCache
    note: Any


@dataclass(slots=True, eq=False)
class PlanCache:
    """One scheduler and its plans. Replaced as a whole, so a running call continues with the cache it started with."""

    scheduler: OpSchedulerBase
    forgotten: Callable[[], None] | None = None
    """Called when a plan is evicted."""
    rules: tuple[Any, ...] | None = None
    graphs: BoundedDict = field(default_factory=_table)
    """By graph and batch: the partitioned graph."""
    facts_read: BoundedDict = field(default_factory=_table)
    """By graph and sizes: the names of the facts that were read."""
    own_keys: BoundedDict = field(default_factory=_table)
    """By situation: what the scheduler's `key` returned."""
    plans: BoundedDict = field(init=False)
    """By key: the plan, lowered."""
    patterns: BoundedDict = field(default_factory=_table)
    """By graph, batch and the scheduler's own key: a plan of equal parts, which serves other batch sizes too."""
    elastic: BoundedDict = field(default_factory=_table)
    """By the same: its shape-polymorphic executable, if the scheduler is elastic."""
    paddings: BoundedDict = field(default_factory=_table)
    """By graph and batch."""
    choices: BoundedDict = field(default_factory=_table)
    """By own key or situation: the chosen scheduler."""
    others: BoundedDict = field(default_factory=_table)
    """By scheduler: the caches of those that were chosen or tried."""

    chooses: bool = field(init=False)
    has_key: bool = field(init=False)
    pads: bool = field(init=False)
    is_elastic: bool = field(init=False)

    def __post_init__(self) -> None:
        scheduler = self.scheduler
        self.plans = BoundedDict(MAX_ENTRIES, self.forgotten)
        self.chooses, self.has_key = defines(scheduler, "choose"), defines(scheduler, "key")
        self.pads = defines(scheduler, "bucket")
        elastic = validate.flag(scheduler.elastic, f"{type(scheduler).__name__}.elastic", ScheduleError)
        self.is_elastic = elastic and self.has_key

    def of(self, scheduler: OpSchedulerBase) -> PlanCache:
        """The cache of a scheduler that was chosen, or is tried."""
        if scheduler is self.scheduler:
            return self
        if scheduler not in self.others:
            self.others[scheduler] = PlanCache(scheduler, self.forgotten)
        found: PlanCache = self.others[scheduler]
        return found

    def situation(self, request: PlanRequest) -> Hashable:
        """The cache key of a scheduler without a `key`: the graph, the sizes, and the facts that were read for them."""
        place = (request.graph, request.sizes)
        names = self.facts_read.get(place)
        return (*place, tuple([fact_value(request.facts, name) for name in names])) if names else place

    def note_read(self, request: PlanRequest, names: set[str]) -> None:
        """Adds these facts to the situations of this graph and these sizes."""
        if names:
            place = (request.graph, request.sizes)
            self.facts_read[place] = tuple(sorted({*self.facts_read.get(place, ()), *names}))

    def choose(self, key: Hashable, scheduler: OpSchedulerBase, note: Any) -> None:
        """Records a choice, and drops the plans of schedulers that were only tried, with their memory and graphs."""
        self.choices[key] = Choice(self.of(scheduler), note)
        used = {id(choice.cache) for choice in self.choices.values()}
        for other in self.others.values():
            if id(other) not in used:
                other.plans.clear()

    def all_plans(self) -> list[Plan]:
        """Its own, and those of schedulers that it has chosen."""
        chosen = {id(c.cache): c.cache for c in self.choices.values() if c.cache is not self}
        made = [lowered.plan for lowered in self.plans.values()] + [elastic.plan for elastic in self.elastic.values()]
        return list(dict.fromkeys([*made, *(p for c in chosen.values() for p in c.all_plans())]))


class ReadyPlans:
    """The fast path of a call: the plans of one graph by sizes and facts, without asking the scheduler."""

    __slots__ = ("__weakref__", "_names", "_plans", "epoch")

    def __init__(self, epoch: object) -> None:
        self.epoch = epoch
        """The planner's epoch. When the planner has another one, these plans are out of date."""
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._plans: dict[tuple[Any, ...], Executable] = {}

    def find(self, sizes: tuple[int, ...], facts: Mapping[str, Any]) -> Executable | None:
        names = self._names.get(sizes)
        if not names or not facts:
            return self._plans.get((sizes, None))
        read = []
        for name in names:
            fact = facts.get(name)
            read.append(fact if type(fact) in PLAIN and name else fact_value(facts, name))
        return self._plans.get((sizes, tuple(read)))

    def remember(self, request: PlanRequest, names: set[str], lowered: Executable) -> None:
        """`names`: the facts that were read on the way to this plan."""
        if len(self._plans) >= MAX_ENTRIES:
            self._plans.clear()
            self._names.clear()
        facts, sizes = request.facts, request.sizes
        known = self._names[sizes] = tuple(sorted(names.union(self._names.get(sizes, ()))))
        read = tuple([fact_value(facts, name) for name in known]) if known and facts else None
        self._plans[sizes, read] = lowered
