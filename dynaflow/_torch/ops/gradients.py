"""Gradients of an operator by recomputing it under autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor


def gradients_of(
    call: Callable[[list[Tensor]], Sequence[Tensor]],
    given: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of the results of `call` with respect to the `given` tensors that are `wanted`."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.detach().requires_grad_(want) for t, want in zip(given, wanted, strict=True)]
        results = [(r, g) for r, g in zip(call(leaves), gradients, strict=True) if r.requires_grad]
        made, by = zip(*results, strict=True)
        own = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(made, own, by, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(own, found, strict=True)]


def empty_like_each(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return [contiguous(t) for t, want in zip(tensors, wanted, strict=True) if want]
