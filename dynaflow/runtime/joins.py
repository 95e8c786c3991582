"""What generated code calls on values: joins of micro-batches, and unpacking the results of a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynaflow.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Join:
    """Concatenates micro-batches, in the memory layout of the whole batch."""

    dim: int
    order: tuple[int, ...]
    """Dims from the largest stride to the smallest."""

    @staticmethod
    def along(dim: int, strides: Sequence[int]) -> Callable[..., torch.Tensor]:
        order = _order(strides)
        return partial(torch.cat, dim=dim) if order is None else Join(dim, order)

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ordered(parts, self.dim, self.order, torch.cat)


@dataclass(frozen=True, slots=True)
class Regroup:
    """Concatenates rows of tensors in which rows are merged with an outer dim of size `outer`, as in (s*b, h)."""

    dim: int
    order: tuple[int, ...] | None
    outer: int
    ranges: tuple[tuple[int, int], ...]
    """For each tensor: the first row to take, and how many."""

    @staticmethod
    def along(dim: int, strides: Sequence[int], outer: int, ranges: tuple[tuple[int, int], ...]) -> Regroup:
        return Regroup(dim, _order(strides), outer, ranges)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ordered(tensors, self.dim, self.order, self._taken)

    def _taken(self, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        apart = (tensor.unflatten(dim, (self.outer, -1)) for tensor in tensors)
        taken = [t.narrow(dim + 1, start, rows) for t, (start, rows) in zip(apart, self.ranges, strict=True)]
        return torch.cat(taken, dim + 1).flatten(dim, dim + 1)


def _order(strides: Sequence[int]) -> tuple[int, ...] | None:
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    return None if order == tuple(range(len(strides))) else order


def _ordered(
    tensors: Sequence[torch.Tensor], dim: int, order: tuple[int, ...] | None, put: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Applies `put` along a dim to tensors with permuted dims, and permutes the result back."""
    if order is None:
        return put(tensors, dim)
    back = [order.index(d) for d in range(len(order))]
    return put([t.permute(order) for t in tensors], order.index(dim)).permute(back)


def unpack(result: Any, count: int, function: Callable[..., Any]) -> Sequence[Any]:
    """The results of a replace_func, as a sequence of `count`; a single tensor counts as one."""
    results = (result,) if isinstance(result, torch.Tensor) else () if result is None else result
    if not isinstance(results, (tuple, list)) or len(results) != count:
        found = len(results) if isinstance(results, (tuple, list)) else type(result).__name__
        raise ScheduleError(
            f"replace_func {getattr(function, '__qualname__', function)} returned {found} results, not {count}",
            advice="return what ctx.signature(items) lists, in that order",
        )
    return results
