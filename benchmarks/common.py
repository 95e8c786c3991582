"""What every benchmark says of itself: machine, versions, command; a table, and JSON for the record."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import dynaflow


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dynaflow": dynaflow.__version__,
        "command": _command(sys.argv),
    }


def _command(argv: list[str]) -> str:
    """As typed, less the place where the result is kept."""
    kept = [a for i, a in enumerate(argv) if a != "--out" and (i == 0 or argv[i - 1] != "--out")]
    return " ".join(["python", *kept])


def report(name: str, rows: Sequence[dict[str, Any]], out: str | None) -> None:
    """Prints the rows as a table and as JSON; keeps the JSON under `out`, if given."""
    result = {"benchmark": name, "machine": machine(), "rows": list(rows)}
    columns = list(rows[0])
    cells = [[_show(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for line in cells:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)))
    print(json.dumps(result))
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


def side_by_side(runs: Sequence[Callable[[], Any]], rounds: int, inner: int = 1) -> list[list[float]]:
    """Seconds per call of each function, measured in turn, so that drift of the machine hits all alike."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = perf_counter()
            for _ in range(inner):
                run()
            found[i].append((perf_counter() - start) / inner)
    return found


def _show(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
