"""What a user subclasses to write a schedule."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaflow.capture.rules import Rule
    from dynaflow.schedule.context import ScheduleContext


class OpSchedulerBase:
    """Decides where the model may be cut and, for each situation, what runs where and when.

    `schedule` runs once per situation: it records decisions on the context and launches nothing. The plan that
    it leaves is checked, lowered, kept under `key(ctx)` and replayed from then on.
    """

    def partition(self) -> list[Rule]:
        """Where the graph may be cut."""
        return []

    def schedule(self, ctx: ScheduleContext) -> Any:
        """Calls `ctx.split`, `ctx.get_ready_ops`, `ctx.execute`; or returns `ctx.sequential()`, or a Plan."""
        return ctx.sequential()

    def key(self, ctx: ScheduleContext) -> Hashable:
        """What the decision depends on. By default: the sizes of the inputs and the facts that were read."""
        return None


    def bucket(self, batch_size: int) -> int:
        """To how many rows a batch is padded, so that few plans (and CUDA graphs) serve many sizes."""
        return batch_size


class Sequential(OpSchedulerBase):
    """Runs the uncut graph."""
