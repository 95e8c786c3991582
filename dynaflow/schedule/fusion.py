"""Fusions: functions that replace several operators. What they take and return, and which operators may be fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynaflow.errors import ScheduleError, user_line
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.op_item import OpItem

Parts = tuple[int, ...]
"""Indices of micro-batches."""


def fusion_values(
    graph: OpGraph, items: Sequence[tuple[Op, Parts]]
) -> tuple[list[tuple[int, Parts]], list[tuple[int, Parts]]]:
    """What a fused call takes, and returns: (value, micro-batches), item by item, each once."""
    made: set[tuple[int, int]] = set()
    reads: list[tuple[int, Parts]] = []
    writes: list[tuple[int, Parts]] = []
    for op, ms in items:
        for v in op.reads:
            if not all((v, m) in made for m in ms) and (v, ms) not in reads:
                reads.append((v, ms))
        made.update((v, m) for v in op.writes for m in ms)
    inside = {op.index for op, _ in items}
    for op, ms in items:
        for v in op.writes:
            users = [u for u in graph.ops if v in u.reads]
            if v in graph.outputs or any(u.index not in inside for u in users) or _partly(items, users, ms):
                writes.append((v, ms))
    return reads, writes


def _partly(items: Sequence[tuple[Op, Parts]], users: list[Op], ms: Parts) -> bool:
    """Whether a user of the value is in the fusion, but not for all of these micro-batches."""
    covered = {(op.index, m) for op, mm in items for m in mm}
    return any((u.index, m) not in covered for u in users for m in ms)


def check_chain(items: Sequence[OpItem]) -> None:
    """Raises unless each item of a fusion uses a result of another one, or all are of one operator."""
    for n, item in enumerate(items):
        alone = all(i.op is item.op for i in items)
        linked = any(
            (a.op.index in item.op.after or item.op.index in a.op.after)
            and (set(a.micro_batches) & set(item.micro_batches))
            for a in [*items[:n], *items[n + 1 :]]
        )
        if not alone and not linked:
            other = next(i for i in items if i.op is not item.op)
            raise ScheduleError(
                f"operator {item} does not chain with the others of its fusion ({other.name}, ...)",
                op=item.name,
                line=user_line(),
                advice="fuse operators where each uses a result of another, for the same micro-batch",
            )


def function_name(function: Callable[..., Any]) -> str:
    """The name by which a plan calls a function."""
    module = getattr(function, "__module__", None) or "__main__"
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"
