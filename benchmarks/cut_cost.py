"""What the cuts cost: the same pieces in sequence on one lane, against the uncut graph.

Kept apart, the pieces are compiled one by one and fusions end at the cuts: that is what a schedule that uses every
cut pays before it gains anything. By default pieces that run back to back are compiled as one: cuts that a schedule
does not use must cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import dynaflow as df
from benchmarks.llama import BF16_LIMIT, FP32_LIMIT, SITUATIONS, Case
from benchmarks.measure import Trial, raising
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import Variants

APART_LIMIT, JOINED_LIMIT = 1.03, 1.01


def trials(v: Variants, limits: bool = True) -> Iterator[Trial]:
    for cudagraph in (None, "plan"):
        for chains, limit in ((False, APART_LIMIT), (True, JOINED_LIMIT)):
            yield Trial(
                what=f"{'cuts not used' if chains else 'cut, kept apart'}{', one graph' if cudagraph else ''}",
                baseline=f"uncut{', one graph' if cudagraph else ''}",
                situation=v.case.name,
                limit=limit if limits else None,
                skip="CUDA graphs need CUDA" if cudagraph and not v.settings.cuda else "",
                run=lambda c=cudagraph, j=chains: v.compare(v.one_lane(c, chains=j), v.sequential(c)),
            )


def other_models(settings: Settings) -> Iterator[Trial]:
    """Models with other shapes than Llama's, for comparison: no limit is set for them."""
    if not settings.can_hold_llama:
        return
    for name, (make, cuts) in MODELS.items():
        try:
            case = _ready(name, *make(settings.tiny), settings)
        except ImportError as e:
            yield Trial(what="cut, kept apart", baseline="uncut", situation=name, skip=str(e))
            continue
        except Exception as e:  # the other models have nothing to do with it
            yield Trial(what="cut, kept apart", baseline="uncut", situation=name, run=raising(e))
            continue
        variants = Variants(case, settings, cuts)
        yield from trials(variants, limits=False)
        variants.close()


def _ready(name: str, model: nn.Module, inputs: dict[str, torch.Tensor], settings: Settings) -> Case:
    dtype = torch.bfloat16 if settings.cuda else torch.float32
    model = model.eval().requires_grad_(False).to(settings.device, dtype)
    moved = {k: v.to(settings.device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}
    limit = BF16_LIMIT if settings.cuda else FP32_LIMIT
    return Case(name=name + (", tiny" if settings.tiny else ""), model=model, inputs=moved, limit=limit)


def _vision(name: str, size: int, tiny: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from torchvision import models

    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, init_weights=False, aux_logits=False)
    return model, {"x": torch.randn(2 if tiny else 8, 3, size, size)}


def _bert(tiny: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**(_SMALL if tiny else {})), add_pooling_layer=False)
    return model, {"input_ids": torch.randint(30, (2, 16) if tiny else (16, 256))}


def _vit(tiny: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    small = {**_SMALL, "image_size": 32, "patch_size": 16}
    model = ViTModel(ViTConfig(**(small if tiny else {})), add_pooling_layer=False)
    size = 32 if tiny else 224
    return model, {"pixel_values": torch.randn(2 if tiny else 16, 3, size, size)}


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_ATTENTION = df.SplitModule("*.attention", tag="attention")
_Make = Callable[[bool], tuple[nn.Module, dict[str, torch.Tensor]]]
MODELS: dict[str, tuple[_Make, tuple[df.SplitModule, ...]]] = {
    "GoogLeNet, batch 8": (partial(_vision, "googlenet", 224), (df.SplitModule("inception*.branch?"),)),
    "Inception v3, batch 8": (partial(_vision, "inception_v3", 299), (df.SplitModule("Mixed_*.branch*"),)),
    "BERT base, 16x256": (_bert, (_ATTENTION, df.SplitModule("*.intermediate", tag="mlp"))),
    "ViT base, batch 16": (_vit, (_ATTENTION, df.SplitModule("*.mlp", tag="mlp"))),
}

BENCHMARK = Benchmark(
    name="cut_cost",
    title="The pieces of a cut model in sequence on one lane, against its uncut graph.",
    suites=("fast",),
    trials=other_models,
    in_situation=trials,
    situations=tuple(SITUATIONS),
)
