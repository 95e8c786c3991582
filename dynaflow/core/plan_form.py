"""Checks that a plan is well formed, as far as that needs no graph."""

from __future__ import annotations

from types import NoneType

from dynaflow.core.plan import MOST_PRIORITY, MOST_SMS, Item, Lane, MicroBatch, Plan, Task, is_name
from dynaflow.errors import PlanError, SplitError, shown

REMAKE = "make the plan again with this model, scheduler and version"


def check_form(plan: Plan) -> None:
    """All checks of this module, for plans of any origin."""
    check_types(plan)
    check_micro_batches(plan, plan.batch_size)
    check_lanes(plan)
    check_items(plan)


def check_types(plan: Plan) -> None:
    """Types of all fields: a plan may be written by hand."""
    if not isinstance(plan, Plan):
        raise PlanError(f"{shown(plan)} is not a Plan", advice="pass a Plan, such as the result of fast.plan(**inputs)")
    for what, found, kind in (
        ("micro_batches", plan.micro_batches, MicroBatch), ("lanes", plan.lanes, Lane), ("tasks", plan.tasks, Task),
    ):  # fmt: skip
        if not _all_are(found, kind):
            raise _malformed(f"{what} is {shown(found)}", f"a tuple of {kind.__name__}")
    if not isinstance(plan.graph, str) or not plan.micro_batches:
        what = f"graph={shown(plan.graph)}, {len(plan.micro_batches)} micro-batches"
        raise _malformed(what, "a fingerprint, and at least one")
    for m in plan.micro_batches:
        pair = m.requests is None or (_all_are(m.requests, int) and len(m.requests) == 2)
        if not pair or not _all_are((m.index, m.start, m.stop), int):
            raise _malformed(shown(m), "integers")
    for lane in plan.lanes:
        share = lane.sms is None or _all_are((lane.sms,), int)
        if not share or not _all_are((lane.priority,), int) or not is_name(lane.name):
            raise _malformed(shown(lane), "a name that can be printed, and integers")
    for i, task in enumerate(plan.tasks):
        fits = _all_are(task.items, Item) and _all_are(task.after, int) and isinstance(task.replace, (str, NoneType))
        if not fits or not all(isinstance(item.op, str) and _all_are(item.micro_batches, int) for item in task.items):
            raise _malformed(f"task {i} is {shown(task)}", "items, and indices of tasks to wait for")


def _all_are(values: object, kind: type) -> bool:
    if not isinstance(values, tuple) or not all(isinstance(v, kind) for v in values):
        return False
    return kind is not int or all(type(v) is int and abs(v) < 1 << 63 for v in values)


def _malformed(found: str, wanted: str) -> PlanError:
    return PlanError(f"malformed plan: {found}, and should be {wanted}", advice=REMAKE)


def check_micro_batches(plan: Plan, batch_size: int) -> None:
    row = request = 0
    for i, m in enumerate(plan.micro_batches):
        if m.index != i or m.start != row or m.stop <= m.start:
            raise SplitError(
                f"micro-batch {i} holds rows {m.start} to {m.stop}, but row {row} comes next",
                advice="micro-batches follow one another without gaps, and none is empty",
            )
        if m.requests is not None and (m.requests[0] != request or m.requests[1] <= request):
            raise SplitError(
                f"micro-batch {i} holds requests {m.requests}, but request {request} comes next",
                advice="micro-batches follow one another without gaps, and none is empty",
            )
        row, request = m.stop, (m.requests or (0, 0))[1]
    if row != batch_size:
        raise SplitError(
            f"the plan splits {row} rows, but the batch has {batch_size}", advice="give sizes that add up to the batch"
        )


def check_lanes(plan: Plan) -> None:
    names = [lane.name for lane in plan.lanes]
    if len(set(names)) < len(names):
        raise PlanError(f"two lanes have one name: {names}", advice=REMAKE)
    for lane in plan.lanes:
        if lane.sms is not None and not 1 <= lane.sms <= MOST_SMS:
            raise PlanError(
                f"lane {lane.name!r} has a share of {shown(lane.sms)} SMs",
                advice="give it at least one SM and at most as many as the device has, or None",
            )
        if abs(lane.priority) > MOST_PRIORITY:
            raise PlanError(
                f"lane {lane.name!r} has the priority {shown(lane.priority)}",
                advice="give it 0, or a small negative number for a more urgent lane",
            )
    for i, task in enumerate(plan.tasks):
        if task.lane not in names:
            raise PlanError(f"task {i} ({task}) is on lane {task.lane!r}, which the plan does not have", advice=REMAKE)
        for a in task.after:
            if not 0 <= a < len(plan.tasks):
                raise PlanError(f"task {i} ({task}) waits for task {shown(a)}, which does not exist", advice=REMAKE)
            if a >= i:
                circle = "wait cycle" if _reaches(plan, a, i) else "wait for a task that is issued later"
                raise PlanError(
                    f"{circle}: task {i} ({task}) waits for task {a} ({plan.tasks[a]})",
                    op=task.items[0].op if task.items else None,
                    advice="a task may wait only for tasks listed before it",
                )


def _reaches(plan: Plan, start: int, goal: int) -> bool:
    """Whether `start` waits for `goal`, through lanes and waits."""
    todo, seen = [start], set()
    while todo:
        i = todo.pop()
        if i == goal:
            return True
        if i not in seen:
            seen.add(i)
            todo.extend(a for a in plan.tasks[i].after if 0 <= a < len(plan.tasks))
            todo.extend(j for j in range(i) if plan.tasks[j].lane == plan.tasks[i].lane)
    return False


def check_items(plan: Plan) -> None:
    everything = tuple(range(len(plan.micro_batches)))
    for t, task in enumerate(plan.tasks):
        if not task.items:
            raise PlanError(f"task {t} ({task}) has 0 operators and no function", advice=REMAKE)
        for item in task.items:
            if not item.micro_batches or list(item.micro_batches) != sorted(item.micro_batches):
                raise PlanError(f"task {t} runs {item}: no micro-batches, or out of order", op=item.op, advice=REMAKE)
            if not set(item.micro_batches) <= set(everything):
                what = f"task {t} runs {item} for a micro-batch that is not there"
                raise PlanError(what, op=item.op, advice=REMAKE)
            if task.replace and item.micro_batches != everything[item.micro_batches[0] :][: len(item.micro_batches)]:
                raise PlanError(f"task {t} fuses {item}, which leaves out micro-batches", op=item.op, advice=REMAKE)
