"""Checks that a plan is safe before it runs.

Contract
    Takes a plan, the graph, and the sizes of the batch. Returns nothing and changes nothing.
    Errors with PlanError or SplitError, with the operator, its line, and what to change, unless all of this holds:

Steps
    1. The plan is well formed: lanes, waits and micro-batches are valid, and waits have no cycle.
    2. It was made for this graph and for a batch of this size.
    3. Every operator runs exactly once for every micro-batch, and operators that mix rows run for all rows at once.
    4. Any two tasks that access the same memory, one of them writing, are ordered as in the model. A value is memory
       that its operator writes and others read, so this covers data dependencies as well.
    5. An operator that needs state of all earlier rows runs after the operators that make it for those.
    6. Any two tasks with collectives of one process group are ordered, so that all ranks run them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynaflow.capture.collectives import ANY
from dynaflow.core import validate
from dynaflow.core.plan import Plan
from dynaflow.core.plan_form import REMAKE, check_items, check_lanes, check_micro_batches, check_types
from dynaflow.errors import PlanError, SplitError, shown
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.split import Requests, requests_of


def check(plan: Plan, graph: OpGraph, batch_size: int, num_tokens: Sequence[int] | None = None) -> None:
    """`num_tokens`: the lengths of the requests, when the batch is ragged."""
    check_types(plan)
    if not isinstance(graph, OpGraph):
        raise PlanError(f"check(plan, {shown(graph)}): not a graph", advice="pass the OpGraph that the plan is for")
    batch_size = validate.integer(batch_size, "check(batch_size)", "pass the number of rows", error=PlanError)
    if plan.graph != graph.fingerprint:
        raise PlanError(
            f"the plan is for another graph ({shown(plan.graph)}, this is {graph.fingerprint})", advice=REMAKE
        )
    check_micro_batches(plan, batch_size)
    if len(plan.micro_batches) > 1:
        _check_requests(plan, requests_of(num_tokens))
    if plan.sequential:
        return
    check_lanes(plan)
    check_items(plan)
    owner = _check_coverage(plan, graph)
    _check_memory(plan, graph, owner)
    _check_follows(plan, graph, owner)
    _check_collectives(plan, graph)


def _check_requests(plan: Plan, requests: Requests | None) -> None:
    """A ragged batch is cut between its requests; micro-batches of other batches have none."""
    ragged = [m.requests is not None for m in plan.micro_batches]
    if any(ragged) != all(ragged):
        raise SplitError("some micro-batches hold requests, and some rows alone", advice=REMAKE)
    if requests is None:
        return
    for m in plan.micro_batches:
        rows = sum(requests[m.requests[0] : m.requests[1]]) if m.requests else None
        if rows != m.size:
            raise SplitError(
                f"micro-batch {m.index} holds {m.size} tokens, which are not those of its requests ({m.requests})",
                advice='split at the boundaries of facts["num_tokens"], as ctx.split does',
            )
    count = (plan.micro_batches[-1].requests or (0, 0))[1]
    if count != len(requests):
        raise SplitError(f"the plan splits {count} requests, but the batch has {len(requests)}", advice=REMAKE)


def _check_coverage(plan: Plan, graph: OpGraph) -> list[list[tuple[int, int]]]:
    """For each operator and micro-batch: the task that runs it, and its position in that task."""
    everything = tuple(range(len(plan.micro_batches)))
    owner: list[list[tuple[int, int] | None]] = [[None] * len(everything) for _ in graph.ops]
    by_name = graph.by_name
    for t, task in enumerate(plan.tasks):
        if len(task.items) > 1 and task.replace is None:  # in a plan that is only drawn, they may be compiled as one
            raise PlanError(f"task {t} ({task}) has {len(task.items)} operators and no function", advice=REMAKE)
        for place, item in enumerate(task.items):
            op = by_name.get(item.op)
            if op is None:
                raise PlanError(f"task {t} runs {item.op!r}, which the graph does not have", op=item.op, advice=REMAKE)
            if not op.splittable and item.micro_batches != everything:
                raise _illegal_split(op)
            for m in item.micro_batches:
                taken = owner[op.index][m]
                if taken is not None:
                    raise PlanError(
                        f"{item.op} runs twice for micro-batch {m}: in tasks {taken[0]} and {t}",
                        op=item.op,
                        line=op.line,
                        advice="execute every operator once for each micro-batch",
                    )
                owner[op.index][m] = (t, place)
    for op in graph.ops:
        if None in owner[op.index]:
            raise PlanError(
                f"{op.name} never runs for micro-batch {owner[op.index].index(None)}",
                op=op.name,
                line=op.line,
                advice="execute every operator once for each micro-batch",
            )
    return owner  # type: ignore[return-value]


def _illegal_split(op: Op) -> SplitError:
    why = op.refusal or "no row of the batch takes part in it, so it runs once"
    return SplitError(
        f"{op.name} can't run for a part of the batch: {why}",
        op=op.name,
        line=op.line,
        advice="execute it for all micro-batches at once; or declare its rule splittable=True if every row is "
        "treated independently",
    )


def _check_memory(plan: Plan, graph: OpGraph, owner: list[list[tuple[int, int]]]) -> None:
    """Walks the accesses of each storage in the model's order, by micro-batch. Conflicting pairs must be ordered."""
    before = plan.happens_before
    parts = range(len(plan.micro_batches))
    writer: dict[int, list[int]] = {}  # storage -> the op that wrote last, as often as there are micro-batches
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        mine = owner[op.index]
        spots = [(0, mine[0])] if not op.splittable else list(zip(parts, mine, strict=True))
        for storage, writes in op.accesses:
            earlier = writer.get(storage, [])
            if writes:
                earlier = earlier + readers.get(storage, [])
            for other in earlier:
                theirs = owner[other]
                for m, (task, place) in spots:
                    # An operator that runs for all rows at once conflicts with every part of the other.
                    for k in parts if not op.splittable else (m,):
                        first, first_place = theirs[k]
                        if not (before[task] >> first & 1) and not (first == task and first_place < place):
                            raise _race(plan, graph, other, op, storage, first, task)
            if writes:
                writer[storage], readers[storage] = [op.index], []
            else:
                readers.setdefault(storage, []).append(op.index)


def _check_follows(plan: Plan, graph: OpGraph, owner: list[list[tuple[int, int]]]) -> None:
    before = plan.happens_before
    for op in graph.ops:
        mine = [task for task, _ in owner[op.index]]
        for a in op.serial_after if op.splittable else ():
            for m, task in enumerate(mine):
                # One that is earlier in the model must have run for the same rows as well.
                for k, (first, _) in enumerate(owner[a][: m + (a < op.index)]):
                    merged = a >= op.index and mine[k] == task  # for both micro-batches at once
                    if not merged and first != task and not before[task] >> first & 1:
                        raise PlanError(
                            f"{op.name} (task {task}, lane {plan.tasks[task].lane}) must come after "
                            f"{graph.ops[a].name} for micro-batch {k} (task {first}, lane {plan.tasks[first].lane}), "
                            "since it needs its state of earlier rows; no wait orders them",
                            op=op.name,
                            line=op.line,
                            advice=f"let task {task} wait for task {first}, or put both on one lane in that order",
                        )


def _check_collectives(plan: Plan, graph: OpGraph) -> None:
    before = plan.happens_before
    last: dict[str, int] = {}  # process group -> the task of its last collective
    for t, task in enumerate(plan.tasks):
        groups = {group for item in task.items for group in graph.by_name[item.op].groups}
        for other, previous in last.items():
            if (other in groups or ANY in (other, *groups)) and groups and not before[t] >> previous & 1:
                op = graph.by_name[task.items[0].op]
                raise PlanError(
                    f"ranks could wait for each other forever: {plan.tasks[previous]} (task {previous}, lane "
                    f"{plan.tasks[previous].lane}) and {task} (task {t}, lane {task.lane}) are collectives of one "
                    "group, and no wait orders them",
                    op=op.name,
                    line=op.line,
                    advice="put the collectives of a group on one lane",
                )
        last.update(dict.fromkeys(groups, t))


def _race(plan: Plan, graph: OpGraph, first: int, op: Op, storage: int, task: int, mine: int) -> PlanError:
    one = graph.ops[first]
    value = next((v.name for v in graph.values if v.storage == storage), None)
    what = f"the memory of {value!r}" if value else "the random generator" if storage < 0 else "the same memory"
    return PlanError(
        f"race: {one.name} (task {task}, lane {plan.tasks[task].lane}) must end before {op.name} (task {mine}, lane "
        f"{plan.tasks[mine].lane}) starts, since both access {what} and one writes it; no wait orders them",
        op=op.name,
        line=op.line,
        advice=f"let task {mine} wait for task {task}, or put both on one lane in that order",
    )
