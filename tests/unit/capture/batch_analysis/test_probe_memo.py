"""Identical calls run once in the fake run; the memo replays what the others would have done."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from dynaflow.capture.batch_analysis import fake_run
from dynaflow.capture.batch_analysis.aten_calls import dims_of, tensors_in
from dynaflow.capture.batch_analysis.node_facts import Probe
from dynaflow.capture.batch_analysis.probe import probe
from dynaflow.capture.batch_analysis.probe_memo import MemoEntry, NotMemoizable
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.engine import analyzed_graph
from tests.fuzz.dice import Dice
from tests.fuzz.groups import draw_group
from tests.fuzz.sizes import POINTS
from tests.helpers import Stack, compiled
from tests.zoo import ZOO

Counted = Counter[str]
"""By name of a function: how often it was replayed."""


def never(*_: Any) -> None:
    raise NotMemoizable


def looks(found: Probe, node: fx.Node) -> Any:
    """All that is known of a node, but for the numbers of its memory."""
    fact = found.facts[node]
    tensors = [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, dims_of(t)) for t in tensors_in(fact.value)
    ]
    plain = fact.value if isinstance(fact.value, (int, float, torch.Size)) else None
    flags = (fact.scalar, fact.view, fact.sized, fact.out_variant, fact.copied)
    return type(fact.value), tensors, plain, fact.refusals, fact.returns, flags, found.dims(node)


def memory(found: Probe) -> Counter[Any]:
    """Of each storage, whatever its number: which nodes do what to it."""
    roles: dict[int, list[Any]] = defaultdict(list)
    for place, fact in enumerate(found.facts.values()):
        for role in ("reads", "writes", "storages", "made"):
            for number in getattr(fact, role):
                roles[number].append((place, role))
    return Counter(map(tuple, roles.values()))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Each graph is probed a second time, with every call made, and both have to find the same."""
    counted: Counted = Counter()
    replay, call_memoized, at = MemoEntry.replay, fake_run.FakeRun.call_memoized, list[fx.Node]()

    def noted(run: Any, node: fx.Node, facts: Any) -> None:
        at[:] = [node]
        call_memoized(run, node, facts)

    def counting(self: MemoEntry, *args: Any) -> Any:
        counted[getattr(at[0].target, "__name__", str(at[0].target))] += 1
        return replay(self, *args)

    def twice(graph: CapturedGraph, spaces: Any) -> Probe:
        with monkeypatch.context() as patch:
            patch.setattr(fake_run, "FakeCall", never)
            expected = probe(graph, spaces)
        before = counted.total()
        found = probe(graph, spaces)
        for node in graph.gm.graph.nodes:
            assert looks(found, node) == looks(expected, node), node.format_node()
        assert memory(found) == memory(expected)
        counted["nodes"] += len(found.facts)
        counted["graphs that had any"] += counted.total() > before + len(found.facts)
        return found

    monkeypatch.setattr(fake_run.FakeRun, "call_memoized", noted)
    monkeypatch.setattr(MemoEntry, "replay", counting)
    monkeypatch.setattr(analyzed_graph, "probe", twice)
    return counted


def probed(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    with torch.no_grad():
        compiled(function, **options).plan(*inputs)


def test_random_graphs(replayed: Counted) -> None:
    cases = 300
    for seed in range(cases):
        group = draw_group(Dice(Random(seed)))
        try:
            group.lowered(POINTS[0], seed=0)
        finally:
            group.close()
    assert replayed["graphs that had any"] > cases / 5


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "t5", "flux"])
def test_models(name: str, replayed: Counted) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{entry.requires} is not installed")
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(entry.build()).plan(**entry.inputs(4))
    assert replayed["graphs that had any"] and replayed.total() - replayed["nodes"] > replayed["nodes"] / 5


def test_one_layer_is_called_for_all(replayed: Counted) -> None:
    probed(Stack(blocks=6), torch.randn(4, 8))
    assert replayed["linear"] == 5 * 3 and replayed["relu"] == 5


def test_views_in_place_writes_and_several_results(replayed: Counted) -> None:
    def model(x: Tensor, state: Tensor) -> Tensor:
        for _ in range(3):
            a, b = x.chunk(2, dim=-1)
            x = torch.cat([a.unflatten(1, (2, 2)).transpose(1, 2).reshape(-1, 4), b.expand_as(a)], -1)
            values, places = x.topk(4, dim=-1)
            state[:, 1:3].mul_(2)
            state += values.sum() + places.sum()
            x = x + state[:, :1]
        return x

    probed(model, torch.randn(4, 8), torch.randn(1, 8), batch_dims={"x": 0, "state": None})
    assert {"chunk", "topk", "mul_", "cat"} <= set(replayed)


def test_equal_numbers_of_other_types_differ(replayed: Counted) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return torch.full((2,), 1), torch.full((2,), True), torch.full((2,), 1.0), x.to(torch.int32).view(torch.float32)

    with torch.no_grad():
        fast = compiled(model)
        assert [t.dtype for t in fast(torch.randn(4, 8))[:3]] == [torch.int64, torch.bool, torch.float32]
    assert not replayed["full"]


def test_what_is_read_from_data_is_never_replayed(replayed: Counted) -> None:
    def model(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return x * first.item() + x * second.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        probed(model, torch.randn(4, 8), torch.tensor(3), torch.tensor(5))
    assert replayed["nodes"] and not replayed["item"]


def test_regions_clear_the_memo(replayed: Counted) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            outside = self.linear(x)
            with torch.autocast("cpu", torch.bfloat16):
                inside = self.linear(x)
            return outside, inside, self.linear(x)

    with torch.no_grad():
        fast = compiled(Mixed())
        assert [t.dtype for t in fast(torch.randn(4, 8))] == [torch.float32, torch.bfloat16, torch.float32]
    assert not replayed["linear"]
