"""The list of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.builder import Builder

Step = Callable[[Builder], Any]
STEPS: list[Step] = []
"""Each as often as it weighs."""


def step(weight: int = 1) -> Callable[[Step], Step]:
    def register(function: Step) -> Step:
        STEPS.extend([function] * weight)
        return function

    return register
