"""How tasks that run at the same time share a device.

Each gets what it would use alone, as long as there is enough. Of what there is too little of, all get as much, or less
if less will do: so a small user is not held up by a large one. More urgent tasks come first.
"""

from __future__ import annotations

from collections.abc import Sequence

Needs = dict[int, float]
"""Resource -> the fraction of it that a task uses when it is alone."""

ALL = 1.0 - 1e-9


def share(needs: Sequence[Needs], priorities: Sequence[int]) -> tuple[list[float], dict[int, float]]:
    """How fast each task goes, 1 being alone on the device; and what is in use of each resource."""
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
    """From full speed down, until there is enough of everything; the scarcest resource first."""
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
    """What was held back for one resource may have left some of another: raises all together while it lasts."""
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
