"""Small, seeded models, their inputs and the places where a user would cut them.

transformers and diffusers are imported inside the builders: importing this module stays cheap, and an entry
whose package is missing is reported by `available` and not by an ImportError.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynaflow.models.inception import BranchCNN

VOCAB = 101
HIDDEN = 32
PROMPT = 12
DECODE_STEPS = 4

# Dim 0 of these inputs is not the batch; they are shared by all rows.
SHARED_INPUTS = frozenset({"img_ids", "txt_ids"})


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    """Seeded weights, eval mode, float32, on the CPU."""
    inputs: Callable[[int], dict[str, Any]]
    """Batch size -> kwargs of the model; seeded by the batch size, on the CPU."""
    cuts: tuple[tuple[str, str], ...]
    """(glob on the module path, tag): where a user would cut."""
    requires: str | None = None
    """Package needed besides torch."""

    @property
    def available(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Decoding with a StaticCache, one fixed token per row and step."""

    name: str
    model: nn.Module
    batch: int
    steps: int
    cache: Callable[[], Any]
    """Prefills a new StaticCache eagerly; every call gives an equal but independent one."""
    step: Callable[[int, Any], dict[str, Any]]
    """(step, cache) -> kwargs of the model. The shapes are the same in every step."""
    whole: Callable[[], dict[str, Any]]
    """Kwargs of the prompt and all steps in one call without a cache; the last `steps` positions agree."""


# --- weights ---------------------------------------------------------------------------------------------


def _randomise(model: nn.Module, seed: int) -> nn.Module:
    """Gives every weight a real variance.

    The usual initialisation (std 0.02, biases 0, norms 1) makes all activations nearly equal, so that a wrong
    split, a lost bias or a swapped norm would stay within the tolerance of a comparison.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor, std: float) -> Tensor:
        return std * torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() < 2:
                    parameter.add_(noise(parameter, 0.1))
                    continue
                is_conv = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
                fan_in = parameter[0].numel() if is_conv else parameter.shape[-1]
                parameter.copy_(noise(parameter, fan_in**-0.5))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "running_var":
                    buffer.mul_(1 + noise(buffer, 0.3).abs())
                elif name in ("running_mean", "e_score_correction_bias"):
                    buffer.add_(noise(buffer, 0.1))
    return model.eval()


def _seeded(make: Callable[[], Any], seed: int) -> nn.Module:
    # Biases start from their random initial values, so the constructor is seeded as well.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = make()
    return _randomise(model, seed)


def transformer(model: str, config: str, seed: int, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return _seeded(lambda: getattr(transformers, model)(getattr(transformers, config)(**fields)), seed)

    return build


# --- inputs ----------------------------------------------------------------------------------------------


def _generator(batch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + batch)


def ids_of(batch: int, length: int, generator: torch.Generator) -> Tensor:
    # The first id is the row's own, so that no two rows are equal by chance; 0..3 are left to special tokens.
    ids = torch.randint(4, VOCAB, (batch, length), generator=generator)
    ids[:, 0] = 4 + torch.arange(batch) % (VOCAB - 4)
    return ids


def left_padding(batch: int, length: int) -> Tensor:
    """A mask whose rows have different lengths and end together, as a batch of prompts does."""
    pad = (torch.arange(batch) * 3 + 1) % 6
    return (torch.arange(length)[None, :] >= pad[:, None]).long()


def _right_padding(batch: int, length: int) -> Tensor:
    return left_padding(batch, length).flip(1)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _prompt(batch: int) -> dict[str, Any]:
    return {"input_ids": ids_of(batch, PROMPT, _generator(batch)), "use_cache": False}


def _padded_prompt(batch: int) -> dict[str, Any]:
    mask = left_padding(batch, PROMPT)
    ids = ids_of(batch, PROMPT, _generator(batch)).masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask), "use_cache": False}


def _padded_prompt_without_positions(batch: int) -> dict[str, Any]:
    inputs = _padded_prompt(batch)
    del inputs["position_ids"]
    return inputs


def _text(batch: int) -> dict[str, Any]:
    mask = _right_padding(batch, PROMPT)
    ids = ids_of(batch, PROMPT, _generator(batch)).masked_fill(mask == 0, 0)
    second = (torch.arange(PROMPT) >= PROMPT // 2).long().expand(batch, -1).contiguous()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": second}


def _image(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=_generator(batch))}


def _text_to_text(batch: int) -> dict[str, Any]:
    generator = _generator(batch)
    mask = _right_padding(batch, PROMPT)
    return {
        "input_ids": ids_of(batch, PROMPT, generator).masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "decoder_input_ids": ids_of(batch, 7, generator),
        "use_cache": False,
    }


def _speech(batch: int) -> dict[str, Any]:
    generator = _generator(batch)
    return {
        "input_features": torch.randn(batch, 16, 40, generator=generator),
        "decoder_input_ids": ids_of(batch, 7, generator),
        "use_cache": False,
    }


def _flux(batch: int) -> dict[str, Any]:
    generator = _generator(batch)
    rows, columns, text = 4, 5, 9
    img_ids = torch.zeros(rows, columns, 3)
    img_ids[..., 1] += torch.arange(rows)[:, None]
    img_ids[..., 2] += torch.arange(columns)[None, :]
    return {
        "hidden_states": torch.randn(batch, rows * columns, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 24, generator=generator),
        "pooled_projections": torch.randn(batch, 16, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "guidance": 1 + 4 * torch.rand(batch, generator=generator),
        "img_ids": img_ids.view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def _wan(batch: int) -> dict[str, Any]:
    generator = _generator(batch)
    return {
        "hidden_states": torch.randn(batch, 4, 2, 8, 8, generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "encoder_hidden_states": torch.randn(batch, 9, 24, generator=generator),
    }


def _picture(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 20, 20, generator=_generator(batch))}


# --- models ----------------------------------------------------------------------------------------------


def _build_cnn() -> nn.Module:
    return _seeded(BranchCNN, seed=11)


def _build_flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    make = partial(
        FluxTransformer2DModel,
        patch_size=1,
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return _seeded(make, seed=12)


def _build_wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    make = partial(
        WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return _seeded(make, seed=13)


_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LAYER_CUTS = (("*.self_attn", "attention"), ("*.mlp", "mlp"))

_ENTRIES = (
    Entry(
        name="llama",
        build=transformer("LlamaForCausalLM", "LlamaConfig", 1, **_DECODER),
        inputs=_padded_prompt,
        cuts=_LAYER_CUTS,
        requires="transformers",
    ),
    Entry(
        name="qwen3",
        build=transformer("Qwen3ForCausalLM", "Qwen3Config", 2, head_dim=16, **_DECODER),
        inputs=_prompt,
        cuts=_LAYER_CUTS,
        requires="transformers",
    ),
    Entry(
        name="gemma3",
        # One layer of each kind, and a window shorter than the prompt, so that the two masks differ.
        build=transformer(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            3,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            **_DECODER,
        ),
        inputs=_padded_prompt_without_positions,
        cuts=_LAYER_CUTS,
        requires="transformers",
    ),
    Entry(
        name="gpt2",
        build=transformer(
            "GPT2LMHeadModel",
            "GPT2Config",
            4,
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        inputs=_prompt,
        cuts=(("*.attn", "attention"), ("*.mlp", "mlp")),
        requires="transformers",
    ),
    Entry(
        name="bert",
        build=transformer(
            "BertModel",
            "BertConfig",
            5,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        inputs=_text,
        # BERT has no module for its feed-forward part: `intermediate` and `output` together are it.
        cuts=(
            ("encoder.layer.*.attention", "attention"),
            ("encoder.layer.*.intermediate", "mlp"),
            ("encoder.layer.[0-9].output", "mlp"),
        ),
        requires="transformers",
    ),
    Entry(
        name="vit",
        build=transformer(
            "ViTForImageClassification",
            "ViTConfig",
            6,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=10,
        ),
        inputs=_image,
        cuts=(("*.attention", "attention"), ("*.mlp", "mlp")),
        requires="transformers",
    ),
    Entry(
        name="t5",
        build=transformer(
            "T5ForConditionalGeneration",
            "T5Config",
            7,
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=8,
            d_ff=2 * HIDDEN,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        inputs=_text_to_text,
        cuts=(
            ("*.SelfAttention", "attention"),
            ("*.EncDecAttention", "cross_attention"),
            ("*.DenseReluDense", "mlp"),
        ),
        requires="transformers",
    ),
    Entry(
        name="whisper",
        build=transformer(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            8,
            vocab_size=VOCAB,
            num_mel_bins=16,
            d_model=HIDDEN,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * HIDDEN,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=2 * HIDDEN,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        ),
        inputs=_speech,
        # The feed-forward part has no module of its own: fc1 and fc2 sit in the layer.
        cuts=(
            ("*.self_attn", "attention"),
            ("*.encoder_attn", "cross_attention"),
            ("*.fc1", "mlp"),
            ("*.fc2", "mlp"),
        ),
        requires="transformers",
    ),
    Entry(
        name="mixtral",
        build=transformer(
            "MixtralForCausalLM",
            "MixtralConfig",
            9,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            **_DECODER,
        ),
        inputs=_prompt,
        cuts=(("*.self_attn", "attention"), ("*.mlp.gate", "router"), ("*.mlp.experts", "experts")),
        requires="transformers",
    ),
    Entry(
        name="deepseek_v3",
        # A dense layer and a layer of experts; the low-rank dimensions all differ from each other.
        build=transformer(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            10,
            **{**_DECODER, "num_key_value_heads": 4},
            moe_intermediate_size=16,
            n_shared_experts=1,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            kv_lora_rank=12,
            q_lora_rank=20,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            num_mtp_layers=0,
        ),
        inputs=_prompt,
        cuts=(
            ("*.self_attn", "attention"),
            ("*.layers.0.mlp", "mlp"),
            ("*.mlp.gate", "router"),
            ("*.mlp.experts", "experts"),
            ("*.mlp.shared_experts", "shared_experts"),
        ),
        requires="transformers",
    ),
    Entry(
        name="branch_cnn",
        build=_build_cnn,
        inputs=_picture,
        cuts=(
            ("block*.branch1x1", "branch1x1"),
            ("block*.branch3x3", "branch3x3"),
            ("block*.branch5x5", "branch5x5"),
            ("block*.branch_pool", "branch_pool"),
        ),
    ),
    Entry(
        name="flux",
        build=_build_flux,
        inputs=_flux,
        cuts=(
            ("*.attn", "attention"),
            ("transformer_blocks.*.ff", "mlp"),
            ("transformer_blocks.*.ff_context", "context_mlp"),
            # In a single block the feed-forward part runs beside the attention.
            ("single_transformer_blocks.*.proj_mlp", "mlp"),
            ("single_transformer_blocks.*.proj_out", "projection"),
        ),
        requires="diffusers",
    ),
    Entry(
        name="wan",
        build=_build_wan,
        inputs=_wan,
        cuts=(("*.attn1", "attention"), ("*.attn2", "cross_attention"), ("*.ffn", "mlp")),
        requires="diffusers",
    ),
)

ZOO: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}

DECODE = ("llama", "mixtral")


# --- decoding --------------------------------------------------------------------------------------------


def decode_setup(name: str, batch: int) -> Decode:
    """The entry's model with a StaticCache: Llama with left padding, Mixtral without.

    The inputs follow the device of the model at the time of the call and the cache its dtype, so that the
    model can be moved with `to` before the cache is made.
    """
    if name not in DECODE:
        raise ValueError(f"no decode setup for {name!r}; there is one for {', '.join(DECODE)}")
    model: Any = ZOO[name].build()
    length = PROMPT + DECODE_STEPS
    generator = _generator(batch)
    ids = ids_of(batch, length, generator)
    mask: Tensor | None = None
    positions = torch.arange(length).expand(batch, -1)
    if name == "llama":
        mask = left_padding(batch, length)
        positions = _positions(mask)
        ids = ids.masked_fill(mask == 0, 0)

    def inputs(start: int, stop: int, cache: Any = None) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "input_ids": ids[:, start:stop].contiguous(),
            "position_ids": positions[:, start:stop].contiguous(),
        }
        if mask is not None:
            # As long as the cache in every step, for a growing mask means a new graph per step. The slots
            # that are not written yet are hidden by causality.
            kwargs["attention_mask"] = mask.clone()
        kwargs = to(model.device, None, kwargs)
        return {**kwargs, "past_key_values": cache, "use_cache": cache is not None}

    def cache() -> Any:
        from transformers import StaticCache

        result = StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            model(**inputs(0, PROMPT, result))
        return result

    def step(index: int, cache: Any) -> dict[str, Any]:
        if not 0 <= index < DECODE_STEPS:
            raise IndexError(f"step {index} of {DECODE_STEPS}")
        return inputs(PROMPT + index, PROMPT + index + 1, cache)

    def whole() -> dict[str, Any]:
        return inputs(0, length)

    return Decode(
        name=name, model=model, batch=batch, steps=DECODE_STEPS, cache=cache, step=step, whole=whole
    )


# --- helpers ---------------------------------------------------------------------------------------------


def _is_cache(obj: Any) -> bool:
    # By name, for a check by type would import transformers for models that do without it.
    return any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(obj).__mro__
    )


def tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output or of its kwargs, in order; a cache gives its keys and values."""
    if isinstance(output, Tensor):
        return [output]
    if _is_cache(output):
        return [t for layer in output.layers for t in (layer.keys, layer.values)]
    if isinstance(output, Mapping):  # includes ModelOutput, a dict that leaves out what is None
        return [t for value in output.values() for t in tensors(value)]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in tensors(value)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [t for field in dataclasses.fields(output) for t in tensors(getattr(output, field.name))]
    return []


def to(device: torch.device | str, dtype: torch.dtype | None, obj: Any) -> Any:
    """Moves a model, kwargs or a prefilled cache. `dtype` is for floating tensors only; None keeps theirs.

    Models and caches are changed in place, as nn.Module.to does; everything else is copied.
    """
    if isinstance(obj, nn.Module):
        return obj.to(device=device, dtype=dtype)
    if isinstance(obj, Tensor):
        return obj.to(device=device, dtype=dtype if obj.is_floating_point() else None)
    if _is_cache(obj):
        for layer in obj.layers:
            for name in ("keys", "values", "cumulative_length"):
                moved = to(device, dtype, getattr(layer, name))
                setattr(layer, name, moved)
                # The tag is an attribute of the old tensor; the cache relies on it when it is compiled.
                torch._dynamo.mark_static_address(moved)
            layer.device, layer.dtype = layer.keys.device, layer.keys.dtype
        return obj
    if isinstance(obj, Mapping):
        return {key: to(device, dtype, value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(to(device, dtype, value) for value in obj)
    return obj


def mark_batch(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Marks dim 0 of the inputs that carry the batch, caches included, as dynamic; gives these tensors."""
    marked = tensors({name: value for name, value in kwargs.items() if name not in SHARED_INPUTS})
    for tensor in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return marked
