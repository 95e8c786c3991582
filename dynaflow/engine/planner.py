"""From a request to an executable: found in the plan cache, or made and lowered.

The parts of the way have modules of their own: `scheduler_chain` finds the scheduler that plans a request, and
`plan_maker` has it make the plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from dynaflow.core import forks, validate
from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.analyzed_graph import AnalyzedGraph
from dynaflow.engine.plan_cache import PlanCache, PlanRequest, ReadyPlans, ScheduledPlan
from dynaflow.engine.plan_maker import PlanMaker
from dynaflow.engine.scheduler_chain import SchedulerChain
from dynaflow.engine.scheduler_trials import SchedulerTrials
from dynaflow.engine.user_code import call_method, call_user
from dynaflow.errors import DynaFlowError, ScheduleError, shown
from dynaflow.lower.executable import Executable
from dynaflow.lower.lower import Lowerer
from dynaflow.lower.padding import Batch, Padding
from dynaflow.schedule.base import OpSchedulerBase, checked_scheduler
from dynaflow.schedule.rank_consensus import RankConsensus

Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class PlanReady(BaseException):
    """Ends a call that was made only for its plan. It is not an error, and must pass through `except Exception`.

    The arguments of a captured graph exist only inside the code that Dynamo has generated for the model, and that code
    continues with the graph's results. The only way to get the plan without running the graph is to leave that code.
    """

    def __init__(self, lowered: Executable, note: Any, trials: SchedulerTrials) -> None:
        self.lowered, self.plan, self.graph = lowered, lowered.plan, lowered.graph
        self.note, self.trials = note, trials


class _Local(threading.local):
    """State of the call that a thread is making."""

    facts: Mapping[str, Any] | None = None
    plan_only = False


class Planner:
    """Plans the requests of one compiled model.

    Plans belong to a scheduler (its PlanCache). Operators, threads and streams belong to the model, and are reused when
    the scheduler changes.

    Contract
    - Consumes a PlanRequest: a captured graph, the arguments of a call, and the facts.
    - Returns an Executable, or None when the graph can't be scheduled at all.
    - Does not run the graph, nor change the arguments. Makes each plan once, under `lock`.
    - Errors with what the scheduler's methods raise (ScheduleError, at the user's line), or what `check` finds.
    """

    def __init__(
        self, scheduler: OpSchedulerBase, lowerer: Lowerer, facts: Facts, stats: Stats, *, check: bool, name: str
    ) -> None:
        self.lowerer, self.stats, self.name = lowerer, stats, name
        self.lock = forks.rlock()
        self.local = _Local()
        self._facts = facts
        self.own_facts: Mapping[str, Any] | None = facts if type(facts) is dict else None
        """The facts, if they are a plain dict; None if they must be evaluated in each call."""
        self.epoch = object()
        """Replaced whenever plans that were found before may be out of date."""
        self.ready_plans: MutableMapping[Any, ReadyPlans] = WeakKeyDictionary()
        """By runner: the plans of this epoch."""
        self.cache = self._cache_of(scheduler)
        self.verified: WeakSet[Executable] = WeakSet()
        """Executables whose first run was compared with the plain model's."""
        self._maker = PlanMaker(stats, self.lock, check=check)
        self._chain = SchedulerChain(self._maker, self._trials, self.lock, self.renew)
        self._consensus = RankConsensus()
        self._forked = False
        forks.register(self)

    @property
    def deciding(self) -> list[threading.Thread]:
        """Threads in which schedulers choose in the background."""
        return self._chain.threads

    def after_fork(self) -> None:
        self._chain.threads.clear()
        self._forked = True
        self.renew()

    def renew(self) -> None:
        self.epoch, self.ready_plans = object(), WeakKeyDictionary()

    def set_scheduler(self, scheduler: OpSchedulerBase) -> None:
        self.use(self._cache_of(scheduler))

    def use(self, cache: PlanCache) -> None:
        """Its scheduler plans all calls from now on."""
        self.cache = cache
        self.renew()

    def _cache_of(self, scheduler: OpSchedulerBase) -> PlanCache:
        return PlanCache(checked_scheduler(scheduler), self.renew)

    def plans(self) -> list[Plan]:
        """All plans in the cache."""
        with self.lock:
            return self.cache.all_plans()

    def facts(self) -> Mapping[str, Any]:
        base = self._facts
        if callable(base):
            base = call_user(base, "facts()", "fix it: it is called in each call")
        if type(base) is not dict:  # the usual case, on the path of each call
            base = validate.mapping(base, "facts()", 'return a mapping: {"phase": "decode"}')
        return {**base, **self.local.facts} if self.local.facts else base

    def planned(self, call: Callable[[], Any], facts: Mapping[str, Any] | None = None) -> PlanReady | None:
        """The plan that a call would run, lowered; None if it reaches no graph. `facts`: additional ones."""
        local, before = self.local, self.local.facts
        local.plan_only, local.facts = True, facts or before
        try:
            call()
        except PlanReady as ready:
            return ready
        finally:
            local.plan_only, local.facts = False, before
        return None

    def ready(self, request: PlanRequest, lowered: Executable) -> PlanReady:
        """The exception that ends such a call."""
        choice = self.cache.choices.get(self._maker.choice_key(self.cache, request))
        return PlanReady(lowered, choice and choice.note, self._trials(self.decider(request), request))

    # Which scheduler

    def request(self, graph: AnalyzedGraph, args: list[Any]) -> PlanRequest:
        return PlanRequest(graph, args, self.facts())

    def decider(self, request: PlanRequest) -> PlanCache:
        """The cache of the scheduler that plans this request."""
        if self._forked and request.graph.graph.device.type == "cuda":
            raise DynaFlowError(
                f"{self.name} runs on CUDA, which can't be used in a process that was forked after its first use",
                advice='start the process by "spawn": torch.multiprocessing.set_start_method("spawn")',
            )
        return self._chain.find(self.cache, request)[-1]

    def _trials(self, cache: PlanCache, request: PlanRequest) -> SchedulerTrials:
        return SchedulerTrials(cache, request, self.lowerer, self.lock, self._maker.plan, self._make)

    def facts_read(self, request: PlanRequest) -> set[str]:
        """The names of the facts that schedulers read to plan this request."""
        names: set[str] = set()
        for cache in self._chain.find(self.cache, request):
            names.update(cache.facts_read.get((request.graph, request.sizes), ()))
            if cache.has_key:
                names.add("num_tokens")
        return names

    # From a request to a plan

    def find(self, cache: PlanCache, request: PlanRequest) -> Executable | None:
        """The plan for this request; None when the graph can't be scheduled at all."""
        found = self._resized(cache, request) if cache.elastic else None
        if found is None:
            found = cache.plans.get(self._maker.plan_key(cache, request))
        if found is not None:
            self.stats.replays += 1
            return found
        with self.lock:
            return self._make(cache, request)

    def _resized(self, cache: PlanCache, request: PlanRequest) -> Executable | None:
        """A shape-polymorphic plan that was made for another batch size, with the cuts of this batch."""
        with self.lock:
            graph = self._maker.graph(cache, request)
            if graph is None:
                return None
            elastic = cache.elastic.get((request.graph, graph.batch_axes, self._maker.own_key(cache, request)))
            ctx = request.context(cache, graph)
            if elastic is None or elastic.parts > ctx.max_parts:
                return None
            found: Executable | None = elastic.at(ctx.resized(elastic.plan), request.values)
            return found

    def padding(self, cache: PlanCache, request: PlanRequest) -> tuple[Padding, Batch] | None:
        """How the batch is padded, by the scheduler's `bucket`; None if it is not."""
        with self.lock:
            graph = self._maker.graph(cache, request)
            if graph is None or not graph.batch_axes:
                return None
            rows = request.batch[1][next(iter(graph.batch_axes[0]))]
            padded = call_method(cache.scheduler, "bucket", rows)
            if not validate.is_integer(padded) or not rows <= padded <= rows << 20:
                raise ScheduleError(
                    f"{type(cache.scheduler).__name__}.bucket({rows}) returned {shown(padded)}",
                    advice="return a number of rows between the size of the batch and a million times that",
                )
            if padded == rows:
                return None
            place = (request.graph, graph.batch_axes)
            if place not in cache.paddings:
                cache.paddings[place] = Padding(graph)
            return cache.paddings[place], Batch(request.values, rows, int(padded))

    def _make(
        self, cache: PlanCache, request: PlanRequest, planned: ScheduledPlan | None = None
    ) -> Executable | None:
        """`planned`: what the scheduler has planned for this request, if it has been asked before."""
        key = self._maker.plan_key(cache, request)
        if key in cache.plans:  # made by another thread in the meantime
            found: Executable = cache.plans[key]
            return found
        made = planned or self._maker.plan(cache, request)
        if made is None:
            return None
        self._consensus.verify(made.plan, made.graph)
        start = time.perf_counter()
        lowered = self._elastic(cache, request, made) if cache.is_elastic else None
        if lowered is None:
            lowered = self.lowerer.lower(made.plan, made.graph, request.values, made.functions)
        stats, operators = self.stats, self.lowerer.operators
        stats.lower_seconds += time.perf_counter() - start
        stats.plans += 1
        stats.operators_compiled, stats.operators_shared = operators.compiled, operators.shared
        cache.plans[self._maker.plan_key(cache, request)] = lowered
        return lowered

    def _elastic(self, cache: PlanCache, request: PlanRequest, made: ScheduledPlan) -> Executable | None:
        """A shape-polymorphic executable, for all batch sizes under the scheduler's key; None if there is none."""
        place = (request.graph, made.graph.batch_axes, self._maker.own_key(cache, request))
        if place not in cache.patterns or place in cache.elastic:
            return None
        plan, values = made.plan, request.values
        known = (e for e in cache.elastic.values() if e.carries_out(plan, made.graph, made.functions))
        elastic = next((e for e in known if e.at(plan, values)), None)  # the same plan under another key
        elastic = elastic or self.lowerer.elastic(plan, made.graph, values, made.functions)
        if elastic is None:
            return None
        cache.elastic[place] = elastic
        found: Executable | None = elastic.at(plan, values)
        return found

    def marked(self, lowered: Executable, row: bool = False) -> Executable:
        """The same plan with timing marks, for a recording; with `row`, its calls run one after the other."""
        if (known := lowered.known_marked(row)) is not None:  # a tuner may hold the lock for long while it compiles
            return known
        with self.lock:
            return lowered.marked(row)
