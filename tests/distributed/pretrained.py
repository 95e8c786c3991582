"""Models of transformers, spread over the ranks by transformers itself."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
VOCABULARY = 96


def llama() -> nn.Module:
    """Attention and MLP spread over the ranks: two sums a layer, and a gather of the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _spread(LlamaForCausalLM, LlamaConfig(**SIZES, use_cache=False), experts=False)


def mixtral() -> nn.Module:
    """Experts spread over the ranks, and nothing else: one sum a layer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return _spread(MixtralForCausalLM, MixtralConfig(**SIZES, use_cache=False, num_local_experts=4), experts=True)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SIZES, use_cache=False, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    return _spread(Qwen3MoeForCausalLM, config, experts=True)


def _spread(kind: Any, config: Any, *, experts: bool) -> nn.Module:
    """Weights are saved by rank 0 and loaded by each rank, its own part of them."""
    from transformers.distributed.configuration_utils import DistributedConfig

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            kind(config).save_pretrained(folder[0])
        dist.barrier()
        spread = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size(), enable_expert_parallel=experts)
        model: nn.Module = kind.from_pretrained(folder[0], distributed_config=spread)
    dist.barrier()
    if dist.get_rank() == 0:
        for name in os.listdir(folder[0]):
            os.remove(os.path.join(folder[0], name))
        os.rmdir(folder[0])
    return model.eval().requires_grad_(False)


def tokens(batch: int, length: int = 6) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch))
