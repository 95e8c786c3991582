"""The record of what was measured: JSON, written row by row, and docs/benchmarks.md, made of it."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dynaflow
from benchmarks.measure import Figure, Trial

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TABLE = HERE.parent / "docs" / "benchmarks.md"

_started = time.perf_counter()


def progress(text: str) -> None:
    """A line with the seconds since the start: a run that is cut off tells how far it came."""
    print(f"[{time.perf_counter() - _started:7.1f} s] {text}", flush=True)


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dynaflow": dynaflow.__version__,
    }


def command(argv: Sequence[str]) -> str:
    """As typed, less the place where the result is kept."""
    kept = [a for i, a in enumerate(argv) if a != "--out" and not a.startswith("--out=") and argv[i - 1] != "--out"]
    return f"python -m benchmarks {shlex.join(kept)}".strip()


def make_row(trial: Trial, found: Figure | None, error: str = "") -> dict[str, Any]:
    """The trial as a row: measured, failed or skipped. Only a measured one holds a number."""
    row: dict[str, Any] = {"what": trial.what, "situation": trial.situation, "baseline": trial.baseline}
    row |= {"unit": trial.unit, "limit": trial.limit, "at_least": trial.at_least}
    if trial.skip:
        return row | {"skipped": trial.skip}
    if found is None:
        return row | {"error": error}
    row |= {"value": found.value, "low": found.low, "high": found.high}
    if trial.limit is not None:
        row["holds"] = found.value >= trial.limit if trial.at_least else found.value <= trial.limit
    return row | {"details": found.details}


class Report:
    """One benchmark's JSON. Each row is on disk as soon as it is known.

    Rows of an earlier run on the same machine and versions stay until they are measured again, so a benchmark
    may be run in parts.
    """

    def __init__(self, name: str, title: str, folder: Path | None, argv: Sequence[str]) -> None:
        device = "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name().split()[-1].lower()
        self.path = folder / f"{name}_{device}.json" if folder else None
        self.result: dict[str, Any] = {"benchmark": name, "title": title, "machine": machine(), "rows": []}
        self.command = command(argv)
        self.rows: list[dict[str, Any]] = []
        """Of this run."""
        if self.path and self.path.exists():
            self.result = merged(json.loads(self.path.read_text()), self.result)

    def add(self, row: Mapping[str, Any]) -> None:
        row = {**row, "command": self.command}
        self.rows.append(row)
        self.result = merged(self.result, {**self.result, "rows": [row]})
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")  # never half a file, whenever the run is cut off
            fresh.write_text(json.dumps(self.result, indent=1) + "\n")
            fresh.replace(self.path)

    def __str__(self) -> str:
        return "\n".join(_aligned([COLUMNS, *map(cells, self.rows)]))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new result and, if it is of the same machine and versions, the old rows that it does not replace."""
    same = old.get("machine") == new["machine"] and all("what" in row for row in old["rows"])
    rows = {_key(row): row for row in old["rows"]} if same else {}
    rows |= {_key(row): row for row in new["rows"]}
    return {**new, "rows": list(rows.values())}


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["what"], row["situation"]


def take(folder: Path, results: Path = RESULTS) -> None:
    """Merges the JSON of another folder into the results."""
    for path in sorted(folder.glob("*.json")):
        new, target = json.loads(path.read_text()), results / path.name
        if target.exists():
            new = merged(json.loads(target.read_text()), new)
        results.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(new, indent=1) + "\n")


COLUMNS = ["what", "situation", "baseline", "value", "10-90%", "limit", "holds", "details"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as text, column by column."""
    start = [row["what"], row["situation"], row["baseline"]]
    limit = row.get("limit")
    bound = "" if limit is None else f"{'at least ' if row.get('at_least') else ''}{_number(limit, row['unit'])}"
    if "skipped" in row:
        return [*start, "skipped", "", bound, "", row["skipped"]]
    if "error" in row:
        return [*start, "error", "", bound, "no", row["error"]]
    low, high = row.get("low"), row.get("high")
    spread = "" if low is None or high is None else f"{_number(low, '')}-{_number(high, '')}"
    holds = "" if "holds" not in row else "yes" if row["holds"] else "no"
    details = ", ".join(f"{name} {_plain(value)}" for name, value in row.get("details", {}).items())
    return [*start, _number(row["value"], row["unit"]), spread, bound, holds, details]


def _number(value: float, unit: str) -> str:
    text = str(round(value)) if unit == "bytes" else f"{value:.3g}" if value >= 10 else f"{value:.3f}"
    return f"{text} {unit}" if unit not in ("", "x") else text


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return str(value)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]


HEADER = """# Benchmarks

Made by `python -m benchmarks --table` from `benchmarks/results/`: do not edit.

Every figure is a ratio to the baseline named beside it, measured in the same run in rounds that alternate; results
are compared with the baseline's first. It is the median of the rounds' ratios, with their 10-90% range. Where no
baseline is named the figure is absolute. An error never yields a figure.
"""


def write_table(results: Path = RESULTS, table: Path = TABLE) -> None:
    """docs/benchmarks.md: a section for each JSON."""
    sections = [_section(json.loads(path.read_text())) for path in sorted(results.glob("*.json"))]
    table.write_text(HEADER + "".join(f"\n{section}" for section in sections))


def _section(result: Mapping[str, Any]) -> str:
    where, rows = result["machine"], result["rows"]
    if all("what" in row for row in rows):
        columns, lines = COLUMNS, [cells(row) for row in rows]
    else:  # a table of its own, from before rows had a common form
        columns, lines = list(rows[0]), [[_plain(row[c]) for c in rows[0]] for row in rows]
    typed = [c for c in [where.get("command"), *(row.get("command") for row in rows)] if c]
    commands = dict.fromkeys(re.sub(r" --cells .*?(?= --|$)", "", c) for c in typed)  # rows name the cells
    text = [f"## {result['benchmark']}: {where['device']}", ""]
    text += [result["title"], ""] if result.get("title") else []
    versions = f"torch {where['torch']}, Python {where['python']}, dynaflow {where['dynaflow']}"
    text += [f"{versions}; {', '.join(f'`{c}`' for c in commands)}", ""]
    text += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    text += ["| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines]
    text += ["", SUMMARIES[result["benchmark"]](_values(rows))] if result["benchmark"] in SUMMARIES else []
    return "\n".join(text) + "\n"


def _values(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["value"] for row in rows if "value" in row]


def _speed(ratios: Sequence[float]) -> str:
    """Of times to the baseline's."""
    mean = math.exp(-math.fsum(map(math.log, ratios)) / max(len(ratios), 1))
    worst = f"; the slowest cell {1 / max(ratios):.3f}x" if ratios else ""
    return f"Geometric mean of the speed-ups over {len(ratios)} cells: {mean:.3f}x{worst}."


def _errors(ratios: Sequence[float]) -> str:
    """Of predictions to what was measured."""
    away = sorted(abs(r - 1) for r in ratios) or [0.0]
    return f"Error over {len(ratios)} plans: median {statistics.median(away):.1%}, worst {away[-1]:.1%}."


SUMMARIES: dict[str, Callable[[Sequence[float]], str]] = {"auto": _speed, "simulator": _errors, "published": _errors}
"""What stands below a table, over all its rows."""
