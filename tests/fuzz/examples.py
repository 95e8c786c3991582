"""What Dynamo would note as the example of a node, made of what the node gave for a few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.fuzz.dice import NotHere
from tests.fuzz.sizes import symbolic


class Example(torch.Tensor):
    """Stands for a symbolic fake tensor: its sizes and strides are symbolic."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]

    @staticmethod
    def of(values: Sequence[torch.Tensor], symbol: int = 0) -> Example:
        sizes = tuple(symbolic(s, symbol) for s in zip(*(v.size() for v in values), strict=True))
        strides = tuple(symbolic(s, symbol) for s in zip(*(v.stride() for v in values), strict=True))
        return Example.sized(values[0].detach(), sizes, strides)

    @staticmethod
    def sized(tensor: torch.Tensor, sizes: Sequence[Any], strides: Sequence[Any]) -> Example:
        made = tensor.as_subclass(Example)
        made.sizes, made.strides = tuple(sizes), tuple(strides)
        return made

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.sizes if dim is None else self.sizes[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.strides if dim is None else self.strides[dim]

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes


def example_of(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return Example.of(values)
    if isinstance(first, (tuple, list)):
        if len({len(v) for v in values}) > 1:
            raise NotHere("the number of results depends on a size")
        return tuple(example_of(v) for v in zip(*values, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return symbolic(values)
    return first
