"""Operators that are called as they are, and compiled code between them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynaflow as df
from dynaflow import _torch
from dynaflow.api import engine_of
from dynaflow.capture import op_registry
from dynaflow.capture.op_registry import has_opaque_ops
from dynaflow.lower.opaque_ops import run_in_order, split_at_opaque
from tests.helpers import Pinned

SEEN: list[bool] = []
"""By call of an operator below: did it get what a user of eager torch would hand it?"""


@torch.library.custom_op("dynaflow_tests::look_outside", mutates_args=("out",))
def look_outside(out: Tensor, x: Tensor, y: Tensor) -> None:
    SEEN.append(type(x) is Tensor)
    out.copy_(x * y)


@look_outside.register_fake
def _(out: Tensor, x: Tensor, y: Tensor) -> None:
    return None


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    SEEN.clear()
    with op_registry.declarations_restored(), torch.no_grad():
        op_registry.opaque_ops("dynaflow_tests::look_outside")
        yield


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """As attention is in serving systems: it writes to a view of memory that the code before it has made."""
    one, other = (x @ weight).relu().split(x.shape[1], dim=1)
    out = torch.empty_like(x)
    look_outside(out.view(-1, x.shape[1]), one, other)
    return torch.rms_norm(out + other, (x.shape[1],))


def model(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = layer(x, weight)
    return x * 2


def weights(layers: int, width: int = 8) -> list[Tensor]:
    return [torch.randn(width, 2 * width) for _ in range(layers)]


class Stretching(df.OpSchedulerBase):
    elastic = True

    def key(self, ctx: df.ScheduleContext) -> Any:
        return "all"


@pytest.mark.parametrize("scheduler", [df.Sequential, Stretching])
def test_layers_that_are_alike_are_compiled_once(scheduler: type[df.OpSchedulerBase]) -> None:
    given = weights(6)
    fast = df.compile(model, scheduler(), batch_dims={"x": 0})
    x = torch.randn(5, 8)
    torch.testing.assert_close(fast(x, given), model(x, given))
    assert fast.stats.graphs == 1 and fast.stats.sequential_runs == 1
    assert fast.stats.operators_compiled == 3, "what is before the first, between two, and after the last"
    assert SEEN == [True] * 12


def picked(x: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    out = x * 2
    before, view = out[order], out[1:, :2]
    look_outside(out, x, x)
    return out[order] + 1, out[0] + before, view - 1


def test_what_is_taken_from_a_tensor_is_taken_in_its_turn() -> None:
    """A copy shows what was there when it was made, and a view what is there when it is read."""
    x, order = torch.randn(6, 4), torch.randperm(6)
    fast = df.compile(picked, Stretching(), batch_dims={"x": 0})
    torch.testing.assert_close(fast(x, order), picked(x, order))
    assert fast.stats.operators_compiled == 2


def test_one_compilation_serves_all_sizes_of_an_elastic_plan() -> None:
    given = weights(3)
    fast = df.compile(model, Stretching(), batch_dims={"x": 0})
    for rows in (5, 9, 64, 2, 5, 31):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x, given), model(x, given))
    assert fast.stats.plans == 1 and fast.stats.operators_compiled == 3


def test_layers_that_are_alike_have_conditions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new size is held against each that was compiled, not against each layer."""
    asked: list[int] = []
    monkeypatch.setattr(_torch.Symbols, "assumed", lambda *_: lambda rows: asked.append(rows) or True)
    given, fast = weights(6), df.compile(model, Stretching(), batch_dims={"x": 0})
    for rows in (5, 9):
        x = torch.randn(rows, 8)
        asked.clear()
        torch.testing.assert_close(fast(x, given), model(x, given))
    assert asked == [9] * 3


def test_micro_batches_are_compiled_in_pieces_too() -> None:
    class Halves(df.OpSchedulerBase):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.split(2)
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op)

    op_registry.by_rows("dynaflow_tests::look_outside")
    given = weights(3)
    fast = df.compile(model, Halves(), batch_dims={"x": 0}, verify=True)
    for rows in (6, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x, given), model(x, given))
        assert len(fast.plan(x, given).micro_batches) == 2
    assert fast.stats.verified == 2


def test_pieces_of_an_uncut_graph_may_stay_where_they_were_captured() -> None:
    given, buffer, pinned = weights(3), torch.zeros(16, 8), Pinned()
    fast = df.compile(model, Stretching(), batch_dims={"x": 0})
    engine_of(fast).operators.captured = pinned
    for rows in (5, 9, 5, 9, 9):
        x = buffer[:rows].copy_(torch.randn(rows, 8))
        torch.testing.assert_close(fast(x, given), model(x, given))
    assert pinned.pieces == 4 and pinned.replays == 3 * 4


@torch.library.custom_op("dynaflow_tests::look_and_return", mutates_args=())
def look_and_return(x: Tensor) -> Tensor:
    return x * 3


@look_and_return.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_pieces_that_read_new_memory_are_not_captured() -> None:
    op_registry.opaque_ops("dynaflow_tests::look_and_return")

    def between(x: Tensor) -> Tensor:
        return look_and_return(x + 1) * 2

    fast, pinned = df.compile(between, Stretching(), batch_dims={"x": 0}), Pinned()
    engine_of(fast).operators.captured = pinned
    x = torch.randn(5, 8)
    torch.testing.assert_close(fast(x), between(x))
    assert fast.stats.operators_compiled == 2 and not pinned.pieces


def test_what_may_be_captured_is_captured_with_the_code_around_it() -> None:
    op_registry.opaque_ops("dynaflow_tests::look_and_return", capturable=True)

    def experts(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = layer(look_and_return(x + 1) * 2, weight)
        return x

    given, buffer, pinned = weights(3), torch.zeros(16, 8), Pinned()
    fast = df.compile(experts, Stretching(), batch_dims={"x": 0})
    engine_of(fast).operators.captured = pinned
    for rows in (5, 9, 5, 9):
        x = buffer[:rows].copy_(torch.randn(rows, 8))
        torch.testing.assert_close(fast(x, given), experts(x, given))
    assert pinned.pieces == 4 and pinned.replays == 2 * 4
    assert fast.stats.operators_compiled == 4, "x + 1 at first, behind a layer too, and what is around the others"


def test_pieces_of_micro_batches_are_not_captured() -> None:
    """A captured piece is known by the size of the whole batch."""

    class Parted(Stretching):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.split(2)
            while ops := ctx.get_ready_ops():
                ctx.execute(ops[0])

    op_registry.by_rows("dynaflow_tests::look_outside")
    given, pinned = weights(3), Pinned()
    fast = df.compile(model, Parted(), batch_dims={"x": 0})
    engine_of(fast).operators.captured = pinned
    for rows in (6, 8):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x, given), model(x, given))
    assert len(fast.plan(x, given).micro_batches) == 2 and fast.stats.plans == 1 and not pinned.pieces


def traced(layers: int) -> fx.GraphModule:
    found = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(gm)
        return gm.forward

    torch.compile(model, backend=keep, fullgraph=True)(torch.randn(4, 8), weights(layers))
    return found[0]


def test_pieces_are_the_graph_cut_where_something_is_left_alone() -> None:
    gm = traced(2)
    pieces = split_at_opaque(gm)
    assert [piece.opaque for piece in pieces] == [False, True, False, True, False]
    nodes = [n for p in pieces for n in p.module.graph.nodes if n.op == "call_function"]
    assert len(nodes) == len([n for n in gm.graph.nodes if n.op == "call_function"])
    for piece in pieces:
        assert has_opaque_ops(piece.module) == piece.opaque
        for node in piece.writes:
            assert isinstance(node.meta["example_value"], Tensor), "no tuples, which compiled code does not return"
    assert has_opaque_ops(gm)


def test_what_a_tuple_holds_is_taken_out_where_it_was_made() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.split, (x, 2))
    graph.call_function(torch.ops.dynaflow_tests.look_outside.default, (x, x, x))
    first = graph.call_function(operator.getitem, (both, 0))
    graph.output((graph.call_function(torch.neg, (first,)), None, 7, first))
    gm = fx.GraphModule({}, graph)
    before, alone, after = split_at_opaque(gm)
    assert before.writes == (first,) and alone.opaque and after.reads == (first,)
    value = torch.randn(4, 3)
    expected = -(value * value)[:2]
    calls = [lambda box, m=p.module: m(*box) for p in (before, alone, after)]
    negative, nothing, seven, kept = run_in_order(graph, [before, alone, after], calls)([value])
    torch.testing.assert_close(negative, expected)
    assert nothing is None and seven == 7 and kept.data_ptr() == value.data_ptr()


def test_what_is_in_a_region_is_not_cut_off_from_it() -> None:
    def mixed(x: Tensor, weights: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, weights)

    given, x = weights(2), torch.randn(5, 8)
    fast = df.compile(mixed, Stretching(), batch_dims={"x": 0})
    torch.testing.assert_close(fast(x, given), mixed(x, given), rtol=0, atol=0)
    assert fast.stats.operators_compiled == 0 and fast.stats.runs == 1


def test_values_go_after_their_last_use() -> None:
    gm = traced(2)
    pieces = split_at_opaque(gm)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(module: fx.GraphModule) -> Any:
        def call(box: list[Any]) -> Any:
            given = tuple(box)
            box.clear()
            results = module(*given)
            del given
            alive.append(sum(ref() is not None for ref in made))
            made.extend(weakref.ref(r) for r in results)
            return results

        return call

    args = [torch.randn(n.meta["example_value"].shape) for n in gm.graph.find_nodes(op="placeholder")]
    given = [weakref.ref(arg) for arg in args]
    run_in_order(gm.graph, pieces, [watched(p.module) for p in pieces])(args)
    assert args == [] and not any(ref() is not None for ref in given)
    assert max(alive) <= 4 < len(made), "not all that were made before"
