"""A lowered plan as a function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dynaflow._torch import Boxed
from dynaflow.core.plan import Plan
from dynaflow.lower.emit import Code, forget
from dynaflow.lower.first_call import Untried
from dynaflow.lower.timing import Marks
from dynaflow.partition.op_graph import OpGraph


class Lowered:
    """A plan's function. Call it with a list of the graph's arguments: it may be emptied."""

    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        run: Boxed,
        code: Code | None = None,
        joined_bytes: int = 0,
        all_values: Callable[[list[Any]], dict[int, Any]] | None = None,
    ) -> None:
        self.plan = replace(plan, code=code.source if code else "")
        self.sequential = plan.sequential
        self.graph = graph
        self.run = run
        self.all_values = all_values
        """Runs the plan for the sake of its inner values: value -> tensor of the whole batch."""
        self.joined_bytes = joined_bytes
        self.code = code
        self.verified = False
        self.marks: Marks | None = None
        """If it takes marks behind the arguments: what they mean."""
        self.remark: Callable[[bool], Lowered] | None = None
        """Makes the same once more with marks; and, if asked to, with all calls in a row."""
        self.with_marks: dict[bool, Lowered] = {}
        """What that has made."""
        if code:
            weakref.finalize(self, forget, code.filename)
        if isinstance(run, Untried):
            run.then(partial(_settle, weakref.ref(self), run))

    def __call__(self, args: list[Any]) -> Any:
        try:
            return self.run(args)
        except Exception as e:
            self.explain(e)
            raise

    def explain(self, error: Exception) -> None:
        """Has an error say in which task it was raised."""
        if where := self.tasks_of(error):
            error.add_note(f"dynaflow: in {where}")

    def marked(self, row: bool = False) -> Lowered:
        """The same with marks, for a recording. This one stays as it is."""
        if row not in self.with_marks:
            assert self.remark is not None and self.marks is None
            self.with_marks[row] = self.remark(row)
        return self.with_marks[row]

    def placed(self, plan: Plan, cuts: tuple[int, ...], remade: Callable[[], Lowered]) -> Lowered:
        """The same function for micro-batches of other sizes, if it is elastic. `remade`: for these sizes alone."""
        run = self.run

        def run_here(args: list[Any]) -> Any:
            args.append(cuts)
            return run(args)

        def run_marked(args: list[Any]) -> Any:
            args.insert(-1, cuts)
            return run(args)

        found = Lowered(plan, self.graph, run_marked if self.marks else run_here, None, self.joined_bytes)
        found.plan, found.code = replace(plan, code=self.plan.code), self.code
        if self.marks:
            found.marks = replace(self.marks, plan=replace(self.marks.plan, micro_batches=plan.micro_batches))
        found.remark = lambda row: self.marked(row).placed(plan, cuts, remade)
        found.all_values = lambda args: _all(remade(), args)
        return found

    def tasks_of(self, error: BaseException) -> str | None:
        """Where an error was raised, in words."""
        indices = self.code.tasks_of(error) if self.code else None
        if not indices:
            return None
        tasks = [self.plan.tasks[i] for i in indices]
        which = f"task {indices[0]}" if len(tasks) == 1 else f"tasks {', '.join(map(str, indices))}, compiled as one"
        return f"{which}, {', then '.join(map(str, tasks))}, on lane {tasks[0].lane}"


def _settle(lowered: weakref.ref[Lowered], untried: Untried, call: Boxed) -> None:
    if (found := lowered()) is not None and found.run is untried:
        found.run = call


def _all(lowered: Lowered, args: list[Any]) -> dict[int, Any]:
    assert lowered.all_values is not None
    return lowered.all_values(args)
