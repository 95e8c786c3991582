"""Second pass of lowering: when each variable is freed.

Contract
    Takes a bound Program; returns it with `frees_first` and `frees` filled in, and nothing else changed.
    A variable is freed on the lane to which its memory returns, at the first step of that lane that follows all its
    readers: before the step's call, or right after it if the step is a reader itself. Then the allocator may reuse the
    memory on that lane without a wait.
    Variables that the results need are not freed; neither are arguments, unless the program owns them (`boxed`).

Steps
    1. Collect the readers of each variable. A reader of a slice reads its base.
    2. Collect which variables may share memory: the results of a call with its arguments.
    3. For each variable, find the first step of its lane that follows all readers. If it shares memory with variables
       that are freed on another lane, their readers count as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dynaflow.lower.ir import Program, Step, Var, Vars

END = -1
"""Stands for the end of the program among the readers."""


@dataclass(slots=True, kw_only=True)
class _Uses:
    readers: dict[Var, set[int]] = field(default_factory=dict)
    lent: dict[Var, set[Var]] = field(default_factory=dict)
    """By variable: others that may be the same memory."""
    made_by: dict[Var, int] = field(default_factory=dict)
    slices: dict[Var, list[Var]] = field(default_factory=dict)
    own: frozenset[Var]
    """Buffers that are allocated for each run."""


def add_frees(program: Program) -> Program:
    uses, before = _uses(program), program.happens_before
    by_lane: dict[str, list[int]] = {}
    for s, step in enumerate(program.steps):
        by_lane.setdefault(step.lane, []).append(s)
    first: dict[int, list[Var]] = {}
    last: dict[int, list[Var]] = {}
    for var in _owned(program):
        lane = _lane(program, uses, var)
        readers = _all_readers(program, uses, var)
        if lane is None or END in readers:
            continue
        if var in uses.made_by:
            readers.add(uses.made_by[var])
        needed = sum(1 << r for r in readers)
        names = [var, *uses.slices.get(var, [])]  # a slice keeps the memory alive
        steps = by_lane.get(lane, [])
        # A step of a lane comes after all that the steps before it come after.
        at = bisect_left(steps, True, key=lambda s: needed & ~(before[s] | 1 << s) == 0)
        if at < len(steps):
            s = steps[at]
            (first if needed & ~before[s] == 0 else last).setdefault(s, []).extend(names)
    freed = [replace(step, frees_first=tuple(first.get(s, ())), frees=tuple(last.get(s, ())))
             for s, step in enumerate(program.steps)]  # fmt: skip
    return replace(program, steps=tuple(freed))


def _owned(program: Program) -> Iterable[Var]:
    """All variables but slices, in the order in which they were made."""
    found = {*program.inputs, *(b.var for b in program.buffers)}
    found.update(v for step in program.steps for v in step.makes if v.kind != "slice")
    return sorted(found, key=lambda v: v.id)


def _uses(program: Program) -> _Uses:
    # 1. and 2.
    uses = _Uses(own=frozenset(b.var for b in program.buffers if b.own))
    for s, step in enumerate(program.steps):
        here: set[Var] = set()
        for instruction in step.needs:
            for var in instruction.reads:
                here.add(var.root)
                uses.readers.setdefault(var.root, set()).add(s)
            if getattr(instruction, "lends", False):
                for var in here:
                    uses.lent.setdefault(var, set()).update(instruction.makes)
        uses.made_by.update(dict.fromkeys(_made(step), s))
    for var in program.final_reads:
        uses.readers.setdefault(var.root, set()).add(END)
    narrows = [*program.start, *(n for step in program.steps for n in step.then), *program.buffer_slices]
    for narrow in sorted(narrows, key=lambda n: n.makes[0].id):
        (out,) = narrow.makes
        uses.slices.setdefault(out.root, []).append(out)
    return uses


def _made(step: Step) -> Vars:
    return tuple(v for v in step.makes if v.kind != "slice")


def _lane(program: Program, uses: _Uses, var: Var) -> str | None:
    """The lane to which the memory of a variable returns; None if it is not freed."""
    if var in uses.made_by:
        return program.steps[uses.made_by[var]].lane
    made_by_caller = var in uses.own if var.kind == "buffer" else program.boxed
    return program.lanes[0] if made_by_caller and not program.partitioned else None


def _all_readers(program: Program, uses: _Uses, var: Var) -> set[int]:
    """The readers of a variable; of all that may share its memory, if some of that is freed on another lane."""
    # 3.
    lane = _lane(program, uses, var)
    same, waiting = {var}, [var]
    while waiting:
        more = uses.lent.get(waiting.pop(), set()) - same
        same |= more
        waiting.extend(more)
    apart = any(_lane(program, uses, other) != lane for other in same)
    return set().union(*(uses.readers.get(v, ()) for v in (same if apart else {var})))
