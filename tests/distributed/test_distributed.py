"""Real collectives: gloo, on processes of their own. Each module's cases share one start of its ranks."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import link
from benchmarks.settings import Settings
from benchmarks.suite import run
from tests.distributed import four, mistakes, training, two
from tests.distributed.launch import Outcome, launch

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by their group"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> object:
    @cache
    def once(module: str, world: int, seconds: float) -> Outcome:
        return launch(module, world, tmp_path_factory.mktemp(module), seconds=seconds)

    return once


@pytest.mark.parametrize("case", two.CASES)
def test_two_ranks(case: str, outcome) -> None:  # type: ignore[no-untyped-def]
    outcome("two", 2, 240.0).check(case, 2)


@pytest.mark.parametrize("case", four.CASES)
def test_four_ranks(case: str, outcome) -> None:  # type: ignore[no-untyped-def]
    outcome("four", 4, 240.0).check(case, 4)


@pytest.mark.parametrize("case", training.CASES)
def test_two_ranks_that_train(case: str, outcome) -> None:  # type: ignore[no-untyped-def]
    outcome("training", 2, 240.0).check(case, 2)


@pytest.mark.parametrize("case", mistakes.CASES)
def test_mistakes(case: str, outcome) -> None:  # type: ignore[no-untyped-def]
    outcome("mistakes", 2, 90.0).check(case, 2)


def test_a_hang_is_ended(tmp_path: Path) -> None:
    """The launcher itself: ranks that never end are killed, and the case that they hang in is named."""
    found = launch("hanging", 2, tmp_path, seconds=3.0)
    assert not found.ended
    found.check("ends", 2)
    with pytest.raises(AssertionError, match=r"hangs was still under way when time was up on ranks \[0, 1\]"):
        found.check("hangs", 2)


def test_the_link_is_measured() -> None:
    """Results are compared before anything is timed: a row without an error was right on both ranks."""
    rows = run([link.BENCHMARK], Settings(tiny=True, operators="eager", rounds=2, device=torch.device("cpu")), None)
    assert len(rows[0].rows) == len(link.LINKS) * len(link.STRATEGIES)
    assert not [row for row in rows[0].rows if "error" in row]
