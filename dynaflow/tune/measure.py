"""Plans timed in turns on the given arguments; what the model writes is restored."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 3
ROUNDS = 9
"""The number of rounds where several ranks measure together: they have to make the same calls."""
MOST_ROUNDS = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one plan, compared with the first plan in the same rounds."""

    seconds: float
    """The median."""
    ratio: float
    """The median of the rounds' ratios to the first plan's time; below 1 is faster."""
    low: float
    high: float
    """Eight of ten ratios are between `low` and `high`."""
    rounds: int


def side_by_side(
    runs: Sequence[Callable[[], Any]], restore: Callable[[], None], *, seconds: float, cuda: bool, rounds: int | None
) -> list[list[float]]:
    """Returns the seconds of each run in alternating rounds, for about `seconds`, or for exactly `rounds` rounds."""

    def timed(run: Callable[[], Any]) -> float:
        restore()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []):
        for run in runs:
            for _ in range(WARM_UP):
                timed(run)
        found: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + seconds
        while len(found[0]) < (rounds or MOST_ROUNDS) and (rounds or len(found[0]) < 5 or time.perf_counter() < end):
            for times, run in zip(found, runs, strict=True):
                times.append(timed(run))
        restore()
    return found


def timings(found: Sequence[Sequence[float]]) -> list[Timing]:
    made = []
    for times in found:
        ratios = sorted(mine / first for mine, first in zip(times, found[0], strict=True))
        tenth = len(ratios) // 10
        made.append(
            Timing(
                seconds=statistics.median(times),
                ratio=statistics.median(ratios),
                low=ratios[tenth],
                high=ratios[-1 - tenth],
                rounds=len(times),
            )
        )
    return made
