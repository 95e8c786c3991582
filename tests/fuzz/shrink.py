"""A smaller case that goes wrong in the same way: fewer and lower throws of its dice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tests.fuzz.dice import Dice, Noted
from tests.fuzz.groups import Throws

Attempt = Callable[[Throws], str | None]
"""Runs a case with these dice; what is wrong with it."""


class _Recorder:
    """Notes the dice that a case asks for, by name, in order to throw them again."""

    def __init__(self, throws: Throws) -> None:
        self._throws = throws
        self.made: dict[str, Dice] = {}

    def __call__(self, what: str) -> Dice:
        self.made[what] = self._throws(what)
        return self.made[what]

    def noted(self) -> dict[str, list[int]]:
        return {what: list(dice.thrown) for what, dice in self.made.items()}


def kind_of(problem: str) -> str:
    """What problems with the same cause have in common, as far as the text tells."""
    lines = problem.strip().splitlines()
    text = next(
        (line for line in reversed(lines) if re.match(r"[\w.]+: ", line) and "dynaflow:" not in line), lines[-1]
    )
    return re.sub(r"\d+(, \d+)*", "N", re.sub(r"'[^']*'|0x\w+", "_", text))[:100]


def shrink(dice: Throws, attempt: Attempt, seconds: float = 120.0) -> Throws:
    """The dice of the smallest case found in that time that is wrong in the same way."""
    recorder = _Recorder(dice)
    problem = attempt(recorder)
    assert problem is not None, "there is nothing wrong with it"
    kind, best = kind_of(problem), recorder.noted()
    until = time.monotonic() + seconds

    def better(candidate: dict[str, list[int]]) -> dict[str, list[int]] | None:
        recorder = _Recorder(lambda what: Noted(candidate[what]))
        found = attempt(recorder)
        if found is None or kind_of(found) != kind:
            return None
        noted = recorder.noted()
        return noted if _weight(noted) < _weight(best) else None

    improved = True
    while improved and time.monotonic() < until:
        improved = False
        for what in sorted(best, reverse=True):
            size = max(1, len(best[what]) // 2)
            while size and time.monotonic() < until:
                place = 0
                while place < len(best[what]) and time.monotonic() < until:
                    throws = best[what]
                    before, these, rest = throws[:place], throws[place : place + size], throws[place + size :]
                    smaller = [before + rest, before + [0] * len(these) + rest] if any(these) else [before + rest]
                    found = next((f for c in smaller if (f := better({**best, what: c})) is not None), None)
                    if found is None:
                        place += size
                    else:
                        best, improved = found, True
                size //= 2
    return lambda what: Noted(best[what])


def _weight(noted: dict[str, list[int]]) -> tuple[int, int]:
    return sum(map(len, noted.values())), sum(map(sum, noted.values()))
