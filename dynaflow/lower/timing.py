"""Timing marks: a recording takes the time before and after each call of a lowered plan.

The code with marks is a variant of the plan's function, so calls without a recording do not pay for it. It takes a
list of marks after the graph's arguments: on CUDA events, which it records; on CPU slots, into which it writes times.

Contract
    `make_marks` takes a plan, its Program, and the segments that are captured. Returns what each mark means: a span of
    marks for each call, and the plan with tasks that are one call merged into one. Changes nothing, raises nothing.

Steps
    1. Collect the calls: segments, and steps outside of them, in the order of issue.
    2. Give each call a mark at its end. A call starts at the end mark of the call before it on its lane; if it waits
       for another lane, or is the first, it gets a mark for its start as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow._torch import Boxed
from dynaflow.core.plan import Plan, Task
from dynaflow.lower.compile_ops import Sizes
from dynaflow.lower.ir import Program
from dynaflow.lower.segments import Segment
from dynaflow.partition.op_graph import OpGraph
from dynaflow.runtime.cuda_lanes import CaptureStreams


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The meaning of a plan's marks."""

    plan: Plan
    """Tasks that were compiled as one call are one task. A sequential plan is one call without tasks."""
    graph: OpGraph
    device: torch.device
    sizes: Sizes
    spans: tuple[tuple[int, int], ...]
    """For each call: the indices of its start mark and its end mark."""
    count: int
    at: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """By the first step of each call: the mark before the call, if any, and the mark after it."""
    own: bool = False
    """The run fills the list of marks, which is given to it empty."""
    key: object = field(default_factory=object)
    """One for all sizes of an elastic plan."""
    cuda: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuda", self.device.type == "cuda")


def whole_marks(plan: Plan, graph: OpGraph, sizes: Sizes) -> Marks:
    """Marks of the uncut graph: one call."""
    return Marks(plan=plan, graph=graph, device=graph.graph.device, sizes=sizes, spans=((0, 1),), count=2)


def make_marks(plan: Plan, graph: OpGraph, sizes: Sizes, program: Program, segments: Sequence[Segment] = ()) -> Marks:
    # 1.
    inside = {s for segment in segments for s in segment.steps}
    calls = sorted([*(segment.steps for segment in segments),
                    *((s,) for s in range(len(program.steps)) if s not in inside)])  # fmt: skip
    call_of = {s: c for c, steps in enumerate(calls) for s in steps}
    # 2.
    last: dict[str, int] = {}
    tasks, spans, at, count = [], [], {}, 0
    for steps in calls:
        first = program.steps[steps[0]]
        indices = [t for s in steps for t in program.steps[s].tasks]
        items = tuple(item for t in indices for item in plan.tasks[t].items)
        replaced = plan.tasks[indices[0]].replace if len(indices) == 1 else None
        after = tuple(dict.fromkeys(call_of[a] for a in first.after))
        tasks.append(Task(items=items, lane=first.lane, after=after, replace=replaced))
        own = bool(first.after) or first.lane not in last
        start = count if own else last[first.lane]
        count += own
        spans.append((start, count))
        at[steps[0]] = (start if own else None, count)
        last[first.lane] = count
        count += 1
    seen = replace(plan, tasks=tuple(tasks), code="")
    return Marks(plan=seen, graph=graph, device=graph.graph.device, sizes=sizes, spans=tuple(spans), count=count, at=at)


def marked_around(run: Boxed, device: torch.device) -> Boxed:
    """The uncut graph with marks around it."""
    cuda = device.type == "cuda"

    def run_marked(args: list[Any]) -> Any:
        marks = args.pop()
        if cuda:
            stream = torch.cuda.current_stream(device)
            marks[0].record(stream)
            results = run(args)
            marks[1].record(stream)
        else:
            marks[0] = time.perf_counter()
            results = run(args)
            marks[1] = time.perf_counter()
        return results

    return run_marked


class Branches:
    """Side streams on which the marks of a CUDA graph are captured, one for each lane."""

    def __init__(self, streams: CaptureStreams) -> None:
        self._streams = streams
        self._used: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    def at(self, lane: torch.cuda.Stream) -> torch.cuda.Stream:
        """The side stream of a lane, after what the lane has issued so far. Marks of one lane keep its order."""
        branch = self._used.setdefault(lane, self._streams.beside(lane))
        branch.wait_stream(lane)
        return branch

    def join(self, main: torch.cuda.Stream) -> None:
        for branch in self._used.values():
            main.wait_stream(branch)


class MarkAside:
    """An event that a graph records at each launch. On the lane itself it would delay the next kernel."""

    def __init__(self, branches: Branches) -> None:
        self.event = torch.cuda.Event(enable_timing=True, external=True)
        self._branches = branches

    def record(self, lane: torch.cuda.Stream) -> None:
        self.event.record(self._branches.at(lane))
