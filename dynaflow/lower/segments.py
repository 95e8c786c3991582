"""Groups the steps of a program into segments: each is captured as one CUDA graph.

Contract
    Takes a Program, and the steps that no graph may contain. Returns segments that cover all other steps once; changes
    nothing, raises nothing.
    A segment is a maximal run of steps on one lane. It ends at a step that stays outside, before a step that waits for
    another lane, and after a step that another lane waits for: a graph is launched, and finishes, as a whole.
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
    """Positions of the inputs that a step outside makes, at a new address in each run."""


def make_segments(program: Program, outside: frozenset[int]) -> list[Segment]:
    """`outside`: steps that no graph may contain."""
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
