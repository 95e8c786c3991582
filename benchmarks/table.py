"""Writes docs/results.md from the JSON under benchmarks/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    text = ["# Results", "", "Made by `python benchmarks/table.py` from `benchmarks/results/`: do not edit.", ""]
    for path in sorted((HERE / "results").glob("*.json")):
        text += _section(json.loads(path.read_text()))
    (HERE.parent / "docs" / "results.md").write_text("\n".join(text))


def _section(result: dict[str, Any]) -> list[str]:
    machine, rows = result["machine"], result["rows"]
    columns = list(rows[0])
    lines = [f"## {result['benchmark']}: {machine['device']}", ""]
    lines += [f"torch {machine['torch']}, Python {machine['python']}; `{machine['command']}`", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_show(row[c]) for c in columns) + " |" for row in rows]
    return [*lines, ""]


def _show(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
