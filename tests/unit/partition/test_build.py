"""The operators that a cut graph becomes: run one by one, in order, they are the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.capture.batch_analysis.probe import concrete
from dynaflow.partition.op_graph import OpGraph
from tests.helpers import STACK_RULES, Block, Each, Stack, assert_equal, compiled, graph_of, randn, ready_for


class Written(nn.Module):
    """Writes a buffer, a view of it, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("cache", torch.zeros(6, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with df.mark("fill"):
            self.cache.copy_(x)
            self.cache[:, 2:].mul_(2)
        with df.mark("read"):
            y = x + self.cache
        y = self.block(y)
        with df.mark("again"):
            self.cache.add_(y)
        return y, self.cache * 1


def sizes(x: Tensor) -> tuple[Tensor, int, Tensor]:
    with df.mark("wide"):
        y = torch.cat([x, x.new_ones(x.shape[0], 1)], 1)
    with df.mark("flat"):
        z = y.reshape(-1)
    return z.view(x.shape[0], -1) * 2, 3, z[: x.shape[0]] + 1


CASES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "stack": (Stack, list(STACK_RULES)),
    "stack, uncut": (Stack, []),
    "stack, every module": (Stack, [df.SplitModule("*"), df.SplitModule(nn.Linear)]),
    "what is written": (Written, [df.SplitModule("block.*")]),
    "sizes": (lambda: sizes, []),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Any, OpGraph]:
    make, rules = CASES[request.param]
    model = make()
    fast = compiled(model, Each(rules, split=None))
    with torch.no_grad():
        fast.plan(randn(6, 8))
    return model, fast, graph_of(fast)


def test_operators_one_by_one_are_the_model(case: tuple[Any, Any, OpGraph]) -> None:
    model, fast, graph = case
    x = randn(6, 8)
    with torch.no_grad():
        ready = ready_for(fast, x)
        args = [a.clone() if isinstance(a, Tensor) else a for a in ready.trials.args]
        values = ready.trials.plan().values
        known = {v.index: args[v.input] for v in graph.values if v.input is not None}
        for op in graph.ops:
            numbers = [concrete(symbol, values) for symbol in op.symbols]
            known.update(zip(op.writes, op.module(*numbers, *[known[v] for v in op.reads]), strict=True))
        expected = [t for t in torch.utils._pytree.tree_leaves(model(x)) if isinstance(t, Tensor)]
        made = [known[v] for v in graph.outputs]
        for want in expected:
            assert any(t.numel() == want.numel() and torch.allclose(t.reshape(want.shape), want) for t in made)


def test_each_value_has_one_maker_that_comes_before(case: tuple[Any, Any, OpGraph]) -> None:
    _, _, graph = case
    makers = {v: op.index for op in graph.ops for v in op.writes}
    assert len(makers) == sum(len(op.writes) for op in graph.ops), "written once"
    for place, op in enumerate(graph.ops):
        assert op.index == place and graph.by_name[op.name] is op
        for v in op.reads:
            assert graph.values[v].input is not None or (makers[v] < place and makers[v] in op.after)
        assert all(a < place for a in op.after)
    assert {v.index for v in graph.values if v.input is None} == makers.keys()


def test_who_writes_memory_is_ordered_with_all_who_touch_it(case: tuple[Any, Any, OpGraph]) -> None:
    _, _, graph = case
    before: list[set[int]] = []
    for op in graph.ops:
        before.append(set(op.after).union(*(before[a] for a in op.after)))
    for op in graph.ops:
        for other in graph.ops[: op.index]:
            shared = {s for s, writes in op.accesses for t, wrote in other.accesses if s == t and (writes or wrote)}
            assert not shared or other.index in before[op.index], (other.name, op.name)


def test_what_is_written_is_known() -> None:
    fast = compiled(Written(), Each(split=None))
    with torch.no_grad():
        fast.plan(randn(6, 8))
    graph = graph_of(fast)
    cache = next(v for v in graph.values if v.input is not None and "cache" in v.name)
    writers = [op.name for op in graph.ops if (cache.storage, True) in op.accesses]
    assert writers == ["fill.state", "again.state"] and cache.storage in graph.written


def test_equal_graphs_have_equal_identities() -> None:
    def graph(model: nn.Module, rules: Any = STACK_RULES, batch: int = 6) -> OpGraph:
        fast = compiled(model, Each(rules))
        with torch.no_grad():
            assert_equal(fast(randn(batch, 8)), model(randn(batch, 8)))
        return graph_of(fast)

    one = graph(Stack())
    assert one.identity == graph(Stack()).identity == graph(Stack(), batch=9).identity
    assert one.fingerprint == graph(Stack(), [df.SplitModule(r.match, tag="other") for r in STACK_RULES]).fingerprint
    assert one.identity != graph(Stack(), [df.SplitModule(r.match, tag="other") for r in STACK_RULES]).identity
    assert one.fingerprint != graph(Stack(), []).fingerprint != graph(Stack(blocks=3), []).fingerprint


def test_operators_have_their_former_names_too() -> None:
    """Schedulers of users read them."""
    fast = compiled(Stack())
    with torch.no_grad():
        fast.plan(randn(4, 8))
    for op in graph_of(fast).ops:
        assert (op.touches, op.follows, op.keeps) == (op.accesses, op.serial_after, op.has_hidden_state)
