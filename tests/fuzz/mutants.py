"""Plans that differ from a legal one in a single place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dynaflow.core.plan import Item, MicroBatch, Plan, Task
from dynaflow.partition.op_graph import OpGraph
from tests.fuzz.dice import Dice

Mutant = tuple[str, Plan]


def mutants(plan: Plan, graph: OpGraph, dice: Dice, each: int = 1) -> Iterator[Mutant]:
    """Plans that differ from a legal one in a single place, `each` of every kind where there are such."""
    for kind, make in _KINDS.items():
        for _ in range(each):
            made = make(plan, graph, dice)
            if made is not None and (made.tasks, made.micro_batches, made.graph) != (
                plan.tasks,
                plan.micro_batches,
                plan.graph,
            ):
                yield kind, made


def _with(plan: Plan, tasks: list[Task]) -> Plan:
    return replace(plan, tasks=tuple(tasks), code="")


def _edit(plan: Plan, index: int, **changes: Any) -> Plan:
    tasks = list(plan.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return _with(plan, tasks)


def _drop_wait(plan: Plan, graph: OpGraph, dice: Dice) -> Plan | None:
    waits = [(i, a) for i, t in enumerate(plan.tasks) for a in t.after]
    if not waits:
        return None
    i, a = dice.pick(waits)
    return _edit(plan, i, after=tuple(x for x in plan.tasks[i].after if x != a))


def _reordered(plan: Plan, order: list[int]) -> Plan:
    """The tasks in another order, each with the waits that it had."""
    place = {old: new for new, old in enumerate(order)}
    tasks = [plan.tasks[old] for old in order]
    return _with(plan, [replace(t, after=tuple(sorted(place[a] for a in t.after))) for t in tasks])


def _move(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    order = list(range(len(plan.tasks)))
    order.insert(dice.below(len(order)), order.pop(dice.below(len(order))))
    return _reordered(plan, order)


def _swap(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    order = list(range(len(plan.tasks)))
    i, j = dice.below(len(order)), dice.below(len(order))
    order[i], order[j] = order[j], order[i]
    return _reordered(plan, order)


def _exchange(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    """Two tasks change places, but waits and lanes stay where they were."""
    i, j = dice.below(len(plan.tasks)), dice.below(len(plan.tasks))
    one, two = plan.tasks[i], plan.tasks[j]
    changed = _edit(plan, i, items=two.items, replace=two.replace)
    return _edit(changed, j, items=one.items, replace=one.replace)


def _change_lane(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    names = [*(lane.name for lane in plan.lanes), "nowhere"]
    return _edit(plan, dice.below(len(plan.tasks)), lane=dice.pick(names[:-1] if not dice.one_in(8) else names))


def _drop_task(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    gone = dice.below(len(plan.tasks))
    tasks = []
    for i, task in enumerate(plan.tasks):
        if i != gone:
            after = tuple(a - (a > gone) for a in task.after if a != gone)
            tasks.append(replace(task, after=after))
    return _with(plan, tasks)


def _duplicate_task(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    return _with(plan, [*plan.tasks, dice.pick(plan.tasks)])


def _split_unsplittable(plan: Plan, graph: OpGraph, dice: Dice) -> Plan | None:
    whole = [(i, t) for i, t in enumerate(plan.tasks) if not t.replace and not graph.by_name[t.items[0].op].splittable]
    if not whole or len(plan.micro_batches) < 2:
        return None
    i, task = dice.pick(whole)
    (item,) = task.items
    first = replace(task, items=(replace(item, micro_batches=item.micro_batches[:1]),))
    rest = replace(task, items=(replace(item, micro_batches=item.micro_batches[1:]),), after=())
    later = [replace(t, after=tuple(a + (a > i) for a in t.after)) for t in plan.tasks[i + 1 :]]
    return _with(plan, [*plan.tasks[:i], first, rest, *later])


def _merged(plan: Plan) -> list[tuple[int, Item]]:
    return [(i, t.items[0]) for i, t in enumerate(plan.tasks) if not t.replace and len(t.items[0].micro_batches) > 1]


def _drop_part(plan: Plan, graph: OpGraph, dice: Dice) -> Plan | None:
    if not _merged(plan):
        return None
    i, item = dice.pick(_merged(plan))
    gone = dice.pick(item.micro_batches)
    return _edit(plan, i, items=(replace(item, micro_batches=tuple(m for m in item.micro_batches if m != gone)),))


def _turn_parts(plan: Plan, graph: OpGraph, dice: Dice) -> Plan | None:
    if not _merged(plan):
        return None
    i, item = dice.pick(_merged(plan))
    return _edit(plan, i, items=(replace(item, micro_batches=item.micro_batches[::-1]),))


def _run_for_nothing(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    task = dice.pick(plan.tasks)
    return _with(plan, [*plan.tasks, replace(task, items=(replace(task.items[0], micro_batches=()),), replace=None)])


def _move_bound(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    parts = list(plan.micro_batches)
    i = dice.below(len(parts))
    kind = dice.below(3)
    if kind == 0:
        parts[i] = replace(parts[i], stop=parts[i].stop + 1)
    elif kind == 1:
        parts[i] = replace(parts[i], start=parts[i].start + 1)
    else:
        parts[i] = replace(parts[i], index=parts[i].index + 1)
    return replace(plan, micro_batches=tuple(parts))


def _extra_part(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    rows = plan.batch_size
    extra = MicroBatch(index=len(plan.micro_batches), start=rows, stop=rows + dice.below(2))
    return replace(plan, micro_batches=(*plan.micro_batches, extra))


def _wait_for_later(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    i = dice.below(len(plan.tasks))
    later = i + dice.below(len(plan.tasks) - i + 1)  # up to one that does not exist
    return _edit(plan, i, after=(*plan.tasks[i].after, later))


def _rename(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    i = dice.below(len(plan.tasks))
    task = plan.tasks[i]
    place = dice.below(len(task.items))
    name = dice.pick(["nothing", *graph.by_name])
    items = tuple(replace(item, op=name) if p == place else item for p, item in enumerate(task.items))
    return _edit(plan, i, items=items)


def _other_graph(plan: Plan, graph: OpGraph, dice: Dice) -> Plan:
    return replace(plan, graph=plan.graph[::-1] + "0")


_KINDS: dict[str, Callable[[Plan, OpGraph, Dice], Plan | None]] = {
    "drop a wait": _drop_wait,
    "move a task": _move,
    "swap two tasks": _swap,
    "exchange two tasks' work": _exchange,
    "change a lane": _change_lane,
    "drop a task": _drop_task,
    "duplicate a task": _duplicate_task,
    "split an unsplittable operator": _split_unsplittable,
    "drop a part of a merge": _drop_part,
    "turn a merge round": _turn_parts,
    "run for nothing": _run_for_nothing,
    "move a bound": _move_bound,
    "an extra micro-batch": _extra_part,
    "wait for a later task": _wait_for_later,
    "rename an operator": _rename,
    "another graph": _other_graph,
}
