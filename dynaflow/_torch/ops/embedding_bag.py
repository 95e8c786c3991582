"""embedding_bag on bags of equal size, one per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaflow._torch.ops import library
from dynaflow._torch.ops.gradients import empty_like_each, gradients_of

_BAG = """(Tensor weight, Tensor ids, Tensor? scales, int mode, bool by_frequency, int padding) -> Tensor"""
_BAG_BACKWARD = """embedding_bag_backward(Tensor gradient, Tensor weight, Tensor ids, Tensor? scales, int mode,
    bool by_frequency, int padding, bool[] wanted) -> Tensor[]"""

def _bag(weight: Tensor, ids: Tensor, scales: Tensor | None, mode: int, by_frequency: bool, padding: int) -> Tensor:
    offsets = torch.arange(0, ids.numel(), ids.shape[1], dtype=ids.dtype, device=ids.device)
    flat = None if scales is None else scales.reshape(-1)
    found = torch.embedding_bag(
        weight, ids.reshape(-1), offsets, by_frequency, mode, False, flat, False, None if padding < 0 else padding
    )
    return found[0]


def _fake_bag(weight: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def _bag_backward(gradient: Tensor, weight: Tensor, ids: Tensor, scales: Tensor | None, *rest: Any) -> list[Tensor]:
    *options, wanted = rest
    given = [weight] if scales is None else [weight, scales]

    def call(given: list[Tensor]) -> list[Tensor]:
        return [_bag(given[0], ids, given[1] if len(given) > 1 else None, *options)]

    return gradients_of(call, given, wanted[: len(given)], [gradient])


def _fake_bag_backward(
    gradient: Tensor, weight: Tensor, ids: Tensor, scales: Tensor | None, *rest: Any
) -> list[Tensor]:
    given = [weight] if scales is None else [weight, scales]
    return empty_like_each(given, rest[-1][: len(given)])


def _keep_bag(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, ids, scales, *ctx.rest = inputs
    ctx.save_for_backward(weight, ids, scales)


def _go_back_bag(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    found = iter(torch.ops.dynaflow.embedding_bag_backward(gradient, *ctx.saved_tensors, *ctx.rest, wanted))
    weight, scales = (next(found) if want else None for want in wanted)
    return weight, None, scales, None, None, None


library.define("embedding_bag" + _BAG)
library.impl("embedding_bag", _bag, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::embedding_bag", _fake_bag, lib=library)
torch.library.register_autograd("dynaflow::embedding_bag", _go_back_bag, setup_context=_keep_bag, lib=library)
library.define(_BAG_BACKWARD)
library.impl("embedding_bag_backward", _bag_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::embedding_bag_backward", _fake_bag_backward, lib=library)
