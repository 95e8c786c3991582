"""Timelines as one self-contained HTML file: it includes the data, the style and the code."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dynaflow.core.plan_text import resource_label
from dynaflow.errors import TimelineError
from dynaflow.observe.document import Document, TimedTask
from dynaflow.observe.summary import Summary, kind, summarize

SCRIPTS = ("timeline.js", "details.js", "page.js")
COLOURS = 7
"""Colours that can be distinguished, also by the colour-blind; as many kinds again are striped, the rest is grey."""


def page(documents: Sequence[Document], *, title: str = "") -> str:
    """Returns the page: the documents one above the other, on one scale."""
    if not documents:
        raise TimelineError("there is no timeline to show", advice="pass at least one")
    title = title or " · ".join(dict.fromkeys(d.title for d in documents))
    parts = {
        "title": html.escape(title),
        "style": _asset("page.css"),
        "scripts": "\n".join(f"<script>\n{_asset(name)}</script>" for name in SCRIPTS),
        # A "<" in a script could end it; JSON can escape it.
        "data": json.dumps(_data(documents, title), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))  # one pass: no part is expanded


def baselines(documents: Sequence[Document]) -> list[int | None]:
    """Returns the document that each one is compared with: the first of its source. Steps have no seconds."""
    first: dict[str, int] = {}
    found: list[int | None] = []
    for i, document in enumerate(documents):
        known = first.setdefault(document.source, i)
        found.append(None if known == i else known)
    return found


def scales(documents: Sequence[Document]) -> list[float]:
    """Returns factors for the documents' times that put them on one scale.

    Seconds are not scaled. Steps have no duration: the longest plan is drawn as long as the longest run.
    """
    seconds = max((d.length for d in documents if d.unit == "s"), default=0.0)
    steps = max((d.length for d in documents if d.unit == "steps"), default=0.0)
    stretch = seconds / steps if seconds and steps else 1.0
    return [1.0 if d.unit == "s" else stretch for d in documents]


def levels(tasks: Sequence[TimedTask]) -> list[int]:
    """Returns the level of each task: overlapping tasks of a lane, such as nested calls, are drawn in several rows."""
    found = [0] * len(tasks)
    free: dict[str, list[float]] = {}
    for i in sorted(range(len(tasks)), key=lambda i: (tasks[i].start, -tasks[i].end, i)):
        ends = free.setdefault(tasks[i].lane, [])
        near = 1e-6 * tasks[i].seconds  # ignore rounding errors of the clock
        level = next((n for n, end in enumerate(ends) if end <= tasks[i].start + near), len(ends))
        ends[level : level + 1] = [tasks[i].end]
        found[i] = level
    return found


def _data(documents: Sequence[Document], title: str) -> dict[str, Any]:
    kinds = _kinds(documents)
    number = {name: i for i, name in enumerate(kinds)}
    both = zip(documents, scales(documents), baselines(documents), strict=True)
    return {
        "title": title,
        "kinds": kinds,
        "colours": COLOURS,
        "documents": [_document(d, summarize(d), number, scale, base) for d, scale, base in both],
    }


def _kinds(documents: Sequence[Document]) -> list[str]:
    """The kinds of operators in all documents, those that take longest first: they get the colours."""
    times: dict[str, float] = {}
    for document, scale in zip(documents, scales(documents), strict=True):
        for task in document.tasks:
            times[kind(task)] = times.get(kind(task), 0.0) + task.seconds * scale
    return sorted(times, key=lambda name: -times[name])


def _document(
    document: Document, summary: Summary, number: dict[str, int], scale: float, base: int | None
) -> dict[str, Any]:
    data = document.to_dict()
    places = {lane.name: i for i, lane in enumerate(document.lanes)}
    for task, given, level, held in zip(
        data["tasks"], document.tasks, levels(document.tasks), summary.blocked_by, strict=True
    ):
        task |= {"lane": places[given.lane], "kind": number[kind(given)], "level": level, "held": held}
        task |= {"uses": {resource_label(name, document.device): u for name, u in given.uses.items()}}
    for counter in data.get("counters", ()):
        counter["name"] = resource_label(counter["name"], document.device)
    return data | {
        "unit": document.unit,
        "begin": document.begin,
        "end": document.end,
        "scale": scale,
        "base": base,
        "path": summary.path,
        "onPath": summary.on_path,
        "waiting": summary.waiting,
        "use": [
            {"tasks": use.tasks, "busy": use.busy, "idle": use.idle, "causes": use.causes} for use in summary.lanes
        ],
    }


def _asset(name: str) -> str:
    return (files("dynaflow.observe") / "assets" / name).read_text(encoding="utf-8")
