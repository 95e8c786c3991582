"""All the randomness of a case: throws of dice, which can be noted and thrown again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """0 is always the simplest outcome, so that a case gets smaller as its throws do."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.thrown: list[int] = []

    def below(self, n: int) -> int:
        if n <= 1:
            return 0
        self.thrown.append(self._throw(n))
        return self.thrown[-1]

    def _throw(self, n: int) -> int:
        return self._random.randrange(n)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def one_in(self, n: int) -> bool:
        return self.below(n) == n - 1


class Noted(Dice):
    """Throws what was noted, as far as it goes, and 0 from then on."""

    def __init__(self, throws: Sequence[int]) -> None:
        super().__init__(Random(0))
        self._noted = iter(throws)

    def _throw(self, n: int) -> int:
        return min(next(self._noted, 0), n - 1)


class NotHere(Exception):
    """The step can't be made with the tensors at hand."""
