"""For all tests: compilers make millions of objects, and Python's garbage collector looks through those that stay again
and again, for a seventh of all the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    """What was compiled for a module's tests goes with them; what stays need not be looked at any more."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    gc.collect()
    gc.freeze()
