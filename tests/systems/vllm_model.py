"""Small models that vLLM loads and serves offline, on CPU: a Llama, a Qwen3 with experts; and others, by their
configurations alone, with weights that are drawn when they are loaded."""

from __future__ import annotations

import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where it can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What is set already stays."""
VOCABULARY = 1024
LONGEST = 512
"""Tokens of a prompt and its answer."""
STEP = 256
"""Tokens of a step."""
BLOCK = 32
"""Tokens of a block of keys and values: what vLLM finds again when prompts begin alike."""

_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 3, 128, 256, 4, 2, 32
_EXPERTS = 8
_COMMON = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def prepare() -> None:
    """Before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)  # small operators on busy cores: two threads would mostly wait for each other


def small_llama(folder: Path) -> str:
    """Its weights vary enough that whoever mixes up requests or positions gets other tokens."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}
    return _save(folder, config, _attention(), {f"mlp.{name}": shape for name, shape in _mlp().items()})


def small_moe(folder: Path) -> str:
    """Each token goes to two experts of eight."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_COMMON,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _INNER,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    attention = _attention() | {"self_attn.q_norm": (_HEAD,), "self_attn.k_norm": (_HEAD,)}
    experts = {f"mlp.experts.{i}.{name}": shape for i in range(_EXPERTS) for name, shape in _mlp().items()}
    return _save(folder, config, attention, {"mlp.gate": (_EXPERTS, _HIDDEN), **experts})


SEEDED = "seeded"
"""A load format."""
CONFIGS: dict[str, dict[str, Any]] = {
    "delta net": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_COMMON,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,  # the CPU's kernel wants so many
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
    },
    # Without attention: on CPU, vLLM rotates queries of three dims by the wrong positions.
    "short convolutions": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **_COMMON,
        "layer_types": ["conv"] * _LAYERS,
        "norm_eps": 1e-5,
        "block_dim": _HIDDEN,
        "block_ff_dim": _INNER,
        "block_multiple_of": 32,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "conv_dim": _HIDDEN,
        "conv_L_cache": 65,  # so long that the last piece of a prompt sees what is before it
        "conv_bias": False,
    },
    "state space": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **_COMMON,
        "state_size": 16,
        "conv_kernel": 4,
        "num_heads": 8,
        "expand": 2,
        "n_groups": 1,
        "chunk_size": 32,
        "time_step_limit": [0.0, 100.0],
        "use_bias": False,
        "use_conv_bias": True,
        "rms_norm": True,
        "layer_norm_epsilon": 1e-5,
    },
    # By its registry, vLLM runs this one with its Transformers backend.
    "GPT-NeoX": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **_COMMON,
        "num_key_value_heads": _HEADS,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON},
}


def configured_only(folder: Path, name: str) -> str:
    """Its weights are those of the load format `SEEDED`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(folder)


@functools.cache
def register_seeded() -> None:
    """Weights by their names, the same in every process; as varied as those of the models above."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(SEEDED)
    class Seeded(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, weight in model.state_dict().items():
                if weight.is_floating_point():
                    weight.copy_(_drawn(name, weight.shape))


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) > 1:
        return drawn if "embed" in name else drawn * 1.5 / shape[1:].numel() ** 0.5
    if name.endswith(".A"):
        return -drawn.exp()  # a decay
    return 1 + 0.1 * drawn if "norm" in name else 0.5 * drawn


Shapes = dict[str, tuple[int, ...]]


def _attention() -> Shapes:
    return {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
        "post_attention_layernorm": (_HIDDEN,),
    }


def _mlp() -> Shapes:
    return {"gate_proj": (_INNER, _HIDDEN), "up_proj": (_INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER)}


def _save(folder: Path, config: dict[str, Any], *layer: Shapes) -> str:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, _HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN),
    }
    for i in range(_LAYERS):
        for name, shape in (item for shapes in layer for item in shapes.items()):
            made = torch.ones(shape) if len(shape) == 1 else matrix(*shape)
            weights[f"model.layers.{i}.{name}.weight"] = made
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def settings(folder: str, **more: Any) -> dict[str, Any]:
    """Few requests at once, and steps too small for long prompts: so requests wait, and prompts come in chunks."""
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": LONGEST,
        "max_num_seqs": 8,
        "max_num_batched_tokens": STEP,
        "block_size": BLOCK,
        "seed": 0,
        **more,
    }
