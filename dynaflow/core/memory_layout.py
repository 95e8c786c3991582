"""Sizes and strides: how a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from the first to the last of a tensor of this layout."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if prod(size) else 0


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """No holes and no overlap."""
    return span(size, stride) == prod(size) and not overlaps_itself(size, stride)


def overlaps_itself(size: Sequence[int], stride: Sequence[int], width: int = 1) -> bool:
    """Whether two elements may share memory: some stride is smaller than the extent of the smaller strides."""
    reach = width
    for step, n in sorted(zip(stride, size, strict=True)):
        if n > 1 and step < reach:
            return True
        reach += step * (n - 1)
    return False
