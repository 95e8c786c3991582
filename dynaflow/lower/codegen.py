"""A program rendered as one flat Python function: no queue, no loop, no look-up per task.

On CPU each lane but the caller's is a block that a worker thread runs; lanes meet at locks. On CUDA one thread
issues everything; lanes are streams and meet at events. With a single lane both are plain calls in a row.
"""

from __future__ import annotations

import itertools
import linecache
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from dynaflow.errors import printable
from dynaflow.lower.first_call import Untried
from dynaflow.lower.segments import Segment
from dynaflow.lower.steps import Program, Step
from dynaflow.lower.timing import Marks

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The source of a lowered plan, its function, and which line belongs to which task."""

    source: str
    run: Callable[..., Any]
    filename: str
    tasks: dict[int, tuple[int, ...]]
    names: dict[str, Any]
    """The code's globals."""

    def tasks_of(self, error: BaseException) -> tuple[int, ...] | None:
        """The task in which `error` was raised, or those of one call: no bookkeeping while things go well."""
        tb, found = error.__traceback__, None
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == self.filename:
                found = self.tasks.get(tb.tb_lineno, found)
            tb = tb.tb_next
        return found


class _Writer:
    def __init__(self, marks: Marks | None = None, cuda: bool = False) -> None:
        self.lines: list[str] = []
        self.tasks: dict[int, tuple[int, ...]] = {}
        self.indent = 0
        self.marks, self._cuda = marks, cuda

    def line(self, text: str, tasks: tuple[int, ...] = ()) -> None:
        self.lines.append("    " * self.indent + text)
        if tasks:
            self.tasks[len(self.lines)] = tasks

    def comment(self, text: str, code: str = "") -> None:
        """Names come from models and plans, and may hold anything: line breaks, for one."""
        self.line(f"{code}# {printable(text)}")

    def mark(self, step: int, side: int, stream: str = "s0") -> None:
        """For a recording, at the start (0) or at the end (1) of the call that begins with the step."""
        number = self.marks.at[step][side] if self.marks else None
        if number is not None:
            self.line(f"marks[{number}].record({stream})" if self._cuda else f"marks[{number}] = clock()")


def generate(
    program: Program, *, cuda: bool, hook: bool, segments: Sequence[Segment] = (), marks: Marks | None = None
) -> Code:
    """`hook`: the code calls `on_task(task, "start" | "stop")` around every task. `marks`: it takes a list of them.

    Two of the code's globals are to be set: `on_task`, for a hook, and `new_call(locks)`, for lanes that are threads.

    Each of the `segments` becomes a function by itself, `segment_0`, ..., called under the name `graph_0`, ...
    """
    out = _Writer(marks, cuda)
    lanes = program.lanes
    for number, segment in enumerate(segments):
        _segment(out, program, number, segment)
    if len(lanes) < 2 and not program.partitioned:
        _single(out, program, hook, segments, cuda)
    elif cuda:
        _streams(out, program, hook, segments)
    else:
        _threads(out, program, hook)
    source = "\n".join(out.lines) + "\n"
    filename = f"<dynaflow plan {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names = dict(program.names)
    if marks:
        names |= {"clock": time.perf_counter, "current_stream": partial(torch.cuda.current_stream, marks.device)}
    exec(compile(source, filename, "exec"), names)
    for name, call in program.names.items():
        if isinstance(call, Untried):
            call.then(partial(_put, weakref.ref(names["run"]), name))
    return Code(source=source, run=names["run"], filename=filename, tasks=out.tasks, names=names)


def _put(run: weakref.ref[FunctionType], name: str, call: Any) -> None:
    if (found := run()) is not None:
        found.__globals__[name] = call


def forget(filename: str) -> None:
    """Takes the source back out of linecache once its plan is gone."""
    linecache.cache.pop(filename, None)


def _parameters(program: Program) -> str:
    return "args, memory" if program.views else "args"


def _arguments(out: _Writer, program: Program) -> None:
    if out.marks:
        out.line("marks = args.pop()")
    used = set(program.used)
    if used:
        names = [f"a{i}" if i in used else "_" for i in range(program.arguments)]
        out.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        if program.boxed:
            out.line("args.clear()")
            if "_" in names:
                out.line("_ = None")
    if program.views:
        out.line(f"{', '.join(program.views)}, = memory")
    for text in program.start:
        out.line(text)


def _body(out: _Writer, step: Step, hook: bool, scope: frozenset[str] | None = None) -> None:
    """`scope`: the variables that may be let go here, when not all."""
    tasks = step.tasks
    _let_go(out, step.frees_first, tasks, scope)
    if hook:
        out.line(f'on_task({tasks[0]}, "start")', tasks)
    for text in step.before:
        out.line(text, tasks)
    left = _left(step, scope)
    if step.box is None:
        out.line(step.call, tasks)
    elif left:
        out.line(f"box = [{', '.join(step.box)}]", tasks)
        _let_go(out, left, tasks)
        out.line(f"{step.call}(box)", tasks)
    else:
        out.line(f"{step.call}([{', '.join(step.box)}])", tasks)
    for text in step.behind:
        out.line(text, tasks)
    if hook:
        out.line(f'on_task({tasks[0]}, "stop")', tasks)
    _let_go(out, [name for name in step.frees if name not in left], tasks, scope)


def _left(step: Step, scope: frozenset[str] | None) -> list[str]:
    """The variables that only the call needs any more: it lets go of its arguments itself, each after its last use."""
    if step.box is None:
        return []
    needed = [name for name in step.frees if name in step.box or name not in step.makes]
    return [name for name in needed if scope is None or name in scope]


def _let_go(out: _Writer, names: list[str], tasks: tuple[int, ...], scope: frozenset[str] | None = None) -> None:
    names = [name for name in names if scope is None or name in scope]
    if names:
        out.line(f"{' = '.join(names)} = None", tasks)


def _title(out: _Writer, step: Step) -> None:
    out.comment(f"{', '.join(map(str, step.tasks))}: {step.title}")


def _end(out: _Writer, program: Program) -> None:
    for text in program.end:
        out.line(text)
    out.line(f"return {program.results}")


def _segment(out: _Writer, program: Program, number: int, segment: Segment) -> None:
    out.line(f"def segment_{number}({', '.join(segment.inputs)}):")
    out.indent += 1
    steps = [program.steps[s] for s in segment.steps]
    local = frozenset(n for step in steps for n in step.makes) - frozenset(segment.outputs)
    for step in steps:
        _title(out, step)
        _body(out, step, False, local)
    out.line(f"return ({''.join(f'{name}, ' for name in segment.outputs).rstrip()})")
    out.indent -= 1


def _call_segment(out: _Writer, program: Program, number: int, segment: Segment) -> None:
    steps = [program.steps[s] for s in segment.steps]
    tasks = tuple(t for step in steps for t in step.tasks)
    known = frozenset(segment.outputs) | {n for step in program.steps if step not in steps for n in step.makes}
    assigned = f"{''.join(f'{name}, ' for name in segment.outputs).rstrip()} = " if segment.outputs else ""
    out.line(f"{assigned}graph_{number}({', '.join(segment.inputs)})", tasks)
    _let_go(out, [n for step in steps for n in (*step.frees_first, *step.frees)], tasks, known)


def _single(out: _Writer, program: Program, hook: bool, segments: Sequence[Segment], cuda: bool) -> None:
    out.line(f"def run({_parameters(program)}):")
    out.indent += 1
    _arguments(out, program)
    if out.marks and cuda:
        out.line("s0 = current_stream()")
    first = {segment.steps[0]: n for n, segment in enumerate(segments)}
    inside = {s for segment in segments for s in segment.steps}
    for s, step in enumerate(program.steps):
        if s in inside and s not in first:
            continue
        out.mark(s, 0)
        if s in first:
            _call_segment(out, program, first[s], segments[first[s]])
        else:
            _title(out, step)
            _body(out, step, hook)
        out.mark(s, 1)
    _end(out, program)


def _signals(program: Program) -> dict[int, list[tuple[int, int]]]:
    """For each step that others wait for: (number of the wait, waiting step)."""
    found: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for s, step in enumerate(program.steps):
        for a in step.after:
            found.setdefault(a, []).append((number, s))
            number += 1
    return found


def _threads(out: _Writer, program: Program, hook: bool) -> None:
    signals = _signals(program)
    waits = sorted(pair for pairs in signals.values() for pair in pairs)
    out.line(f"def run({_parameters(program)}):")
    out.indent += 1
    _arguments(out, program)
    out.line(f"call = new_call({len(waits)})")
    if waits:
        out.line(f"{', '.join(f'w{n}' for n, _ in waits)}{',' if len(waits) == 1 else ''} = call.locks")
    out.line("failed = call.failed")
    if program.variables:
        out.line(" = ".join(program.variables) + " = None")
    freed = dict.fromkeys(name for step in program.steps for name in (*step.frees_first, *step.frees))
    shared = [*program.variables, *(name for name in freed if name not in program.variables)]
    for number, lane in enumerate(program.lanes):
        out.comment(lane, f"def lane_{number}():  ")
        out.indent += 1
        if shared:
            out.line(f"nonlocal {', '.join(shared)}")
        for s, step in enumerate(program.steps):
            if step.lane != lane:
                continue
            _title(out, step)
            for n, waiting in waits:
                if waiting == s:
                    out.line(f"w{n}.acquire()")
                    out.line("if failed: return")
            out.mark(s, 0)
            _body(out, step, hook)
            out.mark(s, 1)
            for n, _ in signals.get(s, []):
                out.line(f"w{n}.release()")
        out.line("return")
        out.indent -= 1
    out.line(f"call.run({', '.join(f'lane_{n}' for n in range(len(program.lanes)))})")
    _end(out, program)


def _streams(out: _Writer, program: Program, hook: bool, segments: Sequence[Segment]) -> None:
    signals = _signals(program)
    number = {lane: i for i, lane in enumerate(program.lanes)}
    out.line(f"def run({_parameters(program)}, streams, events, set_stream):")
    out.indent += 1
    streams = [f"s{i}" for i in number.values()]
    caller = "caller" if program.partitioned else "s0"
    out.line(f"{'caller, ' if program.partitioned else ''}{', '.join(streams)}, = streams")
    joins = {stream: f"j_{stream}" for stream in streams if stream != caller}
    out.line(f"{', '.join([*(f'e{t}' for t in sorted(signals)), *joins.values()])}, = events")
    _arguments(out, program)
    current = home = None if program.partitioned else program.lanes[0]
    first = {segment.steps[0]: n for n, segment in enumerate(segments)}
    inside = {s for segment in segments for s in segment.steps}
    for s, step in enumerate(program.steps):
        if s in inside and s not in first:
            continue
        if s not in inside:
            _title(out, step)
        stream, last = f"s{number[step.lane]}", s
        if step.lane != current:
            out.line(f"set_stream({stream})")
            current = step.lane
        for a in step.after:
            out.line(f"{stream}.wait_event(e{a})", step.tasks)
        out.mark(s, 0, stream)
        if s in first:
            _call_segment(out, program, first[s], segments[first[s]])
            last = segments[first[s]].steps[-1]
        else:
            _body(out, step, hook)
        out.mark(s, 1, stream)
        if last in signals:
            out.line(f"e{last}.record({stream})", step.tasks)
    if current != home:
        out.line(f"set_stream({caller})")
    for stream, event in joins.items():
        out.line(f"{event}.record({stream})")
        out.line(f"{caller}.wait_event({event})")
    for name in program.made_aside:  # the caller's stream uses it from here on
        out.line(f"{name}.record_stream({caller})")
    _end(out, program)


def event_count(program: Program) -> int:
    """One where lanes meet, and one for each lane that joins the caller's at the end."""
    return len(_signals(program)) + len(program.lanes) - (0 if program.partitioned else 1)
