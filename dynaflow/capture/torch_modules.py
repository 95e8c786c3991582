"""Calls of torch's modules that stay whole, as operators of ours (`_torch/ops`).

`nn.LSTM`, `GRU` and `RNN` would be unrolled step by step, and `nn.EmbeddingBag` indexes the whole batch by offsets.

*Contract.* TRACED replaces functions while Dynamo traces. `remove_noop_dropouts` and `replace_embedding_bags` change a
fresh graph in place; results stay equal. A dropout that is removed may be returned or viewed, which the caller must
check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dynaflow import _torch
from dynaflow._torch.ops.recurrent import RNNS

# Traced in place of torch's functions


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
    """Calls the operator with the batch second; layer by layer, if there is dropout between layers."""
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
        _torch.break_if_autocast(input)
        packed = isinstance(args[2], (list, tuple))  # the weights, after batch_sizes and the state
        batch_sizes, hidden, *rest = (*args, False) if packed else (None, *args)
        states = list(hidden) if kind == "lstm" else [hidden]
        return tuple(_in_trace(kind, batch_sizes, input, states, *rest))

    return rnn


TRACED: dict[Callable[..., Any], Callable[..., Any]] = {RNNS[kind]: _traced_rnn(kind) for kind in RNNS}
"""Functions of torch -> what Dynamo traces instead."""


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


def remove_noop_dropouts(gm: fx.GraphModule) -> list[Tensor]:
    """Removes dropouts that drop nothing. In eager mode they return their argument itself, for which torch.compile
    (2.11 and 2.13) returns a copy. Returns the examples of their results, of which other values may be views."""
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


def replace_embedding_bags(gm: fx.GraphModule) -> None:
    """Replaces `embedding_bag` on two-dimensional ids, which are bags of equal size, by our operator."""
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
