"""What a pass of training gets is let go after its last use, as Inductor's own backward does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import dynaflow as df
from dynaflow.engine.runner import GraphRunner
from tests.helpers import Each, compiled, plans_of
from tests.unit.training.test_gradients import assert_same, gradients

ROWS, WIDTH, LAYERS = 6, 24, 4


class Watch:
    """Which of the arguments of the latest run were alive when the backward pass came to its end."""

    def __init__(self) -> None:
        self.given: list[StorageWeakRef] = []
        self.found: list[tuple[int, int]] = []

    def note(self, args: Any) -> None:
        saved = [a for a in args if isinstance(a, Tensor) and a.shape == (ROWS, WIDTH)]
        self.given = list({a.untyped_storage()._cdata: StorageWeakRef(a.untyped_storage()) for a in saved}.values())

    def look(self) -> None:
        self.found.append((sum(not ref.expired() for ref in self.given), len(self.given)))


watch = Watch()


@torch.library.custom_op("dynaflow_tests_memory::passed", mutates_args=())
def passed(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("dynaflow_tests_memory::passed_back", mutates_args=())
def passed_back(gradient: Tensor) -> Tensor:
    watch.look()
    return gradient.clone()


passed.register_fake(torch.empty_like)
passed_back.register_fake(torch.empty_like)
passed.register_autograd(lambda ctx, gradient: passed_back(gradient))


class Layers(nn.Module):
    """Its backward pass ends with a look at what is left of what was saved.

    `frozen`: without gradients of the layers' weights, which a compiler may well put off until the end.
    """

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.layers.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = passed(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x.sum(-1)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    run = GraphRunner.boxed

    def noted(self: GraphRunner, args: Any) -> Any:
        watch.note(args)
        return run(self, args)

    watch.__init__()  # type: ignore[misc]
    monkeypatch.setattr(GraphRunner, "boxed", noted)
    return watch


CUTS = [df.SplitModule("layers.*", tag="layer")]
SCHEDULES = {
    "sequential": df.Sequential(),
    "one lane": Each(CUTS, split=None),
    "two lanes": Each(CUTS, split=2, lanes=2),
}


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_saved_activations_are_gone_before_the_end(name: str, operators: Any, watched: Watch) -> None:
    torch.manual_seed(0)
    model, x = Layers(frozen=operators == "inductor"), torch.randn(ROWS, 4)
    expected = gradients(model, model, {"x": x})
    watched.found.clear()
    fast = compiled(model, SCHEDULES[name], operators=operators)
    for _ in range(2):
        assert_same(gradients(model, fast, {"x": x}), expected)
    assert watched.found == [(0, LAYERS + (operators == "eager"))] * 2


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_to_be_kept_is_there_for_a_second_backward(name: str, operators: Any, watched: Watch) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(ROWS, 4)
    fast = compiled(model, SCHEDULES[name], operators=operators)
    fast(x).square().sum().backward()  # which keeps nothing
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    loss = fast(x).square().sum()
    watched.found.clear()
    for again in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=again)
        assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)
    assert watched.found[0] == (LAYERS + 1, LAYERS + 1)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("split", [None, 2])
def test_copies_on_the_host_go_as_well(split: int | None, operators: Any, watched: Watch) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(ROWS, 4)
    expected = gradients(model, model, {"x": x})
    watched.found.clear()
    scheduler = df.strategies.Prefetch(Each(CUTS, split=split))
    fast = df.compile(model, scheduler, operators=operators, offload_saved=ROWS * WIDTH * 4)
    for _ in range(2):
        assert_same(gradients(model, fast, {"x": x}), expected)
    assert len(watched.found) == 2 and watched.found[0] == watched.found[1] == (0, LAYERS + 1)
    backward = plans_of(fast)[1]
    assert "fetch" in backward.code and "new_b" not in backward.code, "fetched to memory that stays until the end"
