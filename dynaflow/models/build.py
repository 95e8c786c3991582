"""Models by name, or from a folder with a config.json: random weights on a device, or shapes alone on "meta"."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dynaflow.errors import DynaFlowError, nearest
from dynaflow.models import parallel
from dynaflow.models.table import MODELS, Model

Attention = Literal["flash", "sdpa"]
"""As in serving systems, where a key head is read once; or as in transformers, where it is repeated."""

_FLASH = "dynaflow_grouped"
"""A name without "flash": transformers would look for a kernel of that name."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a call: `batch` prompts of `prompt` tokens; or, with `prompt` 0, decoding after `context` tokens."""

    batch: int = 64
    prompt: int = 0
    context: int = 1024


def build(
    name: str,
    *,
    tp: int = 1,
    ep: int = 1,
    layers: int | None = None,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    attention: Attention = "flash",
) -> nn.Module:
    """Returns the model, or its shard on one of `tp` GPUs, or of `ep` that share its experts. The seed is fixed."""
    known = _known(name)
    with _defaults(device, dtype):
        if known is not None and known.own:
            made = _own(known, layers, max(tp, ep))
        else:
            made = _transformer(name, known, layers, tp, ep, attention)
    return made.eval().requires_grad_(False)


def _known(name: str) -> Model | None:
    """Returns the entry of a named model; None for a folder with a config.json."""
    if name in MODELS:
        return MODELS[name]
    if (Path(name) / "config.json").is_file():
        return None
    if Path(name).is_dir():
        raise DynaFlowError(f"the folder {name} has no config.json", advice="name a folder written by transformers")
    if name.endswith(".py"):
        raise DynaFlowError(f"{name} is a file, not a model", advice=f"name a function in it: {name}:function")
    close = ", ".join(nearest(name, list(MODELS), 8))
    raise DynaFlowError(
        f"no model is named {name!r}",
        advice=f"there are {close}; or name a folder with a config.json, module:function or file.py:function",
    )


@contextlib.contextmanager
def _defaults(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Sets the default device and dtype, and the seed."""
    usual, cuda = torch.get_default_dtype(), torch.device(device).type == "cuda"
    with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []), torch.device(device):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def _own(model: Model, layers: int | None, ranks: int) -> nn.Module:
    module, _, kind = model.kind.partition(":")
    if ranks > 1:
        raise DynaFlowError(f"sharding {model.name} over GPUs is not supported", advice="leave tp and ep at 1")
    if layers and not model.layers:
        raise DynaFlowError(f"{model.name} has no equal layers to choose from", advice="leave out --layers")
    sizes = dict(model.sizes) | ({model.layers: layers} if layers else {})
    return getattr(importlib.import_module(f"dynaflow.models.{module}"), kind)(**sizes)


def _transformer(
    name: str, known: Model | None, layers: int | None, tp: int, ep: int, attention: Attention
) -> nn.Module:
    transformers = _transformers(name)
    if known is not None:
        kind = getattr(transformers, known.kind)
        config, count = kind.config_class(**known.sizes), known.layers
    else:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        kind, count = _class_of(transformers, name, config), "num_hidden_layers"
    config._attn_implementation = _implementation(attention)
    if layers:
        setattr(config, count, layers)
        if getattr(config, "layer_types", None):  # one for each layer
            config.layer_types = config.layer_types[:layers]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if tp > 1:
        parallel.shard_config(name, config, tp)
    if parallel.has_experts(config):
        config._experts_implementation = "grouped_mm"
    made = kind(config)
    if ep > 1:
        parallel.shard_experts(name, made, config, ep)
    if tp > 1:
        parallel.add_all_reduces(made)
    return made


def _class_of(transformers: Any, name: str, config: Any) -> Any:
    for architecture in config.architectures or ():
        if kind := getattr(transformers, architecture, None):
            return kind
    raise DynaFlowError(
        f"{name}/config.json names no model that this transformers has: {config.architectures}",
        advice='"architectures" has to list the name of a class',
    )


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as e:
        raise DynaFlowError(
            f"{name} is a model of transformers, which is not installed",
            advice="pip install 'dynaflow[demo]'; or use one that doesn't need it: inception-tiny, flux-tiny, wan-tiny",
        ) from e
    return transformers


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
    causal = query.shape[2] > 1 and getattr(module, "is_causal", True)
    grouped = query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def inputs(model: Any, situation: Workload, *, logits: Literal["last", "all"] = "last") -> dict[str, Any]:
    """Returns keyword arguments for the model, on its device. `logits`: of the last token of each prompt, or of all."""
    first = next(model.parameters())
    with _defaults(first.device, first.dtype):
        if hasattr(model, "example"):
            return model.example(situation.batch)
        if model.main_input_name == "pixel_values":
            config = model.config
            return {"pixel_values": torch.randn(situation.batch, config.num_channels, *[config.image_size] * 2)}
        if model.main_input_name != "input_ids":
            raise DynaFlowError(
                f"the inputs of {type(model).__name__} are not known: {model.main_input_name}",
                advice="write a function that returns the model and its inputs, and name it as module:function",
            )
        return _text(model, situation, logits)


def _text(model: Any, situation: Workload, logits: Literal["last", "all"]) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    decodes = "logits_to_keep" in takes
    if not situation.prompt and not decodes:
        raise DynaFlowError(f"{type(model).__name__} does not decode", advice="give its texts a length: --prompt 64")
    shape = (situation.batch, situation.prompt or 1)
    most = getattr(model.config, "max_position_embeddings", None)
    if most and (situation.prompt or situation.context + 1) > most:
        raise DynaFlowError(
            f"{type(model).__name__} takes at most {most} tokens", advice="use a shorter --prompt or --context"
        )
    given: dict[str, Any] = {"input_ids": torch.randint(model.config.vocab_size, shape)}
    if decodes:
        given |= {"use_cache": not situation.prompt, "logits_to_keep": 1 if logits == "last" else 0}
    if not situation.prompt:
        given["position_ids"] = torch.full(shape, situation.context)
        given["past_key_values"] = _cache(model, situation)
    return given


def _cache(model: Any, situation: Workload) -> Any:
    """Returns a cache with `context` random tokens and room for one more."""
    from transformers import StaticCache

    config = model.config
    cache: Any = StaticCache(config=config, max_cache_len=situation.context + 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, widths = getattr(config, "num_key_value_heads", config.num_attention_heads), (width, width)
    if hasattr(config, "kv_lora_rank"):  # latent attention keeps one compressed head
        heads, widths = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    for layer in cache.layers:
        layer.lazy_initialization(*(torch.empty((situation.batch, heads, 1, w), dtype=model.dtype) for w in widths))
        for tensor in (layer.keys, layer.values):
            tensor[:, :, : situation.context].normal_()
        layer.cumulative_length.fill_(situation.context)
    return cache
