"""Compiled inside of compiled, captures that start again, and models that break the graph in every way."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynaflow as df
from dynaflow import _torch
from tests.helpers import assert_equal, names, randn

SIZES = (4, 6, 4, 3, 1)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """torch.compile counts the captures of a class's code, for all its models."""
    torch._dynamo.reset()


class Halves(df.OpSchedulerBase):
    """In two on two lanes, wherever that can be."""

    rules: tuple[df.SplitModule, ...] = ()

    def partition(self) -> list[df.SplitModule]:
        return list(self.rules)

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if not ctx.can_split or ctx.batch_size < 2:
            return ctx.sequential()
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=("main", "side")[op.micro_batch or 0])
        return None


def by_dynaflow(model: Any, **options: Any) -> Any:
    return df.compile(model, Halves(), operators="eager", **options)


def by_name(model: Any, **options: Any) -> Any:
    given = {"scheduler": Halves(), "operators": "eager"}
    return torch.compile(model, backend="dynaflow", options=given, **options)


def by_torch(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


DOORS = {"dynaflow": by_dynaflow, "by name": by_name, "torch": by_torch}
PAIRS = [(a, b) for a in DOORS for b in DOORS if (a, b) != ("torch", "torch")]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + 1)


def compare(fast: Callable[..., Any], model: Callable[..., Any], sizes: tuple[int, ...] = SIZES) -> None:
    for size in sizes:
        x = randn(size, 8)
        with torch.no_grad():
            assert_equal(fast(x), model(x))
        assert vars(x) == {}
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        fast(one).square().sum().backward()
        model(two).square().sum().backward()
        assert_equal(one.grad, two.grad, 1e-4)


# --- compiled inside of compiled ------------------------------------------------------------------------------


@pytest.mark.parametrize(("around", "inside"), PAIRS)
def test_a_compiled_module_in_a_compiled_module(around: str, inside: str) -> None:
    inner = Inner()
    model, wrapped = Outer(inner), Outer(DOORS[inside](inner))
    wrapped.head = model.head
    compare(DOORS[around](wrapped, fullgraph=True), model)


@pytest.mark.parametrize(("around", "inside"), PAIRS)
def test_a_compiled_module_compiled_again(around: str, inside: str) -> None:
    model = Inner()
    compare(DOORS[around](DOORS[inside](model)), model)


@pytest.mark.parametrize(("around", "inside"), PAIRS)
def test_a_compiled_function_in_a_compiled_function(around: str, inside: str) -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.relu(x * 2) + 1

    compiled = DOORS[inside](inner)
    compare(DOORS[around](lambda x: compiled(x) * 3), lambda x: inner(x) * 3)


def test_the_outermost_scheduler_decides_and_the_inner_one_says_so() -> None:
    plain = Inner()
    inner = by_dynaflow(plain)
    outer = Outer(inner)
    scheduler = Halves()
    scheduler.rules = (df.SplitModule("inner.a"), df.SplitModule(Inner, tag="inner"))
    fast = df.compile(outer, scheduler, operators="eager")
    compare(fast, lambda x: outer.head(plain(x) + 1))
    assert {"inner.a", "inner"} <= set(names(fast.plan(randn(4, 8)))), "paths are as if nothing had been compiled"
    assert fast.stats.runs and not inner.stats.runs
    assert [why for why in inner.stats.plain_reasons if "another compiled function" in why] == inner.stats.plain_reasons


def test_paths_in_what_torch_has_compiled() -> None:
    scheduler = Halves()
    scheduler.rules = (df.SplitModule("a"),)
    fast = df.compile(by_torch(Inner()), scheduler, operators="eager")
    assert "a" in names(fast.plan(randn(4, 8)))


def test_called_by_a_function_that_is_not_traced() -> None:
    """The inner call is a real one then, amid a call of the outer model's that was captured in parts."""
    inner = by_dynaflow(Inner())
    seen: list[Any] = []

    @torch.compiler.disable
    def aside(x: Tensor) -> Tensor:
        seen.append(dict(vars(x)))
        return inner(x, facts={"inner": True})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, *, first: bool = False) -> Tensor:
            return self.b(aside(x if first else self.a(x)))

    class Read(Halves):
        def schedule(self, ctx: df.ScheduleContext) -> Any:
            assert ctx.facts.get("who") == "outer"
            return super().schedule(ctx)

    net = Net()
    fast = df.compile(net, Read(), operators="eager")
    for first in (True, False):
        for size in SIZES:
            x = randn(size, 8)
            assert_equal(fast(x, first=first, facts={"who": "outer"}), net(x, first=first))
            assert vars(x).keys() <= {"_dynamo_propagated_dynamic_indices"}, "AOTAutograd leaves that itself"
    assert inner.stats.runs, "it is scheduled by itself"


def test_a_model_that_calls_its_compiled_self() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.__dict__["fast"] = None

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = torch.tanh(self.a(x))
            return (self.fast or self)(x, depth - 1) if depth else x

    net = Net()
    plain = copy.deepcopy(net)
    net.__dict__["fast"] = by_dynaflow(net)
    compare(net.fast, plain)  # type: ignore[arg-type]


# --- captures that start again --------------------------------------------------------------------------------


class Notes:
    shape: Any = None


class Stores(nn.Module):
    """Keeps a shape, a number in the first trace and a symbol in the second, and breaks in an inner frame."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.notes = nn.Linear(8, 8), Notes()

    def inner(self, h: Tensor, mask: Tensor) -> Tensor:
        self.notes.shape = h.shape
        h = h.view(-1, self.notes.shape[-1])
        rows = mask.nonzero()
        h = self.a(h)[rows[:, 0]]
        self.notes.count = int(rows.shape[0])  # type: ignore[attr-defined]
        return h.sum()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + self.inner(h, h.view(-1, 8) > 0)


@pytest.mark.parametrize("door", ["dynaflow", "by name"])
def test_a_restart_need_not_come_past_the_same_places(door: str) -> None:
    model = Stores()
    compare(DOORS[door](model), model)


def test_a_tensor_may_be_gone_when_the_backward_pass_is_compiled() -> None:
    """AOTAutograd may compile it when it first runs, and Dynamo holds the tensors of the capture weakly."""
    known: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        (node,) = gm.graph.find_nodes(op="placeholder")
        arg = copy.copy(node.meta["grapharg"])
        node = fx.Graph().placeholder("x")
        node.meta["grapharg"] = arg
        known.extend([node, _torch.graph_input(node)[2] is not None])
        return gm

    torch.compile(lambda x: x.sin(), backend=backend)(randn(4, 8))
    gc.collect()
    node, was_there = known
    assert was_there and _torch.graph_input(node)[2] is None


def test_a_restart_that_comes_to_nothing_has_no_effect_on_the_next_capture() -> None:
    traces: list[int] = []

    @torch.compiler.assume_constant_result
    def fails_at_the_second() -> float:
        traces.append(1)
        if len(traces) == 2:
            raise ValueError("the second trace")
        return 2.0

    with pytest.raises(Exception, match="the second trace"):
        by_name(lambda x: x * fails_at_the_second())(randn(4, 8))
    fast = torch.compile(lambda x: x + 1, backend="dynaflow", options={"scheduler": Strict(), "operators": "eager"})
    x = randn(4, 8)
    assert_equal(fast(x), x + 1)
    assert vars(x) == {}


class Strict(df.OpSchedulerBase):
    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)


# --- graph breaks ---------------------------------------------------------------------------------------------


def say(*what: Any) -> None:
    print(*what, file=io.StringIO())


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = 0


class Prints(Three):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        say(x.shape)
        return self.c(self.b(x))


class Branches(Three):
    def inner(self, x: Tensor) -> Tensor:
        return self.b(x) + 1 if x.sum() > 0 else self.b(x) - 1

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(self.a(x)))


class Yields(Three):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        for layer in (self.a, self.b):
            x = layer(x)
            yield x
            say(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for part in self.parts(x):
            total = total + part
        return self.c(total)


class Catches(Three):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            say("before")
            x = self.b(x)
            raise KeyError
        except KeyError:
            x = x + 1
        finally:
            x = x * 2
        return self.c(x)


class Enters(Three):
    @contextlib.contextmanager
    def region(self) -> Iterator[int]:
        self.count += 1
        try:
            yield 3
        finally:
            self.count -= 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with self.region() as factor, torch.no_grad():
            y = self.b(x) * factor
            say("inside")
            y = y + self.count
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b(x)
            say("inside")
            z = self.c(z)
        return self.c(x) + y + z.float()


class Numbers(Three):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) * x.sum().item() + float(x.detach().numpy().max()))


class Counts(Three):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.a(x)
        say(self.count)
        self.last = x.detach()
        return self.c(self.b(x))


class Stays(Three):
    @torch.compiler.disable
    def aside(self, x: Tensor) -> Tensor:
        return self.b(x) + x.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.aside(self.a(x)))


BREAKING = [Prints, Branches, Yields, Catches, Enters, Numbers, Counts, Stays]


@pytest.mark.parametrize("kind", BREAKING)
@pytest.mark.parametrize("door", ["dynaflow", "by name"])
def test_broken_graphs(kind: type[Three], door: str) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    compare(DOORS[door](model), plain)
    assert model.count == plain.count


def test_an_exception_of_the_models_leaves_it_usable() -> None:
    class Net(Three):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if x.shape[0] == 5:
                raise ValueError("five")
            say("on")
            return self.c(self.b(x))

    net = Net()
    fast = by_dynaflow(net)
    for size in (5, 4, 5, 6, 4):
        x = randn(size, 8)
        if size == 5:
            with pytest.raises(ValueError, match="five"):
                fast(x)
        else:
            assert_equal(fast(x), net(x))
        assert vars(x) == {}


def test_modes_change_between_calls() -> None:
    net = Prints()
    fast, x = by_dynaflow(net), randn(4, 8)
    modes: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.enable_grad,
    ]
    for mode in (*modes, *reversed(modes)):
        with mode():
            found, expected = fast(x), net(x)
            assert_equal(found, expected)
            assert found.requires_grad == expected.requires_grad
            assert found.is_inference() == expected.is_inference()
