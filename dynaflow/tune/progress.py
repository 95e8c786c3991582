"""A progress bar for work with a time budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(seconds: float) -> Iterator[Callable[[str], None]]:
    """Yields a function that displays what is being done. No bar without a budget; plain lines without rich."""
    if seconds <= 0:
        yield lambda text: None
        return
    start = time.perf_counter()
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda text: print(f"[{time.perf_counter() - start:5.1f} s of {seconds:.0f}] {text}", flush=True)
        return
    with Progress(TextColumn("tuning"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda text: bar.update(task, description=text, completed=min(time.perf_counter() - start, seconds))
