"""Output of the commands: text for people, or one JSON object for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dynaflow.errors import DynaFlowError


class _Output(Console):
    """As wide as the terminal. In a pipe nothing is folded, unless COLUMNS is set."""

    @property
    def bounded(self) -> bool:
        return self.is_terminal or os.environ.get("COLUMNS", "").isdigit()

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.bounded else ConsoleDimensions(100_000, found.height)

    @property
    def drawing(self) -> int:
        """The width of timelines."""
        return max(self.width, 60) if self.bounded else 110


out, errors = _Output(), _Output(stderr=True)


def complain(text: str) -> None:
    """Prints an error to stderr, wrapped only between words: paths can still be copied."""
    errors.print(text, style="red", markup=False, highlight=False, overflow="ignore", crop=False)


class Folded:
    """A text that is wrapped after spaces and signs if it is too long: rich wraps only at spaces."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, _words(self.text, " ./:,(")), default=0)
        return Measurement(longest, len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [""]
        for word in _words(self.text, " ./:,("):
            for part in [word] if len(word) <= options.max_width else _words(word, "_"):
                if lines[-1] and len(lines[-1] + part.rstrip()) > options.max_width:
                    lines.append("")
                lines[-1] += part
        yield Text("\n".join(line.rstrip() for line in lines), overflow="fold")


def _words(text: str, signs: str) -> list[str]:
    return re.findall(f".+?(?:[{signs}]+|$)", text)


def table(*columns: str, folds: Collection[str] = (), right: Collection[str] = (), gap: int = 2) -> Table:
    """Returns a table in which only the columns in `folds` are wrapped if there is no room."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column not in folds)
    return made


def show(rows: Table) -> None:
    out.print(rows, markup=False, highlight=False)


def listed(said: Iterable[tuple[str, str]]) -> None:
    """Prints names and their descriptions, one per line."""
    rows = Table.grid("", "", padding=(0, 2, 0, 0))
    rows.columns[0].no_wrap = True
    for pair in said:
        rows.add_row(*pair)
    show(rows)


def verbatim(text: str) -> None:
    """Prints a text without colours and without rich's line breaks."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, default=str))


@contextlib.contextmanager
def nothing_else(as_json: bool) -> Iterator[None]:
    """If stdout is for one JSON object, everything printed inside of the block goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def can_write(*paths: Path | None) -> None:
    """Raises if a file can't be written, before the work starts."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise DynaFlowError(f"{path} can't be written", advice=f"create the folder {path.parent} first")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise DynaFlowError(f"{path} can't be written: {e.strerror}", advice="name another place") from e
