"""What sizes and strides say of a tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory a tensor of this layout reaches over."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if prod(size) else 0


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """No holes and no overlap."""
    return span(size, stride) == prod(size) and not overlaps_itself(size, stride)


def overlaps_itself(size: Sequence[int], stride: Sequence[int], width: int = 1) -> bool:
    """Whether two elements may share memory: a stride steps over less than what the smaller ones reach."""
    reach = width
    for step, n in sorted(zip(stride, size, strict=True)):
        if n > 1 and step < reach:
            return True
        reach += step * (n - 1)
    return False
