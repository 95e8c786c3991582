"""From a call's arguments to the plan that runs for them: found, or made and lowered.

A Planner belongs to one compiled model. Plans belong to a scheduler (its PlanCache); operators, threads and streams to
the model, so another scheduler finds them ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from dynaflow.core import forks, validate
from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.analyzed_graph import AnalyzedGraph
from dynaflow.engine.plan_cache import Choice, PlanCache, Planned, PlanRequest, ReadyPlans
from dynaflow.engine.snapshot import NoRoom, copied
from dynaflow.engine.trials import Trials
from dynaflow.errors import DynaFlowError, PartitionError, ScheduleError, SplitError, raised_at, shown
from dynaflow.lower.executable import Executable
from dynaflow.lower.lower import Lowerer
from dynaflow.lower.padding import Batch, Padding
from dynaflow.partition.op_graph import OpGraph
from dynaflow.partition.partition import partition
from dynaflow.partition.rules import SplitFunc, SplitModule
from dynaflow.schedule.base import OpSchedulerBase, checked_scheduler
from dynaflow.schedule.check import check
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.plan_store import StoredPlan, frozen, functions_of, hashable, registered
from dynaflow.schedule.rank_consensus import Meetings

Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

CHOICES = 8
"""How many schedulers may choose another one in a row."""


class PlanReady(BaseException):
    """Ends a call that was made for its plan alone. No error: it must pass through `except Exception`.

    The arguments of a captured graph exist nowhere but in the code that Dynamo has made of the model, and that code
    goes on with the graph's results. So to have a call's plan and no results is to leave that code.
    """

    def __init__(self, lowered: Executable, note: Any, trials: Trials) -> None:
        self.lowered, self.plan, self.graph = lowered, lowered.plan, lowered.graph
        self.note, self.trials = note, trials


class _Local(threading.local):
    """What belongs to the call that a thread is making."""

    facts: Mapping[str, Any] | None = None
    plan_only = False


class Planner:
    def __init__(
        self, scheduler: OpSchedulerBase, lowerer: Lowerer, facts: Facts, stats: Stats, *, check: bool, name: str
    ) -> None:
        self.lowerer, self.stats, self.check_plans, self.name = lowerer, stats, check, name
        self.lock = forks.rlock()
        self.local = _Local()
        self._facts = facts
        self.own_facts: Mapping[str, Any] | None = facts if type(facts) is dict else None
        """Those that are the same in each call; None if they have to be asked for."""
        self.epoch = object()
        """Another one as soon as plans that were found before may not be those to run."""
        self.ready_plans: MutableMapping[Any, ReadyPlans] = WeakKeyDictionary()
        """By runner: those of this epoch."""
        self.cache = self._cache_of(scheduler)
        self.verified: WeakSet[Executable] = WeakSet()
        """Those whose first run was compared with the plain model's."""
        self.deciding: list[threading.Thread] = []
        self._meetings = Meetings()
        self._forked = False
        forks.tell(self)

    def after_fork(self) -> None:
        self.deciding.clear()
        self._forked = True
        self.renew()

    def renew(self) -> None:
        self.epoch, self.ready_plans = object(), WeakKeyDictionary()

    def set_scheduler(self, scheduler: OpSchedulerBase) -> None:
        self.use(self._cache_of(scheduler))

    def use(self, cache: PlanCache) -> None:
        """From the next call on, its scheduler decides."""
        self.cache = cache
        self.renew()

    def _cache_of(self, scheduler: OpSchedulerBase) -> PlanCache:
        return PlanCache(checked_scheduler(scheduler), self.renew)

    def plans(self) -> list[Plan]:
        """All that are kept."""
        with self.lock:
            return self.cache.all_plans()

    def facts(self) -> Mapping[str, Any]:
        base = self._facts
        if callable(base):
            base = _called(base, "facts()", "mend it: it is asked in each call")
        if type(base) is not dict:  # that is the usual kind, and this is asked in each call
            base = validate.mapping(base, "facts()", 'return a mapping: {"phase": "decode"}')
        return {**base, **self.local.facts} if self.local.facts else base

    def planned(self, call: Callable[[], Any], facts: Mapping[str, Any] | None = None) -> PlanReady | None:
        """What a call would run, lowered but not run; None if it comes to no graph. `facts`: beside those it has."""
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
        """What such a call ends with."""
        choice = self.cache.choices.get(self._choice_key(self.cache, request))
        return PlanReady(lowered, choice and choice.note, self._trials(self.decider(request), request))

    # Who decides

    def request(self, graph: AnalyzedGraph, args: list[Any]) -> PlanRequest:
        return PlanRequest(graph, args, self.facts())

    def decider(self, request: PlanRequest) -> PlanCache:
        """The cache of whoever decides about this request."""
        if self._forked and request.graph.graph.device.type == "cuda":
            raise DynaFlowError(
                f"{self.name} runs on CUDA, which can't be used in a process that was forked after its first use",
                advice='start the process by "spawn": torch.multiprocessing.set_start_method("spawn")',
            )
        return self._decider(request)[-1]

    def _decider(self, request: PlanRequest) -> list[PlanCache]:
        """And before it, those that left it to another."""
        chain = [self.cache]
        while (cache := chain[-1]).chooses:
            if len(chain) > CHOICES + 1:
                raise ScheduleError(
                    f"{type(cache.scheduler).__name__}.choose() never comes to an end: "
                    f"{CHOICES} schedulers in a row have handed the call to another one",
                    advice="return self, or a scheduler without a choose() of its own",
                )
            if (choice := cache.choices.get(self._choice_key(cache, request))) is None:
                with self.lock:
                    choice = self._choose(cache, request)
            if choice.cache is cache:
                break
            chain.append(choice.cache)
        return chain

    def _choose(self, cache: PlanCache, request: PlanRequest) -> Choice:
        graph, note, later = self._graph(cache, request), None, None
        chosen = cache.scheduler
        if graph is not None:
            ctx = request.new_context(graph)
            ctx.trials = self._trials(cache, request)
            chosen = checked_scheduler(_user(cache.scheduler, "choose", ctx))
            cache.note_read(request, ctx.facts.read)
            note, later = ctx.note, ctx.later
        key = self._choice_key(cache, request)
        if later is not None:
            note = self._decide_later(cache, key, ctx)
        cache.choose(key, chosen, note)
        return cache.choices[key]

    def _decide_later(self, cache: PlanCache, key: Hashable, ctx: ScheduleContext) -> Any:
        """In a thread of its own, on copies: callers go on using the arguments. Returns what there is to say by now."""
        later, trials = ctx.later, ctx.trials
        assert later is not None and isinstance(trials, Trials)
        try:
            trials.request = trials.request.with_args(copied(trials.args, keep=trials.owned))
        except NoRoom as e:
            return str(e)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def decide() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                try:
                    chosen = checked_scheduler(later(ctx))
                except Exception as e:
                    chosen, ctx.note = None, f"tuning failed: {type(e).__name__}: {e}"
            with self.lock:
                decided = chosen or cache.choices.get(key, Choice(cache, None)).cache.scheduler
                cache.choose(key, decided, ctx.note)
                self.renew()
            trials.request.args = ()

        thread = threading.Thread(target=decide, name="dynaflow-tune", daemon=True)
        self.deciding.append(thread)
        thread.start()
        return ctx.note

    def _trials(self, cache: PlanCache, request: PlanRequest) -> Trials:
        return Trials(cache, request, self.lowerer, self.lock, self._plan, self._make)

    # Under what a decision is kept

    def _choice_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        """Of a choice: the scheduler's own key, or the situation."""
        return (request.graph, self._own_key(cache, request)) if cache.has_key else cache.situation(request)

    def _plan_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        if not cache.has_key:
            return cache.situation(request)
        # Cuts fall between requests: whatever the scheduler thinks, they fit these requests only.
        lengths = frozen(request.facts.get("num_tokens"))
        return (request.graph, request.sizes, lengths, self._own_key(cache, request))

    def _own_key(self, cache: PlanCache, request: PlanRequest) -> Hashable:
        """What the scheduler's `key` says. It is asked once for the same sizes and the same facts that it read."""
        if cache in request.own_keys:
            return request.own_keys[cache]
        keeps = "num_tokens" not in request.facts  # of which the context knows more than what was read
        if keeps and (place := cache.situation(request)) in cache.own_keys:
            own: Hashable = cache.own_keys[place]
            return own
        with self.lock:
            graph = self._graph(cache, request)
            if graph is None:
                return None
            ctx = request.context(cache, graph)
            own = request.own_keys[cache] = _key_of(cache.scheduler, ctx)
            if keeps:
                cache.note_read(request, ctx.facts.read)
                cache.own_keys[cache.situation(request)] = own
            return own

    def facts_read(self, request: PlanRequest) -> set[str]:
        """On the way to the plan for this request."""
        names: set[str] = set()
        for cache in self._decider(request):
            names.update(cache.facts_read.get((request.graph, request.sizes), ()))
            if cache.has_key:
                names.add("num_tokens")
        return names

    # From a request to a plan

    def find(self, cache: PlanCache, request: PlanRequest) -> Executable | None:
        """The plan for this request; None when the graph can't be scheduled at all."""
        found = self._stretched(cache, request) if cache.elastic else None
        if found is None:
            found = cache.plans.get(self._plan_key(cache, request))
        if found is not None:
            self.stats.replays += 1
            return found
        with self.lock:
            return self._make(cache, request)

    def _stretched(self, cache: PlanCache, request: PlanRequest) -> Executable | None:
        """A plan made for another batch, with the cuts of this one."""
        with self.lock:
            graph = self._graph(cache, request)
            if graph is None:
                return None
            elastic = cache.elastic.get((request.graph, graph.batch_axes, self._own_key(cache, request)))
            ctx = request.context(cache, graph)
            if elastic is None or elastic.parts > ctx.max_parts:
                return None
            found: Executable | None = elastic.at(ctx.resized(elastic.plan), request.values)
            return found

    def padding(self, cache: PlanCache, request: PlanRequest) -> tuple[Padding, Batch] | None:
        """How the batch is to be padded; None if it stays as it is."""
        with self.lock:
            graph = self._graph(cache, request)
            if graph is None or not graph.batch_axes:
                return None
            rows = request.batch[1][next(iter(graph.batch_axes[0]))]
            padded = _user(cache.scheduler, "bucket", rows)
            if not validate.is_integer(padded) or not rows <= padded <= rows << 20:
                raise ScheduleError(
                    f"{type(cache.scheduler).__name__}.bucket({rows}) returned {shown(padded)}",
                    advice="return a number of rows that is no smaller than the batch, nor a million times as large",
                )
            if padded == rows:
                return None
            place = (request.graph, graph.batch_axes)
            if place not in cache.paddings:
                cache.paddings[place] = Padding(graph)
            return cache.paddings[place], Batch(request.values, rows, int(padded))

    def _make(self, cache: PlanCache, request: PlanRequest) -> Executable | None:
        key = self._plan_key(cache, request)
        if key in cache.plans:  # another thread made it meanwhile
            found: Executable = cache.plans[key]
            return found
        made = self._plan(cache, request)
        if made is None:
            return None
        self._meetings.agree(made.plan, made.graph)
        start = time.perf_counter()
        lowered = self._elastic(cache, request, made) if cache.is_elastic else None
        if lowered is None:
            lowered = self.lowerer.lower(made.plan, made.graph, request.values, made.functions)
        stats, operators = self.stats, self.lowerer.operators
        stats.lower_seconds += time.perf_counter() - start
        stats.plans += 1
        stats.operators_compiled, stats.operators_shared = operators.compiled, operators.shared
        cache.plans[self._plan_key(cache, request)] = lowered
        return lowered

    def _elastic(self, cache: PlanCache, request: PlanRequest, made: Planned) -> Executable | None:
        """A function that serves other sizes under the scheduler's key as well; None if there is none."""
        place = (request.graph, made.graph.batch_axes, self._own_key(cache, request))
        if place not in cache.patterns or place in cache.elastic:
            return None
        plan, values = made.plan, request.values
        known = (e for e in cache.elastic.values() if e.carries_out(plan, made.graph, made.functions))
        elastic = next((e for e in known if e.at(plan, values)), None)  # decided the same under another key
        elastic = elastic or self.lowerer.elastic(plan, made.graph, values, made.functions)
        if elastic is None:
            return None
        cache.elastic[place] = elastic
        found: Executable | None = elastic.at(plan, values)
        return found

    def _plan(self, cache: PlanCache, request: PlanRequest) -> Planned | None:
        """The scheduler's plan for this request, checked; None when the graph can't be scheduled at all."""
        graph = self._graph(cache, request)
        if graph is None:
            return None
        ctx = request.new_context(graph)
        start = time.perf_counter()
        stored = loaded = place = None
        if cache.has_key:
            place = (request.graph, graph.batch_axes, self._own_key(cache, request))
        pattern = cache.patterns.get(place)
        if pattern is not None and len(pattern[0].micro_batches) <= ctx.max_parts:
            plan, functions = ctx.resized(pattern[0]), pattern[1]
        else:
            # Made now: schedule() may change the scheduler.
            stored = _called(
                partial(StoredPlan, cache.scheduler, graph, request.sizes, ctx, request.facts),
                f"the scheduler {type(cache.scheduler).__name__}", "mend cache_key()",
            )  # fmt: skip
            loaded = None if cache.is_elastic else stored.load()  # which does not tell what else it would serve
            if loaded is not None:
                plan, functions = loaded
                self.stats.plans_loaded += 1
            else:
                plan, functions = self._schedule(cache.scheduler, ctx, request.graph.graph.partial)
                if place is not None and ctx.even_split is not None:
                    cache.patterns[place] = (plan, functions)
        checked_at = time.perf_counter()
        if self.check_plans:
            check(plan, graph, ctx.batch_size, ctx.facts.get("num_tokens") if len(plan.micro_batches) > 1 else None)
        self.stats.schedule_seconds += checked_at - start
        self.stats.check_seconds += time.perf_counter() - checked_at
        if stored is not None and loaded is None:
            self.stats.plans_stored += stored.store(plan, functions)
        if not cache.has_key:
            cache.note_read(request, ctx.facts.read)
        return Planned(plan=plan, graph=graph, functions=functions, values=request.batch[1])

    def _schedule(self, scheduler: OpSchedulerBase, ctx: ScheduleContext, part: bool) -> tuple[Plan, Mapping[str, Any]]:
        self.stats.scheduler_calls += 1
        try:
            result = _user(scheduler, "schedule", ctx)
        except SplitError as e:
            if ctx.can_split or not (part or ctx.phase == "backward"):
                raise
            # A part of a model that breaks the graph may well have no batch, and a backward pass nothing but gradients
            # of weights, as where all below the head is frozen: that is nobody's mistake.
            self.stats.plain_graphs += 1
            self.stats.plain_reasons.append(str(e))
            return ctx.whole(), {}
        if result is not None and not isinstance(result, Plan):
            raise ScheduleError(
                f"{type(scheduler).__name__}.schedule() returned {shown(result)}",
                advice="return nothing, ctx.sequential(), or a Plan",
            )
        if isinstance(result, Plan):
            return result, functions_of(result, {**registered(scheduler.functions), **ctx.functions})
        return ctx.finish(), ctx.functions

    def _graph(self, cache: PlanCache, request: PlanRequest) -> OpGraph | None:
        """The graph cut as the scheduler wants it; None if it can't be scheduled."""
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
                self.stats.plain_graphs += 1
                self.stats.plain_reasons.append(analyzed.plain or "")
                return None
            complete = not self.stats.graph_breaks and analyzed.graph.phase != "backward"
            cut = (batch_axes, cache.rules, complete)
            if cut not in analyzed.partitions:  # of other schedulers, which cut the same way
                analyzed.partitions[cut] = partition(analyzed.graph, found, cache.rules, complete=complete)
                self.stats.partitions += 1
            cache.graphs[place] = analyzed.partitions[cut]
            self.stats.partition_seconds += time.perf_counter() - start
        graph: OpGraph = cache.graphs[place]
        return graph

    def marked(self, lowered: Executable, row: bool = False) -> Executable:
        """The same plan for a recording; with `row`, its calls one after the other."""
        if (known := lowered.known_marked(row)) is not None:  # a tuner that compiles may hold the lock for long
            return known
        with self.lock:
            return lowered.marked(row)


def _user(scheduler: OpSchedulerBase, method: str, *args: Any) -> Any:
    """Calls a scheduler's method."""

    def call() -> Any:
        found = getattr(scheduler, method)(*args)
        return list(found) if method == "partition" and isinstance(found, Iterator) else found

    advice = f"mend {method}(), or the options that it was given"
    return _called(call, f"the scheduler {type(scheduler).__name__}", advice)


def _called(code: Callable[[], Any], name: str, advice: str) -> Any:
    """What the user's code returns; what it raises names the line."""
    try:
        return code()
    except DynaFlowError:
        raise
    except Exception as e:
        raise ScheduleError(f"{name} raised {type(e).__name__}: {e}", line=raised_at(e), advice=advice) from e


def _key_of(scheduler: OpSchedulerBase, ctx: ScheduleContext) -> Hashable:
    own: Hashable = hashable(_user(scheduler, "key", ctx), f"what {type(scheduler).__name__}.key() returned")
    return own


def rules_of(scheduler: OpSchedulerBase) -> tuple[Any, ...]:
    """Where a scheduler cuts graphs."""
    found = _user(scheduler, "partition")
    rules = tuple([found] if (listed := validate.members(found)) is None else listed)
    for rule in rules:
        if not isinstance(rule, (SplitModule, SplitFunc)):
            raise PartitionError(
                f"{type(scheduler).__name__}.partition() returned {shown(rule)}",
                advice="return a list of SplitModule and SplitFunc; an empty one, if there is nothing to cut",
            )
    return rules
