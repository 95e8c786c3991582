"""What a random graph may do next. Each step adds a call or a few; what does not fit the tensors at hand is NotHere."""

from __future__ import annotations

from tests.fuzz.steps import blocks, mixing, numbers, rows, views, writes
from tests.fuzz.steps.register import STEPS, Step

GENTLE: list[Step] = [s for s in STEPS if s.__module__ in (rows.__name__, views.__name__, blocks.__name__)] + [
    numbers.number_as_tensor
]
"""Those that neither mix rows nor write."""

__all__ = ["GENTLE", "STEPS", "Step", "blocks", "mixing", "numbers", "rows", "views", "writes"]
