"""Finds the fastest schedule for a situation: simulate all, measure the best few, and never lose to sequence.

1. Each candidate plans; those that plan a sequence, or what another has planned already, are out.
2. The simulator says how long each would take; operators are timed for it if there are more plans than are measured.
3. The best few and sequence run side by side, in rounds that alternate, on the arguments at hand.
4. The fastest wins if it beats sequence by more than the noise; else sequence does.
5. The decision is kept on disk; a new process runs the winner beside sequence once more before it believes it.

Ranks that meet in collectives make the same calls in the same order, and go by the slowest rank's times.
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
from dynaflow.core.plan_text import resource_in_words
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
"""A winner takes at most this part of sequence's time, and nine rounds of ten are faster than sequence."""
TRUSTED_GAIN = 0.93
"""The same for a prediction that nothing was measured for."""
store = DiskCache("decisions")
_numbers = itertools.count()

Say = Callable[[str], None]
Named = tuple[str, OpSchedulerBase]
Among = Sequence[Named] | Callable[[], Iterable[Named]]
"""Schedulers to choose from; or what makes them, one by one while there is time."""


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
    """For one situation: `ctx` is of the uncut graph, with trials."""

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
            why = "what some operators do can't be predicted, and nothing is to be measured"
            return self.sequence, Decision(chosen=SEQUENCE, why=why, tried=(Attempt(name=SEQUENCE),))
        if self.measures:
            self.trials.lowered(self.sequence)  # which is compiled in any case: no part of the time for tuning
            self.start = time.perf_counter()
            self.end = self.start + self.seconds
        found = list(self._planned())
        # Uncut, it is timed as a whole; cut, layers that are alike are looked at once, which is sooner done.
        graph = self._uncut() if self.measures or not found else found[0].graph
        first = _Candidate(name=SEQUENCE, scheduler=self.sequence, graph=graph, tried=Attempt(name=SEQUENCE))
        # What is measured in any case needs no good prediction; and ranks' clocks differ, and with them what they find.
        if self.measures and len(found) > self.most and not self.ranks:
            with contextlib.suppress(NoRoom):
                self.time_operators([first, *found])
        first = self._simulated(first)
        found = sorted((self._simulated(c) for c in found), key=lambda c: c.predicted)
        chosen, why = first, "nothing else to do"
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
            store.put(self._key(), decision.to_json())  # else there may be time, or room, in the next process
        return chosen.scheduler, decision

    # 1. plan

    def _candidates(self) -> Iterable[Named]:
        return self.among() if callable(self.among) else self.among

    def _planned(self) -> Iterator[_Candidate]:
        seen: set[Any] = set()
        for name, scheduler in self._candidates():
            if not self.ranks and self.measures and time.perf_counter() > self.end:
                return
            if not self.measures and "solver" in re.split(r"\W", name):  # for seconds, and in each situation
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
        """What the model writes, kept once for all runs. Raises NoRoom."""
        return Snapshot(self._uncut(), self.trials.args)

    # 2. simulate

    def time_operators(self, found: list[_Candidate]) -> None:
        """Operators that nobody has timed yet. Takes at most a third of the time that is left."""
        end = time.perf_counter() + (self.end - time.perf_counter()) / 3
        for candidate in found:
            made = self.trials.plan(candidate.scheduler)
            if time.perf_counter() < end and self.profiler.missing(made.plan, made.graph):
                self.say(f"timing the operators of {candidate.name}")
                try:
                    self.profiler.measure(made, self.trials, self.snapshot.restore)
                except Exception as e:  # one that does not run by itself: the cost model knows something of it
                    self.say(f"{candidate.name}: {e}")

    def _simulated(self, candidate: _Candidate) -> _Candidate:
        plan = self.trials.plan(candidate.scheduler).plan
        device = device_for(self.ctx.device).with_ranks(max(len(self.ranks), 1))
        costs = Costs(candidate.graph, device, self.profiler.profile, sizes=self.ctx.sizes)
        try:
            run = simulate(plan, candidate.graph, costs, device, cudagraph=self.trials.cudagraph)
        except Exception as e:  # a prediction is a help, and never a duty
            candidate.tried = replace(candidate.tried, problem=f"can't be simulated: {_first_line(e)}")
            return candidate
        limit = resource_in_words(run.limit, run.device)
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
            except Exception as e:  # its plan may be one that does not compile, or fit: then it is no candidate
                candidate.tried = replace(candidate.tried, problem=f"{type(e).__name__}: {_first_line(e)}")
                continue
            candidate.tried = replace(candidate.tried, measured=mine)
            first.tried = replace(first.tried, measured=baseline)
            why = "measured: sequence is as fast as anything" if best is first else why
            ratio = best.tried.measured.ratio if best.tried.measured and best is not first else GAIN
            if mine.ratio < ratio and mine.high < 1:
                best, why = candidate, "measured"
        return best, why

    def _was_timed(self, candidate: _Candidate) -> bool:
        """Operator by operator: so most of it is compiled."""
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
        """All ranks go by the same times, or they would choose differently."""
        if len(self.ranks) < 2:
            return found
        prefix = f"dynaflow/tune/{self.number}/{self.exchanges}"
        self.exchanges += 1
        heard = _torch.exchange(prefix, _torch.rank(), self.ranks, json.dumps(found), PATIENCE)
        everyone = [json.loads(text) for text in heard.values()]
        return [[max(times) for times in zip(*(them[i] for them in everyone), strict=True)] for i in range(len(found))]

    # 5. keep

    def _known(self) -> tuple[OpSchedulerBase, Decision] | None:
        """What an earlier process decided, if it still holds."""
        text = store.get(self._key())
        if text is None or self.ranks:  # one rank might find what another does not
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
