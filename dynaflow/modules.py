"""Calls of torch's own modules that compilers take to pieces, each kept in one piece as an operator.

`nn.LSTM`, `GRU` and `RNN` would be unrolled step by step, and `nn.EmbeddingBag` counts along the whole batch. The
operators here call torch's own functions. A backward pass calls them again and goes back through that, since the rows
of what torch saves for its own can't be told apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dynaflow import _torch
from dynaflow.capture.alignment import Call, Labels, Operand, Refusal, Signature

_library = torch.library.Library("dynaflow", "FRAGMENT")

RNNS: dict[str, Callable[..., Any]] = {n: getattr(torch, n) for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_RNN = """(Tensor input, Tensor[] hidden, Tensor[] weights, bool has_biases, int layers, bool bidirectional,
    Tensor? batch_sizes) -> (Tensor, Tensor, Tensor)"""
_RNN_BACKWARD = """rnn_backward(str kind, Tensor[] gradients, Tensor input, Tensor[] hidden, Tensor[] weights,
    bool has_biases, int layers, bool bidirectional, Tensor? batch_sizes, bool[] wanted) -> Tensor[]"""
_BAG = """(Tensor weight, Tensor ids, Tensor? scales, int mode, bool by_frequency, int padding) -> Tensor"""
_BAG_BACKWARD = """embedding_bag_backward(Tensor gradient, Tensor weight, Tensor ids, Tensor? scales, int mode,
    bool by_frequency, int padding, bool[] wanted) -> Tensor[]"""


def _gradients(
    call: Callable[[list[Tensor]], Sequence[Tensor]],
    given: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor],
) -> list[Tensor]:
    """Of what `call` makes, with respect to the tensors that it is `given` and that are wanted."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.detach().requires_grad_(want) for t, want in zip(given, wanted, strict=True)]
        results = [(r, g) for r, g in zip(call(leaves), gradients, strict=True) if r.requires_grad]
        made, by = zip(*results, strict=True)
        own = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(made, own, by, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(own, found, strict=True)]


# Recurrent layers: the sequence first, the batch second, nothing dropped out.


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

    return _gradients(call, [input, *hidden, *weights], wanted, gradients)


def _fake_rnn_backward(
    kind: str,
    gradients: Sequence[Tensor],
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return _like([input, *hidden, *weights], rest[-1])


def _like(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return [contiguous(t) for t, want in zip(tensors, wanted, strict=True) if want]


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
    """As torch does where cuDNN runs it: all in the type that autocast says."""
    to = torch.get_autocast_dtype("cuda")
    with torch.autocast("cuda", enabled=False):
        call = getattr(torch.ops.dynaflow, name)
        return call(input.to(to), [h.to(to) for h in hidden], [w.to(to) for w in weights], *rest)


def _define_rnn(kind: str) -> None:
    _library.define(kind + _RNN)
    _library.impl(kind, partial(_rnn_results, kind), "CompositeExplicitAutograd")
    _library.impl(kind, partial(_autocast_rnn, kind), "AutocastCUDA")
    torch.library.register_fake(f"dynaflow::{kind}", partial(_fake_rnn, kind), lib=_library)
    back = partial(_go_back_rnn, kind)
    torch.library.register_autograd(f"dynaflow::{kind}", back, setup_context=_keep_rnn, lib=_library)


for _kind in RNNS:
    _define_rnn(_kind)
_library.define(_RNN_BACKWARD)
_library.impl("rnn_backward", _rnn_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::rnn_backward", _fake_rnn_backward, lib=_library)

_STEPS: Labels = (None, "rows", None)


def _rnn_rule(call: Call) -> Signature | Refusal:
    if call.bound.get("batch_sizes") is not None:
        return call.refuse("takes packed sequences, in which the rows of all steps lie in a line")
    given = [*call.bound.get("gradients", ()), call["input"], *call["hidden"]]
    wanted = call.bound.get("wanted", ())[1 + len(call["hidden"]) :]
    if any(wanted):
        return call.refuse("sums the gradients of its weights over all rows")
    outs = [_STEPS if out.ndim == 3 else None for out in call.outs]
    return Signature([Operand(t, _STEPS) for t in given], [*outs])


# What Dynamo traces in place of torch's functions


def _in_trace(
    kind: str,
    batch_sizes: Tensor | None,
    input: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """The call with the batch second; and layer by layer, if something is dropped out between them."""
    call = getattr(torch.ops.dynaflow, kind)
    output = input.transpose(0, 1) if batch_first else input
    if not (train and dropout > 0 and layers > 1):
        output, *states = call(output, hidden, weights, has_biases, layers, bidirectional, batch_sizes)
    else:
        ways, each, parts = 2 if bidirectional else 1, len(weights) // layers, []
        for layer in range(layers):
            own = [h[layer * ways : (layer + 1) * ways] for h in hidden]
            part = weights[layer * each : (layer + 1) * each]
            output, *states = call(output, own, part, has_biases, 1, bidirectional, batch_sizes)
            parts.append(states)
            if layer < layers - 1:
                output = F.dropout(output, dropout, True)
        states = [torch.cat([part[i] for part in parts]) for i in range(len(hidden))]
    return [output.transpose(0, 1) if batch_first else output, *states[: len(hidden)]]


def _traced_rnn(kind: str) -> Callable[..., Any]:
    def rnn(input: Tensor, *args: Any) -> Any:
        _torch.break_where_cast(input)
        packed = isinstance(args[2], (list, tuple))  # the weights, behind the sizes of the batch and the state
        batch_sizes, hidden, *rest = (*args, False) if packed else (None, *args)
        states = list(hidden) if kind == "lstm" else [hidden]
        return tuple(_in_trace(kind, batch_sizes, input, states, *rest))

    return rnn


TRACED: dict[Callable[..., Any], Callable[..., Any]] = {RNNS[kind]: _traced_rnn(kind) for kind in RNNS}
"""Functions of torch's, and what is traced in their places."""


# Bags of equal size


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

    return _gradients(call, given, wanted[: len(given)], [gradient])


def _fake_bag_backward(
    gradient: Tensor, weight: Tensor, ids: Tensor, scales: Tensor | None, *rest: Any
) -> list[Tensor]:
    given = [weight] if scales is None else [weight, scales]
    return _like(given, rest[-1][: len(given)])


def _keep_bag(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, ids, scales, *ctx.rest = inputs
    ctx.save_for_backward(weight, ids, scales)


def _go_back_bag(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    found = iter(torch.ops.dynaflow.embedding_bag_backward(gradient, *ctx.saved_tensors, *ctx.rest, wanted))
    weight, scales = (next(found) if want else None for want in wanted)
    return weight, None, scales, None, None, None


_library.define("embedding_bag" + _BAG)
_library.impl("embedding_bag", _bag, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::embedding_bag", _fake_bag, lib=_library)
torch.library.register_autograd("dynaflow::embedding_bag", _go_back_bag, setup_context=_keep_bag, lib=_library)
_library.define(_BAG_BACKWARD)
_library.impl("embedding_bag_backward", _bag_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::embedding_bag_backward", _fake_bag_backward, lib=_library)


def _bag_rule(call: Call) -> Signature | Refusal:
    if call.bound.get("wanted", (False,))[0]:
        return call.refuse("sums the gradient of its weight over all rows")
    given = (call.bound.get(name) for name in ("gradient", "ids", "scales"))
    rows: Labels = ("rows", None)
    return Signature([Operand(t, rows) for t in given if isinstance(t, Tensor)], [rows])


_DROPOUTS = {
    F.dropout: ("input", "p", "training"),
    F.dropout2d: ("input", "p", "training"),
    F.dropout3d: ("input", "p", "training"),
    F.alpha_dropout: ("input", "p", "training"),
    F.feature_alpha_dropout: ("input", "p", "training"),
    torch.dropout: ("input", "p", "train"),
    torch.feature_dropout: ("input", "p", "train"),
    torch.alpha_dropout: ("input", "p", "train"),
    torch.feature_alpha_dropout: ("input", "p", "train"),
}
_DEFAULTS = {"p": 0.5, "training": True}


def leave_out_dropouts(gm: fx.GraphModule) -> list[Tensor]:
    """Takes dropouts that drop nothing out of the graph. They return what they are given, itself, and torch.compile
    (2.11 and 2.13) makes a copy of it. Returns what it takes for their results, which others may be views of."""
    left_out = []
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS:
            names = _DROPOUTS[node.target]
            given = {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
            if given[names[2]] is False or given["p"] == 0:
                left_out.append(node.meta["example_value"])
                node.replace_all_uses_with(given["input"])
                gm.graph.erase_node(node)
    return left_out


def keep_bags(gm: fx.GraphModule) -> None:
    """Puts our operator in the place of `embedding_bag` on ids of two dims: bags of equal size, one for each row."""
    calls = gm.graph.find_nodes(op="call_function", target=F.embedding_bag)
    for node in calls:
        given = inspect.signature(F.embedding_bag).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        bag = given.arguments
        if bag["input"].meta["example_value"].dim() != 2 or bag["max_norm"] is not None or bag["sparse"]:
            continue
        padding = (
            -1 if bag["padding_idx"] is None else bag["padding_idx"] % bag["weight"].meta["example_value"].shape[0]
        )
        options = (_MODES.index(bag["mode"]), bag["scale_grad_by_freq"], padding)
        node.args = (bag["weight"], bag["input"], bag["per_sample_weights"], *options)
        node.kwargs, node.target = {}, torch.ops.dynaflow.embedding_bag.default
    if calls:
        gm.recompile()


_MODES = ("sum", "mean", "max")

RULES: dict[str, Callable[[Call], Signature | Refusal]] = {
    **dict.fromkeys((*RNNS, "rnn_backward"), _rnn_rule),
    **dict.fromkeys(("embedding_bag", "embedding_bag_backward"), _bag_rule),
}
"""Of the operators defined here."""
