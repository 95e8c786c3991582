"""A bar for work that has a budget of seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(seconds: float) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done. No bar without a budget, and plain lines without rich."""
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
