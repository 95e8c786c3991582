"""What commands print: for people, or one JSON object for scripts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from dynaflow.errors import DynaFlowError

out, errors = Console(), Console(stderr=True)


def verbatim(text: str) -> None:
    """As it is: no colours, no line breaks of rich's."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, default=str))


@contextlib.contextmanager
def nothing_else(as_json: bool) -> Iterator[None]:
    """If stdout is for one JSON object, all that is printed meanwhile goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        advice = "name another place" if path.parent.is_dir() else f"make the folder {path.parent} first"
        raise DynaFlowError(f"{path} can't be written: {e.strerror}", advice=advice) from e
