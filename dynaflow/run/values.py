"""What generated code calls on values: joining parts of a batch, and unpacking a user's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Join:
    """Puts the parts of a batch back together, in the memory layout that the whole would have had."""

    dim: int
    order: tuple[int, ...] | None
    """Dims from the widest stride to the narrowest, where that is not their own order."""

    @staticmethod
    def along(dim: int, strides: Sequence[int]) -> Join:
        order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
        return Join(dim, None if order == tuple(range(len(strides))) else order)

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.order is None:
            return torch.cat(parts, self.dim)  # type: ignore[arg-type]
        back = [self.order.index(d) for d in range(len(self.order))]
        return torch.cat([p.permute(self.order) for p in parts], self.order.index(self.dim)).permute(back)


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
