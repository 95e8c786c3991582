"""Plans timed side by side on the arguments at hand, leaving no trace: what the model writes is put back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow.capture.ops import OpGraph
from dynaflow.updates import UPDATE

WARM_UP = 3
ROUNDS = 9
"""Where ranks measure together and have to make the same calls."""
MOST_ROUNDS = 101


class NoRoom(Exception):
    """What is to be put back can't be: it is too large for a copy, or out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one plan, against the first in the same rounds."""

    seconds: float
    """The median."""
    ratio: float
    """The median of the rounds' ratios to the first plan's time; below 1 is faster."""
    low: float
    high: float
    """Between which eight of ten ratios lie."""
    rounds: int


def copied(args: Sequence[Any], *, keep: frozenset[int]) -> tuple[Any, ...]:
    """Copies of the tensors among arguments, but for the positions in `keep`."""
    taken = [a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in keep]
    _check_room(taken)
    return tuple(a.clone() if isinstance(a, torch.Tensor) and i not in keep else a for i, a in enumerate(args))


def _check_room(tensors: Sequence[torch.Tensor]) -> None:
    needed = sum(t.numel() * t.element_size() for t in tensors)
    if any(t.is_cuda for t in tensors) and needed > torch.cuda.mem_get_info()[0] // 2:
        raise NoRoom(f"there is no room for copies of {needed / 2**30:.1f} GiB of the model's inputs")


class Snapshot:
    """The inputs that a graph writes, as they were."""

    def __init__(self, graph: OpGraph, args: Sequence[Any]) -> None:
        if any(UPDATE in op.tags for op in graph.ops):
            raise NoRoom("the steps of an optimizer can't be taken back, so nothing is measured")
        if keeps := next((op.name for op in graph.ops if op.keeps), None):
            raise NoRoom(f"the state that {keeps} keeps can't be put back, so nothing is measured")
        written = {v.input for v in graph.values if v.input is not None and v.storage in graph.written}
        inputs = [args[i] for i in sorted(written)]
        _check_room(inputs)
        self._kept = [(t, t.clone()) for t in inputs]

    def restore(self) -> None:
        for tensor, copy in self._kept:
            tensor.copy_(copy)


def side_by_side(
    runs: Sequence[Callable[[], Any]], restore: Callable[[], None], *, seconds: float, cuda: bool, rounds: int | None
) -> list[list[float]]:
    """The seconds of each run in rounds that alternate, until `seconds` are over, or for just so many `rounds`."""

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
