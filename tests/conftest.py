"""For all tests: which are slow, and left to `make test-slow`; and how often garbage is collected, since compilers make
millions of objects, and looking through those that stay takes a seventh of all the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt").read_text().split()
"""Folders, files and tests, one a line; of a test with parameters all, or one: `file.py::test[this]`."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: named in tests/slow.txt")
    gc.set_threshold(50_000, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file, _, name = item.nodeid.partition("::")
        own = (file, f"{file}::{name.partition('[')[0]}", item.nodeid)
        if any(entry in own or file.startswith(f"{entry}/") for entry in SLOW):
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    """What was compiled for a module's tests goes with them; what stays need not be looked at any more."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which random cases were run: processes that run tests side by side show nothing of those that pass."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if any(getattr(report, "nodeid", "").startswith("tests/fuzz") for report in reports):
        from tests.fuzz.seeds import VARIABLE, first_case_of_commit

        terminalreporter.write_line(f"random cases from {VARIABLE}={first_case_of_commit()} on")
