"""Random legal schedules, mutants of their plans, and an oracle that judges those on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dynaflow import OpSchedulerBase, SplitFunc
from dynaflow.capture.ops import Op, OpGraph
from dynaflow.capture.probe import concrete
from dynaflow.errors import SplitError
from dynaflow.schedule.context import OpItem, ScheduleContext, fusion_values
from dynaflow.schedule.plan import Item, MicroBatch, Plan, Task
from tests.fuzz.graphs import Dice

LANES = ("main", "side", "third", "fourth")


class RandomScheduler(OpSchedulerBase):
    """Any schedule that the context allows."""

    def __init__(self, dice: Dice, functions: list[str]) -> None:
        self.dice = dice
        self.rules = [SplitFunc(dice.pick(functions))] if functions and dice.one_in(3) else []
        self.refused: str | None = None
        """Why nothing could be split, when that is so."""

    def partition(self) -> list[Any]:
        return list(self.rules)

    def schedule(self, ctx: ScheduleContext) -> Any:
        dice = self.dice
        if dice.one_in(20):
            return ctx.sequential()
        self._split(ctx)
        lanes = LANES[: 1 + dice.below(4)]
        fuses, merges = dice.one_in(3) and not self.elastic, dice.one_in(2)  # the functions are made for one size
        while ready := ctx.get_ready_ops():
            item = dice.pick(ready)
            lane = dice.pick(lanes)
            others = [i for i in ready if i.op is item.op and i is not item]
            if others and merges and not dice.one_in(3):
                chosen = [item, *(i for i in others if not dice.one_in(3))]
                ctx.execute(chosen, lane)
            elif fuses and len(chain := self._chain(ctx, item, others)) > 1:
                ctx.execute(chain, lane, replace_func=fused(ctx, chain))
            else:
                ctx.execute(item, lane)
        return None

    def _split(self, ctx: ScheduleContext) -> None:
        dice, rows = self.dice, ctx.batch_size
        parts = min(dice.pick([1, 2, 3, 4, 2, 3, 4, 5]), rows)
        if parts == 1:
            return
        sizes: list[int] | int = parts
        if not self.elastic and not dice.one_in(3):
            sizes = [1] * parts
            for _ in range(rows - parts):
                sizes[dice.below(parts)] += 1
        try:
            ctx.split(sizes)
        except SplitError as e:
            if any(op.splittable for op in ctx.ops) and not str(e).startswith("the graph has no batch"):
                raise
            self.refused = str(e)

    def _chain(self, ctx: ScheduleContext, first: OpItem, others: list[OpItem]) -> list[OpItem]:
        """`first` and operators that follow it, for the same micro-batches, as far as nothing else is missing.

        Sometimes for a second micro-batch as well, one after the other.
        """
        chain = self._grown(ctx, [first], first)
        if others and self.dice.one_in(2):
            second = self.dice.pick(others)
            longer = self._grown(ctx, [*chain, second], second)
            grown = len(longer) - len(chain) - 1
            if bool(grown) == (len(chain) > 1):  # an item with no neighbour is no part of a chain
                return longer
        return chain

    def _grown(self, ctx: ScheduleContext, chain: list[OpItem], first: OpItem) -> list[OpItem]:
        for op in ctx.ops:
            if len(chain) > 1 and self.dice.one_in(3):
                break
            if not any(i.op.index in op.after and i.micro_batches == first.micro_batches for i in chain):
                continue
            item = next((i for i in ctx.items(op) if i.micro_batches == first.micro_batches), None)
            if item is None or (op.index, item.micro_batches[0]) in ctx._owner:
                continue
            inside = {(i.op.index, m) for i in chain for m in (i.micro_batches if i.op.splittable else (0,))}
            if all(before in ctx._owner or before in inside for before in ctx._before(item)):
                chain = [*chain, item]
        return chain


class RandomElasticScheduler(RandomScheduler):
    """One schedule, drawn once, for batches of all sizes."""

    elastic = True

    def key(self, ctx: ScheduleContext) -> str:
        return "any"


def fused(ctx: ScheduleContext, items: list[OpItem]) -> Callable[..., Any]:
    """A function that computes what the items do, by calling their own modules."""
    graph = ctx._graph
    chain = [(i.op, i.micro_batches) for i in items]
    reads, writes = fusion_values(graph, chain)
    numbers = []
    for op, ms in chain:
        rows = sum(ctx.micro_batches[m].size for m in ms)
        sizes = {**graph.graph.hints, **{s: rows for space in graph.spaces for s in space}}
        numbers.append([concrete(e, sizes) for e in op.symbols])

    def run(*args: Any) -> tuple[Any, ...]:
        known = dict(zip(reads, args, strict=True))
        for (op, ms), given in zip(chain, numbers, strict=True):
            made = op.module(*given, *[known[v, ms] for v in op.reads])
            known.update({(v, ms): tensor for v, tensor in zip(op.writes, made, strict=True)})
        return tuple(known[key] for key in writes)

    return run


# Mutants

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
    whole = [
        (i, t) for i, t in enumerate(plan.tasks) if not t.replace and not graph.by_name[t.items[0].op].splittable
    ]
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


# The oracle: simple, slow, and without a line of the check's


def why_illegal(plan: Plan, graph: OpGraph, rows: int) -> str | None:
    """What is wrong with a plan, found by brute force; None when it is legal."""
    if not plan.tasks:  # the uncut graph
        return _malformed(plan, graph, rows)
    return _malformed(plan, graph, rows) or _not_once(plan, graph) or _unordered(plan, graph)


def _malformed(plan: Plan, graph: OpGraph, rows: int) -> str | None:
    if plan.graph != graph.fingerprint:
        return "another graph"
    held = [(m.index, row) for m in plan.micro_batches for row in range(m.start, m.stop)]
    if [row for _, row in held] != list(range(rows)):
        return "the rows are not each held once, in order"
    if [m.index for m in plan.micro_batches] != sorted({index for index, _ in held}):
        return "an empty micro-batch, or one with a wrong number"
    names = [lane.name for lane in plan.lanes]
    for i, task in enumerate(plan.tasks):
        if names.count(task.lane) != 1:
            return f"no lane {task.lane}"
        if any(a not in range(i) for a in task.after):  # one thread issues the tasks in order: it would wait forever
            return f"task {i} waits for itself or a later one"
    return None


def _runs(plan: Plan, graph: OpGraph) -> list[tuple[Op, int, int, int]]:
    """(operator, micro-batch, task, place in the task); an operator that runs whole counts for every micro-batch."""
    known = {op.name: op for op in graph.ops}
    return [
        (known[item.op], m, t, place)
        for t, task in enumerate(plan.tasks)
        for place, item in enumerate(task.items)
        for m in item.micro_batches
    ]


def _not_once(plan: Plan, graph: OpGraph) -> str | None:
    known = {op.name: op for op in graph.ops}
    parts = [m.index for m in plan.micro_batches]
    for task in plan.tasks:
        for item in task.items:
            if item.op not in known:
                return f"no operator {item.op}"
            if not known[item.op].splittable and list(item.micro_batches) != parts:
                return f"{item.op} runs for a part"
            if list(item.micro_batches) != sorted(item.micro_batches):  # its rows would come in another order
                return f"{item} has its micro-batches out of order"
            if not item.micro_batches:
                return f"{item} runs for nothing"
    runs = sorted((op.index, m) for op, m, _, _ in _runs(plan, graph))
    if runs != sorted((op.index, m) for op in graph.ops for m in parts):
        return "some operator does not run once for each micro-batch"
    return None


def _unordered(plan: Plan, graph: OpGraph) -> str | None:
    ended = [_ended_before(plan, t) for t in range(len(plan.tasks))]
    runs = _runs(plan, graph)
    for first, m, t, place in runs:
        for second, k, u, other in runs:
            if first.index >= second.index or not _conflict(first, second):
                continue
            if first.splittable and second.splittable and m != k:
                continue  # other rows, other bytes
            if not (t in ended[u] or (t == u and place < other)):
                return f"{first.name}[{m}] (task {t}) and {second.name}[{k}] (task {u}) are not ordered"
    return None


def _conflict(one: Op, two: Op) -> bool:
    return any(s == z and (w or v) for s, w in one.touches for z, v in two.touches)


def _ended_before(plan: Plan, task: int) -> set[int]:
    """Backwards from a task, over waits and its lane."""
    seen: set[int] = set()
    todo = [task]
    while todo:
        now = todo.pop()
        earlier = [t for t in range(now) if plan.tasks[t].lane == plan.tasks[now].lane]
        for t in (*plan.tasks[now].after, *earlier):
            if t not in seen:
                seen.add(t)
                todo.append(t)
    return seen


