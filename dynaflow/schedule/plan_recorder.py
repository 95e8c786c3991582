"""Records what a scheduler executes as the tasks of a plan, and tracks which operators are ready."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dynaflow.core.plan import Item, Lane, MicroBatch, Plan, Task, is_name
from dynaflow.errors import ScheduleError, shown, user_line
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.fusion import check_chain, function_name, fusion_values
from dynaflow.schedule.op_item import Execution, OpItem, as_items, executions_of, merge, not_an_item

DEFAULT_LANE = "main"


class PlanRecorder:
    """The tasks of one plan. A `ScheduleContext` makes it when the split is fixed, and forwards calls to it.

    Contract
    - Consumes a graph, its micro-batches, and calls of `execute`. Adds the functions of fusions to `functions`.
    - `finish` returns a Plan in which each task comes after all that it needs. A task waits for tasks of other lanes
      only where the order does not follow from earlier waits.
    - Errors with ScheduleError, at the user's line, when an item is not ready, was executed before, or is not of this
      context. A refused call changes nothing.
    """

    def __init__(
        self,
        graph: OpGraph,
        micro_batches: tuple[MicroBatch, ...],
        whole: MicroBatch,
        functions: dict[str, Callable[..., Any]],
    ) -> None:
        """`whole` is the batch as one micro-batch. `functions`: those of the plan, by name."""
        self.tasks: list[Task] = []
        self.last_on: dict[str, int] = {}
        """Of each lane in use: its last task."""
        self.owner: dict[Execution, int] = {}
        """What was executed, and by which task."""
        self._graph, self._micro_batches, self._functions = graph, micro_batches, functions
        self._finished_before: list[int] = []
        """For each task, a bit mask of the tasks that have ended when it starts."""
        self._idle_asks = 0
        everything = tuple(range(len(micro_batches)))
        self._items = [
            [OpItem(op=op, micro_batch=m, micro_batches=(m.index,)) for m in micro_batches]
            if op.splittable
            else [OpItem(op=op, micro_batch=whole, micro_batches=everything)]
            for op in graph.ops
        ]
        self._users: list[list[Op]] = [[] for _ in graph.ops]
        self._followers: list[list[Op]] = [[] for _ in graph.ops]
        for op in graph.ops:
            for a in op.after:
                self._users[a].append(op)
            for a in op.serial_after if op.splittable else ():
                self._followers[a].append(op)
        self._missing: dict[Execution, int] = {}
        """How many executions each one still waits for."""
        for op, items in zip(graph.ops, self._items, strict=True):
            for m, item in enumerate(items):
                self._missing[op.index, m] = len(set(self.executions_before(item)))
        self._ready = [unit for unit, count in self._missing.items() if not count]

    # Questions

    def ready(self) -> list[OpItem]:
        self._idle_asks += 1
        if self._idle_asks > 1000 + len(self._missing):
            raise ScheduleError(
                f"get_ready_ops() was called {self._idle_asks - 1} times with nothing executed in between",
                op=self._graph.ops[self._ready[0][0]].name if self._ready else None,
                line=user_line(),
                advice="execute at least one of the operators that it returns",
            )
        return [self._items[o][m] for o, m in self._ready]

    def items(self, op: Op | str) -> list[OpItem]:
        found = self._graph.by_name.get(op.name if isinstance(op, Op) else op if isinstance(op, str) else "")
        if found is None or not (isinstance(op, str) or found is op):
            name = op.name if isinstance(op, Op) else shown(op)
            what = f"{name} is not an operator of this graph"
            raise ScheduleError(what, op=name, line=user_line(), advice="see ctx.ops")
        return list(self._items[found.index])

    def before(self, item: OpItem) -> list[OpItem]:
        if not isinstance(item, OpItem):
            raise not_an_item("before()", item)
        return [self._items[o][m] for o, m in dict.fromkeys(self.executions_before(item))]

    def is_ready(self, given: Sequence[OpItem]) -> bool:
        items = as_items("is_ready()", given)
        own = {unit for item in items for unit in executions_of(item)}
        merged = [merge(items)] if len({i.op for i in items}) == 1 else items
        return all(unit in self.owner or unit in own for item in merged for unit in self.executions_before(item))

    def signature(self, given: Sequence[OpItem]) -> tuple[list[str], list[str]]:
        items = as_items("signature()", given)
        self._check_items(items)
        reads, writes = fusion_values(self._graph, [(i.op, i.micro_batches) for i in items])
        names = self._graph.values
        return [names[v].name for v, _ in reads], [names[v].name for v, _ in writes]

    def executions_before(self, item: OpItem) -> list[Execution]:
        """What must be executed before an item."""
        ops, op, found = self._graph.ops, item.op, list[Execution]()
        for a in op.after:
            if ops[a].splittable:
                found.extend((a, m) for m in item.micro_batches)
            else:
                found.append((a, 0))
        for a in op.serial_after if op.splittable else ():
            if ops[a].splittable:
                found.extend((a, m) for m in range(item.micro_batches[-1]) if m not in item.micro_batches)
        return found

    # Recording

    def execute(
        self,
        given: OpItem | Sequence[OpItem],
        lane: str,
        replace_func: Callable[..., Any] | None,
        after: OpItem | Sequence[OpItem],
    ) -> None:
        """Records a task, in four steps:

        1. Check the arguments by themselves.
        2. Find the tasks that it depends on; raise if one was not executed.
        3. Mark its items as executed, which makes others ready.
        4. Append the task, with the waits that do not follow from others.
        """
        items = as_items("execute()", given)
        self._check_call(items, lane, replace_func)
        merged = [merge(items)] if replace_func is None else items
        deps = self._dependencies(merged)
        deps.update(self._executed(as_items("execute(after=...)", after), merged[0]))
        for item in merged:  # from here on nothing is refused
            self._mark_executed(item, len(self.tasks))
        name = None if replace_func is None else self._name(replace_func)
        self._append(tuple(Item(op=i.name, micro_batches=i.micro_batches) for i in merged), lane, deps, name)
        self._idle_asks = 0

    def finish(self, declared: Mapping[str, Lane]) -> Plan:
        """The plan of all tasks. `declared`: lanes with a share or a priority."""
        left = list(dict.fromkeys(o for o, m in self._missing if (o, m) not in self.owner))
        if left:
            op, more = self._graph.ops[left[0]], f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ScheduleError(
                f"operator {op.name!r} was never executed{more}",
                op=op.name,
                line=op.line,
                advice="execute what get_ready_ops() returns until it returns nothing, or return ctx.sequential()",
            )
        # The first lane is the caller's own stream, which can free its arguments as soon as they are used.
        names = sorted(self.last_on, key=lambda name: name != DEFAULT_LANE)
        lanes = tuple(declared.get(name, Lane(name=name)) for name in names)
        return Plan(
            graph=self._graph.fingerprint, micro_batches=self._micro_batches, lanes=lanes, tasks=tuple(self.tasks)
        )

    def _dependencies(self, items: Sequence[OpItem]) -> set[int]:
        deps: set[int] = set()
        inside: set[Execution] = set()
        for item in items:
            for before in self.executions_before(item):
                owner = self.owner.get(before)
                if owner is not None:
                    deps.add(owner)
                elif before not in inside:
                    raise self._not_ready(item, before)
            inside.update(executions_of(item))
        return deps

    def _executed(self, after: list[OpItem], waiting: OpItem) -> Iterator[int]:
        """The tasks that ran the items of `after`."""
        self._check_items(after)
        for item in after:
            for unit in executions_of(item):
                owner = self.owner.get(unit)
                if owner is None:
                    raise ScheduleError(
                        f"operator {waiting} is to wait for {item}, which was not executed before",
                        op=waiting.name,
                        line=user_line(),
                        advice="name only items that were executed already in after=",
                    )
                yield owner

    def _mark_executed(self, item: OpItem, task: int) -> None:
        op = item.op
        for unit in executions_of(item):
            m = unit[1]
            self.owner[unit] = task
            if unit in self._ready:
                self._ready.remove(unit)
            for user in self._users[op.index]:
                self._arrived(user, (m,) if user.splittable and op.splittable else self._parts_of(user))
            for follower in self._followers[op.index] if op.splittable else ():
                self._arrived(follower, self._parts_of(follower)[m + 1 :])

    def _arrived(self, op: Op, parts: Iterable[int]) -> None:
        """These executions of an operator wait for one less."""
        for m in parts:
            unit = (op.index, m)
            self._missing[unit] -= 1
            if not self._missing[unit] and unit not in self.owner:
                bisect.insort(self._ready, unit)

    def _parts_of(self, op: Op) -> range:
        return range(len(self._items[op.index]))

    def _append(self, items: tuple[Item, ...], lane: str, deps: set[int], function: str | None) -> None:
        last = self.last_on.get(lane)
        mask = 0 if last is None else self._finished_before[last] | 1 << last
        waits = []
        for dep in sorted(deps, reverse=True):  # the latest implies most
            if not mask >> dep & 1:
                waits.append(dep)
                mask |= self._finished_before[dep] | 1 << dep
        self.last_on[lane] = len(self.tasks)
        self._finished_before.append(mask)
        self.tasks.append(Task(items=items, lane=lane, after=tuple(sorted(waits)), replace=function))

    def _name(self, function: Callable[..., Any]) -> str:
        """The function's name in the plan. Closures made by one function get a number each."""
        name = unique = function_name(function)
        number = 1
        while self._functions.setdefault(unique, function) is not function:
            number += 1
            unique = f"{name}#{number}"
        return unique

    # Checks

    def _check_call(self, items: list[OpItem], lane: str, replace_func: Callable[..., Any] | None) -> None:
        if not items:
            raise not_an_item("execute()")
        self._check_items(items)
        first = items[0].name
        if not is_name(lane):
            what = f"lane={shown(lane)} is not a name"
            raise ScheduleError(what, op=first, line=user_line(), advice='pass a name, such as "compute"')
        if replace_func is not None and not callable(replace_func):
            what = f"replace_func={shown(replace_func)} is not a function"
            raise ScheduleError(what, op=first, line=user_line(), advice="pass the function itself")
        for item in items:
            if any(unit in self.owner for unit in executions_of(item)):
                raise ScheduleError(
                    f"operator {item} was executed already",
                    op=item.name,
                    line=user_line(),
                    advice="execute every item that get_ready_ops() returns once; ask again after executing",
                )
        if len({(i.name, i.micro_batches) for i in items}) < len(items):
            raise ScheduleError(
                f"operator {items[0]} is given twice", op=first, line=user_line(), advice="name every item once"
            )
        if replace_func is not None:
            check_chain(items)
        elif len({i.name for i in items}) > 1:
            raise ScheduleError(
                f"execute() got different operators ({first}, {items[-1].name}) without replace_func",
                op=first,
                line=user_line(),
                advice="execute each separately, or pass replace_func= to fuse them",
            )

    def _check_items(self, items: list[OpItem]) -> None:
        for item in items:
            if item not in self.items(item.op):
                raise ScheduleError(
                    f"operator {item} is not of this context",
                    op=item.name,
                    line=user_line(),
                    advice="take items from this context's get_ready_ops() or items(), after split()",
                )

    def _not_ready(self, item: OpItem, before: Execution) -> ScheduleError:
        return ScheduleError(
            f"operator {item} is not ready: {self._graph.ops[before[0]].name}[{before[1]}] comes before it and was not "
            "executed",
            op=item.name,
            line=user_line(),
            advice="execute only what get_ready_ops() returns",
        )
