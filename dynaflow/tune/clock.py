"""A clock for work on a device: what the device takes, neither what the host takes nor what the clock does.

On CUDA the device is kept busy until the host has issued all that is timed. A card that is power-limited is slower once
it has worked for a while, by a tenth and more: so it works first, and what keeps it busy is the same work once more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dynaflow import _torch

HEAT = 0.3
"""Seconds of work before anything is timed, at least."""
CYCLES = 2e9
"""A second, or longer."""
SHORTEST, LONGEST = 1e-3, 0.1
"""Seconds for which the device is held back so that the host gets ahead of it."""
EMPTY = 5


class Clock:
    """Called at the start and at the end of each thing to be timed, in the order in which they run."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._on = False
        self._moments: list[Any] = []
        self._hold = 0.0
        """Seconds for which the device has to be held back beside the work that keeps it busy, as far as is known."""

    def __call__(self, *told: Any) -> None:
        if self._on:
            self._moments.append(_event() if self.cuda else time.perf_counter())

    def warm_up(self, work: Callable[[], Any], seconds: float = HEAT) -> None:
        """Runs the work once to load and tune its kernels, and on CUDA for so many seconds more."""
        work()
        if not self.cuda:
            return
        torch.cuda.synchronize()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            work()
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any]) -> list[float]:
        """The seconds of each thing that the work calls the clock around."""
        if not self.cuda:
            self._note(work)
            return [b - a for a, b in self._pairs()]
        while not (own := self._issued(work)):
            self._hold = max(2 * self._hold, SHORTEST)
        nothing = statistics.median(a.elapsed_time(b) for a, b in own)
        return [max(0.0, a.elapsed_time(b) - nothing) / 1e3 for a, b in self._pairs()]

    def _issued(self, work: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Runs the work twice, the second time with the clock on. Returns events with nothing between; none if the
        device came to the timed work before the host had issued all of it, and could have held it longer."""
        torch.cuda.synchronize()
        if self._hold:
            _torch.sleep(int(self._hold * CYCLES))
        work()
        own = [(_event(), _event()) for _ in range(EMPTY)]
        self._note(work)
        in_time = not own[0][0].query() or self._hold >= LONGEST
        torch.cuda.synchronize()
        return own if in_time else []

    def _note(self, work: Callable[[], Any]) -> None:
        self._moments, self._on = [], True
        try:
            work()
        finally:
            self._on = False

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self._moments[::2], self._moments[1::2], strict=True))


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
