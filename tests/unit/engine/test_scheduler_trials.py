"""What a scheduler that chooses learns of others, by `ctx.trials`."""

from __future__ import annotations

from typing import Any

import torch

import dynaflow as df
from tests.helpers import STACK_RULES, Each, Stack, assert_equal, compiled, randn


class Chooses(df.OpSchedulerBase):
    def __init__(self, *among: df.OpSchedulerBase) -> None:
        self.among = among
        self.seen: list[Any] = []

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        assert ctx.trials is not None
        for scheduler in self.among:
            planned, again = ctx.trials.plan(scheduler), ctx.trials.plan(scheduler)
            assert planned is again, "asked for its plan once"
            lowered = ctx.trials.lowered(scheduler)
            self.seen.append((planned.plan, lowered(list(ctx.trials.args))))
        return self.among[-1]


def test_others_are_planned_and_run_on_the_arguments_at_hand() -> None:
    model, x = Stack(), randn(6, 8)
    first, last = Each(STACK_RULES, split=2), Each(split=3)
    chooser = Chooses(first, last)
    fast = compiled(model, chooser)
    with torch.no_grad():
        assert_equal(fast(x), model(x))
        assert [len(plan.micro_batches) for plan, _ in chooser.seen] == [2, 3]
        for _, (result,) in chooser.seen:
            assert_equal(result, model(x))
        assert len(fast.plan(x).micro_batches) == 3
    assert last.calls == first.calls == 1, "a plan that was tried and lowered is not made again to run"


def test_tasks_can_be_watched() -> None:
    seen: list[tuple[str, str]] = []

    class Watches(Chooses):
        def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
            assert ctx.trials is not None
            made = ctx.trials.plan(self.among[0])
            watched = ctx.trials.watched(made, made.plan, lambda task, moment: seen.append((str(task), moment)))
            self.seen.append((made.plan, watched(list(ctx.trials.args))))
            return self.among[0]

    x, model = randn(6, 8), Stack()
    chooser = Watches(Each(STACK_RULES, split=2))
    with torch.no_grad():
        compiled(model, chooser)(x)
        ((plan, (result,)),) = chooser.seen
        assert_equal(result, model(x))
    assert [moment for _, moment in seen] == ["start", "stop"] * len(plan.tasks)
    assert [task for task, _ in seen[::2]] == [str(task) for task in plan.tasks]
