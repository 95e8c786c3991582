"""The inputs of a random graph: sizes, dtypes, layouts, and which memory they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tests.fuzz.dice import Dice
from tests.fuzz.sizes import B, Size, Sizes, T

EXACT = (torch.float64, torch.complex128)
"""Rounding must not flip a comparison, and 1e-9 is a meaningful tolerance."""
ROUNDED = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(slots=True, kw_only=True)
class Input:
    name: str
    sizes: tuple[Size, ...]
    dtype: torch.dtype = torch.float64
    owned: bool = False
    transposed: bool = False
    """Laid out with the last two dims swapped in memory."""
    view_of: str | None = None
    """Shares the memory of this input, of which it is a `window`."""
    window: str = ""
    hidden: bool = False
    """No argument: only memory that others are windows of."""
    writable: bool = True
    grad: bool = False

    @property
    def batch_dim(self) -> int | None:
        return next((d for d, s in enumerate(self.sizes) if s.batch and not s.more), None)

    @property
    def length_dims(self) -> list[int]:
        return [d for d, s in enumerate(self.sizes) if s.length]

    def make(self, sizes: Sizes, random: torch.Generator, made: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.view_of is not None:
            return WINDOWS[self.window].view(made[self.view_of])
        shape = [s.at(sizes) for s in self.sizes]
        stored = shape[:-2] + shape[-2:][::-1] if self.transposed else shape
        tensor = filled(stored, self.dtype, random)
        return tensor.transpose(-1, -2) if self.transposed else tensor

    def __str__(self) -> str:
        words = [f"{self.name}: [{', '.join(map(str, self.sizes))}]"]
        words += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float64 else []
        words += [w for w in ("owned", "transposed", "hidden", "grad") if getattr(self, w)]
        return " ".join([*words, f"{self.window} of {self.view_of}"] if self.view_of else words)


def filled(shape: list[int], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    if dtype in WHOLE:
        return torch.randint(0, 4, shape, generator=random).to(dtype)
    if dtype.is_complex:
        parts = torch.rand([*shape, 2], generator=random, dtype=torch.float64) * 2 - 1
        return torch.view_as_complex(parts).to(dtype)
    return (torch.rand(shape, generator=random, dtype=torch.float64) * 2 - 1).to(dtype)


@dataclass(frozen=True, slots=True)
class Window:
    """A view of an input's memory that is an input itself."""

    view: Callable[[torch.Tensor], torch.Tensor]
    sizes: Callable[[tuple[Size, ...]], tuple[Size, ...]]


def _fewer(size: Size, by: int = 1) -> Size:
    return replace(size, more=size.more - by)


WINDOWS: dict[str, Window] = {
    "columns": Window(lambda t: t[:, 1:], lambda s: (s[0], _fewer(s[1]), *s[2:])),
    "tail": Window(lambda t: t[1:], lambda s: (_fewer(s[0]), *s[1:])),
    "head": Window(lambda t: t[:-1], lambda s: (_fewer(s[0]), *s[1:])),
    "row": Window(lambda t: t[0], lambda s: s[1:]),
    "last row": Window(lambda t: t[-1], lambda s: s[1:]),
    "turned": Window(lambda t: t.transpose(0, 1), lambda s: (s[1], s[0], *s[2:])),
    "even": Window(lambda t: t[::2], lambda s: (replace(s[0], number=s[0].number // 2), *s[1:])),
    "odd": Window(lambda t: t[1::2], lambda s: (replace(s[0], number=s[0].number // 2), *s[1:])),
    "first half": Window(lambda t: t[: t.shape[0] // 2], lambda s: (replace(s[0], number=s[0].number // 2), *s[1:])),
    "second half": Window(lambda t: t[t.shape[0] // 2 :], lambda s: (replace(s[0], number=s[0].number // 2), *s[1:])),
    "same": Window(lambda t: t.view_as(t), lambda s: s),
    "backwards": Window(lambda t: t.as_strided(t.shape[::-1], t.stride()[::-1]), lambda s: s[::-1]),
}
"""By name. Rows of some are rows of the whole, rows of others are not."""

ROLLING = Window(lambda t: t.unfold(0, 3, 1), lambda s: (_fewer(s[0], 2), Size(3)))
"""Rows that overlap."""
WINDOWS["rolling"] = ROLLING
WINDOWS["spread"] = Window(lambda t: t[:1].expand_as(t), lambda s: s)


def _aliases(dice: Dice, dtype: torch.dtype, width: int) -> list[Input]:
    """Inputs that share memory, and the memory."""
    two, one = (B, Size(width)), (Size(1, batch=True, more=1), Size(width))
    twice, square = (Size(2, batch=True), Size(width)), (B, B)
    long, deep = (Size(1, batch=True, more=2),), (B, Size(4), Size(width))
    base, kinds = dice.pick(
        [
            (one, ("tail", "head")),
            (two, ("whole", "row")),
            (two, ("whole", "turned")),
            (square, ("whole", "turned")),
            (twice, ("even", "odd")),
            (twice, ("first half", "second half")),
            (two, ("whole", "same")),
            (two, ("whole", "last row", "row")),
            (one, ("tail", "head", "row")),
            (long, ("rolling",)),
            (two, ("spread", "whole")),
            (deep, ("whole", "columns")),
            (square, ("backwards", "whole")),
        ]
    )
    memory = Input(name="memory", sizes=base, dtype=dtype, hidden="whole" not in kinds)
    made = [memory]
    for n, kind in enumerate(k for k in kinds if k != "whole"):
        sizes = WINDOWS[kind].sizes(base)
        made.append(Input(name=f"part{n}", sizes=sizes, dtype=dtype, view_of="memory", window=kind))
    return made


def draw_inputs(dice: Dice, *, has_batch: bool, has_length: bool, dtype: torch.dtype) -> list[Input]:
    b = B if has_batch else Size(dice.pick([5, 1, 0]))
    width, rows = Size(_static(dice)), T if has_length and dice.one_in(2) else Size(_static(dice))
    wanted = [Input(name="x0", sizes=(b, T, width) if has_length else (b, width), dtype=dtype)]
    shapes = [(b, width), (b, rows, width), (b,), (rows, b), (rows, b, width), (width, b), (rows, width, b)]
    for n in range(dice.below(3)):
        shape = dice.pick(shapes)
        wanted.append(Input(name=f"x{n + 1}", sizes=shape, dtype=dtype, transposed=len(shape) > 1 and dice.one_in(4)))
    if dice.one_in(3):
        wanted.append(Input(name="cache", sizes=(b, Size(6), width), dtype=dtype))
    if dice.one_in(4):
        wanted.append(Input(name="cache_t", sizes=(Size(6), b, width), dtype=dtype))
    if dice.one_in(2):
        wanted.append(Input(name="w", sizes=(width, width), dtype=dtype, owned=True, writable=False))
    if dice.one_in(3):
        wanted.append(Input(name="shared", sizes=(rows, width), dtype=dtype))
    if dice.one_in(4):
        wanted.append(Input(name="counter", sizes=(), owned=not dice.one_in(2)))
    if dice.one_in(4):
        wanted.append(Input(name="mean", sizes=(width,), dtype=dtype, owned=True))
    if dice.one_in(4):
        wanted.append(Input(name="ids", sizes=(b, Size(2)), dtype=torch.int64, writable=False))
    if dice.one_in(6):
        other = dice.pick([torch.float32, torch.bool, torch.int32, torch.complex128, torch.uint8, torch.float64])
        wanted.append(Input(name="other", sizes=(b, width), dtype=other))
    bases = [i for i in wanted if len(i.sizes) > 1 and i.sizes[0].batch and _splits(i.sizes[1]) and not i.owned]
    if bases and dice.one_in(8):
        base = dice.pick(bases)
        sizes = WINDOWS["columns"].sizes(base.sizes)
        wanted.append(Input(name="part", sizes=sizes, dtype=base.dtype, view_of=base.name, window="columns"))
    if has_batch and dice.one_in(6):
        wanted += _aliases(dice, dtype, dice.pick([4, 3, 2]))
    return wanted


def _static(dice: Dice) -> int:
    return dice.pick([4, 3, 2, 6, 4, 3, 2, 6, 1, 5, 4, 0]) if dice.one_in(3) else dice.pick([4, 3, 2, 6])


def _splits(size: Size) -> bool:
    return not size.batch and not size.length and size.number > 1
