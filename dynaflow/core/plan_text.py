"""Draws a plan in the terminal: a row per lane, time from left to right."""

from __future__ import annotations

import math
import re
import string
import textwrap
from collections.abc import Sequence

from dynaflow.core import validate
from dynaflow.core.plan import Plan, Task
from dynaflow.core.plan_form import check_form
from dynaflow.errors import TimelineError

Span = tuple[float, float]

NARROWEST = 20
"""Least number of columns for the tasks."""


def draw(plan: Plan, spans: Sequence[Span] | None = None, width: int = 110) -> str:
    """`spans` are the tasks' measured starts and ends, in ms; without them every task takes one step.

    A letter stands for a kind of operator (its path without numbers), digits for the micro-batches.
    """
    check_form(plan)
    advice = "pass a number of columns"
    width = validate.integer(width, "draw(width)", advice, least=1, most=100_000, error=TimelineError)
    if plan.sequential:
        return "(the uncut graph, in sequence)"
    letters = _letters(plan)
    times = _checked(spans, plan) if spans is not None else steps_of(plan)
    begin, end = min(s for s, _ in times), max(e for _, e in times)
    label = max(len(lane.name) for lane in plan.lanes)
    columns = max(NARROWEST, width - label - 2)
    if spans is None:
        columns -= columns % 4  # no step is cut at the end of a row
    unit = 4 if spans is None else columns / max(end - begin, 1e-9)
    bands = max(1, -(-int((end - begin) * unit) // columns))
    rows = {lane.name: [" "] * (columns * bands + 1) for lane in plan.lanes}
    for task, (start, stop) in zip(plan.tasks, times, strict=True):
        a, b = round((start - begin) * unit), round((stop - begin) * unit)
        text = letters[_kind(task)] + _parts(task, plan)
        room = max(b - a, 1)
        cell = ("[" + text[: room - 2].ljust(room - 2, "·") + "]") if room > 3 else text[:room].ljust(room, "·")
        rows[task.lane][a : a + room] = list(cell)
    lines = []
    for band in range(bands):
        for lane in plan.lanes:
            part = "".join(rows[lane.name][band * columns : (band + 1) * columns]).rstrip()
            lines.append(f"{lane.name:>{label}} |{part}")
        if bands > 1 and band < bands - 1:
            lines.append("")
    legend = ", ".join(f"{letter}\0{kind}" for kind, letter in letters.items())  # \0: no line break
    scale = "" if spans is None else f"   ({end - begin:.2f} ms)"
    indent = " " * (label + 2)
    lines += textwrap.wrap(
        legend + scale, width, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def _checked(spans: Sequence[Span], plan: Plan) -> list[Span]:
    advice = "pass the start and the end of each of the plan's tasks, in ms: [(0.0, 1.5), ...]"
    found = validate.sequence(spans, "draw(spans)", advice, TimelineError)
    try:
        times = [(float(start), float(end)) for start, end in found]
    except (TypeError, ValueError):
        times = []
    if len(times) != len(plan.tasks) or not all(map(math.isfinite, (t for pair in times for t in pair))):
        raise validate.invalid("draw(spans)", spans, advice, TimelineError)
    return times


def steps_of(plan: Plan) -> list[Span]:
    """Start and end of each task if all take one step."""
    free: dict[str, float] = {}
    times: list[Span] = []
    for task in plan.tasks:
        start = max([free.get(task.lane, 0.0), *(times[a][1] for a in task.after)])
        times.append((start, start + 1))
        free[task.lane] = start + 1
    return times


def kind_of(op: str) -> str:
    """The path without its numbers, which operators of equal layers share."""
    return re.sub(r"\b\d+\b", "*", re.sub(r"#\d+", "", op))


def resource_label(name: str, device: str) -> str:
    """The name to print for a resource: the cost model's "sms" are a CPU's cores. Files use the cost model's name."""
    return "cores" if name == "sms" and on_cpu(device) else name


def on_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def _kind(task: Task) -> str:
    return kind_of(" + ".join(item.op for item in task.items))


def _letters(plan: Plan) -> dict[str, str]:
    kinds = list(dict.fromkeys(_kind(task) for task in plan.tasks))
    names = string.ascii_uppercase + string.ascii_lowercase
    return {kind: names[i % len(names)] for i, kind in enumerate(kinds)}


def _parts(task: Task, plan: Plan) -> str:
    parts = sorted({m for item in task.items for m in item.micro_batches})
    if len(plan.micro_batches) > 1 and len(parts) == len(plan.micro_batches):
        return "*"
    return "+".join(map(str, parts))
