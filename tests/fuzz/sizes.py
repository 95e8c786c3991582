"""Sizes that vary from call to call: that of the batch, and sometimes a length as well.

A graph is made by running it for a few sizes at once. The symbolic size of a value is the formula that gives what was
found for each of them: that takes a hundredth of the time of a run on symbolic fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tests.fuzz.dice import NotHere


@dataclass(frozen=True, slots=True)
class Sizes:
    """Those of one call."""

    batch: int
    length: int = 0


HINT, LENGTH = 22, 17
"""At capture. Neither the batch nor its half is a multiple of any other size, so a size tells what it is."""

POINTS = tuple(Sizes(b, t) for b, t in ((HINT, LENGTH), (26, LENGTH), (25, LENGTH), (HINT, 19), (HINT, 14), (25, 14)))
"""The sizes for which a graph runs while it is made: enough to tell a formula."""
BATCHES = 3
"""How many of them will do where there is no length."""

SMALLEST = 2
"""What a dynamic size is at least: torch takes 0 and 1 for constants."""


def of_batch(size: int) -> bool:
    return size >= HINT // 2 - 1 and (size % (HINT // 2) == 0 or size in (HINT - 1, HINT // 2 - 1))


def of_length(size: int) -> bool:
    return size >= LENGTH // 2 and (size % LENGTH == 0 or size in (LENGTH - 1, LENGTH // 2, LENGTH // 2 + 1))


def fixed(size: int) -> bool:
    return not (of_batch(size) or of_length(size))


def at_least(size: int) -> int:
    """How large a size is in any call."""
    return size if fixed(size) else SMALLEST


@dataclass(frozen=True, slots=True)
class Size:
    """A size among the inputs: a number, times the batch and the length if it has those, and `more`."""

    number: int
    batch: bool = False
    length: bool = False
    more: int = 0

    def at(self, sizes: Sizes) -> int:
        return self.number * (sizes.batch if self.batch else 1) * (sizes.length if self.length else 1) + self.more

    def __str__(self) -> str:
        text = "B" * self.batch + "T" * self.length
        number = str(self.number) if self.number != 1 or not text else ""
        return f"{number}{text}{f'{self.more:+}' if self.more else ''}"


B, T = Size(1, batch=True), Size(1, length=True)


def _symbols() -> tuple[torch.SymInt, ...]:
    env, made = ShapeEnv(), []
    for name, hint in (("s0", HINT), ("s1", HINT), ("s2", LENGTH)):
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        made.append(env.create_symintnode(symbol, hint=hint, source=source))
    return tuple(made)  # type: ignore[arg-type]


SYMBOLS = _symbols()
"""Two names for the size of the batch, as when nothing in a model ties two inputs together, and one for the length."""


@dataclass(frozen=True, slots=True)
class Formula:
    """times * f(batch) * g(length) + rest, where f and g are among `_PARTS`."""

    times: int
    f: int
    g: int
    rest: int

    def symbolic(self, symbol: int) -> Any:
        if not self.f and not self.g:
            return self.rest
        return self.times * _PARTS[self.f](SYMBOLS[symbol]) * _PARTS[self.g](SYMBOLS[2]) + self.rest


_PARTS: tuple[Callable[[Any], Any], ...] = (
    lambda n: 1,
    lambda n: n,
    lambda n: n // 2,
    lambda n: (n + 1) // 2,
    lambda n: n * n,
    lambda n: n - 1,
    lambda n: n + 1,
    lambda n: n * (n // 2),
    lambda n: n * ((n + 1) // 2),
    lambda n: n * (n - 1),
    lambda n: n * (n + 1),
    lambda n: (n // 2) * (n // 2),
)


@cache
def formula(values: tuple[int, ...]) -> Formula:
    """What has these values for POINTS."""
    first = values[0]
    if len(set(values)) == 1:
        return Formula(0, 0, 0, first)
    points = POINTS[: len(values)]
    by_batch, by_length = len(set(values[:BATCHES])) > 1, len({values[0], *values[BATCHES : BATCHES + 2]}) > 1
    for f in range(1, len(_PARTS)) if by_batch else (0,):
        for g in range(1, len(_PARTS)) if by_length else (0,):
            made = [_PARTS[f](p.batch) * _PARTS[g](p.length) for p in points]
            other = next((i for i, m in enumerate(made) if m != made[0]), None)
            if other is None:
                continue
            times = (values[other] - first) // (made[other] - made[0])
            rest = first - times * made[0]
            if all(times * m + rest == v for m, v in zip(made, values, strict=True)):
                return Formula(times, f, g, rest)
    raise NotHere(f"no formula for {values}")


@cache
def symbolic(values: tuple[int, ...], symbol: int = 0) -> Any:
    """The size that has these values for POINTS; `symbol`: which name it has for the batch."""
    return formula(values).symbolic(symbol)
