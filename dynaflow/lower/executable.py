"""A lowered plan as a function.

An Executable is immutable. Recording, CUDA graphs and other sizes are decorators: they take one and return another.
Only its Entry changes, when compiled code has made its first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dynaflow._torch import Boxed
from dynaflow.core.plan import Plan
from dynaflow.lower.emit import Code
from dynaflow.lower.first_call import FirstCall
from dynaflow.lower.timing import Marks
from dynaflow.partition.op_graph import OpGraph


class Entry:
    """The function that an executable calls. A FirstCall is replaced by its code after the first call."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Boxed) -> None:
        self.call = call
        if isinstance(call, FirstCall):
            call.then(partial(_settle, weakref.ref(self), call))


def _settle(entry: weakref.ref[Entry], first: FirstCall, call: Boxed) -> None:
    if (found := entry()) is not None and found.call is first:
        found.call = call


class Recordable:
    """Makes the variants of an executable with timing marks, each when a recording first needs it."""

    def __init__(self, make: Callable[[bool], Executable]) -> None:
        """`make` takes whether all calls run one after the other."""
        self._make = make
        self.made: dict[bool, Executable] = {}

    def get(self, row: bool) -> Executable:
        if row not in self.made:
            self.made[row] = self._make(row)
        return self.made[row]


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A plan's function. Call it with a list of the graph's arguments, which it may empty."""

    plan: Plan
    graph: OpGraph
    entry: Entry
    code: Code | None = None
    joined_bytes: int = 0
    """What a call copies to join micro-batches."""
    all_values: Callable[[list[Any]], dict[int, Any]] | None = None
    """Runs the plan and returns its intermediate values: value -> tensor of the whole batch."""
    marks: Marks | None = None
    """What its marks mean, if it takes a list of them after the arguments."""
    recordable: Recordable | None = None
    """None if it takes marks."""
    sequential: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequential", self.plan.sequential)  # every call reads it

    def __call__(self, args: list[Any]) -> Any:
        try:
            return self.entry.call(args)
        except Exception as e:
            self.explain(e)
            raise

    def explain(self, error: Exception) -> None:
        """Adds a note to an error, with the task that raised it."""
        if where := self.tasks_of(error):
            error.add_note(f"dynaflow: in {where}")

    def tasks_of(self, error: BaseException) -> str | None:
        """The task that raised an error, as text."""
        return tasks_of(self.plan, self.code, error)

    def marked(self, row: bool = False) -> Executable:
        """The same with marks, for a recording; with `row`, its calls one after the other."""
        assert self.recordable is not None
        return self.recordable.get(row)

    def known_marked(self, row: bool) -> Executable | None:
        """The same, if it was made before."""
        assert self.recordable is not None
        return self.recordable.made.get(row)


def tasks_of(plan: Plan, code: Code | None, error: BaseException) -> str | None:
    """The task of a plan that raised an error, as text."""
    indices = code.tasks_of(error) if code else None
    if not indices:
        return None
    tasks = [plan.tasks[i] for i in indices]
    which = f"task {indices[0]}" if len(tasks) == 1 else f"tasks {', '.join(map(str, indices))}, compiled as one"
    return f"{which}, {', then '.join(map(str, tasks))}, on lane {tasks[0].lane}"


def with_code(plan: Plan, code: Code | None) -> Plan:
    """The plan with its generated code."""
    return replace(plan, code=code.source if code else "")


def resized(executable: Executable, plan: Plan, cuts: tuple[int, ...], remade: Callable[[], Executable]) -> Executable:
    """A shape-polymorphic executable for micro-batches of other sizes. `remade` makes one for these sizes only."""
    entry, marks = executable.entry, executable.marks

    def run_here(args: list[Any]) -> Any:
        args.append(cuts)
        return entry.call(args)

    def run_marked(args: list[Any]) -> Any:
        args.insert(-1, cuts)
        return entry.call(args)

    def values(args: list[Any]) -> dict[int, Any]:
        made = remade()
        assert made.all_values is not None
        return made.all_values(args)

    return Executable(
        plan=replace(plan, code=executable.plan.code),
        graph=executable.graph,
        entry=Entry(run_marked if marks else run_here),
        code=executable.code,
        joined_bytes=executable.joined_bytes,
        all_values=values,
        marks=marks and replace(marks, plan=replace(marks.plan, micro_batches=plan.micro_batches)),
        recordable=None if marks else Recordable(lambda row: resized(executable.marked(row), plan, cuts, remade)),
    )
