"""Finds the fastest schedule for a situation: simulates all, measures the best few, and never loses to the sequence.

1. Each candidate plans; those that plan a sequence, or the same as another one, are dropped.
2. The simulator predicts each plan's time; operators are timed for it if there are more plans than will be measured.
3. The best few and the sequence run in alternating rounds on the given arguments.
4. The fastest wins if it beats the sequence by more than the noise; otherwise the sequence does.
5. The decision is stored on disk; a new process measures the winner against the sequence once more.

Ranks with common collectives make the same calls in the same order, and use the slowest rank's times.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.op_registry import has_opaque_ops
from dynaflow.core.device import device_for
from dynaflow.core.disk_cache import DiskCache
from dynaflow.core.plan_text import resource_label
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulate import simulate
from dynaflow.engine.snapshot import NoRoom, Snapshot
from dynaflow.errors import DynaFlowError
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase, Sequential
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.rank_consensus import PATIENCE
from dynaflow.tune.decision import SEQUENCE, Attempt, Decision
from dynaflow.tune.measure import ROUNDS, Timing, side_by_side, timings
from dynaflow.tune.profile import Profiler

GAIN = 0.99
"""A winner takes at most this fraction of the sequence's time, and is faster in nine rounds of ten."""
TRUSTED_GAIN = 0.93
"""The same for a prediction without a measurement."""
store = DiskCache("decisions")
_numbers = itertools.count()

Say = Callable[[str], None]
Named = tuple[str, OpSchedulerBase]
Among = Sequence[Named] | Callable[[], Iterable[Named]]
"""Schedulers to choose from, or a function that makes them one by one while there is time."""


@dataclass(slots=True, kw_only=True)
class _Candidate:
    name: str
    scheduler: OpSchedulerBase
    graph: OpGraph
    tried: Attempt

    @property
    def predicted(self) -> float:
        return self.tried.predicted if self.tried.predicted is not None else float("inf")


class Tuner:
    """Tunes one situation. `ctx` is that of the uncut graph, and has trials."""

    def __init__(
        self,
        ctx: ScheduleContext,
        *,
        seconds: float,
        most: int,
        among: Among,
        say: Say = lambda text: None,
    ) -> None:
        assert ctx.trials is not None
        self.ctx, self.trials, self.most, self.say = ctx, ctx.trials, most, say
        self.among = among
        self.start = time.perf_counter()
        self.end = self.start + seconds
        self.seconds, self.measures = seconds, seconds > 0
        self.sequence = Sequential()
        groups = sorted({g for op in ctx.ops for g in op.groups})
        self.ranks = _torch.ranks_of(groups) if groups else ()
        self.exchanges = 0
        self.number = next(_numbers) if self.ranks else 0  # ranks tune the same situations in the same order
        self.profiler = Profiler(ctx.device)

    def decide(self) -> tuple[OpSchedulerBase, Decision]:
        known = self._known()
        if known is not None:
            return known
        if not self.measures and not self.ranks and has_opaque_ops(self.ctx.graph.graph.gm):
            why = "the cost of some operators can't be predicted, and seconds=0 allows no measurement"
            return self.sequence, Decision(chosen=SEQUENCE, why=why, tried=(Attempt(name=SEQUENCE),))
        if self.measures:
            self.trials.lowered(self.sequence)  # compiled in any case: it doesn't count as tuning
            self.start = time.perf_counter()
            self.end = self.start + self.seconds
        found = list(self._planned())
        # Uncut, it is timed as a whole; cut, equal layers are simulated once, which is faster.
        graph = self._uncut() if self.measures or not found else found[0].graph
        first = _Candidate(name=SEQUENCE, scheduler=self.sequence, graph=graph, tried=Attempt(name=SEQUENCE))
        # Plans that are measured anyway need no good prediction; and profiles would differ between ranks.
        if self.measures and len(found) > self.most and not self.ranks:
            with contextlib.suppress(NoRoom):
                self.time_operators([first, *found])
        first = self._simulated(first)
        found = sorted((self._simulated(c) for c in found), key=lambda c: c.predicted)
        chosen, why = first, "no other schedule"
        if found and self.measures:
            chosen, why = self._measured(first, found)
        elif found:
            best = found[0]
            wins = best.predicted <= TRUSTED_GAIN * first.predicted
            chosen, why = (best, "predicted, not measured") if wins else (first, "no prediction is clearly better")
        decision = Decision(
            chosen=chosen.name,
            why=why,
            tried=tuple(c.tried for c in (first, *found)),
            seconds=time.perf_counter() - self.start,
        )
        if self.measures and (not found or first.tried.measured or all(c.tried.problem for c in found[: self.most])):
            store.put(self._key(), decision.to_json())  # otherwise the next process may have the time, or the memory
        return chosen.scheduler, decision

    # 1. plan

    def _candidates(self) -> Iterable[Named]:
        return self.among() if callable(self.among) else self.among

    def _planned(self) -> Iterator[_Candidate]:
        seen: set[Any] = set()
        for name, scheduler in self._candidates():
            if not self.ranks and self.measures and time.perf_counter() > self.end:
                return
            if not self.measures and "solver" in re.split(r"\W", name):  # it takes seconds in each situation
                continue
            try:
                made = self.trials.plan(scheduler)
            except DynaFlowError as e:
                self.say(f"{name}: {e}")
                continue
            if made.plan.sequential or made.plan in seen:
                continue
            seen.add(made.plan)
            self.say(f"planned {name}")
            yield _Candidate(name=name, scheduler=scheduler, graph=made.graph, tried=Attempt(name=name))

    def _uncut(self) -> OpGraph:
        graph: OpGraph = self.trials.plan(self.sequence).graph
        return graph

    @cached_property
    def snapshot(self) -> Snapshot:
        """What the model writes, copied once for all runs. Raises NoRoom."""
        return Snapshot(self._uncut(), self.trials.args)

    # 2. simulate

    def time_operators(self, found: list[_Candidate]) -> None:
        """Times the operators that were never timed. Takes at most a third of the remaining time."""
        end = time.perf_counter() + (self.end - time.perf_counter()) / 3
        for candidate in found:
            made = self.trials.plan(candidate.scheduler)
            if time.perf_counter() < end and self.profiler.missing(made.plan, made.graph):
                self.say(f"timing the operators of {candidate.name}")
                try:
                    self.profiler.measure(made, self.trials, self.snapshot.restore)
                except Exception as e:  # an operator that doesn't run by itself: the cost model predicts it
                    self.say(f"{candidate.name}: {e}")

    def _simulated(self, candidate: _Candidate) -> _Candidate:
        plan = self.trials.plan(candidate.scheduler).plan
        device = device_for(self.ctx.device).with_ranks(max(len(self.ranks), 1))
        costs = Costs(candidate.graph, device, self.profiler.profile, sizes=self.ctx.sizes)
        try:
            run = simulate(plan, candidate.graph, costs, device, cudagraph=self.trials.cudagraph)
        except Exception as e:  # best effort
            candidate.tried = replace(candidate.tried, problem=f"can't be simulated: {_first_line(e)}")
            return candidate
        limit = resource_label(run.limit, run.device)
        candidate.tried = replace(candidate.tried, predicted=run.seconds, limit=limit)
        return candidate

    # 3. measure

    def _measured(self, first: _Candidate, found: list[_Candidate]) -> tuple[_Candidate, str]:
        try:
            _ = self.snapshot
        except NoRoom as e:
            return first, str(e)
        best, why = first, "there was no time to measure anything"
        for candidate in found[: self.most]:
            late = not self.ranks and time.perf_counter() > self.end
            if late and (first.tried.measured or not self._was_timed(candidate)):
                break
            self.say(f"measuring {candidate.name}")
            try:
                baseline, mine = self._race(first.scheduler, candidate.scheduler)
            except Exception as e:  # its plan may not compile, or not fit in memory
                candidate.tried = replace(candidate.tried, problem=f"{type(e).__name__}: {_first_line(e)}")
                continue
            candidate.tried = replace(candidate.tried, measured=mine)
            first.tried = replace(first.tried, measured=baseline)
            why = "measured: nothing is faster than the sequence" if best is first else why
            ratio = best.tried.measured.ratio if best.tried.measured and best is not first else GAIN
            if mine.ratio < ratio and mine.high < 1:
                best, why = candidate, "measured"
        return best, why

    def _was_timed(self, candidate: _Candidate) -> bool:
        """Whether its operators were timed: then most of it is compiled."""
        made = self.trials.plan(candidate.scheduler)
        return not self.profiler.missing(made.plan, made.graph)

    def _race(self, *schedulers: OpSchedulerBase) -> list[Timing]:
        plans = [self.trials.lowered(scheduler) for scheduler in schedulers]
        left = max(0.2, self.end - time.perf_counter()) / (self.most + 1)
        found = side_by_side(
            [lambda p=p: p(list(self.trials.args)) for p in plans],  # type: ignore[misc]
            self.snapshot.restore,
            seconds=min(left, 2.0),
            cuda=self.ctx.device.type == "cuda",
            rounds=ROUNDS if self.ranks else None,
        )
        return timings(self._slowest(found))

    def _slowest(self, found: list[list[float]]) -> list[list[float]]:
        """Returns the slowest rank's times, so that all ranks choose the same."""
        if len(self.ranks) < 2:
            return found
        prefix = f"dynaflow/tune/{self.number}/{self.exchanges}"
        self.exchanges += 1
        received = _torch.exchange_texts(prefix, _torch.rank(), self.ranks, json.dumps(found), PATIENCE)
        everyone = [json.loads(text) for text in received.values()]
        return [[max(times) for times in zip(*(one[i] for one in everyone), strict=True)] for i in range(len(found))]

    # 5. store

    def _known(self) -> tuple[OpSchedulerBase, Decision] | None:
        """What an earlier process decided, if it is still true."""
        text = store.get(self._key())
        if text is None or self.ranks:  # one rank might find it and another one not
            return None
        try:
            decision = Decision.from_json(text)
        except (ValueError, RecursionError):
            return None
        if decision.chosen == SEQUENCE:
            return self.sequence, decision
        scheduler = next((s for n, s in self._candidates() if n == decision.chosen), None)
        if scheduler is None:
            return None
        if not self.measures:
            return scheduler, decision
        try:
            now = self._race(self.sequence, scheduler)[1]
        except Exception:
            return None
        return (scheduler, decision) if now.ratio < GAIN else None

    def _key(self) -> str:
        ctx = self.ctx
        names = "all" if callable(self.among) else [name for name, _ in self.among]
        card = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else ""
        parts = [ctx.graph.identity, sorted(ctx.inputs.items()), str(ctx.device), card, ctx.sms, names,
                 self.trials.cudagraph, torch.__version__, str(ctx.facts.get("num_tokens"))]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:80]
