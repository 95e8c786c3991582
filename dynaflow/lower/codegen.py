"""A program rendered as one flat Python function: no queue, no loop, no look-up per task.

On CPU each lane but the caller's is a block that a worker thread runs; lanes meet at locks. On CUDA one thread
issues everything; lanes are streams and meet at events. With a single lane both are plain calls in a row.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynaflow.lower.program import Program, Step

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The source of a lowered plan, its function, and which line belongs to which task."""

    source: str
    run: Callable[..., Any]
    filename: str
    tasks: dict[int, int]

    def task_of(self, error: BaseException) -> int | None:
        """The task in which `error` was raised: no bookkeeping while things go well."""
        tb, found = error.__traceback__, None
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == self.filename:
                found = self.tasks.get(tb.tb_lineno, found)
            tb = tb.tb_next
        return found


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: dict[int, int] = {}
        self.indent = 0

    def line(self, text: str, task: int | None = None) -> None:
        self.lines.append("    " * self.indent + text)
        if task is not None:
            self.tasks[len(self.lines)] = task


def generate(program: Program, *, cuda: bool, hook: bool) -> Code:
    """`hook`: the code calls `on_task(task, "start" | "stop")` around every task."""
    out = _Writer()
    lanes = program.lanes
    if len(lanes) < 2:
        _single(out, program, hook)
    elif cuda:
        _streams(out, program, hook)
    else:
        _threads(out, program, hook)
    source = "\n".join(out.lines) + "\n"
    filename = f"<dynaflow plan {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names = dict(program.names)
    exec(compile(source, filename, "exec"), names)
    return Code(source=source, run=names["run"], filename=filename, tasks=out.tasks)


def forget(filename: str) -> None:
    """Takes the source back out of linecache once its plan is gone."""
    linecache.cache.pop(filename, None)


def _arguments(out: _Writer, program: Program) -> None:
    used = set(program.used)
    if used:
        names = [f"a{i}" if i in used else "_" for i in range(program.arguments)]
        out.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
    for text in program.start:
        out.line(text)


def _body(out: _Writer, step: Step, hook: bool) -> None:
    t = step.task
    if step.frees_first:
        out.line(f"{' = '.join(step.frees_first)} = None", t)
    if hook:
        out.line(f'on_task({t}, "start")', t)
    for text in step.before:
        out.line(text, t)
    out.line(step.call, t)
    for text in step.after:
        out.line(text, t)
    if hook:
        out.line(f'on_task({t}, "stop")', t)
    if step.frees:
        out.line(f"{' = '.join(step.frees)} = None", t)


def _end(out: _Writer, program: Program) -> None:
    for text in program.end:
        out.line(text)
    out.line(f"return {program.results}")


def _single(out: _Writer, program: Program, hook: bool) -> None:
    out.line("def run(args, on_task):")
    out.indent += 1
    _arguments(out, program)
    for step in program.steps:
        out.line(f"# {step.task}: {step.title}")
        _body(out, step, hook)
    _end(out, program)


def _signals(program: Program) -> dict[int, list[tuple[int, int]]]:
    """For each task that others wait for: (number of the wait, waiting task)."""
    found: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for step in program.steps:
        for a in step.waits:
            found.setdefault(a, []).append((number, step.task))
            number += 1
    return found


def _threads(out: _Writer, program: Program, hook: bool) -> None:
    signals = _signals(program)
    waits = sorted(pair for pairs in signals.values() for pair in pairs)
    out.line("def run(args, on_task, call):")
    out.indent += 1
    _arguments(out, program)
    if waits:
        out.line(f"{', '.join(f'w{n}' for n, _ in waits)}{',' if len(waits) == 1 else ''} = call.locks({len(waits)})")
    out.line("failed = call.failed")
    if program.variables:
        out.line(" = ".join(program.variables) + " = None")
    for number, lane in enumerate(program.lanes):
        out.line(f"def lane_{number}():  # {lane}")
        out.indent += 1
        if program.variables:
            out.line(f"nonlocal {', '.join(program.variables)}")
        for step in program.steps:
            if step.lane != lane:
                continue
            out.line(f"# {step.task}: {step.title}")
            for n, waiting in waits:
                if waiting == step.task:
                    out.line(f"w{n}.acquire()")
                    out.line("if failed: return")
            _body(out, step, hook)
            for n, _ in signals.get(step.task, []):
                out.line(f"w{n}.release()")
        out.line("return")
        out.indent -= 1
    out.line(f"call.run(({', '.join(f'lane_{n}' for n in range(len(program.lanes)))},))")
    _end(out, program)


def _streams(out: _Writer, program: Program, hook: bool) -> None:
    signals = _signals(program)
    number = {lane: i for i, lane in enumerate(program.lanes)}
    out.line("def run(args, on_task, streams, events, set_stream):")
    out.indent += 1
    out.line(f"{', '.join(f's{i}' for i in number.values())}, = streams")
    if signals:
        out.line(f"{', '.join(f'e{t}' for t in sorted(signals))}, = events")
    _arguments(out, program)
    current = program.lanes[0]
    for step in program.steps:
        out.line(f"# {step.task}: {step.title}")
        if step.lane != current:
            out.line(f"set_stream(s{number[step.lane]})")
            current = step.lane
        for a in step.waits:
            out.line(f"s{number[step.lane]}.wait_event(e{a})", step.task)
        _body(out, step, hook)
        if step.task in signals:
            out.line(f"e{step.task}.record(s{number[step.lane]})", step.task)
    if current != program.lanes[0]:
        out.line("set_stream(s0)")
    for i in range(1, len(program.lanes)):
        out.line(f"s0.wait_stream(s{i})")
    for name in program.made_aside:  # the caller's stream uses it from here on
        out.line(f"{name}.record_stream(s0)")
    _end(out, program)


def event_count(program: Program) -> int:
    return len(_signals(program))
