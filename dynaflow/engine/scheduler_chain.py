"""Which scheduler plans a request: `choose` may return another scheduler, at once or in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from dynaflow.engine.plan_cache import Choice, PlanCache, PlanRequest
from dynaflow.engine.plan_maker import PlanMaker
from dynaflow.engine.scheduler_trials import SchedulerTrials
from dynaflow.engine.snapshot import NoRoom, copied
from dynaflow.engine.user_code import call_method
from dynaflow.errors import ScheduleError
from dynaflow.schedule.base import checked_scheduler
from dynaflow.schedule.context import ScheduleContext

MAX_HANDOVERS = 8
"""How many schedulers may choose another one in a row."""


class SchedulerChain:
    """Follows `choose` from scheduler to scheduler."""

    def __init__(
        self,
        maker: PlanMaker,
        trials: Callable[[PlanCache, PlanRequest], SchedulerTrials],
        lock: Any,
        renew: Callable[[], None],
    ) -> None:
        """`renew` is called when a choice in the background has changed which plan runs."""
        self._maker, self._trials, self._lock, self._renew = maker, trials, lock, renew
        self.threads: list[threading.Thread] = []
        """Threads that choose in the background."""

    def find(self, first: PlanCache, request: PlanRequest) -> list[PlanCache]:
        """The caches of the schedulers that were asked, in order. The last one plans the request."""
        chain = [first]
        while (cache := chain[-1]).chooses:
            if len(chain) > MAX_HANDOVERS + 1:
                raise ScheduleError(
                    f"{type(cache.scheduler).__name__}.choose() never comes to an end: "
                    f"{MAX_HANDOVERS} schedulers in a row have handed the call to another one",
                    advice="return self, or a scheduler without a choose() of its own",
                )
            if (choice := cache.choices.get(self._maker.choice_key(cache, request))) is None:
                with self._lock:
                    choice = self._choose(cache, request)
            if choice.cache is cache:
                break
            chain.append(choice.cache)
        return chain

    def _choose(self, cache: PlanCache, request: PlanRequest) -> Choice:
        graph, note, later = self._maker.graph(cache, request), None, None
        chosen = cache.scheduler
        if graph is not None:
            ctx = request.new_context(graph)
            ctx.trials = self._trials(cache, request)
            chosen = checked_scheduler(call_method(cache.scheduler, "choose", ctx))
            cache.note_read(request, ctx.facts.read)
            note, later = ctx.note, ctx.later
        key = self._maker.choice_key(cache, request)
        if later is not None:
            note = self._decide_later(cache, key, ctx)
        cache.choose(key, chosen, note)
        return cache.choices[key]

    def _decide_later(self, cache: PlanCache, key: Hashable, ctx: ScheduleContext) -> Any:
        """Chooses in a thread, on copies, since callers go on using the arguments. Returns an interim note."""
        later, trials = ctx.later, ctx.trials
        assert later is not None and isinstance(trials, SchedulerTrials)
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
            with self._lock:
                decided = chosen or cache.choices.get(key, Choice(cache, None)).cache.scheduler
                cache.choose(key, decided, ctx.note)
                self._renew()
            trials.request.args = ()

        thread = threading.Thread(target=decide, name="dynaflow-tune", daemon=True)
        self.threads.append(thread)
        thread.start()
        return ctx.note
