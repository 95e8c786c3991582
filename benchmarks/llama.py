"""Llama-3-8B with random weights, made where it runs, and the situations in which it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import tensors
from benchmarks.settings import Settings

FULL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256}  # fmt: skip

ROOM = 128
"""Tokens that a cache can take beyond the context."""
SHRINK = 64
"""A tiny run divides lengths by this."""

BF16_LIMIT, FP32_LIMIT = 0.1, 1e-3
"""Of a row's relative difference. Two compilers round bf16 at different places, which is a few percent after 32
layers; a row that was mixed up or left out is off by about one."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    name: str
    batch: int
    length: int
    """Of the prompt, or of the context that a decode step continues."""
    decode: bool


def _situations(*all_of: Situation) -> dict[str, Situation]:
    return {s.name: s for s in all_of}


SITUATIONS = _situations(
    Situation(name="prefill1x2048", batch=1, length=2048, decode=False),
    Situation(name="prefill8x512", batch=8, length=512, decode=False),
    *(Situation(name=f"decode{batch}", batch=batch, length=1024, decode=True) for batch in (1, 8, 64, 256)),
)
TWO_BATCHES = tuple(name for name, s in SITUATIONS.items() if s.batch >= 4)
"""Where the batch is worth splitting."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its inputs, ready to be called any number of times."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    limit: float
    """Of the relative difference between two right results."""
    reset: Callable[[], None] = lambda: None
    """Makes the next call equal to the first."""
    results: Callable[[Any], list[Tensor]] = lambda output: [t.clone() for t in tensors(output)]
    """All that a call gave and wrote, copied."""

    @property
    def bytes(self) -> int:
        """Of the weights and of the inputs, caches included."""
        held = [*self.model.parameters(), *self.model.buffers(), *tensors(self.inputs)]
        for layer in getattr(self.inputs.get("past_key_values"), "layers", ()):
            held += [layer.keys, layer.values]
        return sum(t.numel() * t.element_size() for t in held)


def build(settings: Settings) -> Any:
    """Weights of std 0.02, drawn on the device itself: drawing 8 billion of them on a CPU takes minutes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = dict(TINY if settings.tiny else FULL)
    if settings.layers:
        shape["num_hidden_layers"] = settings.layers
    shape |= {"use_cache": False, "attn_implementation": "sdpa"}
    config = LlamaConfig(**shape)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    model = model.to(dtype).to_empty(device=settings.device).eval().requires_grad_(False)
    generator = torch.Generator(settings.device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.fill_(1)  # norms
        else:
            parameter.normal_(0, 0.02, generator=generator)
    # Its frequencies are buffers that no one keeps: nothing else would fill them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(settings.device)
    return model


def label(situation: str, settings: Settings) -> str:
    """The situation's name, and how the model differs from the full one."""
    layers = f", {settings.layers} layers" if settings.layers else ""
    return f"{situation}{layers}{', tiny' if settings.tiny else ''}"


def case(model: Any, situation: Situation, settings: Settings) -> Case:
    """The situation's inputs for this model, with a cache of its own when decoding."""
    generator = torch.Generator(settings.device).manual_seed(situation.batch)
    length = situation.length // SHRINK if settings.tiny else situation.length
    limit = BF16_LIMIT if settings.cuda else FP32_LIMIT
    name = label(situation.name, settings)
    shape = (situation.batch, 1 if situation.decode else length)
    ids = torch.randint(model.config.vocab_size, shape, device=settings.device, generator=generator)
    if not situation.decode:
        return Case(name=name, model=model, inputs={"input_ids": ids, "use_cache": False}, limit=limit)
    cache = _cache(model, situation.batch, length, generator)
    positions = torch.full(shape, length, device=settings.device)
    written = [t[:, :, length] for layer in cache.layers for t in (layer.keys, layer.values)]
    counters = [layer.cumulative_length for layer in cache.layers]

    def reset() -> None:
        for counter in counters:
            counter.fill_(length)

    def results(output: Any) -> list[Tensor]:
        found = [output.logits.clone(), *(t.clone() for t in (*written, *counters))]
        for t in written:  # the next one to be compared must write them itself
            t.zero_()
        return found

    inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    return Case(name=name, model=model, inputs=inputs, limit=limit, reset=reset, results=results)


def _cache(model: Any, batch: int, length: int, generator: torch.Generator) -> Any:
    """A StaticCache as if `length` tokens were in it, random ones."""
    from transformers import StaticCache

    config = model.config
    cache: Any = StaticCache(config=config, max_cache_len=length + ROOM)
    head = config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        like = torch.empty((batch, config.num_key_value_heads, 1, head), dtype=model.dtype, device=model.device)
        layer.lazy_initialization(like, like)
        layer.keys[:, :, :length].normal_(generator=generator)
        layer.values[:, :, :length].normal_(generator=generator)
        layer.cumulative_length.fill_(length)
    return cache
