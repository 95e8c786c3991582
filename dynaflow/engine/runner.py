"""Runners: captured graphs as Dynamo calls them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.input_aliasing import InputAliasing, Overlap, written_inputs
from dynaflow.engine import recorder
from dynaflow.engine.analyzed_graph import AnalyzedGraph
from dynaflow.engine.plan_cache import PlanCache, PlanRequest, ReadyPlans
from dynaflow.engine.planner import Planner
from dynaflow.engine.verify import verified_run
from dynaflow.errors import NOT_FAILURES, DynaFlowError, PlanError, fall_back, model_is_gone
from dynaflow.lower.executable import Executable
from dynaflow.runtime.cuda_lanes import capturing


def _alive(planner: Planner | None) -> Planner:
    if planner is None:
        raise model_is_gone()
    return planner


class GraphRunner:
    """One captured graph, as Dynamo calls it."""

    def __init__(self, planner: Planner, graph: AnalyzedGraph, verify: bool, owner: Any = None) -> None:
        """`owner` is referenced, and so lives as long as the runner."""
        self._planner, self._owner, self._verify = weakref.ref(planner), owner, verify
        self.graph = graph
        captured = graph.graph
        self._sharing = InputAliasing() if captured.phase == "inference" else None
        """Finds inputs that share memory; None if the graph writes none. For AOTAutograd's passes the engine does
        that, for both together."""
        self._others: dict[tuple[tuple[int, int], ...] | None, GraphRunner] = {}
        """For calls whose inputs share memory: by the positions of those in step, or None if some are not."""
        self._ready: Callable[[], ReadyPlans | None] = type(None)
        """A weak reference to the fast path, owned by the planner: Dynamo's code, and so the runner, may outlive it."""
        self._changes_arguments = bool(captured.shards or captured.host_scalars.positions)

    def __call__(self, *args: Any) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> Any:
        """As AOTAutograd calls it. From here on there is one list of arguments, which a callee may empty."""
        planner, ready = self._planner(), self._ready()
        if planner is not None and ready is not None and ready.epoch is planner.epoch:
            local, facts, sharing = planner.local, planner.own_facts, self._sharing
            if facts is None or local.facts:
                facts = planner.facts()
            lowered = ready.find(tuple(map(args.__getitem__, self.graph.size_positions)), facts)
            quiet = recorder.now is None and not local.plan_only
            if lowered is not None and quiet and (sharing is None or not sharing.find(args)):
                stats = planner.stats
                stats.replays += 1
                stats.runs += 1
                stats.sequential_runs += lowered.sequential
                stats.joined_bytes = lowered.joined_bytes
                try:
                    return lowered.entry.call(args)
                except Exception as e:
                    lowered.explain(e)
                    raise
        return self._planned(args)

    def _planned(self, args: list[Any]) -> Any:
        """The slow path: finds a plan, or makes one."""
        planner = _alive(self._planner())
        if not self._changes_arguments:
            return self._results(planner, args)
        captured = self.graph.graph
        for i in captured.shards:
            args[i] = _torch.shard_of(args[i])
        numbers = captured.host_scalars
        if not numbers.positions:
            return self._results(planner, args)
        made = numbers.made(args)
        return numbers.put_back(made, self._results(planner, args))

    def _results(self, planner: Planner, args: list[Any]) -> Any:
        if self.graph.plain is not None:
            return self._unscheduled(planner, args)
        epoch = planner.epoch
        try:
            runner = self.for_memory_of(args, planner)
            request = planner.request(runner.graph, args)
            cache = planner.decider(request)
            padding = planner.padding(cache, request) if cache.pads else None
        except NOT_FAILURES:
            raise
        except Exception as e:
            self.run_plainly(fall_back(e, planner.name))
            return self._unscheduled(planner, args)
        if padding is None:
            return runner._run(planner, cache, request, epoch)
        how, batch = padding
        return how.run(lambda grown: runner._run(planner, cache, request.with_args(grown), None), args, batch)

    def _run(self, planner: Planner, cache: PlanCache, request: PlanRequest, epoch: object) -> Any:
        """`epoch`: the planner's, before the lookup; None if the arguments were padded."""
        args: list[Any] = request.args  # type: ignore[assignment]
        try:
            lowered = planner.find(cache, request)
        except NOT_FAILURES:
            raise
        except Exception as e:  # nothing of the graph has run yet
            self.run_plainly(fall_back(e, planner.name))
            lowered = None
        if lowered is None:
            return self._unscheduled(planner, args)
        if planner.local.plan_only:
            raise planner.ready(request, lowered)
        active, stats = recorder.now, planner.stats
        stats.runs += 1
        stats.sequential_runs += lowered.sequential
        stats.joined_bytes = lowered.joined_bytes
        if self._verify and lowered not in planner.verified:
            captured, sizes = self.graph.graph, request.values
            result = verified_run(lowered, args, lambda: planner.lowerer.whole(captured, sizes))
            planner.verified.add(lowered)
            stats.verified += 1
            if active is not None:
                active.missed("it was compared with the plain model")
            return result
        if active is None:
            if epoch is not None and not (cache.pads or cache.elastic or self._changes_arguments):
                self._remember(planner, request, epoch, lowered)
            return lowered(args)
        marked = planner.marked(lowered)
        if marked.marks is not None and marked.marks.cuda and capturing():
            active.missed("it was captured in a CUDA graph by the caller")
            return lowered(args)
        return active.run(marked, args, planner)

    def _remember(self, planner: Planner, request: PlanRequest, epoch: object, lowered: Executable) -> None:
        """Adds the plan to the fast path."""
        self._sharing = self._known_sharing()
        plans = self._ready()
        if plans is None or plans.epoch is not epoch:
            plans = planner.ready_plans[self] = ReadyPlans(epoch)
            self._ready = weakref.ref(plans)
        plans.remember(request, planner.facts_read(request), lowered)

    def for_memory_of(self, args: list[Any], planner: Planner) -> GraphRunner:
        """The runner for inputs that share memory as these do: this one, unless one is written that others see."""
        sharing = self._known_sharing()
        found = sharing.find(args) if sharing is not None else ()
        if sharing is None or not found:
            return self
        if sharing.written is None:
            with planner.lock:
                if self.graph.probe(self.graph.batch_axes(args, planner.facts())[0]) is None:
                    self.run_plainly(self.graph.plain or "")
            return self.for_memory_of(args, planner)
        captured = self.graph.graph
        clash, pairs = self._clash(found, args, planner), tuple((overlap.one, overlap.other) for overlap in found)
        with planner.lock:
            if (key := None if clash else pairs) not in self._others:
                graph = AnalyzedGraph(captured.with_aliased_inputs(pairs))
                other = self._others[key] = GraphRunner(planner, graph, self._verify, self._owner)
                other._sharing = None
                if clash:
                    other.run_plainly(clash.describe([given.name for given in captured.inputs]))
            return self._others[key]

    def _clash(self, found: tuple[Overlap, ...], args: Sequence[Any], planner: Planner) -> Overlap | None:
        """The first overlap that prevents a split."""
        captured = self.graph.graph
        if captured.grad:  # a write to a slice bumps the version counter of the whole tensor
            return found[0]
        with planner.lock:
            batch_axes, values = self.graph.batch_axes(args, planner.facts())
            probe = self.graph.probe(batch_axes)
        return next((o for o in found if probe is None or not o.in_step(captured, probe, values)), None)

    def _known_sharing(self) -> InputAliasing | None:
        """What checks the arguments for shared memory; None once it is known that the graph writes none of them."""
        if self._sharing is not None and self._sharing.written is None:
            known = self.graph.known_probe
            if self.graph.plain or known is not None:
                written = written_inputs(self.graph.graph, known) if known is not None else frozenset()
                self._sharing = InputAliasing(written) if written else None
        return self._sharing

    def run_plainly(self, why: str) -> None:
        """Runs the graph unscheduled from now on."""
        planner = _alive(self._planner())
        self.graph.plain, self._sharing, self._ready = why, None, type(None)
        planner.stats.plain_graphs += 1
        planner.stats.plain_reasons.append(why)

    def _unscheduled(self, planner: Planner, args: list[Any]) -> Any:
        why = f"the graph runs plainly: {self.graph.plain}"
        if planner.local.plan_only:
            raise PlanError(why, advice="see stats.plain_reasons")
        if recorder.now is not None:
            recorder.now.missed(why)
        return planner.lowerer.operators.as_it_is(self.graph.graph.gm)(args)


class PlainRunner:
    """A graph that runs unscheduled, as captured."""

    def __init__(self, planner: Planner, gm: fx.GraphModule, why: str) -> None:
        self._planner = weakref.ref(planner)
        self._gm, self._why = gm, f"the graph runs plainly: {why}"

    def __call__(self, *args: Any) -> Any:
        planner = self._planner()
        if planner is not None and planner.local.plan_only:
            raise PlanError(self._why, advice="see stats.plain_reasons")
        if recorder.now is not None:
            recorder.now.missed(self._why)
        return self._gm(*args)


class DeferredError:
    """Raises an error of the user in the call: Dynamo would wrap one that is raised during capture."""

    def __init__(self, error: DynaFlowError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error.with_traceback(None)
