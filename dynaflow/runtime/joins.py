"""What generated code calls on values: joining parts of a batch, and unpacking a user's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dynaflow.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Join:
    """Puts the parts of a batch together, in the memory layout that the whole would have had."""

    dim: int
    order: tuple[int, ...]
    """Dims from the widest stride to the narrowest, which is not their own order."""

    @staticmethod
    def along(dim: int, strides: Sequence[int]) -> Callable[..., torch.Tensor]:
        order = _order(strides)
        return partial(torch.cat, dim=dim) if order is None else Join(dim, order)

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ordered(parts, self.dim, self.order, torch.cat)


@dataclass(frozen=True, slots=True)
class Regroup:
    """Takes rows out of tensors in which they come `behind` times over, as in (s*b, h), and puts them together."""

    dim: int
    order: tuple[int, ...] | None
    behind: int
    ranges: tuple[tuple[int, int], ...]
    """Of each tensor: the first row that is taken, and how many are."""

    @staticmethod
    def along(dim: int, strides: Sequence[int], behind: int, ranges: tuple[tuple[int, int], ...]) -> Regroup:
        return Regroup(dim, _order(strides), behind, ranges)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ordered(tensors, self.dim, self.order, self._taken)

    def _taken(self, tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        apart = (tensor.unflatten(dim, (self.behind, -1)) for tensor in tensors)
        taken = [t.narrow(dim + 1, start, rows) for t, (start, rows) in zip(apart, self.ranges, strict=True)]
        return torch.cat(taken, dim + 1).flatten(dim, dim + 1)


def _order(strides: Sequence[int]) -> tuple[int, ...] | None:
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    return None if order == tuple(range(len(strides))) else order


def _ordered(
    tensors: Sequence[torch.Tensor], dim: int, order: tuple[int, ...] | None, put: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """What `put` makes of the tensors along a dim, with the dims in another order meanwhile."""
    if order is None:
        return put(tensors, dim)
    back = [order.index(d) for d in range(len(order))]
    return put([t.permute(order) for t in tensors], order.index(dim)).permute(back)


def unpack(result: Any, count: int, function: Callable[..., Any]) -> Sequence[Any]:
    """The results of a replace_func: `count` of them, as a tuple; a lone tensor stands for itself."""
    results = (result,) if isinstance(result, torch.Tensor) else () if result is None else result
    if not isinstance(results, (tuple, list)) or len(results) != count:
        found = len(results) if isinstance(results, (tuple, list)) else type(result).__name__
        raise ScheduleError(
            f"replace_func {getattr(function, '__qualname__', function)} returned {found} results, not {count}",
            advice="return what ctx.signature(items) lists, in that order",
        )
    return results
