"""Judges a plan by itself: simple, slow, and without a line of the check's."""

from __future__ import annotations

from dynaflow.core.plan import Plan
from dynaflow.partition.op_graph import Op, OpGraph


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
    return any(s == z and (w or v) for s, w in one.accesses for z, v in two.accesses)


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
