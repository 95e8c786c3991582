"""How concurrent tasks share a device.

Max-min fairness: each task gets what it would use alone while there is enough. A scarce resource is divided evenly,
except that no task gets more than it needs. Tasks of higher priority are served first.
"""

from __future__ import annotations

from collections.abc import Sequence

Needs = dict[int, float]
"""Resource -> the fraction that a task uses when it runs alone."""

ALL = 1.0 - 1e-9


def share(needs: Sequence[Needs], priorities: Sequence[int]) -> tuple[list[float], dict[int, float]]:
    """The speed of each task, 1 being alone on the device; and the utilization of each resource."""
    rates = [0.0] * len(needs)
    used: dict[int, float] = {}
    for priority in sorted(set(priorities)):
        mine = [i for i, p in enumerate(priorities) if p == priority]
        _hold_back(needs, rates, used, mine)
        for i in mine:
            for r, need in needs[i].items():
                used[r] = used.get(r, 0.0) + need * rates[i]
        _fill(needs, rates, used, mine)
    return rates, {r: min(1.0, u) for r, u in used.items()}


def _hold_back(needs: Sequence[Needs], rates: list[float], used: dict[int, float], mine: list[int]) -> None:
    """Lowers speeds from 1 until no resource is oversubscribed, the scarcest resource first."""
    for i in mine:
        rates[i] = 1.0
    while True:
        wanted: dict[int, float] = {}
        for i in mine:
            for r, need in needs[i].items():
                wanted[r] = wanted.get(r, 0.0) + need * rates[i]
        missing = {r: w + used.get(r, 0.0) - 1.0 for r, w in wanted.items()}
        scarce = max(missing, key=lambda r: (missing[r], -r), default=None)
        if scarce is None or missing[scarce] <= 1.0 - ALL:
            return
        left = max(0.0, 1.0 - used.get(scarce, 0.0))
        users = sorted((i for i in mine if scarce in needs[i]), key=lambda i: needs[i][scarce] * rates[i])
        for n, i in enumerate(users):
            given = min(needs[i][scarce] * rates[i], left / (len(users) - n))
            rates[i] = given / needs[i][scarce]
            left -= given


def _fill(needs: Sequence[Needs], rates: list[float], used: dict[int, float], mine: list[int]) -> None:
    """Raises speeds evenly while resources last: a limit on one resource may leave some of another."""
    while True:
        full = {r for r, u in used.items() if u >= ALL}
        rising = [i for i in mine if rates[i] < ALL and not needs[i].keys() & full]
        if not rising:
            return
        slope: dict[int, float] = {}
        for i in rising:
            for r, need in needs[i].items():
                slope[r] = slope.get(r, 0.0) + need
        step = min([*(1.0 - rates[i] for i in rising), *((1.0 - used.get(r, 0.0)) / s for r, s in slope.items())])
        for i in rising:
            rates[i] += step
        for r, s in slope.items():
            used[r] = used.get(r, 0.0) + s * step
