"""The zoo through df.compile: outputs as in eager, and the work really split."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dynaflow as df
from tests.helpers import Each, assert_equal, compiled, graph_of, parts_of, uneven, whole
from tests.zoo import DECODE, SHARED_INPUTS, ZOO, Entry, decode_setup

BATCH = 7

ENTRIES = [
    pytest.param(
        entry, id=name, marks=pytest.mark.skipif(not entry.available, reason=f"{entry.requires} is not installed")
    )
    for name, entry in ZOO.items()
]

# Tokens are sorted by expert: every row is treated by itself, which no rule for single operators can see.
DECLARED = {"experts"}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@functools.cache
def model_of(name: str) -> nn.Module:
    return ZOO[name].build()


def rules(entry: Entry) -> list[Any]:
    return [df.SplitModule(glob, tag=tag, splittable=True if tag in DECLARED else None) for glob, tag in entry.cuts]


def batch_dims(inputs: dict[str, Any]) -> dict[str, int | None] | None:
    """Flux has inputs without a batch whose size may equal it by chance; the others say nothing."""
    if not SHARED_INPUTS & set(inputs):
        return None
    return {name: None if name in SHARED_INPUTS else 0 for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def assert_split(fast: df.CompiledModel, plan: df.Plan) -> None:
    """Every operator that a rule claimed runs for each micro-batch by itself."""
    everything = [(m,) for m in range(len(plan.micro_batches))]
    claimed = [op for op in graph_of(fast).ops if op.tags - {"state"}]
    assert claimed
    for op in claimed:
        assert sorted(parts_of(plan, op.name)) == everything, f"{op.name} runs whole: {op.refusal}"
    assert len(whole(plan)) < len(graph_of(fast).ops) / 2


@pytest.mark.parametrize("entry", ENTRIES)
def test_model(entry: Entry) -> None:
    """One capture serves both schedulers, two and three lanes, and two batch sizes."""
    model = model_of(entry.name)
    inputs = entry.inputs(BATCH)
    fast = compiled(model, Each(rules(entry), 2, lanes=2), batch_dims=batch_dims(inputs), fullgraph=True)
    expected = model(**inputs)
    for split, lanes in ((2, 2), (uneven, 3)):
        fast.set_scheduler(Each(rules(entry), split, lanes))
        for _ in range(2):
            assert_equal(fast(**inputs), expected)
        plan = fast.plan(**inputs)
        assert len(plan.lanes) == lanes
        assert [m.size for m in plan.micro_batches] == ([4, 3] if lanes == 2 else [1, 4, 2])
        assert_split(fast, plan)
    other = entry.inputs(5)
    assert_equal(fast(**other), model(**other))
    assert fast.stats.graphs == 1
    assert fast.stats.plain_graphs == 0


@pytest.mark.parametrize("name", DECODE)
def test_static_cache_decode(name: str) -> None:
    """The scheduler changes half-way: what one plan wrote into the cache, the next one reads."""
    pytest.importorskip("transformers")
    setup = decode_setup(name, BATCH)
    fast = compiled(setup.model, Each(rules(ZOO[name]), 2, lanes=2), fullgraph=True)
    mine, plain = setup.cache(), setup.cache()
    for step in range(setup.steps):
        if step == setup.steps // 2:
            fast.set_scheduler(Each(rules(ZOO[name]), uneven, lanes=3))
        expected = setup.model(**setup.step(step, plain))
        found = fast(**setup.step(step, mine))
        assert_equal(found.logits, expected.logits)
        for a, b in zip(mine.layers, plain.layers, strict=True):
            assert_equal(a.keys, b.keys)
            assert_equal(a.values, b.values)
            assert_equal(a.cumulative_length, b.cumulative_length)
        before = mine.layers[0].cumulative_length.clone()
        plan = fast.plan(**setup.step(step, mine))
        assert_equal(mine.layers[0].cumulative_length, before)
        assert len(plan.micro_batches) == (2 if step < setup.steps // 2 else 3)
        assert_split(fast, plan)
    assert fast.stats.graphs == 1, "every step is the same graph"
    assert fast.stats.plans == 2


def test_llama_with_inductor() -> None:
    pytest.importorskip("transformers")
    entry = ZOO["llama"]
    model = model_of("llama")
    inputs = entry.inputs(4)
    fast = df.compile(model, Each(rules(entry), 2), fullgraph=True)
    expected = model(**inputs)
    assert_equal(fast(**inputs), expected)
    assert_split(fast, fast.plan(**inputs))
    assert fast.stats.operators_shared > 0, "equal layers share their operators"
    assert fast.stats.joined_bytes == 0
    for batch in (6, 8):
        compiled = fast.stats.operators_compiled
        other = entry.inputs(batch)
        assert_equal(fast(**other), model(**other))
    assert fast.stats.operators_compiled == compiled, "from the third batch size on, nothing is compiled"
