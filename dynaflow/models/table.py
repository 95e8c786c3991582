"""The named models, as data. Nothing is imported or built for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A class and its sizes."""

    name: str
    kind: str
    """A class of transformers, whose config takes the sizes; or module:Class, a class of this package."""
    sizes: Mapping[str, Any]
    about: str
    layers: str
    """The size that is the number of layers; "" if its layers are not equal."""

    @property
    def own(self) -> bool:
        return ":" in self.kind


def _model(name: str, kind: str, about: str, *, layers: str = "num_hidden_layers", **sizes: Any) -> Model:
    return Model(name=name, kind=kind, sizes=MappingProxyType(sizes), about=about, layers=layers)


def _decoder(
    name: str, kind: str, about: str, hidden: int, inside: int, layers: int, heads: int, kv: int, **more: Any
) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rope_parameters": {"rope_type": "default", "rope_theta": more.pop("theta", 500000.0)},
        "max_position_embeddings": 131072,
        **more,
    }
    return _model(name, f"{kind}ForCausalLM", about, **sizes)


_TINY: Mapping[str, Any] = {"vocab_size": 512, "theta": 10000.0, "max_position_embeddings": 2048}
_ENCODER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip

# From the config.json of each model's repository.
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        m.name: m
        for m in (
            _decoder("llama-tiny", "Llama", "2 layers of 64", 64, 128, 2, 4, 2, **_TINY),
            _decoder("llama-small", "Llama", "4 layers of 256", 256, 768, 4, 8, 8, **_TINY),
            _decoder("llama-medium", "Llama", "8 layers of 2048", 2048, 6144, 8, 8, 8, **_TINY),
            _decoder("llama-2-7b", "Llama", "7 B", 4096, 11008, 32, 32, 32, vocab_size=32000, theta=10000.0),
            _decoder("llama-3-8b", "Llama", "8 B", 4096, 14336, 32, 32, 8, vocab_size=128256),
            _decoder("llama-3-70b", "Llama", "70 B", 8192, 28672, 80, 64, 8, vocab_size=128256),
            _decoder("qwen3-tiny", "Qwen3", "2 layers of 64", 64, 128, 2, 4, 2, head_dim=16, **_TINY),
            _decoder("qwen3-8b", "Qwen3", "8 B", 4096, 12288, 36, 32, 8, vocab_size=151936, head_dim=128, theta=1e6),
            _decoder("qwen3-32b", "Qwen3", "32 B", 5120, 25600, 64, 64, 8, vocab_size=151936, head_dim=128, theta=1e6),
            _decoder(
                "qwen3-30b-a3b", "Qwen3Moe", "30 B, 128 experts", 2048, 6144, 48, 32, 4, vocab_size=151936,
                head_dim=128, theta=1e6, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                norm_topk_prob=True,
            ),
            _decoder(
                "mixtral-tiny", "Mixtral", "2 layers of 64, 4 experts", 64, 128, 2, 4, 2, num_local_experts=4,
                num_experts_per_tok=2, sliding_window=None, **_TINY,
            ),
            _decoder(
                "mixtral-8x7b", "Mixtral", "47 B, 8 experts", 4096, 14336, 32, 32, 8, vocab_size=32000, theta=1e6,
                num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
            ),
            _decoder(
                "deepseek-tiny", "DeepseekV2", "2 layers of 64, 8 experts", 64, 128, 2, 4, 4, n_routed_experts=8,
                num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=None,
                qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, topk_method="greedy",
                **_TINY,
            ),
            _decoder(
                "deepseek-v2-lite", "DeepseekV2", "16 B, 64 experts", 2048, 10944, 27, 16, 16, vocab_size=102400,
                theta=10000.0, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
                moe_intermediate_size=1408, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
                qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1, topk_method="greedy",
            ),
            _model("gpt2-tiny", "GPT2LMHeadModel", "2 layers of 32", layers="n_layer", vocab_size=512, n_positions=512,
                   n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
            _model("gpt2", "GPT2LMHeadModel", "124 M", layers="n_layer", n_layer=12),
            _model("gpt2-xl", "GPT2LMHeadModel", "1.6 B", layers="n_layer", n_embd=1600, n_layer=48, n_head=25),
            _model("bert-tiny", "BertModel", "2 layers of 32", vocab_size=512, **_ENCODER),
            _model("bert-base", "BertModel", "110 M", num_hidden_layers=12),
            _model("bert-large", "BertModel", "335 M", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                   num_attention_heads=16),
            _model("vit-tiny", "ViTForImageClassification", "2 layers of 32", image_size=32, patch_size=8,
                   **_ENCODER),
            _model("vit-base", "ViTForImageClassification", "86 M", num_hidden_layers=12),
            _model("flux-tiny", "diffusion:TwoStreams", "2 blocks of 64", layers="blocks", width=64, heads=4, blocks=2,
                   words=8, patches=16),
            _model("flux-blocks", "diffusion:TwoStreams", "4 B: the two-stream blocks", layers="blocks", width=3072,
                   heads=24, blocks=19),
            _model("wan-tiny", "diffusion:VideoBlocks", "2 blocks of 64", layers="blocks", width=64, heads=4,
                   inside=128, blocks=2, words=8, patches=24),
            _model("wan-1.3b-blocks", "diffusion:VideoBlocks", "1.4 B: the blocks", layers="blocks", width=1536,
                   heads=12, inside=8960, blocks=30),
            _model("wan-14b-blocks", "diffusion:VideoBlocks", "14 B: the blocks", layers="blocks", width=5120,
                   heads=40, inside=13824, blocks=40),
            _model("inception-tiny", "inception:BranchCNN", "2 blocks", layers=""),
            _model("inception-v3", "inception:InceptionV3", "24 M", layers=""),
        )
    }
)  # fmt: skip
