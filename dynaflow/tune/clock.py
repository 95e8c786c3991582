"""A clock for device time: without the host's time and without the overhead of the clock.

On CUDA the device stays busy until the host has issued all timed work. A power-limited card gets slower after a
while, by a tenth and more: so it warms up first, and the work that keeps it busy is the same as the timed work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dynaflow import _torch

HEAT = 0.3
"""The least seconds of work before anything is timed."""
CYCLES = 2e9
"""Clock cycles in a second, or more."""
SHORTEST, LONGEST = 1e-3, 0.1
"""Seconds that the device sleeps so that the host gets ahead of it."""
EMPTY = 5
"""Pairs of events with nothing in between: the overhead of the clock."""


class Clock:
    """Called at the start and at the end of each thing to be timed, in the order in which they run."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._on = False
        self._moments: list[Any] = []
        self._hold = 0.0
        """Seconds that the device has to sleep in addition to the work that keeps it busy, as far as is known."""

    def __call__(self, *_: Any) -> None:
        if self._on:
            self._moments.append(_event() if self.cuda else time.perf_counter())

    def warm_up(self, work: Callable[[], Any], seconds: float = HEAT) -> None:
        """Runs the work once to load and tune its kernels, and on CUDA repeats it for `seconds`."""
        work()
        if not self.cuda:
            return
        torch.cuda.synchronize()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            work()
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any]) -> list[float]:
        """Returns the seconds of each part of the work that calls the clock before and after."""
        if not self.cuda:
            self._record(work)
            return [b - a for a, b in self._pairs()]
        while not (empty := self._issued(work)):
            self._hold = max(2 * self._hold, SHORTEST)
        overhead = statistics.median(a.elapsed_time(b) for a, b in empty)
        return [max(0.0, a.elapsed_time(b) - overhead) / 1e3 for a, b in self._pairs()]

    def _issued(self, work: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Runs the work twice, the second time with the clock on. Returns pairs of events with nothing in between.

        None if the device reached the timed work before the host had issued all of it, and may sleep longer.
        """
        torch.cuda.synchronize()
        if self._hold:
            _torch.sleep(int(self._hold * CYCLES))
        work()
        empty = [(_event(), _event()) for _ in range(EMPTY)]
        self._record(work)
        in_time = not empty[0][0].query() or self._hold >= LONGEST
        torch.cuda.synchronize()
        return empty if in_time else []

    def _record(self, work: Callable[[], Any]) -> None:
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
