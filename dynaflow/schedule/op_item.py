"""What `ctx.execute` takes: an operator for one micro-batch, or for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynaflow.core import validate
from dynaflow.core.plan import MicroBatch
from dynaflow.errors import ScheduleError, shown, user_line
from dynaflow.partition.op_graph import Op

Execution = tuple[int, int]
"""One execution: the index of an operator, and that of a micro-batch (0 for an operator that can't be split)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpItem:
    """An operator for one micro-batch; for all of them when the operator can't be split or has no batch."""

    op: Op
    micro_batch: MicroBatch
    micro_batches: tuple[int, ...]
    """Indices of the micro-batches that it covers."""

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def tags(self) -> frozenset[str]:
        return self.op.tags

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.micro_batches))}]"


def executions_of(item: OpItem) -> list[Execution]:
    """The executions that an item stands for."""
    return [(item.op.index, m) for m in (item.micro_batches if item.op.splittable else (0,))]


def merge(items: list[OpItem]) -> OpItem:
    """One item for several micro-batches of one operator."""
    if len(items) == 1:
        return items[0]
    indices = tuple(sorted(m for i in items for m in i.micro_batches))
    return OpItem(op=items[0].op, micro_batch=items[0].micro_batch, micro_batches=indices)


def as_items(who: str, given: Any) -> list[OpItem]:
    """A list of items from one item, or from several. `who` is the method to which they were passed."""
    found = [given] if isinstance(given, OpItem) else validate.members(given)
    if found is None:
        raise not_an_item(who, given)
    for item in found:
        if not isinstance(item, OpItem) or not isinstance(item.op, Op) or not isinstance(item.micro_batches, tuple):
            raise not_an_item(who, item)
    return found


def not_an_item(who: str, *given: Any) -> ScheduleError:
    found = [item.name if isinstance(item, Op) else shown(item) for item in given]
    return ScheduleError(
        f"{who} got {', '.join(found) or 'no operator'}",
        line=user_line(),
        advice="pass what get_ready_ops() returned: one item, or a list of them; ctx.items(name) finds them by name",
    )
