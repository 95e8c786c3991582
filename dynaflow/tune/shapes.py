"""Models by name, as shapes without weights: to be captured and simulated with no GPU and no process group.

They are transformers' models on the meta device. A share of a model that several GPUs hold has its heads and
widths divided, and collectives where such a model has them: an all-reduce after attention and after the MLP (tensor
parallel), or an exchange of tokens before and after the experts (expert parallel).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynaflow.capture.ops import OpGraph
from dynaflow.errors import DynaFlowError, nearest
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.plan import MicroBatch, Plan

Attention = Literal["flash", "sdpa"]
"""As serving systems do it, where a key head is read once; or as transformers does it, where it is repeated."""

GROUP = "ranks"
"""Stands for the process group in collectives that never run."""
_FLASH = "dynaflow_grouped"
"""Not "flash" anything: transformers would look for a kernel of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's class in transformers and its sizes."""

    name: str
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _model(
    name: str, architecture: str, hidden: int, inside: int, layers: int, heads: int, kv: int, **more: Any
) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rope_parameters": _rope(more.pop("theta", 500000.0)),
        "max_position_embeddings": 131072,
        **more,
    }
    return Model(name=name, architecture=architecture, sizes=MappingProxyType(sizes))


# From the config.json of each model's repository.
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        m.name: m
        for m in (
            _model("llama-3-8b", "Llama", 4096, 14336, 32, 32, 8, vocab_size=128256),
            _model("llama-3-70b", "Llama", 8192, 28672, 80, 64, 8, vocab_size=128256),
            _model("llama-2-7b", "Llama", 4096, 11008, 32, 32, 32, vocab_size=32000, theta=10000.0),
            _model("qwen3-8b", "Qwen3", 4096, 12288, 36, 32, 8, vocab_size=151936, head_dim=128, theta=1e6),
            _model("qwen3-32b", "Qwen3", 5120, 25600, 64, 64, 8, vocab_size=151936, head_dim=128, theta=1e6),
            _model(
                "qwen3-30b-a3b", "Qwen3Moe", 2048, 6144, 48, 32, 4, vocab_size=151936, head_dim=128, theta=1e6,
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
            ),
            _model(
                "deepseek-v2-lite", "DeepseekV2", 2048, 10944, 27, 16, 16, vocab_size=102400, theta=10000.0,
                n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408,
                kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                first_k_dense_replace=1, topk_method="greedy",
            ),
        )
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What one call is for: `batch` prompts of `prompt` tokens; or, with `prompt` 0, one more token after `context`."""

    batch: int = 64
    prompt: int = 0
    context: int = 1024


def build(
    name: str,
    *,
    tp: int = 1,
    ep: int = 1,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    attention: Attention = "flash",
) -> nn.Module:
    """The model, or what one of `tp` GPUs holds of it, or of `ep` that share its experts; on the meta device."""
    import transformers

    model = MODELS.get(name)
    if model is None:
        close = nearest(name, list(MODELS), 8)
        raise DynaFlowError(f"no model is named {name!r}", advice=f"there are {', '.join(close)}")
    sizes = dict(model.sizes) | ({"num_hidden_layers": layers} if layers else {})
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    _divide(name, sizes, tp, ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
                              "moe_intermediate_size"))  # fmt: skip
    experts = next((key for key in ("num_experts", "n_routed_experts") if key in sizes), None)
    if ep > 1 and experts is None:
        raise DynaFlowError(f"{name} has no experts to share among {ep} GPUs", advice="use tp instead of ep")
    config = getattr(transformers, f"{model.architecture}Config")(
        **sizes, use_cache=False, attn_implementation=_implementation(attention)
    )
    if experts is not None:
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        made = getattr(transformers, f"{model.architecture}ForCausalLM")(config)
        if ep > 1:
            assert experts is not None
            _share_experts(name, made, config, experts, ep)
    made = made.to(dtype).eval().requires_grad_(False)
    if tp > 1:
        _reduce(made)
    return made


def _divide(name: str, sizes: dict[str, Any], tp: int, keys: tuple[str, ...]) -> None:
    for key in keys:
        if key in sizes and tp > 1:
            if key == "num_key_value_heads" and sizes[key] < tp:
                sizes[key] = 1  # key heads are repeated on several GPUs
            elif sizes[key] % tp:
                raise DynaFlowError(
                    f"{name} can't be divided among {tp} GPUs: {key} is {sizes[key]}", advice="take a divisor of it"
                )
            else:
                sizes[key] //= tp


def _implementation(attention: Attention) -> str:
    if attention == "sdpa":
        return "sdpa"
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_FLASH, _flash)
    AttentionMaskInterface.register(_FLASH, lambda *args, **kwargs: None)
    return _FLASH


def _flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    causal, grouped = query.shape[2] > 1, query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _reduce(model: Any) -> None:
    """Every GPU has a part of each sum: they are added up where a block ends."""
    for layer in model.model.layers:
        sparse = hasattr(layer.mlp, "experts")
        for module in (layer.self_attn.o_proj, layer.mlp if sparse else layer.mlp.down_proj):
            module.register_forward_hook(_sum_up)


def _sum_up(module: nn.Module, args: Any, out: Any) -> Any:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(out, "sum", GROUP))


def _share_experts(name: str, model: Any, config: Any, key: str, ep: int) -> None:
    """Each GPU keeps all of the model but the experts, and all experts' tokens travel."""
    count = getattr(config, key)
    if count % ep:
        raise DynaFlowError(f"{name} has {count} experts, not to be shared by {ep} GPUs", advice="take a divisor")
    own = copy(config)
    setattr(own, key, count // ep)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = ExpertParallel(type(layer.mlp.experts)(own), count // ep)


class ExpertParallel(nn.Module):
    """A GPU's own experts, with the exchanges around them. Every GPU is taken to send, and to get, as many tokens."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, width, chosen = hidden.shape[0], hidden.shape[1], index.shape[1]
        # The choices go first: the exchange cuts along dim 0, which must not be that of the tokens.
        sent = hidden.unsqueeze(0).expand(chosen, tokens, width).contiguous()
        got = _exchange(sent).transpose(0, 1).reshape(tokens * chosen, width)
        local = (index % self.count).reshape(tokens * chosen, 1)
        done = self.inner(got, local, torch.ones_like(local, dtype=weights.dtype))
        back = _exchange(done.view(tokens, chosen, width).transpose(0, 1).contiguous())
        return (back * weights.t().unsqueeze(-1)).sum(0).to(hidden.dtype)


def _exchange(x: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(x, [x.shape[0]], [x.shape[0]], GROUP))


def inputs(model: Any, situation: Situation, *, logits: Literal["last", "all"] = "last") -> dict[str, Any]:
    """What the model is called with. `logits`: of the last token of each prompt, or of all."""
    from transformers import StaticCache

    config = model.config
    positions = situation.prompt or 1
    given: dict[str, Any] = {
        "input_ids": torch.empty((situation.batch, positions), dtype=torch.long, device="meta"),
        "use_cache": False,
        "logits_to_keep": 1 if logits == "last" else 0,
    }
    if situation.prompt:
        return given
    cache: Any = StaticCache(config=config, max_cache_len=situation.context + 1)
    heads, widths = config.num_key_value_heads, (config.head_dim, config.head_dim)
    if hasattr(config, "kv_lora_rank"):  # latent attention keeps one compressed head
        heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    for layer in cache.layers:
        layer.lazy_initialization(
            *(torch.empty((situation.batch, heads, 1, w), dtype=model.dtype, device="meta") for w in widths)
        )
    given["position_ids"] = torch.empty((situation.batch, 1), dtype=torch.long, device="meta")
    return given | {"past_key_values": cache, "use_cache": True}


def capture(model: nn.Module, scheduler: OpSchedulerBase, given: Mapping[str, Any]) -> tuple[OpGraph, Plan]:
    """The model's operators as the scheduler cuts them, and the plan that it makes for these inputs."""
    from dynaflow.api import compile as compile_model

    with torch.no_grad():
        compiled = compile_model(model, scheduler, operators="eager")
        plan = compiled.plan(**given)
    graphs = list(compiled._engine._schedules.graphs.values())
    return next(g for g in graphs if g.fingerprint == plan.graph), plan


def in_sequence(plan: Plan) -> Plan:
    """The same batch, as the uncut graph runs it."""
    whole = MicroBatch(index=0, start=0, stop=plan.batch_size)
    return Plan(graph=plan.graph, micro_batches=(whole,), lanes=(), tasks=())
