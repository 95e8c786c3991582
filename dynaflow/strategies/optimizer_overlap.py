"""The optimizer's step for a layer, beside the backward of the layers below (`df.compile(..., optimizer=...)`).

A step reads and writes weights and states and computes very little; the backward pass beside it mostly computes. The
gradients of a layer are freed before those of the layer after the next are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dynaflow as df

UPDATE = "update"


class OptimizerOverlap(df.WrappingScheduler):
    """Runs steps on their own lane, as soon as their gradients are ready; `inner` schedules the rest.

    Operators wait until at most `behind` layers have gradients that are not applied yet. `inner` sees the graph without
    steps; its `key` is not used. None: all in order, on one lane.
    """

    def __init__(self, inner: df.OpSchedulerBase | None = None, behind: int = 1) -> None:
        super().__init__(inner)
        self.at_least(0, behind=behind)
        self.behind = behind

    def cache_key(self) -> Any:
        return (self.behind,)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if not any(UPDATE in op.tags for op in ctx.ops):
            return self.inner.schedule(ctx)
        rest: Any = _WithoutSteps(ctx, self.behind)
        return self.inner.schedule(rest)


class _WithoutSteps:
    """The context for the inner scheduler: it hides the steps, and issues them as soon as they are ready."""

    def __init__(self, ctx: df.ScheduleContext, behind: int) -> None:
        self._ctx, self._behind = ctx, behind
        self.ops = tuple(op for op in ctx.ops if UPDATE not in op.tags)
        self._steps: list[df.OpItem] = []  # issued, and no operator waits for them yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def get_ready_ops(self) -> list[df.OpItem]:
        return [item for item in self._ctx.get_ready_ops() if UPDATE not in item.tags]

    def execute(self, ops: df.OpItem | Sequence[df.OpItem], *args: Any, **kwargs: Any) -> None:
        if len(self._steps) > self._behind:  # steps run in order: waiting for the last of these is enough
            kwargs["after"] = [*kwargs.get("after", ()), self._steps[-1 - self._behind]]
            del self._steps[: -self._behind or None]
        self._ctx.execute(ops, *args, **kwargs)
        for item in self._ctx.get_ready_ops():
            if UPDATE in item.tags:
                self._ctx.execute(item, lane=UPDATE)
                self._steps.append(item)

    def sequential(self) -> None:
        while ops := self.get_ready_ops():
            self.execute(ops[0])
