"""Recurrent layers as one operator: sequence first, batch second, no dropout.

The backward pass recomputes torch's own function under autograd: the tensors that torch saves can't be split by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaflow._torch.ops import library
from dynaflow._torch.ops.gradients import empty_like_each, gradients_of

RNNS: dict[str, Callable[..., Any]] = {n: getattr(torch, n) for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_RNN = """(Tensor input, Tensor[] hidden, Tensor[] weights, bool has_biases, int layers, bool bidirectional,
    Tensor? batch_sizes) -> (Tensor, Tensor, Tensor)"""
_RNN_BACKWARD = """rnn_backward(str kind, Tensor[] gradients, Tensor input, Tensor[] hidden, Tensor[] weights,
    bool has_biases, int layers, bool bidirectional, Tensor? batch_sizes, bool[] wanted) -> Tensor[]"""


def _rnn(
    kind: str,
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_sizes: Tensor | None,
    *,
    train: bool = False,
) -> tuple[Tensor, ...]:
    state: Any = tuple(hidden) if kind == "lstm" else hidden[0]
    rest: tuple[Any, ...] = (list(weights), has_biases, layers, 0.0, train, bidirectional)
    if batch_sizes is not None:
        found = RNNS[kind](input, batch_sizes, state, *rest)
    else:
        found = RNNS[kind](input, state, *rest, False)
    return tuple(t.contiguous() for t in found)


def _rnn_results(kind: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, *states = _rnn(kind, *args)
    return output, states[0], states[1] if kind == "lstm" else states[0].new_empty(0)


def _fake_rnn(
    kind: str,
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width = hidden[0].shape[-1] * (2 if bidirectional else 1)
    states = [torch.empty_like(h, memory_format=torch.contiguous_format) for h in hidden]
    return input.new_empty((*input.shape[:-1], width)), states[0], states[1] if kind == "lstm" else input.new_empty(0)


def _rnn_backward(
    kind: str,
    gradients: Sequence[Tensor],
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_sizes: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    states = len(hidden) + 1

    def call(given: list[Tensor]) -> tuple[Tensor, ...]:
        rest = (has_biases, layers, bidirectional, batch_sizes)
        return _rnn(kind, given[0], given[1:states], given[states:], *rest, train=True)

    return gradients_of(call, [input, *hidden, *weights], wanted, gradients)


def _fake_rnn_backward(
    kind: str,
    gradients: Sequence[Tensor],
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return empty_like_each([input, *hidden, *weights], rest[-1])


def _keep_rnn(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, hidden, weights, *ctx.rest, batch_sizes = inputs
    ctx.states = len(hidden)
    ctx.save_for_backward(input, *hidden, *weights, batch_sizes)


def _go_back_rnn(kind: str, ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    input, *others, batch_sizes = ctx.saved_tensors
    hidden, weights = others[: ctx.states], others[ctx.states :]
    needed = ctx.needs_input_grad
    wanted = [bool(needed[0]), *map(bool, needed[1]), *map(bool, needed[2])]
    made = gradients[: 1 + ctx.states]
    found = iter(torch.ops.dynaflow.rnn_backward(kind, made, input, hidden, weights, *ctx.rest, batch_sizes, wanted))
    own = [next(found) if want else None for want in wanted]
    return own[0], own[1 : 1 + ctx.states], own[1 + ctx.states :], None, None, None, None


def _autocast_rnn(name: str, input: Tensor, hidden: Sequence[Tensor], weights: Sequence[Tensor], *rest: Any) -> Any:
    """As torch does with cuDNN: all arguments in autocast's dtype."""
    to = torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", enabled=False):
        call = getattr(torch.ops.dynaflow, name)
        return call(input.to(to), [h.to(to) for h in hidden], [w.to(to) for w in weights], *rest)


def _define_rnn(kind: str) -> None:
    library.define(kind + _RNN)
    library.impl(kind, partial(_rnn_results, kind), "CompositeExplicitAutograd")
    library.impl(kind, partial(_autocast_rnn, kind), "AutocastCUDA")
    torch.library.register_fake(f"dynaflow::{kind}", partial(_fake_rnn, kind), lib=library)
    back = partial(_go_back_rnn, kind)
    torch.library.register_autograd(f"dynaflow::{kind}", back, setup_context=_keep_rnn, lib=library)


for _kind in RNNS:
    _define_rnn(_kind)
library.define(_RNN_BACKWARD)
library.impl("rnn_backward", _rnn_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::rnn_backward", _fake_rnn_backward, lib=library)
