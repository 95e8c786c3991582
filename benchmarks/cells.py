"""The cells of the strategies' suite: models of the shapes that people run, in the phases in which they run them.

Layers are few, since equal layers behave alike and compiling them takes long; the shapes are the full ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from benchmarks import copies
from benchmarks.cut_cost import MODELS as VISION_AND_TEXT
from benchmarks.llama import BF16_LIMIT, FP32_LIMIT, Case, Situation, build, case
from benchmarks.settings import Settings
from dynaflow.models.diffusion import TwoStreams

LAYERS = 4
"""Of the Llama; of mixtures of experts."""
MORE_LAYERS = 16
"""Of the one whose weights are on the host: the first fetch and the last layer run beside nothing, of 32 it is less."""
ALIKE = 0.1
"""How much of an expert's random weights is its own."""
Make = Callable[[Settings], Case]


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    make: Make
    schedulers: tuple[str | tuple[str, df.OpSchedulerBase], ...] = ()
    """What `auto` may choose from besides the strategies as they are, where the model needs options."""
    kinds: frozenset[str] = field(default_factory=frozenset)
    """For which other rows it is used: "branches", "moe", ..."""


def _limit(settings: Settings) -> float:
    return BF16_LIMIT if settings.cuda else FP32_LIMIT


def _random(model: nn.Module, settings: Settings) -> nn.Module:
    """Weights drawn where they are used: drawing billions on a CPU takes minutes."""
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    model = model.to(dtype).to_empty(device=settings.device).eval().requires_grad_(False)
    generator = torch.Generator(settings.device).manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() < 2:
            tensor.fill_(1)
        elif tensor.is_floating_point():
            tensor.normal_(0, 0.02, generator=generator)
    return model


# Llama


def _situation(batch: int, length: int, decode: bool) -> Situation:
    name = f"decode{batch}" if decode else f"prefill{batch}x{length}"
    return Situation(name=name, batch=batch, length=length, decode=decode)


def few_layers(settings: Settings) -> Any:
    return build(replace(settings, layers=settings.layers or LAYERS))


def _llama(situation: Situation, settings: Settings) -> Case:
    return case(few_layers(settings), situation, replace(settings, layers=settings.layers or LAYERS))


# Mixtures of experts, decoding


def _experts(kind: str, batch: int, settings: Settings) -> Case:
    import transformers

    shape = dict(MOE_TINY[kind] if settings.tiny else MOE[kind])
    architecture = shape.pop("architecture")
    shape["num_hidden_layers"] = settings.layers or LAYERS
    config = getattr(transformers, f"{architecture}Config")(**shape, attn_implementation="sdpa", use_cache=True)
    with torch.device("meta"):
        model: Any = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model = _random(model, settings)
    for experts in (p for p in model.parameters() if p.dim() == 3):
        # Alike: in bfloat16 two right results may send a token to different experts where its scores are close.
        experts.mul_(ALIKE).add_(experts[:1] / ALIKE)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(settings.device)
    model.set_experts_implementation("batched_mm" if batch <= 4 else "grouped_mm")
    name = f"{kind} decode, batch {batch}" + (", tiny" if settings.tiny else "")
    return _decoding(name, model, batch, 16 if settings.tiny else 1024, settings)


def _decoding(name: str, model: Any, batch: int, length: int, settings: Settings) -> Case:
    from transformers import StaticCache

    generator = torch.Generator(settings.device).manual_seed(batch)
    ids = torch.randint(model.config.vocab_size, (batch, 1), device=settings.device, generator=generator)
    cache: Any = StaticCache(config=model.config, max_cache_len=length + 8)
    prompt = torch.randint(model.config.vocab_size, (batch, 4), device=settings.device, generator=generator)
    model(input_ids=prompt, past_key_values=cache, use_cache=True)  # makes the cache's tensors, whatever their shape
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor[..., :length, :].normal_(generator=generator)
        layer.cumulative_length.fill_(length)
    positions = torch.full((batch, 1), length, device=settings.device)

    def reset() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    return Case(
        name=name, model=model, inputs=inputs, limit=_limit(settings), reset=reset,
        results=lambda output: [output.logits.clone()],
    )  # fmt: skip


MOE = {
    "Qwen3-MoE": {
        "architecture": "Qwen3Moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 8192,
    },
    "DeepSeek-V2-Lite": {
        "architecture": "DeepseekV2", "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "moe_intermediate_size": 1408, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0,
        "topk_method": "greedy", "max_position_embeddings": 8192,
    },
}  # fmt: skip
MOE_TINY = {
    "Qwen3-MoE": {**MOE["Qwen3-MoE"], "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16},
    "DeepSeek-V2-Lite": {**MOE["DeepSeek-V2-Lite"], "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
                         "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16,
                         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip


# Convolutions, BERT, ViT


def _known(name: str, batch: int | None, settings: Settings) -> Case:
    model, inputs = VISION_AND_TEXT[name][0](settings.tiny)
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    model = model.eval().requires_grad_(False).to(settings.device, dtype)
    if batch is not None:
        inputs = {k: v[:1].repeat(batch, *[1] * (v.dim() - 1)) + torch.arange(batch).view(-1, *[1] * (v.dim() - 1)) % 7
                  for k, v in inputs.items()}  # fmt: skip
    moved = {k: v.to(settings.device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
    title = f"{name.split(',')[0]}, batch {batch}" if batch is not None else name
    return Case(name=title + (", tiny" if settings.tiny else ""), model=model, inputs=moved, limit=_limit(settings))


# Two streams, as in a diffusion transformer


def _two_streams(images: int, settings: Settings) -> Case:
    width, heads, blocks, words, patches = (64, 4, 1, 4, 16) if settings.tiny else (3072, 24, 2, 512, 4096)
    with torch.device("meta"):
        model = TwoStreams(width, heads, blocks)
    model = _random(model, settings)
    generator = torch.Generator(settings.device).manual_seed(images)
    dtype = next(model.parameters()).dtype
    make = partial(torch.randn, device=settings.device, dtype=dtype, generator=generator)
    inputs = {"text": make(images, words, width), "image": make(images, patches, width)}
    name = f"two streams, {images} image{'s' if images > 1 else ''}" + (", tiny" if settings.tiny else "")
    return Case(name=name, model=model, inputs=inputs, limit=_limit(settings))


# Blocks that end on a slow link: to the host and back, as many bytes as an all-reduce


def _linked(tokens: int, inside: int, settings: Settings) -> Case:
    blocks, hidden = (2, 16) if settings.tiny else (8, 4096)
    tokens, inside = (8, 32) if settings.tiny else (tokens, inside)
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    x = torch.randn(tokens, hidden, device=settings.device, dtype=dtype)
    copies.HOST.prepare(x, 4 * blocks)
    model = copies.make_model(blocks, hidden, inside, x)
    name = f"{blocks} blocks of {hidden}/{inside} on a link, {tokens} tokens" + (", tiny" if settings.tiny else "")
    return Case(name=name, model=model, inputs={"input": x}, limit=_limit(settings))


LINK = "dynaflow_benchmarks.round_trip"


def _link_schedulers() -> tuple[tuple[str, df.OpSchedulerBase], ...]:
    from dynaflow.strategies import CommOverlap, NanoFlow

    return (
        *((f"comm_overlap(parts={n})", CommOverlap(parts=n, collectives=LINK, by_rows=True)) for n in (2, 3, 4)),
        ("nanoflow(parts=2)", NanoFlow(parts=2, collectives=LINK, by_rows=True)),
    )


# A batch in which every request decodes a token, and some more tokens are prefilled along with it


class Layer(nn.Module):
    def __init__(self, hidden: int, inside: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.head = heads, kv, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv) * self.head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * inside, bias=False), nn.Linear(inside, hidden, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = x.size(0)
        q = self.qkv(F.rms_norm(x, x.shape[-1:]))[..., : self.heads * self.head]
        decoded = q[:, :1].view(rows, 1, self.heads, self.head).transpose(1, 2)
        seen = F.scaled_dot_product_attention(decoded, keys, values, enable_gqa=True)
        mixed = torch.cat([seen.transpose(1, 2).reshape(rows, 1, -1), q[:, 1:]], dim=1)
        x = x + self.out(mixed)
        gate, up = self.up(F.rms_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A decode step over full caches; the tokens that are prefilled cost products, and no attention here."""

    def __init__(self, layers: int, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(layers))

    def forward(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            x = layer(x, k, v)
        return x


def _mixed(requests: int, context: int, prefilled: int, settings: Settings) -> Case:
    hidden, inside, heads, kv, layers = (32, 48, 4, 2, 2) if settings.tiny else (4096, 14336, 32, 8, LAYERS)
    requests, context = (4, 8) if settings.tiny else (requests, context)
    with torch.device("meta"):
        model = Decoder(layers, hidden, inside, heads, kv)
    model = _random(model, settings)
    make = partial(torch.randn, device=settings.device, dtype=next(model.parameters()).dtype)
    caches = [[make(requests, kv, context, hidden // heads) for _ in range(layers)] for _ in range(2)]
    for cache in (*caches[0], *caches[1]):
        torch._dynamo.mark_static_address(cache)  # else all graphs, ours and theirs, would copy them in
    inputs = {"x": make(requests, 1 + prefilled, hidden), "keys": caches[0], "values": caches[1]}
    name = f"{requests} requests at {context}, {prefilled} more tokens each" + (", tiny" if settings.tiny else "")
    return Case(name=name, model=model, inputs=inputs, limit=_limit(settings))


# Weights on the host


def _offloaded(batch: int, length: int, settings: Settings) -> Case:
    layers = settings.layers or (LAYERS if settings.tiny else MORE_LAYERS)
    ready = _llama(_situation(batch, length, False), replace(settings, layers=layers))
    model = ready.model
    df.offload(model, settings.device, match="*.layers.*", at_least=1 << (4 if settings.tiny else 20))
    return Case(name=f"{ready.name}, weights on the host", model=model, inputs=ready.inputs, limit=ready.limit)


CELLS: tuple[Cell, ...] = (
    *(Cell(name=f"llama prefill {b}x{n}", make=partial(_llama, _situation(b, n, False)))
      for b, n in ((1, 128), (1, 512), (1, 2048), (4, 512), (8, 512))),
    *(Cell(name=f"llama decode {b}", make=partial(_llama, _situation(b, 1024, True))) for b in (1, 4, 8, 32, 64, 256)),
    *(Cell(name=f"{kind} decode {b}", make=partial(_experts, kind, b), kinds=frozenset({"moe"}))
      for kind in MOE for b in (1, 4, 16, 64)),
    *(Cell(name=f"{kind} {b}", make=partial(_known, f"{kind}, batch 8", b), kinds=frozenset({"branches"}))
      for kind in ("GoogLeNet", "Inception v3") for b in (1, 8, 32)),
    *(Cell(name=f"two streams {n}", make=partial(_two_streams, n), kinds=frozenset({"branches"})) for n in (1, 2)),
    Cell(name="BERT 16x256", make=partial(_known, "BERT base, 16x256", None)),
    Cell(name="ViT 16", make=partial(_known, "ViT base, batch 16", None)),
    *(Cell(name=f"link {t}/{i}", make=partial(_linked, t, i), schedulers=_link_schedulers(), kinds=frozenset({"link"}))
      for t, i in ((2048, 14336), (8192, 14336), (8192, 7168), (8192, 4096))),
    *(Cell(name=f"mixed {r}/{c}/{p}", make=partial(_mixed, r, c, p), kinds=frozenset({"mixed"}))
      for r, c, p in ((512, 1024, 1), (512, 2048, 3), (1024, 1024, 1), (1024, 2048, 3))),
    *(Cell(name=f"offloaded {b}x{n}", make=partial(_offloaded, b, n), kinds=frozenset({"prefetch"}))
      for b, n in ((1, 2048), (8, 512), (8, 2048))),
)  # fmt: skip
BY_NAME = {cell.name: cell for cell in CELLS}
assert len(BY_NAME) == len(CELLS)
