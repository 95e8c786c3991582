"""What models do in training, under a schedule: checkpointing, autocast, functions of their own, random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dynaflow as df
from tests.helpers import STACK_RULES, Each, Stack, compiled
from tests.unit.training.test_gradients import Phases, assert_same, gradients
from tests.zoo import ZOO

EXACT = 1e-9
SPLITS = (None, 2)
"""In sequence, and in two micro-batches on two lanes."""


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.outer(torch.tanh(self.inner(self.outer(x))))))


class Squared(torch.autograd.Function):
    """Its gradient is not what autograd would make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 3 * x * scale * gradient, (x * x * gradient).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(Squared.apply(self.inner(x), self.scale))


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with df.mark("gate", tag="gate"):
            x = torch.sigmoid(self.inner(x)) * x
        return self.outer(x)


class TiedAndFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.fixed = (nn.Linear(8, 8) for _ in range(3))
        self.outer.weight = self.inner.weight
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.fixed(self.inner(x))))


INNER_OUTER = (df.SplitModule("inner", tag="inner", optional=True), df.SplitModule("outer", tag="outer"))
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "checkpointed": (Checkpointed, STACK_RULES),
    "used twice": (UsedTwice, INNER_OUTER),
    "own function": (OwnFunction, INNER_OUTER),
    "marked": (Marked, INNER_OUTER[1:]),
    "tied and frozen": (TiedAndFrozen, INNER_OUTER),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    make, rules = CASES[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, 8).double()
    expected = gradients(model, model, {"x": x})
    fast = compiled(model, verify=True)
    for split in SPLITS:
        scheduler = Phases(rules, split=split, lanes=2)
        fast.set_scheduler(scheduler)
        for _ in range(2):
            assert_same(gradients(model, fast, {"x": x}), expected, EXACT)
        (forward, named, _), (backward, again, _) = scheduler.asked
        assert (forward, backward) == ("forward", "backward")
        found = {name.partition("#")[0].removesuffix(".weights") for name in again}
        assert {name.partition("#")[0] for name in named} <= found, "not found again in the backward pass"
    assert fast.stats.graphs == 2


# Activation checkpointing


def saved_bytes(call: Callable[[], Tensor]) -> int:
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        call()
    return sum(sizes)


def test_a_checkpointed_model_saves_less() -> None:
    x = torch.randn(64, 8)
    saved = []
    for kind in (Stack, Checkpointed):
        fast = compiled(kind(blocks=4), Each(STACK_RULES, split=2))
        fast(x)  # what is saved is decided while it is compiled
        saved.append(saved_bytes(lambda fast=fast: fast(x)))
    assert saved[1] < saved[0] / 2, saved


def test_gradient_checkpointing_of_transformers() -> None:
    entry = ZOO["llama"]
    model: Any = entry.build().double().train()
    inputs = entry.inputs(4)
    expected = gradients(model, model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rules = [df.SplitModule(path, tag=tag, optional=True) for path, tag in entry.cuts]
    fast = compiled(model)
    for split in SPLITS:
        fast.set_scheduler(Each(rules, split=split, lanes=2))
        assert_same(gradients(model, fast, inputs), expected, EXACT)
    assert fast.stats.graphs == 2


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.dropout(self.inner(x), 0.5))


class CheckpointedDropped(Dropped):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedMasked(Dropped):
    """By whole numbers, which are drawn in another way."""

    def masked(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.outer(x * torch.randint(0, 2, x.shape))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.masked, x, use_reentrant=False)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="2.11 can't trace it with a batch that varies")
@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("kind", [CheckpointedDropped, CheckpointedMasked])
def test_what_was_dropped_is_dropped_again(kind: Callable[[], Dropped], operators: str) -> None:
    """The backward pass computes the activations once more, with the same random numbers."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 8)
    fast = compiled(model, verify=True, operators=operators)
    for split in SPLITS:
        fast.set_scheduler(Each(INNER_OUTER, split=split, lanes=2))
        model.zero_grad()
        out = fast(x)
        out.sum().backward()
        activations = model.outer.weight.grad[0]  # summed over the rows
        torch.testing.assert_close(model.outer.weight @ activations, out.sum(0))


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_dropout_is_the_same_for_the_same_seed(operators: str) -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(6, 8)
    fast = compiled(model, Each(INNER_OUTER, lanes=2), operators=operators)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        out = fast(x)
        out.square().sum().backward()
        assert model.inner.weight.grad is not None
        return out.detach(), model.inner.weight.grad.clone()

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])


# Autocast, in half precision: not all CPUs have products of bfloat16


class Mixed(Stack):
    """A stack with a layer that is kept out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.careful = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.autocast("cpu", enabled=False):
            x = self.careful(x.float())
        return self.head(x).float()


class MixedInside(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        with half():
            return super().forward(x)


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool) -> None:
    """Each value has the type that eager gives it, on all lanes and in both passes: then results are equal."""
    torch.manual_seed(0)
    model, x = MixedInside() if inside else Mixed(), torch.randn(6, 8)
    around = contextlib.nullcontext if inside else half

    def under(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            with around():
                return call(x)

        return run

    exact = gradients(model, Mixed.forward.__get__(model), {"x": x})
    expected = gradients(model, under(model), {"x": x})
    assert any(not torch.equal(exact[name], expected[name]) for name in exact), "autocast did nothing"
    rules = (*STACK_RULES, df.SplitModule("careful"), df.SplitModule("head"))
    fast = compiled(model)
    for split in SPLITS:
        fast.set_scheduler(Each(rules, split=split, lanes=2))
        assert_same(gradients(model, under(fast), {"x": x}), expected, 1e-5)


# Gradients that are there already


def test_gradients_add_up_until_they_are_cleared() -> None:
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(6, 8).double()
    fast = compiled(model, Each(STACK_RULES, lanes=2))

    def steps(call: Callable[..., Any], set_to_none: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=set_to_none)
        for i in range(2):
            call(x + i).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = steps(model, True)
    steps(fast, True)
    places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    assert_same(steps(fast, False), expected, EXACT)
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == places
    assert_same(steps(fast, True), expected, EXACT)


def test_a_second_backward_through_the_same_call() -> None:
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(6, 8).double()

    def twice(call: Callable[..., Any]) -> dict[str, Tensor]:
        model.zero_grad()
        out = call(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = {name: g.clone() for name, g in twice(model).items()}
    assert_same(twice(compiled(model, Each(STACK_RULES, lanes=2))), expected, EXACT)


# Ways to go back


def two_calls(model: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    (call(x).square().sum() + call(x[:5]).exp().mean() * call(x).mean()).backward()


def hooks(model: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    handle = model.head.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[operator, union-attr]
    call(x).square().sum().backward()
    handle.remove()


def grad_of_some(model: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    wanted: Any = (model.head.weight, model.layers[0].attn.weight)  # type: ignore[index, union-attr]
    for parameter, gradient in zip(wanted, torch.autograd.grad(call(x).square().sum(), wanted), strict=True):
        parameter.grad = gradient


def frozen_for_a_while(model: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    for wanted in (True, False, True):
        model.layers[0].requires_grad_(wanted)  # type: ignore[index]
        call(x).square().sum().backward()


def evaluated_between(model: nn.Module, call: Callable[..., Any], x: Tensor) -> None:
    for rows, train in ((6, True), (4, False), (5, True)):
        call(x[:rows]).square().sum().backward()
        model.train(not train)
        with torch.inference_mode():
            call(x)
    model.train()


WAYS = (two_calls, hooks, grad_of_some, frozen_for_a_while, evaluated_between)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_go_back(way: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(6, 8).double()
    found = []
    for call in (model, compiled(model, Each(STACK_RULES, lanes=2))):
        model.zero_grad()
        way(model, call, x)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(found[1], found[0], EXACT)


def test_results_of_all_kinds() -> None:
    class Results(Stack):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "more": (y.exp(), None, [y.sum(-1), 3]), "none": None, "kept": y.detach(), "x": x}

    torch.manual_seed(0)
    model, x = Results().double(), torch.randn(6, 8).double()
    expected = gradients(model, model, {"x": x})
    fast = compiled(model, Each(STACK_RULES, lanes=2))
    assert_same(gradients(model, fast, {"x": x}), expected, EXACT)
    result = fast(x)
    assert result["none"] is result["more"][1] is None and result["more"][2][1] == 3
    assert not result["kept"].requires_grad and result["x"] is x
