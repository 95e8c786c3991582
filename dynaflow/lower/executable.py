"""A lowered plan as a function, and what can be put around it.

An Executable never changes. Recording, CUDA graphs, padding and other sizes are decorators: they take one and return
another. The only thing that moves is inside its Entry: compiled code settles there once it has run.
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
from dynaflow.lower.first_call import Untried
from dynaflow.lower.timing import Marks
from dynaflow.partition.op_graph import OpGraph


class Entry:
    """What a call of an executable calls. Compiled code at its first call is replaced by the code itself."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Boxed) -> None:
        self.call = call
        if isinstance(call, Untried):
            call.then(partial(_settle, weakref.ref(self), call))


def _settle(entry: weakref.ref[Entry], untried: Untried, call: Boxed) -> None:
    if (found := entry()) is not None and found.call is untried:
        found.call = call


class Recordable:
    """Makes the variants of an executable that take marks, each when a recording first asks for it."""

    def __init__(self, make: Callable[[bool], Executable]) -> None:
        """`make`: gets whether all calls are to run one after the other."""
        self._make = make
        self.made: dict[bool, Executable] = {}

    def get(self, row: bool) -> Executable:
        if row not in self.made:
            self.made[row] = self._make(row)
        return self.made[row]


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A plan's function. Call it with a list of the graph's arguments: it may be emptied."""

    plan: Plan
    graph: OpGraph
    entry: Entry
    code: Code | None = None
    joined_bytes: int = 0
    """What a call copies to join micro-batches."""
    all_values: Callable[[list[Any]], dict[int, Any]] | None = None
    """Runs the plan for the sake of its inner values: value -> tensor of the whole batch."""
    marks: Marks | None = None
    """If it takes marks after the arguments: what they mean."""
    recordable: Recordable | None = None
    """None if it takes marks itself."""
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
        """Adds a note to an error: in which task it was raised."""
        if where := self.tasks_of(error):
            error.add_note(f"dynaflow: in {where}")

    def tasks_of(self, error: BaseException) -> str | None:
        """Where an error was raised, in words."""
        return tasks_of(self.plan, self.code, error)

    def marked(self, row: bool = False) -> Executable:
        """The same with marks, for a recording; with `row`, its calls one after the other."""
        assert self.recordable is not None
        return self.recordable.get(row)

    def known_marked(self, row: bool) -> Executable | None:
        """The same, if it has been made before."""
        assert self.recordable is not None
        return self.recordable.made.get(row)


def tasks_of(plan: Plan, code: Code | None, error: BaseException) -> str | None:
    """Where in a plan's code an error was raised, in words."""
    indices = code.tasks_of(error) if code else None
    if not indices:
        return None
    tasks = [plan.tasks[i] for i in indices]
    which = f"task {indices[0]}" if len(tasks) == 1 else f"tasks {', '.join(map(str, indices))}, compiled as one"
    return f"{which}, {', then '.join(map(str, tasks))}, on lane {tasks[0].lane}"


def with_code(plan: Plan, code: Code | None) -> Plan:
    """The plan, to show with the code that it became."""
    return replace(plan, code=code.source if code else "")


def resized(executable: Executable, plan: Plan, cuts: tuple[int, ...], remade: Callable[[], Executable]) -> Executable:
    """An elastic executable for micro-batches of other sizes. `remade`: one that is made for these sizes alone."""
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
