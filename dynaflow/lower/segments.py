"""Which steps of a program are captured together when it is captured in pieces: maximal runs on each lane.

A run ends where an operator stays outside, where it waits for another lane, and where another lane waits for it: a
graph is launched as a whole, on one lane, and is done as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaflow.lower.ir import Program, Var, Vars


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    steps: tuple[int, ...]
    inputs: Vars
    outputs: Vars
    made_outside: frozenset[int]
    """Of the inputs, those that an operator outside has made: at another place in memory each time."""


def make_segments(program: Program, outside: frozenset[int]) -> list[Segment]:
    """`outside`: steps that no graph can hold."""
    awaited = {a for step in program.steps for a in step.after}
    latest: dict[str, list[int]] = {}
    runs: list[list[int]] = []
    for s, step in enumerate(program.steps):
        if s in outside:
            latest.pop(step.lane, None)
            continue
        run = latest.get(step.lane)
        if run is not None and not step.after and run[-1] not in awaited:
            run.append(s)
        else:
            run = latest[step.lane] = [s]
            runs.append(run)
    made_outside = {var for s in outside for var in program.steps[s].makes}
    return [_segment(program, run, made_outside) for run in runs]


def _segment(program: Program, run: Sequence[int], outside: set[Var]) -> Segment:
    inside = [program.steps[s] for s in run]
    makes = dict.fromkeys(var for step in inside for var in step.makes)
    inputs = tuple(dict.fromkeys(var for step in inside for var in step.reads if var not in makes))
    others = [step for s, step in enumerate(program.steps) if s not in run]
    needed = program.final_reads.union(*(step.reads for step in others))
    return Segment(
        steps=tuple(run),
        inputs=inputs,
        outputs=tuple(var for var in makes if var in needed),
        made_outside=frozenset(i for i, var in enumerate(inputs) if var in outside),
    )
