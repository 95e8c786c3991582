"""A captured graph as Dynamo calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from dynaflow import _torch, recording
from dynaflow.capture.graph import CapturedGraph
from dynaflow.capture.ops import OpGraph
from dynaflow.capture.probe import Contradiction, probe
from dynaflow.errors import DynaFlowError, PlanError
from dynaflow.run.streams import capturing
from dynaflow.verify import verified_run

if TYPE_CHECKING:
    from dynaflow.decided import Situation
    from dynaflow.engine import Engine
    from dynaflow.lower.lower import Lowered
    from dynaflow.trials import Trials

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

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[n] for n in self._numbers])

    def probe(self, spaces: Spaces) -> Any:
        """The facts of the graph's nodes; with no batch when none can be followed; None when all fails."""
        if spaces not in self._probes:
            try:
                self._probes[spaces] = probe(self.graph, spaces)
            except Contradiction as e:
                self.plain = None if spaces else str(e)
                self._probes[spaces] = self.probe(()) if spaces else None
        return self._probes[spaces]

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
        situation = engine.situation(self, args)
        if situation.schedules.has_buckets and (padding := engine.padding(self, situation, args)) is not None:
            how, rows, padded = padding
            how.pad(args, rows, padded)
            return how.results(self._run(engine, situation._replace(sizes=self.sizes(args)), args), rows, padded)
        return self._run(engine, situation, args)

    def _run(self, engine: Engine, situation: Situation, args: list[Any]) -> Any:
        lowered = engine.find(self, situation, args)
        if engine.local.plan_only:
            if lowered is None:
                raise PlanError(f"the graph runs plainly: {self.plain}", advice="see stats.plain_reasons")
            raise PlanReady(lowered, engine.note(self, args), engine.trials(self, args))
        recorder = recording.now
        if lowered is None:
            if recorder is not None:
                recorder.missed(f"the graph runs plainly: {self.plain}")
            return engine.operators.as_it_is(self.graph.gm)(args)
        stats = engine.stats
        stats.runs += 1
        stats.sequential_runs += lowered.plan.sequential
        stats.joined_bytes = lowered.joined_bytes
        if engine.verify and not lowered.verified:
            sizes = {**self.graph.hints, **self.graph.symbol_values(args)}
            result = verified_run(lowered, args, lambda: engine.lowerer.whole(self.graph, sizes))
            lowered.verified = True
            stats.verified += 1
            if recorder is not None:
                recorder.missed("it was compared with the plain model")
            return result
        if recorder is None:
            return lowered(args)
        marked = engine.marked(lowered)
        if marked.marks is not None and marked.marks.cuda and capturing():
            recorder.missed("it was captured in a CUDA graph by the caller")
            return lowered(args)
        return recorder.run(marked, args, engine)


class Raiser:
    """Stands for a graph whose capture failed with an error of the user's."""

    def __init__(self, error: DynaFlowError) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error.with_traceback(None)
