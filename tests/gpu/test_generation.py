"""`generate` on CUDA: decoding is captured once for each size, whatever is called in between."""

from __future__ import annotations

import pytest
import torch

import dynaflow as df
from tests.gpu.test_cuda import exact_matmuls  # noqa: F401  (a fixture)
from tests.helpers import TwoBatches
from tests.zoo import ZOO

transformers = pytest.importorskip("transformers")
hf = df.integrations.transformers
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 40


def build(name):
    model = ZOO[name].build().cuda()
    model.config.use_cache = True
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def generated(model, batch, length, **options):
    ids = torch.randint(4, 101, (batch, length), generator=torch.Generator().manual_seed(batch)).cuda()
    mask = (torch.arange(length) >= torch.arange(batch)[:, None] % 4).long().cuda()
    return model.generate(ids * mask, attention_mask=mask, max_new_tokens=STEPS, **{"do_sample": False, **options})


@pytest.mark.parametrize("scheduler", [TwoBatches(), "sequential", "auto"], ids=["two", "sequential", "auto"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_captures_stay(name, scheduler):
    model = build(name)
    sizes = [(8, 12, {}), (4, 9, {}), (2, 9, {"num_beams": 3})]
    expected = [generated(model, *size, **options) for *size, options in sizes]
    options = {"scheduler_options": {"seconds": 2.0, "most": 1}} if scheduler == "auto" else {}
    hf.accelerate(model, scheduler, max_cache_len=64, **options)
    stats = hf.compiled(model).decode.stats
    captures, kept = [], []
    for _ in range(4):
        for (*size, options), tokens in zip(sizes, expected, strict=True):
            assert (generated(model, *size, **options) == tokens).float().mean() > 0.95
            kept.append(torch.empty(1 << 22, device="cuda"))  # where the next cache might have gone
        captures.append(stats.captures)
    assert captures[0] > 0 and captures[1] == captures[2] == captures[3]
    assert stats.graph_replays > 3 * len(sizes) * (STEPS - 2) and not stats.capture_failures
    assert not hf.compiled(model).prefill.stats.captures


def test_a_cache_that_is_held_stays():
    model = build("llama")
    hf.accelerate(model, TwoBatches(), max_cache_len=64)
    made = generated(model, 8, 12, return_dict_in_generate=True)
    held = [(layer.keys, layer.keys.clone()) for layer in made.past_key_values.layers]
    for _ in range(3):
        again = generated(model, 8, 12)
        assert torch.equal(again, made.sequences)
    assert all(torch.equal(now, before) for now, before in held)


def test_callers_on_two_streams():
    """The memory of one call goes to the next, which may be on another stream."""
    model = build("llama")
    expected = generated(model, 8, 12)
    hf.accelerate(model, "sequential", max_cache_len=64)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(6):
        streams[turn % 2].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[turn % 2]):
            found = generated(model, 8, 12)
        torch.cuda.current_stream().wait_stream(streams[turn % 2])
        assert (found == expected).float().mean() > 0.95
