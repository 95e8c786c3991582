"""Where a plan's values live: joins that cost nothing, results that stay, and the arena between them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dynaflow as df
from dynaflow.core.memory_layout import is_dense, span
from dynaflow.core.plan import happens_before
from dynaflow.lower.memory import ALIGNMENT, Use, plan_arena
from tests.helpers import (
    Each,
    Scheduler,
    assert_equal,
    blocks_of,
    compiled,
    graph_of,
    randn,
    run_rest,
    set_chains,
    write_results,
)

X = randn(6, 5, 8)
CPU = torch.device("cpu")


def fast_of(model: Callable[..., Any], scheduler: df.OpSchedulerBase | None = None, **options: Any) -> df.CompiledModel:
    """Uncompiled operators, but written into buffers as compiled ones are."""
    fast = compiled(model, scheduler, **{"batch_dims": {"x": 0}, **options})
    write_results(fast)
    return fast


def run_thrice(
    model: Callable[..., Any], *inputs: Tensor, scheduler: df.OpSchedulerBase | None = None, **options: Any
) -> df.CompiledModel:
    """Compares with the plain model, and compares the first results again after later calls: those are the caller's."""
    fast = fast_of(model, scheduler, **options)
    with torch.no_grad():
        found, expected = fast(*inputs), model(*inputs)
        assert_equal(found, expected)
        for more in (1.5, 3.0):
            other = [i * more for i in inputs]
            assert_equal(fast(*other), model(*other))
        assert_equal(found, expected)
    return fast


def marked(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One operator for each function, in a row."""

    def model(x: Tensor) -> Tensor:
        with df.mark("one"):
            x = functions[0](x)
        if len(functions) > 1:
            with df.mark("two"):
                x = functions[1](x)
        if len(functions) > 2:
            with df.mark("three"):
                x = functions[2](x)
        return x

    return model


def by_operator(split: int | Sequence[int] | None = 2, merged: Sequence[str] = (), lanes: int = 1) -> Scheduler:
    """One operator after the other, so that no two tasks become one call; `merged` ones for all rows at once."""

    def schedule(ctx: df.ScheduleContext) -> None:
        if split is not None:
            ctx.split(split)
        for op in ctx.ops:
            items = ctx.items(op)
            for item in [items] if op.name in merged else items:
                ctx.execute(item, lane=f"lane{0 if isinstance(item, list) else item.micro_batch % lanes}")

    return Scheduler(schedule)


# --- joins ----------------------------------------------------------------------------------------------------

WEIGHT, BIAS = randn(7, 8), randn(7)
FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: torch.relu(x * 2) + 1,
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "linear without bias": lambda x: F.linear(x, WEIGHT),
    "linear of a transposed input": lambda x: F.linear(x.transpose(1, 2), WEIGHT[:, :5], BIAS),
    "linear of rows": lambda x: F.linear(x[:, 0], WEIGHT, BIAS),
    "mm": lambda x: torch.mm(x[:, 0], WEIGHT.t()),
    "addmm": lambda x: torch.addmm(BIAS, x[:, 0], WEIGHT.t()),
    "addmm of rows": lambda x: torch.addmm(x[:, 1], x[:, 0], WEIGHT.t() @ WEIGHT),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum((1, 2)),
    "embedding": lambda x: F.embedding((x[:, :, 0] > 0).long(), WEIGHT),
    "another dtype": lambda x: x.to(torch.float64),
    "another layout": lambda x: x.transpose(1, 2) + 1,
    "bool": lambda x: x > 0,
    "written in place": lambda x: torch.relu(x * 2).add_(1),
}
COPIED: dict[str, Callable[[Tensor], Tensor]] = {
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x),
    "conv": lambda x: F.conv1d(x, randn(3, 5, 1)),
    "cat": lambda x: torch.cat([x, x], 1),
    "cumsum": lambda x: x.cumsum(-1),
    # A product whose result is written again inside its operator, and ones called in another way.
    "linear written in place": lambda x: F.linear(x, WEIGHT, BIAS).mul_(2),
    "method mm": lambda x: x[:, 0].mm(WEIGHT.t()),
    "addmm with a factor": lambda x: torch.addmm(BIAS, x[:, 0], WEIGHT.t(), beta=2),
}


@pytest.mark.parametrize("end", FREE)
@pytest.mark.parametrize("split", [2, [1, 2, 3]], ids=str)
def test_joining_results_is_free(end: str, split: Any) -> None:
    fast = run_thrice(FREE[end], X, scheduler=Each(split=split, lanes=2))
    assert fast.stats.runs == 3 and fast.stats.joined_bytes == 0
    assert fast.stats.arena_bytes == 0, "results have memory of their own"


@pytest.mark.parametrize("end", COPIED)
def test_ends_that_take_no_memory_are_joined_by_copies(end: str) -> None:
    fast = run_thrice(COPIED[end], X)
    with torch.no_grad():
        result = fast(X)
    assert fast.stats.joined_bytes == result.numel() * result.element_size()


@pytest.mark.parametrize("end", FREE)
def test_merged_operator_in_the_middle_reads_parts_made_apart(end: str) -> None:
    model = marked(FREE[end], lambda x: x.float() * 2, torch.sin)
    fast = run_thrice(model, X, scheduler=by_operator(3, merged=["two"], lanes=2))
    assert fast.stats.joined_bytes == 0
    with torch.no_grad():
        plan = fast.plan(X)
    assert [len(task.items[0].micro_batches) for task in plan.tasks] == [1, 1, 1, 3, 1, 1, 1]
    assert fast.stats.arena_bytes > 0


def test_some_neighbours_merged_in_the_middle() -> None:
    """Two of three parts are used together: slices of one buffer, cut three ways."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 2, 3])
        one, two, three = (ctx.items(name) for name in ("one", "two", "three"))
        for item in one:
            ctx.execute(item, lane=f"lane{item.micro_batch % 2}")
        ctx.execute(two[1:], lane="lane1")
        ctx.execute(two[0], lane="lane0")
        ctx.execute(three[:2], lane="lane0")
        ctx.execute(three[2], lane="lane1")

    fast = run_thrice(marked(torch.sin, torch.cos, torch.tanh), X, scheduler=Scheduler(schedule))
    assert fast.stats.joined_bytes == 0


@pytest.mark.parametrize("merged", ["one", "two", "three"])
def test_merged_parts_that_are_not_neighbours(merged: str) -> None:
    """What such a task makes lies in no one place of the whole: it is right, and copied."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 3, 2])
        for op in ctx.ops:
            items = ctx.items(op)
            for task in [[items[0], items[2]], items[1]] if op.name == merged else items:
                ctx.execute(task)

    for functions in ((torch.sin, torch.cos, torch.tanh), (FREE["linear"], torch.cos, torch.tanh)):
        fast = run_thrice(marked(*functions), X, scheduler=Scheduler(schedule))
        assert fast.stats.joined_bytes > 0


def doubled(*given: Tensor) -> Tensor:
    return given[0] * 2


def test_results_of_a_users_function_are_joined_by_copies() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for item in ctx.items("one"):
            ctx.execute([item], replace_func=doubled)
        run_rest(ctx)

    fast = run_thrice(marked(lambda x: x * 2), X, scheduler=Scheduler(schedule))
    assert fast.stats.joined_bytes == X.numel() * 4


def test_a_part_of_a_value_made_by_a_function() -> None:
    """What it makes lies elsewhere, whenever it comes: the other parts may be no neighbours then, and get no slices."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 2, 1, 1, 1])
        one = ctx.items("one")
        ctx.execute([one[0], one[4]])
        ctx.execute(one[1], replace_func=torch.tanh)
        ctx.execute(one[2])
        ctx.execute(one[3], lane="side")
        run_rest(ctx)

    run_thrice(marked(torch.tanh, lambda x: x.cumsum(0)), X, scheduler=Scheduler(schedule))


def test_gradients_flow_through_copies() -> None:
    """With grad mode on, what autograd follows is joined by its own operations."""
    layer = nn.Linear(8, 3)
    fast = fast_of(layer, batch_dims={"input": 0})
    x = X.clone().requires_grad_()
    found = fast(x)
    assert fast.stats.joined_bytes > 0 and fast.stats.arena_bytes == 0
    mine = torch.autograd.grad(found.square().sum(), [x, *layer.parameters()])
    assert_equal(mine, torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]), tolerance=1e-4)


def test_grad_mode_turned_on_inside_the_model() -> None:
    """What lies in the arena must not remember how it was made: autograd would follow it into the next call."""
    weight = WEIGHT.clone().requires_grad_()

    def model(x: Tensor) -> Tensor:
        with df.mark("one"), torch.enable_grad():
            x = x * weight[0]
        with df.mark("two"):
            return torch.sin(x)

    fast = fast_of(model, by_operator(merged=["two"]))
    with torch.no_grad():
        for _ in range(2):
            assert_equal(fast(X), model(X))
    assert not blocks_of(fast).blocks(CPU), "what remembers how it was made has memory of its own"


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("end", ["linear", "linear without bias", "mm", "addmm", "bmm"])
def test_products_under_autocast(where: str, end: str) -> None:
    """The result is of another dtype than the arguments, which an out-variant would refuse."""

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return FREE[end](x)

    model = inside if where == "inside" else FREE[end]
    fast = fast_of(model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if where == "outside":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        found, expected = fast(X), model(X)
    assert found.dtype == torch.bfloat16
    assert_equal(found, expected, tolerance=0.02)


def test_autocast_of_one_operator_after_another() -> None:
    """The second product's input is bfloat16 already, its weight is not."""

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with df.mark("one"):
                x = F.linear(x, WEIGHT)
            with df.mark("two"):
                return F.linear(x, WEIGHT[:, :7])

    fast = fast_of(model, by_operator(merged=["two"]))
    with torch.no_grad():
        assert_equal(fast(X), model(X), tolerance=0.05)


@pytest.mark.parametrize(
    ("end", "free"), [("pointwise", True), ("softmax", True), ("linear", False), ("linear without bias", False)]
)
def test_batch_on_dim_1(end: str, free: bool) -> None:
    """A product wants its rows in one block, and those of a part lie apart: it falls back to a copy."""
    fast = run_thrice(FREE[end], X, scheduler=Each(split=[1, 4], lanes=2), batch_dims={"x": 1})
    assert (fast.stats.joined_bytes == 0) == free


def test_batch_on_dim_1_inside() -> None:
    model = marked(lambda x: torch.sin(x).transpose(0, 1) * 2, lambda x: F.linear(x, WEIGHT), torch.cos)
    for merged in ("two", "three"):
        run_thrice(model, X, scheduler=by_operator([1, 2, 3], merged=[merged], lanes=2))


def test_second_batch_size_and_empty_features() -> None:
    model = marked(torch.sin, torch.cos, torch.tanh)
    fast = run_thrice(model, X, scheduler=by_operator(2, merged=["two"]))
    with torch.no_grad():
        for batch in (9, 2, 31):
            assert_equal(fast(randn(batch, 5, 8)), model(randn(batch, 5, 8)))
        assert_equal(fast(torch.zeros(4, 0, 8)), model(torch.zeros(4, 0, 8)))
    assert fast.stats.joined_bytes == 0


# --- results are the caller's ---------------------------------------------------------------------------------


def is_in_arena(fast: df.CompiledModel, tensor: Tensor) -> bool:
    place = tensor.untyped_storage().data_ptr()
    return any(b.memory.untyped_storage().data_ptr() == place for b in blocks_of(fast).blocks(CPU))


def _contiguous(x: Tensor) -> Tensor:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        return y.transpose(0, 1).contiguous()


def _reshape(x: Tensor) -> Tensor:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        return y.transpose(0, 1).reshape(5, -1)


def _reshape_and_more(x: Tensor) -> tuple[Tensor, Tensor]:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        z = y.transpose(0, 1).reshape(5, -1)
    with df.mark("three"):
        return z + 1, z


def _to(x: Tensor) -> tuple[Tensor, Tensor]:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        z = y.to(torch.float32)
    with df.mark("three"):
        return z, z * 2


def _views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with df.mark("one"):
        y = torch.sin(x)
        z = torch.cos(x)
    with df.mark("two"):
        w = y + z
    return y.transpose(1, 2), z[:, 1:3], w.flatten(1)


def _used_on(x: Tensor) -> tuple[Tensor, Tensor]:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        return y, F.linear(y, WEIGHT)


def _returned_input(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        z = F.dropout(y, 0.5, training=False)
    return x, z, z.view(-1, 40)


def _identity(x: Tensor) -> Tensor:
    with df.mark("one"):
        y = torch.sin(x)
    with df.mark("two"):
        return nn.Identity()(y).type_as(x)


RESULTS = [_contiguous, _reshape, _reshape_and_more, _to, _views, _used_on, _returned_input, _identity]


@pytest.mark.parametrize("model", RESULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("split", [None, 2, [1, 5], [1] * 6], ids=str)
@pytest.mark.parametrize("chains", [True, False])
def test_results_stay_as_they_are(model: Callable[..., Any], split: Any, chains: bool) -> None:
    fast = fast_of(model, by_operator(split))
    set_chains(fast, chains)
    with torch.no_grad():
        for x in (X, X[:1]):  # a batch of 1 is a graph of its own: there a reshape may be no copy
            if split is not None and len(x) == 1:
                continue
            found, expected = fast(x), model(x)
            fast(x * 3)
            assert_equal(found, expected)
            for tensor in found if isinstance(found, tuple) else (found,):
                assert not is_in_arena(fast, tensor)


@pytest.mark.parametrize(
    "look",
    [
        lambda y, x: y.transpose(0, 1).reshape(5, -1),
        lambda y, x: y.transpose(0, 1).contiguous().flatten(1),
        lambda y, x: y.transpose(0, 1).flatten(1),
        lambda y, x: y.transpose(0, 1).reshape_as(x.transpose(0, 1).reshape(5, -1)),
    ],
    ids=["reshape", "contiguous", "flatten", "reshape_as"],
)
def test_copy_that_is_none_for_a_single_row(look: Callable[[Tensor, Tensor], Tensor]) -> None:
    """For the part of one row, what operator two makes is the memory of operator one: nobody may write there yet."""

    def model(x: Tensor) -> Tensor:
        with df.mark("one"):
            y = torch.sin(x)
        with df.mark("two"):
            z = look(y, x)
        with df.mark("three"):
            w = torch.cos(x)
        with df.mark("four"):
            w = torch.exp(w)
        with df.mark("five"):
            return z + w.transpose(0, 1).reshape(5, -1)

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 5])
        for name in ("one", "two", "three", "four", "five"):
            for item in ctx.items(name):
                ctx.execute(item)

    fast = run_thrice(model, X, scheduler=Scheduler(schedule))
    assert fast.stats.arena_bytes > 0


def same(*given: Tensor) -> Tensor:
    return given[0]


@pytest.mark.parametrize("split", [None, 2, [1, 5]], ids=str)
@pytest.mark.parametrize("merged", [(), ("one",)], ids=["each", "merged"])
def test_user_function_that_returns_its_argument(split: Any, merged: Sequence[str]) -> None:
    """What a user's function gets may become a result: it is not for the arena."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with df.mark("one"):
            y = torch.sin(x)
        with df.mark("two"):
            z = y + 0
        with df.mark("three"):
            return z, F.linear(torch.cos(z), WEIGHT)

    def schedule(ctx: df.ScheduleContext) -> None:
        if split is not None:
            ctx.split(split)
        one = ctx.items("one")
        for item in [one] if merged else one:
            ctx.execute(item)
        for item in ctx.items("two"):
            ctx.execute([item], replace_func=same)
        run_rest(ctx)

    run_thrice(model, X, scheduler=Scheduler(schedule))


@pytest.mark.parametrize(
    "look", [lambda h: h.unfold(1, 2, 1), lambda h: h[:, None].expand(-1, 3, -1)], ids=["unfold", "expand"]
)
def test_results_whose_elements_share_memory_do_so_after_a_split(look: Callable[[Tensor], Tensor]) -> None:
    def model(x: Tensor) -> Tensor:
        return look(torch.tanh(x))

    x = randn(6, 4)
    fast = compiled(model, Each(split=[4, 2]))
    with torch.no_grad():
        found, expected = fast(x), model(x)
    assert_equal(found, expected)
    assert found.stride() == expected.stride()


def test_user_function_that_keeps_its_argument() -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x * 2

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for item in ctx.items("one"):
            ctx.execute(item)
        for item in ctx.items("two"):
            ctx.execute([item], replace_func=keep)
        run_rest(ctx)

    run_thrice(marked(torch.sin, lambda x: x * 2, torch.cos), X, scheduler=Scheduler(schedule))
    assert_equal(torch.cat(kept[:2]), torch.sin(X))


def test_model_in_several_modes_shares_its_arena() -> None:
    """Memory made in inference mode could be written in no other."""
    model = marked(torch.sin, torch.cos, torch.tanh)
    fast = fast_of(model, by_operator(2, merged=["two"], lanes=2))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_equal(fast(X), model(X))
            assert fast.stats.arena_bytes > 0
            assert fast(X).is_inference() == model(X).is_inference()


def test_value_written_in_place_by_a_later_operator() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with df.mark("one"):
            y = torch.sin(x)
        with df.mark("two"):
            z = torch.cos(y)
        with df.mark("three"):
            y.mul_(2)
        with df.mark("four"):
            return y + z, z * 2

    for merged in ((), ("two",), ("three",), ("four",)):
        fast = run_thrice(model, X, scheduler=by_operator(3, merged=merged, lanes=2))
        assert fast.stats.joined_bytes == 0


def test_results_that_may_be_views_hold_what_they_look_at() -> None:
    """For some sizes `contiguous` hands on the memory of the first lane, which must not give it away too early."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with df.mark("one"):
            y = torch.sin(x)
        with df.mark("two"):
            z = y.t().contiguous()
        with df.mark("three"):
            u = torch.cos(z)
        with df.mark("four"):
            v = z * 2
        with df.mark("five"):
            w = torch.tanh(v)
        with df.mark("six"):
            return u + w, w * 2

    def schedule(ctx: df.ScheduleContext) -> None:
        for name, lane in zip(("one", "two", "three", "four", "five", "six"), "abbaab", strict=True):
            ctx.execute(ctx.items(name)[0], lane=lane)

    fast = compiled(model, Scheduler(schedule))
    with torch.no_grad():
        assert_equal(fast(X[0]), model(X[0]))
        code = fast.plan(X[0]).code
    (one,) = re.findall(r"(v\d+), = op0", code)
    assert code.count(f"{one} =") == 1, "let go, though `three` may still look at it"


@pytest.mark.parametrize(
    ("more", "fresh"),
    [
        (lambda y, z: torch.exp(z), [True]),
        (lambda y, z: z.clone(), [True]),
        (lambda y, z: (z, z.t().contiguous()), [False, True]),
        (lambda y, z: y.t().contiguous(), [False]),
    ],
    ids=["none", "of its own", "of a result", "of what it reads"],
)
def test_copies_of_what_an_operator_made_are_new(more: Callable[[Tensor, Tensor], Any], fresh: list[bool]) -> None:
    """Though a copy may be left out: what it would have copied is seen by nobody else."""

    def model(x: Tensor) -> Any:
        with df.mark("one"):
            y = torch.sin(x)
        with df.mark("two"):
            return more(y, torch.cos(y))

    fast = compiled(model, by_operator(None))
    with torch.no_grad():
        assert_equal(fast(X[0]), model(X[0]))
    graph = graph_of(fast)
    assert sorted(graph.values[v].fresh for v in graph.by_name["two"].writes) == fresh


# --- the arena by itself --------------------------------------------------------------------------------------


def buffer(nbytes: int, writers: set[int], readers: set[int]) -> Use:
    return Use(nbytes, frozenset(writers), frozenset(writers | readers))


@st.composite
def lanes_and_buffers(draw: st.DrawFn) -> tuple[list[Any], list[Use]]:
    steps = []
    for i in range(draw(st.integers(1, 12))):
        after = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        steps.append(SimpleNamespace(lane=draw(st.sampled_from("xyz")), after=tuple(after)))
    buffers = []
    for _ in range(draw(st.integers(1, 10))):
        writers = draw(st.sets(st.integers(0, len(steps) - 1), min_size=1, max_size=3))
        readers = draw(st.sets(st.integers(0, len(steps) - 1), max_size=3))
        nbytes = draw(st.one_of(st.integers(0, 8), st.integers(1, 4000)))
        buffers.append(buffer(nbytes, writers, readers))
    return steps, buffers


@settings(max_examples=300, deadline=None)
@given(lanes_and_buffers())
def test_buffers_that_share_memory_never_live_at_once(case: tuple[list[Any], list[Use]]) -> None:
    steps, buffers = case
    before = happens_before(steps)
    offsets, size = plan_arena(buffers, before)

    def precedes(one: Use, other: Use) -> bool:
        return all(before[w] >> u & 1 for u in one.users for w in other.writers)

    for at, b in zip(offsets, buffers, strict=True):
        assert at % ALIGNMENT == 0 and at >= 0 and at + b.nbytes <= size
    placed = [(at, b) for at, b in zip(offsets, buffers, strict=True) if b.nbytes]
    for (i, a), (j, b) in combinations(placed, 2):
        apart = i + a.nbytes <= j or j + b.nbytes <= i
        assert apart or precedes(a, b) or precedes(b, a), f"{a} at {i} and {b} at {j}"
    assert size <= sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in buffers)
    assert size >= max(b.nbytes for b in buffers)


def test_chain_needs_two_buffers() -> None:
    """Step i reads what i - 1 wrote and writes the next: two places, however long the chain."""
    steps = [SimpleNamespace(lane="x", after=()) for _ in range(20)]
    offsets, size = plan_arena([buffer(1000, {i}, {i + 1}) for i in range(19)], happens_before(steps))
    assert size == 1024 + 1000
    assert set(offsets) == {0, 1024}


def test_lanes_share_memory_only_where_they_wait() -> None:
    lanes = [SimpleNamespace(lane=lane, after=()) for lane in "xxyy"]
    buffers = [buffer(512, {0}, {1}), buffer(512, {2}, {3})]
    assert plan_arena(buffers, happens_before(lanes))[1] == 1024
    lanes[2].after = (1,)  # y starts when x is done
    assert plan_arena(buffers, happens_before(lanes))[1] == 512
    lanes[2].after = (0,)  # y starts when x has written, but not yet read
    assert plan_arena(buffers, happens_before(lanes))[1] == 1024


def test_every_part_of_a_buffer_counts() -> None:
    """A buffer whose parts are written on two lanes: both must be done, and both may not have begun."""
    lanes = [SimpleNamespace(lane=lane, after=()) for lane in "xyxy"]
    buffers = [buffer(512, {0, 1}, set()), buffer(512, {2}, set())]
    assert plan_arena(buffers, happens_before(lanes))[1] == 1024
    lanes[2].after = (1,)
    assert plan_arena(buffers, happens_before(lanes))[1] == 512


def test_no_buffers_no_arena() -> None:
    assert plan_arena([], ()) == ([], 0)


def test_gap_between_two_is_used() -> None:
    steps = [SimpleNamespace(lane="x", after=()) for _ in range(3)]
    large, middle = buffer(4096, {0}, {2}), buffer(2048, {0}, {1})
    small, late = buffer(1024, {0}, {2}), buffer(1536, {2}, {2})
    assert plan_arena([large, middle, small, late], happens_before(steps)) == ([0, 4096, 6144, 4096], 7168)


def test_layouts_with_holes_are_not_dense() -> None:
    assert is_dense((2, 3), (3, 1)) and is_dense((2, 3), (1, 2)) and is_dense((1, 3), (99, 1))
    assert not is_dense((2, 3), (4, 1)) and not is_dense((2, 3), (0, 1)) and not is_dense((2, 3), (1, 1))
    assert span((2, 3), (4, 1)) == 7 and span((2, 0), (4, 1)) == 0 and span((), ()) == 1


def test_expanded_results_get_no_buffer() -> None:
    """A value whose elements share memory can't be written part by part; nor can one with holes."""

    def model(x: Tensor) -> Tensor:
        with df.mark("one"):
            y = torch.sin(x[:, :1]).expand(-1, 3, -1)
        with df.mark("two"):
            return y * 2

    run_thrice(model, X, scheduler=by_operator(3, merged=["two"]))


def test_arena_of_a_long_model_is_small() -> None:
    """Sixteen layers in a row, cut everywhere: the values between them take turns in two places."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.GELU() for _ in range(16))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for op in ctx.ops:
            for item in ctx.items(op):
                ctx.execute(item)

    x = randn(4, 256)
    fast = run_thrice(Layers(), x, scheduler=Scheduler(schedule, [df.SplitModule("layers.*")]))
    assert fast.stats.arena_bytes <= 4 * (x.numel() * 4 // 2), "two parts, each in two places"
    assert sum(v.input is None for v in graph_of(fast).values) == 16


# --- blocks ---------------------------------------------------------------------------------------------------


def taken_blocks(fast: df.CompiledModel) -> list[Any]:
    """Fills with every block that a run takes."""
    pool, found = blocks_of(fast), []
    take = pool.take

    def watched(device: torch.device, nbytes: int) -> Any:
        found.append(take(device, nbytes))
        return found[-1]

    pool.take = watched  # type: ignore[method-assign]
    return found


CHAIN = marked(torch.sin, lambda x: F.linear(x, WEIGHT), torch.cos)


def test_calls_find_the_same_memory_again() -> None:
    fast = fast_of(CHAIN, by_operator(2, merged=["two"]))
    found = taken_blocks(fast)
    large, small = randn(64, 5, 8), randn(4, 5, 8)
    with torch.no_grad():
        for x in (large, large, small, large, small):
            assert_equal(fast(x), CHAIN(x))
    assert len(found) == 5 and len(set(found)) == 1


def test_block_comes_back_from_a_run_that_failed() -> None:
    broken = False

    def fails(*given: Tensor) -> Tensor:
        if broken:
            raise ValueError("broken")
        return given[0].sin()

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for name in ("one", "two"):
            for item in ctx.items(name):
                ctx.execute(item)
        for item in ctx.items("three"):
            ctx.execute([item], replace_func=fails)

    fast = fast_of(marked(torch.exp, torch.neg, torch.sin), Scheduler(schedule))
    set_chains(fast, False)
    found = taken_blocks(fast)
    with torch.no_grad():
        for broken in (False, True, False):
            if broken:
                with pytest.raises(ValueError, match="broken"):
                    fast(X)
            else:
                fast(X)
    assert len(found) == 3 and len(set(found)) == 1


@pytest.mark.parametrize("lanes", [1, 2])
def test_threads_that_call_one_model_at_once(lanes: int) -> None:
    """Each run has a block of its own; a shared one would mix the numbers of two callers."""
    model = marked(
        lambda x: torch.sin(x) * 2, lambda x: torch.cos(x) + torch.sin(x), lambda x: F.linear(torch.tanh(x), WEIGHT)
    )
    fast = fast_of(model, by_operator(3, merged=["two"], lanes=lanes))
    inputs = [randn(6 + n % 2, 200, 8) * (n + 1) for n in range(4)]  # of two sizes: two plans
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        for x in inputs:
            fast(x)
    wrong: list[Any] = []
    barrier = threading.Barrier(len(inputs))

    def call(n: int) -> None:
        try:
            with torch.no_grad():
                barrier.wait()
                kept = [fast(inputs[n]) for _ in range(25)]
            for found in kept:
                assert_equal(found, expected[n])
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert fast.stats.arena_bytes > 0


def test_windows_that_overlap() -> None:
    """All rows of them are laid out row by row in what is made of them, and two rows column by column: `contiguous` is
    a view of the one, and a copy of the other."""

    def model(x: Tensor) -> Tensor:
        y = x + x
        z = y.contiguous()
        z.add_(1)
        y.mul_(2)
        return -z

    memory = randn(6)
    windows = memory.as_strided((4, 3), (1, 1))
    with torch.no_grad():
        assert_equal(compiled(model, Each(split=[2, 1, 1]))(windows), model(windows))


def test_a_result_of_a_write_that_runs_whole_has_its_rows_where_they_were() -> None:
    """Behind another dim."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = x.flatten(0, 1).add_(1).add_(y.shape[0]) * 1
        made.contiguous().add_(1)
        return made * 2, y.sin()

    fast = compiled(model, Each([df.SplitFunc("sin"), df.SplitFunc("mul")], split=[1, 1]), batch_dims={"x": 1, "y": 0})
    with torch.no_grad():
        assert_equal(fast(randn(4, 2), randn(2, 4)), model(randn(4, 2), randn(2, 4)))


def test_a_slice_of_what_was_written_is_a_view_of_it() -> None:
    """Of half of an even batch the slice is all of it; of an odd one it is not."""

    def model(x: Tensor) -> Tensor:
        half = x.flip(1).chunk(2, 0)[0]
        made = torch.where(half > 0, half, half)
        return made.mul_(2)[: x.shape[0] // 2]

    fast = compiled(lambda x: model(x), Each(split=None))
    with torch.no_grad():
        for rows in (8, 6, 5, 7):
            assert_equal(fast(randn(rows, 4)), model(randn(rows, 4)))
