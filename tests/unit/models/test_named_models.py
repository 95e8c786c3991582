"""The models that have a name: each can be built, small ones run, large ones have as many weights as they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dynaflow as df
from dynaflow import _torch
from dynaflow.models.build import Workload, build, inputs
from dynaflow.models.table import MODELS

TINY = [name for name in MODELS if name.endswith("-tiny")]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2", 124_439_808),
        ("inception-v3", 23_834_568),  # torchvision's, without its second classifier
    ],
)
def test_as_many_weights_as_published(name: str, count: int) -> None:
    assert sum(p.numel() for p in build(name).parameters()) == count


def test_every_family_has_a_small_one() -> None:
    assert {name.split("-")[0] for name in MODELS} == {name.removesuffix("-tiny") for name in TINY}


@pytest.mark.parametrize("name", TINY)
def test_small_ones_run_and_are_equal_every_time(name: str) -> None:
    def result() -> torch.Tensor:
        model = build(name, device="cpu", dtype=torch.float32, attention="sdpa")
        with torch.no_grad():
            return _torch.tree_leaves(model(**inputs(model, Workload(batch=3, prompt=8))))[0]

    before = torch.random.get_rng_state()
    first, second = result(), result()
    assert torch.equal(first, second) and first.isfinite().all() and len(first) == 3
    assert not torch.equal(first[0], first[1]), "rows are different"
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers are as they were"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["llama-tiny", "deepseek-tiny", "gpt2-tiny"])
def test_decoding_continues_a_full_cache(name: str) -> None:
    model = build(name, device="cpu", dtype=torch.float32, attention="sdpa")
    given = inputs(model, Workload(batch=3, context=7))
    with torch.no_grad():
        assert model(**given).logits.shape == (3, 1, 512)
    assert all(layer.cumulative_length == 8 for layer in given["past_key_values"].layers)


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    build("qwen3-tiny").config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]})
    )
    model = build(str(tmp_path), layers=1)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config.num_hidden_layers == 1
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("lama-tiny", {}, "no model is named"),
        ("gpt2", {"tp": 2}, "sharding gpt2 over 2 GPUs is not supported"),
        ("flux-tiny", {"tp": 2}, "sharding flux-tiny over GPUs is not supported"),
        ("inception-tiny", {"layers": 1}, "no equal layers"),
        ("llama-tiny", {"ep": 2}, "no experts"),
    ],
)
def test_what_can_not_be_built(name: str, options: dict[str, int], told: str) -> None:
    with pytest.raises(df.DynaFlowError, match=told) as raised:
        build(name, **options)  # type: ignore[arg-type]
    assert raised.value.advice


def test_inputs_that_a_model_can_not_read() -> None:
    with pytest.raises(df.DynaFlowError, match="does not decode"):
        inputs(build("bert-tiny"), Workload(batch=2))
    with pytest.raises(df.DynaFlowError, match="at most 512 tokens"):
        inputs(build("gpt2-tiny"), Workload(batch=2, prompt=513))
