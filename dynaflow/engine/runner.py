"""A captured graph as Dynamo calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.input_aliasing import Overlap, Sharing, written_inputs
from dynaflow.capture.batch_analysis.probe import Contradiction, Unschedulable, probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.engine import recorder
from dynaflow.engine.verify import verified_run
from dynaflow.errors import NOT_FAILURES, DynaFlowError, PlanError, fall_back
from dynaflow.partition.op_graph import OpGraph
from dynaflow.runtime.cuda_lanes import capturing
from dynaflow.schedule.split import request_count

if TYPE_CHECKING:
    from dynaflow.engine.engine import Engine
    from dynaflow.engine.plan_cache import Situation
    from dynaflow.engine.trials import Trials
    from dynaflow.lower.executable import Lowered

Spaces = tuple[frozenset[sympy.Symbol], ...]


class PlanReady(BaseException):
    """Ends a call that was made for its plan alone. No error: it must pass through `except Exception`."""

    def __init__(self, lowered: Lowered, note: Any, trials: Trials) -> None:
        self.lowered, self.plan, self.graph = lowered, lowered.plan, lowered.graph
        self.note, self.trials = note, trials


class GraphRunner:
    """One captured graph, as Dynamo calls it."""

    def __init__(self, engine: Engine, graph: CapturedGraph) -> None:
        # Dynamo keeps runners for as long as the model's code lives: a compiled object's engine must not be.
        self._engine: Callable[[], Engine | None] = weakref.ref(engine) if engine.owned else lambda: engine
        self.graph = graph
        self.plain: str | None = None
        """Why the graph runs plainly, if it does."""
        idle = graph.idle
        self._numbers = tuple(n for n, i in enumerate(graph.inputs) if i.shape is None and n not in idle)
        self._probes: dict[Spaces, Any] = {}
        self.partitions: dict[Any, OpGraph] = {}
        """By the batch's symbols and a scheduler's rules."""
        self._sharing = Sharing() if graph.phase == "inference" else None  # AOTAutograd's passes are looked at together
        self._others: dict[tuple[tuple[int, int], ...] | None, GraphRunner] = {}
        """For calls whose inputs share memory: by the positions of those in step, or None where some are not."""

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[n] for n in self._numbers])

    def probe(self, spaces: Spaces) -> Any:
        """The facts of the graph's nodes; with no batch when none can be followed; None when all fails."""
        if spaces not in self._probes:
            try:
                self._probes[spaces] = probe(self.graph, spaces)
            except Unschedulable as e:
                self.plain = str(e)
                self._probes[spaces] = None
            except Contradiction as e:
                self.plain = None if spaces else str(e)
                self._probes[spaces] = self.probe(()) if spaces else None
        return self._probes[spaces]

    def spaces(self, args: Sequence[Any], facts: Mapping[str, Any]) -> tuple[Spaces, dict[sympy.Symbol, int]]:
        """The symbols that stand for the batch of a call, and what all symbols are worth in it."""
        values = self.graph.symbol_values(args)
        return self.graph.batch_spaces(values, request_count(facts.get("num_tokens"))), values

    def __call__(self, *args: Any) -> Any:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> Any:
        """As AOTAutograd calls it. From here on there is one list, which whoever uses the arguments may empty."""
        engine = self._engine()
        assert engine is not None, "called by a compiled model that is gone"
        for i in self.graph.shards:
            args[i] = _torch.shard_of(args[i])
        numbers = self.graph.numbers
        if not numbers.positions:
            return self._results(engine, args)
        made = numbers.made(args)
        return numbers.put_back(made, self._results(engine, args))

    def _results(self, engine: Engine, args: list[Any]) -> Any:
        if self.plain is not None:
            return self._unscheduled(engine, args)
        try:
            runner = self if self._sharing is None else self._for_memory_of(args, engine)
            situation = engine.situation(runner, args)
            padding = engine.padding(runner, situation, args) if situation.schedules.has_buckets else None
        except NOT_FAILURES:
            raise
        except Exception as e:
            self.run_plainly(fall_back(e, engine.name))
            return self._unscheduled(engine, args)
        if padding is None:
            return runner._run(engine, situation, args)
        how, batch = padding
        run = lambda grown: runner._run(engine, situation._replace(sizes=runner.sizes(grown)), grown)  # noqa: E731
        return how.run(run, args, batch)

    def _for_memory_of(self, args: list[Any], engine: Engine) -> GraphRunner:
        """The runner for inputs that share memory as these do: this one, unless one is written that others see."""
        sharing = self._known_sharing()
        found = sharing.find(args) if sharing is not None else ()
        if sharing is None or not found:
            return self
        if sharing.written is None:
            with engine.lock:
                if self.probe(self.spaces(args, engine.facts())[0]) is None:
                    self.run_plainly(self.plain or "")
            return self._for_memory_of(args, engine)
        clash, pairs = self._clash(found, args, engine), tuple((overlap.one, overlap.other) for overlap in found)
        with engine.lock:
            if (key := None if clash else pairs) not in self._others:
                other = self._others[key] = GraphRunner(engine, self.graph.sharing(pairs))
                other._sharing = None
                if clash:
                    other.run_plainly(clash.told([given.name for given in self.graph.inputs]))
            return self._others[key]

    def _clash(self, found: tuple[Overlap, ...], args: Sequence[Any], engine: Engine) -> Overlap | None:
        """The first overlap that can't be split."""
        if self.graph.grad:  # autograd sees that a slice was written by the version of all of it
            return found[0]
        with engine.lock:
            spaces, values = self.spaces(args, engine.facts())
            probe = self.probe(spaces)
        return next((o for o in found if probe is None or not o.in_step(self.graph, probe, values)), None)

    def _known_sharing(self) -> Sharing | None:
        """What looks at the arguments; None once it is known that the graph writes none of them."""
        if self._sharing is not None and self._sharing.written is None:
            known = next((p for p in self._probes.values() if p is not None), None)
            if self.plain or known is not None:
                written = written_inputs(self.graph, known) if known is not None else frozenset()
                self._sharing = Sharing(written) if written else None
        return self._sharing

    def run_plainly(self, why: str) -> None:
        """From now on, the graph as it is, whatever its inputs share."""
        engine = self._engine()
        assert engine is not None, "called by a compiled model that is gone"
        self.plain, self._sharing = why, None
        engine.stats.plain_graphs += 1
        engine.stats.plain_reasons.append(why)

    def _run(self, engine: Engine, situation: Situation, args: list[Any]) -> Any:
        try:
            lowered = engine.find(self, situation, args)
        except NOT_FAILURES:
            raise
        except Exception as e:  # nothing of the graph has run so far
            self.run_plainly(fall_back(e, engine.name))
            lowered = None
        if lowered is None:
            return self._unscheduled(engine, args)
        if engine.local.plan_only:
            raise PlanReady(lowered, engine.note(self, args), engine.trials(self, args))
        active, stats = recorder.now, engine.stats
        stats.runs += 1
        stats.sequential_runs += lowered.plan.sequential
        stats.joined_bytes = lowered.joined_bytes
        if engine.verify and not lowered.verified:
            sizes = {**self.graph.hints, **self.graph.symbol_values(args)}
            result = verified_run(lowered, args, lambda: engine.lowerer.whole(self.graph, sizes))
            lowered.verified = True
            stats.verified += 1
            if active is not None:
                active.missed("it was compared with the plain model")
            return result
        if active is None:
            return lowered(args)
        marked = engine.marked(lowered)
        if marked.marks is not None and marked.marks.cuda and capturing():
            active.missed("it was captured in a CUDA graph by the caller")
            return lowered(args)
        return active.run(marked, args, engine)

    def _unscheduled(self, engine: Engine, args: list[Any]) -> Any:
        why = f"the graph runs plainly: {self.plain}"
        if engine.local.plan_only:
            raise PlanError(why, advice="see stats.plain_reasons")
        if recorder.now is not None:
            recorder.now.missed(why)
        return engine.operators.as_it_is(self.graph.gm)(args)


class PlainRunner:
    """A graph that runs as it was captured, as Dynamo calls it."""

    def __init__(self, engine: Engine, gm: fx.GraphModule, why: str) -> None:
        self._engine = weakref.ref(engine)
        self._gm, self._why = gm, f"the graph runs plainly: {why}"

    def __call__(self, *args: Any) -> Any:
        engine = self._engine()
        if engine is not None and engine.local.plan_only:
            raise PlanError(self._why, advice="see stats.plain_reasons")
        if recorder.now is not None:
            recorder.now.missed(self._why)
        return self._gm(*args)


class Raiser:
    """Stands for a graph whose capture failed with an error of the user's."""

    def __init__(self, error: DynaFlowError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error.with_traceback(None)
