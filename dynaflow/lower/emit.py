"""Last pass of lowering: a program as one flat Python function, without a queue, loop or lookup per task.

Contract
    Takes a Program whose frees and buffers are in place; returns its source and its function, and changes nothing.
    Every instruction becomes one line, in the order of the steps; lines of a step know its tasks, for error messages.

A backend has what differs between devices: how steps are grouped, and the code before and after each. With a single
lane they are calls in sequence. On CPU each lane but the caller's is a block that a worker thread runs; lanes meet at
locks. On CUDA one thread issues everything; lanes are streams and meet at events.
"""

from __future__ import annotations

import itertools
import linecache
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from dynaflow.errors import printable
from dynaflow.lower.first_call import FirstCall
from dynaflow.lower.ir import (
    Call,
    Instruction,
    Join,
    Narrow,
    New,
    Program,
    Replace,
    Step,
    Var,
    assignment,
    listed,
    tuple_of,
)
from dynaflow.lower.segments import Segment
from dynaflow.lower.timing import Marks
from dynaflow.runtime.joins import unpack

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Code:
    """The source of a lowered plan, its function, and which line belongs to which task."""

    source: str
    run: Callable[..., Any]
    filename: str
    tasks: Mapping[int, tuple[int, ...]]
    names: dict[str, Any]
    """The code's globals."""

    def tasks_of(self, error: BaseException) -> tuple[int, ...] | None:
        """The tasks of the call that raised `error`, found by its traceback: runs need no bookkeeping."""
        tb, found = error.__traceback__, None
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == self.filename:
                found = self.tasks.get(tb.tb_lineno, found)
            tb = tb.tb_next
        return found


def emit(
    program: Program, *, cuda: bool, hook: bool, segments: Sequence[Segment] = (), marks: Marks | None = None
) -> Code:
    """`hook`: the code calls `on_task(task, "start" | "stop")` around every task. `marks`: it takes a list of them.

    Two of the code's globals are to be set: `on_task`, for a hook, and `new_call(locks)`, for lanes that are threads.

    Each of the `segments` becomes a function of its own, `segment_0`, ..., called under the name `graph_0`, ...
    """
    out = _Emitter(program, _backend(program, cuda, marks is not None), hook, segments, marks, cuda)
    for number in range(len(segments)):
        out.segment(number)
    out.function()
    source = "\n".join(out.lines) + "\n"
    filename = f"<dynaflow plan {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names = dict(out.names)
    if marks:
        names |= {"clock": time.perf_counter, "current_stream": partial(torch.cuda.current_stream, marks.device)}
    exec(compile(source, filename, "exec"), names)
    for name, call in out.names.items():
        if isinstance(call, FirstCall):
            call.then(partial(_put, weakref.ref(names["run"]), name))
    code = Code(source=source, run=names["run"], filename=filename, tasks=out.tasks, names=names)
    weakref.finalize(code, linecache.cache.pop, filename, None)
    return code


def _put(run: weakref.ref[FunctionType], name: str, call: Any) -> None:
    if (found := run()) is not None:
        found.__globals__[name] = call


def event_count(program: Program) -> int:
    """Events of code for streams: one for each awaited step, and one for each lane that joins the caller's."""
    return len(_signals(program)) + len(program.lanes) - (0 if program.partitioned else 1)


def _signals(program: Program) -> dict[int, list[tuple[int, int]]]:
    """For each step that others wait for: (number of the wait, waiting step)."""
    found: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for s, step in enumerate(program.steps):
        for a in step.after:
            found.setdefault(a, []).append((number, s))
            number += 1
    return found


class _Emitter:
    def __init__(
        self,
        program: Program,
        backend: _Backend,
        hook: bool,
        segments: Sequence[Segment],
        marks: Marks | None,
        cuda: bool,
    ) -> None:
        self.program, self.backend, self.hook, self.segments = program, backend, hook, segments
        self.marks, self.cuda = marks, cuda
        self.lines: list[str] = []
        self.tasks: dict[int, tuple[int, ...]] = {}
        self.names: dict[str, Any] = {}
        """What the code refers to: operators, joins."""
        self.indent = 0
        self.segment_of = {segment.steps[0]: n for n, segment in enumerate(segments)}
        """By first step."""
        self.captured = frozenset(s for segment in segments for s in segment.steps)
        self.operators: dict[tuple[int, Any], str] = {}
        """Their names, in the order of the steps, whatever the order of the code."""
        for step in program.steps:
            for call in step.needs:
                if isinstance(call, Call) and (call.op, call.call) not in self.operators:
                    self.operators[call.op, call.call] = self._operator(f"op{call.op}", call.call)

    # Lines

    def line(self, text: str, tasks: tuple[int, ...] = ()) -> None:
        self.lines.append("    " * self.indent + text)
        if tasks:
            self.tasks[len(self.lines)] = tasks

    def comment(self, text: str, code: str = "") -> None:
        """Escapes the text: names come from models and plans, and may contain line breaks."""
        self.line(f"{code}# {printable(text)}")

    def mark(self, step: int, side: int) -> None:
        """For a recording, at the start (0) or at the end (1) of the call that begins with the step."""
        number = self.marks.at[step][side] if self.marks else None
        if number is not None:
            stream = self.backend.stream_of(self.program.steps[step])
            self.line(f"marks[{number}].record({stream})" if self.cuda else f"marks[{number}] = clock()")

    def name(self, name: str, value: Any) -> str:
        """A global of the code that stands for a value."""
        self.names[name] = value
        return name

    def _operator(self, name: str, call: Any) -> str:
        if name in self.names:  # another size of the same operator, compiled separately
            name = f"{name}_{len(self.names)}"
        return self.name(name, call)

    # Functions

    def function(self) -> None:
        program, backend = self.program, self.backend
        parameters = ["args", *(["memory"] if program.views else []), *backend.parameters]
        self.line(f"def run({', '.join(parameters)}):")
        self.indent += 1
        backend.enter(self)
        self._arguments()
        backend.begin(self)
        for steps in backend.blocks(self):
            for s in steps:
                self._step(s)
            backend.end_block(self)
        backend.end(self)
        for join in program.end:
            self._instruction(join)
        for var in program.clones:
            self.line(f"{var} = {var}.clone()")
        self.line(f"return {self._results()}")
        self.indent -= 1

    def segment(self, number: int) -> None:
        segment = self.segments[number]
        self.line(f"def segment_{number}({listed(segment.inputs)}):")
        self.indent += 1
        steps = [self.program.steps[s] for s in segment.steps]
        local = frozenset(v for step in steps for v in step.makes) - frozenset(segment.outputs)
        for step in steps:
            self._title(step)
            self._body(step, hook=False, scope=local)
        self.line(f"return ({tuple_of(segment.outputs)})")
        self.indent -= 1

    def _arguments(self) -> None:
        program = self.program
        if self.marks:
            self.line("marks = args.pop()")
        names = ["_"] * program.arguments
        for var in program.inputs:
            names[var.argument] = str(var)
        if program.extents:
            names.append(f"a{program.arguments}")
        if program.inputs or program.extents:
            self.line(f"{_tuple(names)} = args")
            if program.boxed:
                self.line("args.clear()")
                if "_" in names:
                    self.line("_ = None")
        if program.views:
            self.line(f"{listed(var for var, _ in program.views)}, = memory")
        if program.extents:
            self.line(f"{', '.join(program.extents)}, = a{program.arguments}")
        for instruction in program.start:
            self._instruction(instruction)

    def _results(self) -> str:
        program = self.program
        if program.epilogue is None:
            return f"({tuple_of(program.results)})"
        name = self.name("epilogue", program.epilogue.function)
        return f"{name}({listed((*program.epilogue.sizes, *program.results))})"

    # Steps

    def _step(self, s: int) -> None:
        step = self.program.steps[s]
        number = self.segment_of.get(s)
        if number is None:
            self._title(step)
        self.backend.before(self, s)
        self.mark(s, 0)
        if number is None:
            self._body(step, hook=self.hook)
        else:
            self._call_segment(number)
        self.mark(s, 1)
        self.backend.after(self, s if number is None else self.segments[number].steps[-1])

    def _title(self, step: Step) -> None:
        self.comment(f"{', '.join(map(str, step.tasks))}: {step.title}")

    def _body(self, step: Step, *, hook: bool, scope: frozenset[Var] | None = None) -> None:
        """`scope`: the variables that may be freed here; None for all."""
        tasks = step.tasks
        self._free(step.frees_first, tasks, scope)
        if hook:
            self.line(f'on_task({tasks[0]}, "start")', tasks)
        for instruction in step.before:
            self._instruction(instruction, tasks)
        left = _left(step, scope)
        self._call(step.call, left, tasks)
        for narrow in step.then:
            self._instruction(narrow, tasks)
        if hook:
            self.line(f'on_task({tasks[0]}, "stop")', tasks)
        self._free([v for v in step.frees if v not in left], tasks, scope)

    def _call_segment(self, number: int) -> None:
        segment = self.segments[number]
        steps = [self.program.steps[s] for s in segment.steps]
        tasks = tuple(t for step in steps for t in step.tasks)
        others = (step for s, step in enumerate(self.program.steps) if s not in segment.steps)
        known = frozenset((*segment.outputs, *(v for step in others for v in step.makes)))
        assigned = assignment(segment.outputs)
        self.line(f"{assigned}graph_{number}({listed(segment.inputs)})", tasks)
        self._free([v for step in steps for v in (*step.frees_first, *step.frees)], tasks, known)

    # Instructions

    def _instruction(self, instruction: Instruction, tasks: tuple[int, ...] = ()) -> None:
        match instruction:
            case Narrow():
                self.line(str(instruction), tasks)
            case Join(out=out, reads=reads, join=join):
                self.line(f"{out} = {self.name(f'join_{out}', join)}({_pair(reads)})", tasks)
            case New(out=out, new=new):
                self.line(f"{out} = {self.name(f'new_{out}', new)}()", tasks)
            case _:
                self._call(instruction, [], tasks)

    def _call(self, call: Call | Replace | None, left: Sequence[Var], tasks: tuple[int, ...]) -> None:
        """`left`: the variables that only this call still needs. Their names are cleared before it, since it frees its
        arguments itself, each after its last use."""
        if call is None:
            self.line("pass  # nothing that it makes is used", tasks)
            return
        assigned = assignment(call.makes)
        if isinstance(call, Replace):
            name = self.name(f"f{call.task}", call.function)
            given = listed(call.reads)
            self.line(f"{assigned}{self.name('unpack', unpack)}({name}({given}), {len(call.makes)}, {name})", tasks)
            return
        given = f"[{listed((*call.sizes, *call.reads))}]"
        if left:
            self.line(f"box = {given}", tasks)
            self._free(left, tasks)
            given = "box"
        self.line(f"{assigned}{self.operators[call.op, call.call]}({given})", tasks)

    def _free(self, found: Iterable[Var], tasks: tuple[int, ...], scope: frozenset[Var] | None = None) -> None:
        names = [str(v) for v in found if scope is None or v in scope]
        if names:
            self.line(f"{' = '.join(names)} = None", tasks)


def _left(step: Step, scope: frozenset[Var] | None) -> list[Var]:
    """The variables that only the call still needs."""
    if not isinstance(step.call, Call):
        return []
    makes = frozenset(step.makes)
    needed = [v for v in step.frees if v in step.call.reads or v not in makes]
    return [v for v in needed if scope is None or v in scope]


# Backends


class _Backend:
    """What differs between devices. This one: calls in sequence, on one lane."""

    parameters: tuple[str, ...] = ()

    def __init__(self, program: Program) -> None:
        self.program = program
        self.signals = _signals(program)

    def enter(self, out: _Emitter) -> None:
        """At the start of the function."""

    def begin(self, out: _Emitter) -> None:
        """After the arguments."""

    def blocks(self, out: _Emitter) -> Iterator[list[int]]:
        """The steps in the order of the code. `end_block` comes after each block."""
        yield [s for s in range(len(self.program.steps)) if s in out.segment_of or s not in out.captured]

    def end_block(self, out: _Emitter) -> None: ...

    def before(self, out: _Emitter, s: int) -> None:
        """Before a step."""

    def after(self, out: _Emitter, s: int) -> None:
        """After a step."""

    def end(self, out: _Emitter) -> None:
        """Before the results are joined and returned."""

    def stream_of(self, step: Step) -> str:
        return "s0"


class _OneStream(_Backend):
    """Calls in sequence, on the current stream, with marks."""

    def begin(self, out: _Emitter) -> None:
        out.line("s0 = current_stream()")


class _Threads(_Backend):
    """Lanes are functions, which threads run; each wait is a lock."""

    def begin(self, out: _Emitter) -> None:
        program = self.program
        self.waits = sorted(pair for pairs in self.signals.values() for pair in pairs)
        out.line(f"call = new_call({len(self.waits)})")
        if self.waits:
            out.line(f"{_tuple([f'w{n}' for n, _ in self.waits])} = call.locks")
        out.line("failed = call.failed")
        variables = sorted({v for step in program.steps for v in step.makes}, key=lambda v: v.id)
        if variables:
            out.line(" = ".join(map(str, variables)) + " = None")
        freed = (v for step in program.steps for v in (*step.frees_first, *step.frees))
        self.shared = tuple(dict.fromkeys((*variables, *freed)))

    def blocks(self, out: _Emitter) -> Iterator[list[int]]:
        for number, lane in enumerate(self.program.lanes):
            out.comment(lane, f"def lane_{number}():  ")
            out.indent += 1
            if self.shared:
                out.line(f"nonlocal {listed(self.shared)}")
            yield [s for s, step in enumerate(self.program.steps) if step.lane == lane]

    def end_block(self, out: _Emitter) -> None:
        out.line("return")
        out.indent -= 1

    def before(self, out: _Emitter, s: int) -> None:
        for n, waiting in self.waits:
            if waiting == s:
                out.line(f"w{n}.acquire()")
                out.line("if failed: return")

    def after(self, out: _Emitter, s: int) -> None:
        for n, _ in self.signals.get(s, []):
            out.line(f"w{n}.release()")

    def end(self, out: _Emitter) -> None:
        out.line(f"call.run({', '.join(f'lane_{n}' for n in range(len(self.program.lanes)))})")


class _Streams(_Backend):
    """Lanes are streams; each step that others wait for records an event."""

    parameters = ("streams", "events", "set_stream")

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.number = {lane: i for i, lane in enumerate(program.lanes)}
        self.caller = "caller" if program.partitioned else "s0"
        self.home = self.current = None if program.partitioned else program.lanes[0]
        self.joins = {s: f"j_{s}" for i in self.number.values() if (s := f"s{i}") != self.caller}

    def enter(self, out: _Emitter) -> None:
        streams = [*(["caller"] if self.program.partitioned else []), *(f"s{i}" for i in self.number.values())]
        out.line(f"{', '.join(streams)}, = streams")
        out.line(f"{', '.join([*(f'e{s}' for s in sorted(self.signals)), *self.joins.values()])}, = events")

    def before(self, out: _Emitter, s: int) -> None:
        step = self.program.steps[s]
        stream = self.stream_of(step)
        if step.lane != self.current:
            out.line(f"set_stream({stream})")
            self.current = step.lane
        for a in step.after:
            out.line(f"{stream}.wait_event(e{a})", step.tasks)

    def after(self, out: _Emitter, s: int) -> None:
        step = self.program.steps[s]
        if s in self.signals:
            out.line(f"e{s}.record({self.stream_of(step)})", step.tasks)

    def end(self, out: _Emitter) -> None:
        if self.current != self.home:
            out.line(f"set_stream({self.caller})")
        for stream, event in self.joins.items():
            out.line(f"{event}.record({stream})")
            out.line(f"{self.caller}.wait_event({event})")
        for var in self.program.made_aside:  # the caller's stream uses it from here on
            out.line(f"{var}.record_stream({self.caller})")

    def stream_of(self, step: Step) -> str:
        return f"s{self.number[step.lane]}"


def _backend(program: Program, cuda: bool, marked: bool) -> _Backend:
    if len(program.lanes) < 2 and not program.partitioned:
        return _OneStream(program) if cuda and marked else _Backend(program)
    return _Streams(program) if cuda else _Threads(program)


# Lists of names


def _tuple(names: Sequence[str]) -> str:
    return f"{', '.join(names)}{',' if len(names) == 1 else ''}"


def _pair(found: Sequence[Var]) -> str:
    return f"({listed(found)}{',' * (len(found) == 1)})"
