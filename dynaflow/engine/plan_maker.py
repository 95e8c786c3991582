"""From a request to a checked plan: the scheduler's partition of the graph, its cache keys, and its plan.

Contract
    Takes a scheduler's PlanCache and a PlanRequest. Returns a ScheduledPlan, or None when the graph can't be scheduled.
    Nothing is lowered, and nothing runs. Adds the partition, the facts that were read, and a plan that serves other
    batch sizes (`patterns`) to the cache.
    Errors with what the scheduler's methods raise (ScheduleError, at the user's line), or what `check` finds.

Steps of `plan`
    1. Cut the graph by the scheduler's rules.
    2. Resize the plan that the scheduler made for another batch size under the same key, or
    3. load the plan from disk (see `plan_store`), or
    4. call `schedule`.
    5. Check the plan.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.plan_cache import PlanCache, PlanRequest, ScheduledPlan
from dynaflow.engine.user_code import call_method, call_user, key_of, rules_of
from dynaflow.errors import ScheduleError, SplitError, shown
from dynaflow.partition.op_graph import OpGraph
from dynaflow.partition.partition import partition
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.check import check
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.plan_store import StoredPlan, frozen, functions_of, registered


class PlanMaker:
    """Asks schedulers for plans."""

    def __init__(self, stats: Stats, lock: Any, *, check: bool) -> None:
        self._stats, self._lock, self._check = stats, lock, check

    def plan(self, cache: PlanCache, request: PlanRequest) -> ScheduledPlan | None:
        """The scheduler's plan for this request, checked; None when the graph can't be scheduled at all."""
        # 1.
        graph = self.graph(cache, request)
        if graph is None:
            return None
        ctx = request.new_context(graph)
        start = time.perf_counter()
        stored = loaded = place = None
        if cache.has_key:
            place = (request.graph, graph.batch_axes, self.own_key(cache, request))
        # 2.
        pattern = cache.patterns.get(place)
        if pattern is not None and len(pattern[0].micro_batches) <= ctx.max_parts:
            plan, functions = ctx.resized(pattern[0]), pattern[1]
        else:
            # 3. The key is computed first, since schedule() may change the scheduler.
            stored = call_user(
                partial(StoredPlan, cache.scheduler, graph, request.sizes, ctx, request.facts),
                f"the scheduler {type(cache.scheduler).__name__}", "fix cache_key()",
            )  # fmt: skip
            loaded = None if cache.is_elastic else stored.load()  # a stored plan serves one size only
            if loaded is not None:
                plan, functions = loaded
                self._stats.plans_loaded += 1
            else:  # 4.
                plan, functions = self._schedule(cache.scheduler, ctx, request.graph.graph.partial)
                if place is not None and ctx.even_split is not None:
                    cache.patterns[place] = (plan, functions)
        # 5.
        checked_at = time.perf_counter()
        if self._check and loaded is None:  # stored plans are checked when they are loaded
            check(plan, graph, ctx.batch_size, ctx.facts.get("num_tokens") if len(plan.micro_batches) > 1 else None)
        self._stats.schedule_seconds += checked_at - start
        self._stats.check_seconds += time.perf_counter() - checked_at
        if stored is not None and loaded is None:
            self._stats.plans_stored += stored.store(plan, functions)
        if not cache.has_key:
            cache.note_read(request, ctx.facts.read)
        return ScheduledPlan(plan=plan, graph=graph, functions=functions, values=request.batch[1])

    def _schedule(self, scheduler: OpSchedulerBase, ctx: ScheduleContext, part: bool) -> tuple[Plan, Mapping[str, Any]]:
        self._stats.scheduler_calls += 1
        try:
            result = call_method(scheduler, "schedule", ctx)
        except SplitError as e:
            if ctx.can_split or not (part or ctx.phase == "backward"):
                raise
            # Not an error of the scheduler: after a graph break, a part of a model may have no batch, and if all layers
            # below the head are frozen, a backward pass has only gradients of weights.
            self._stats.plain_graphs += 1
            self._stats.plain_reasons.append(str(e))
            return ctx.whole(), {}
        if result is not None and not isinstance(result, Plan):
            raise ScheduleError(
                f"{type(scheduler).__name__}.schedule() returned {shown(result)}",
                advice="return nothing, ctx.sequential(), or a Plan",
            )
        if isinstance(result, Plan):
            return result, functions_of(result, {**registered(scheduler.functions), **ctx.functions})
        return ctx.finish(), ctx.functions

    def graph(self, cache: PlanCache, request: PlanRequest) -> OpGraph | None:
        """The graph, cut by the scheduler's rules; None if it can't be scheduled."""
        analyzed = request.graph
        if analyzed.plain:
            return None
        batch_axes = request.batch[0]
        place = (analyzed, batch_axes)
        if place not in cache.graphs:
            start = time.perf_counter()
            if cache.rules is None:
                cache.rules = rules_of(cache.scheduler)
            found = analyzed.probe(batch_axes)
            if found is None:
                self._stats.plain_graphs += 1
                self._stats.plain_reasons.append(analyzed.plain or "")
                return None
            complete = not self._stats.graph_breaks and analyzed.graph.phase != "backward"
            cut = (batch_axes, cache.rules, complete)
            if cut not in analyzed.partitions:  # shared with schedulers that have equal rules
                analyzed.partitions[cut] = partition(analyzed.graph, found, cache.rules, complete=complete)
                self._stats.partitions += 1
            cache.graphs[place] = analyzed.partitions[cut]
            self._stats.partition_seconds += time.perf_counter() - start
        graph: OpGraph = cache.graphs[place]
        return graph

    def choice_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        """The cache key of a choice: the scheduler's own key, or the situation."""
        return (request.graph, self.own_key(cache, request)) if cache.has_key else cache.situation(request)

    def plan_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        """The cache key of a plan."""
        if not cache.has_key:
            return cache.situation(request)
        # Cuts fall between requests, so the plan fits only these lengths, whatever the scheduler's key is.
        lengths = frozen(request.facts.get("num_tokens"))
        return (request.graph, request.sizes, lengths, self.own_key(cache, request))

    def own_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        """What the scheduler's `key` returns. Called once for the same sizes and the same facts that it read."""
        if cache in request.own_keys:
            return request.own_keys[cache]
        cached = "num_tokens" not in request.facts  # the context uses it without a recorded read
        if cached and (place := cache.situation(request)) in cache.own_keys:
            own: Hashable = cache.own_keys[place]
            return own
        with self._lock:
            graph = self.graph(cache, request)
            if graph is None:
                return None
            ctx = request.context(cache, graph)
            own = request.own_keys[cache] = key_of(cache.scheduler, ctx)
            if cached:
                cache.note_read(request, ctx.facts.read)
                cache.own_keys[cache.situation(request)] = own
            return own
