"""A model's shard on one of several GPUs, with the collectives that such a model has.

Tensor parallel: heads and widths are divided, with an all-reduce after attention and after the MLP. Expert parallel:
experts are divided, with an all-to-all of tokens before and after them. For planning and simulation only: the
collectives name a process group that does not exist.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from dynaflow.errors import DynaFlowError

GROUP = "ranks"
"""The name of the process group, in collectives that never run."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_DIVIDED = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "moe_intermediate_size",
)  # fmt: skip


def has_experts(config: Any) -> bool:
    return _experts(config) is not None


def _experts(config: Any) -> str | None:
    return next((key for key in _EXPERTS if getattr(config, key, None)), None)


def shard_config(name: str, config: Any, tp: int) -> None:
    """Changes the config to that of the shard on one of `tp` GPUs."""
    if not hasattr(config, "num_key_value_heads"):
        raise DynaFlowError(f"sharding {name} over {tp} GPUs is not supported", advice="leave --tp at 1")
    for key in (key for key in _DIVIDED if getattr(config, key, None)):
        size = getattr(config, key)
        if key == "num_key_value_heads" and size < tp:
            setattr(config, key, 1)  # key heads are replicated on several GPUs
        elif size % tp:
            raise DynaFlowError(
                f"{name} can't be divided among {tp} GPUs: {key} is {size}", advice="use a divisor of it"
            )
        else:
            setattr(config, key, size // tp)


def add_all_reduces(model: Any) -> None:
    """Adds an all-reduce at the end of each block, where every GPU has a partial sum."""
    for layer in model.model.layers:
        sparse = hasattr(layer.mlp, "experts")
        for module in (layer.self_attn.o_proj, layer.mlp if sparse else layer.mlp.down_proj):
            module.register_forward_hook(_all_reduce)


def _all_reduce(module: nn.Module, args: Any, out: Any) -> Any:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(out, "sum", GROUP))


def shard_experts(name: str, model: Any, config: Any, ep: int) -> None:
    """Replaces the experts of each layer by one GPU's share of them; the rest of the model is replicated."""
    key = _experts(config)
    if key is None:
        raise DynaFlowError(f"{name} has no experts to share among {ep} GPUs", advice="use tp instead of ep")
    count = getattr(config, key)
    if count % ep:
        raise DynaFlowError(f"{name} has {count} experts, not divisible by {ep}", advice="use a divisor of it for ep")
    own = copy(config)
    setattr(own, key, count // ep)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertParallel(type(layer.mlp.experts)(own), count // ep)


class ExpertParallel(nn.Module):
    """One GPU's experts, with the all-to-alls around them. All GPUs are assumed to exchange equally many tokens."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, width, chosen = hidden.shape[0], hidden.shape[1], index.shape[1]
        # The chosen experts are dim 0: the all-to-all splits dim 0, which must not be the tokens.
        sent = hidden.unsqueeze(0).expand(chosen, tokens, width).contiguous()
        got = _exchange(sent).transpose(0, 1).reshape(tokens * chosen, width)
        local = (index % self.count).reshape(tokens * chosen, 1)
        done = self.inner(got, local, torch.ones_like(local, dtype=weights.dtype))
        back = _exchange(done.view(tokens, chosen, width).transpose(0, 1).contiguous())
        return (back * weights.t().unsqueeze(-1)).sum(0).to(hidden.dtype)


def _exchange(x: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(x, [x.shape[0]], [x.shape[0]], GROUP))
