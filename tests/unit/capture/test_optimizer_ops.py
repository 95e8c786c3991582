"""An optimizer's steps inside of the backward pass: bit by bit those of `optimizer.step()`, and in no one's way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.capture import optimizer_ops
from dynaflow.schedule.check import check
from dynaflow.strategies import OptimizerOverlap
from tests.helpers import STACK_RULES, Each, Stack, compiled, randn
from tests.zoo import ZOO

Make = Callable[[Any], torch.optim.Optimizer]


def loss_of(result: Any) -> Tensor:
    return (result if isinstance(result, Tensor) else result.logits).square().mean()


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


STEP = optimizer_ops.ParameterStep.step


class Beside:
    """A model that is trained with `optimizer=`, and its twin, which gets the same gradients and calls `step()`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        model: nn.Module,
        make: Make = adamw,
        scheduler: Any = None,
        **options: Any,
    ) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.optimizer, self.other = make(model.parameters()), make(self.twin.parameters())
        self.fast = compiled(model, scheduler or OptimizerOverlap(), optimizer=self.optimizer, **options)
        self.updated: list[str] = []
        self.copied = 0
        """Weights that were not updated in place."""
        twins = dict(self.twin.named_parameters())
        name_of = {id(p): name for name, p in model.named_parameters()}

        def step(update: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
            for parameter, weight, gradient in zip(update.parameters, weights, gradients, strict=True):
                self.copied += weight.data_ptr() != parameter.data_ptr()
                self.updated.append(name_of[id(parameter)])
                twins[name_of[id(parameter)]].grad = gradient.clone()
            STEP(update, weights, gradients)

        monkeypatch.setattr(optimizer_ops.ParameterStep, "step", step)

    def step(self, **inputs: Any) -> float:
        """Both make one, and are the same after it."""
        self.optimizer.zero_grad()
        self.other.zero_grad()
        self.updated.clear()
        loss = loss_of(self.fast(**inputs))
        loss.backward()
        for name, parameter in self.model.named_parameters():
            assert (parameter.grad is None) == (name in self.updated or not parameter.requires_grad), name
            if parameter.grad is not None:
                dict(self.twin.named_parameters())[name].grad = parameter.grad.clone()
        self.optimizer.step()
        self.other.step()
        self.compare()
        return loss.item()

    def compare(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
        assert_equal_states(self.optimizer.state_dict(), self.other.state_dict())


def assert_equal_states(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal_states(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            assert_equal_states(f, e)
    else:
        assert found == expected


def losses(model: nn.Module, call: Callable[..., Any], optimizer: torch.optim.Optimizer, inputs: Any) -> list[float]:
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(call(**inputs))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "sequential": df.Sequential,
    "split": lambda: Each([df.SplitModule("*layers.*")], split=2, lanes=2),
    "beside": OptimizerOverlap,
    "beside, split": lambda: OptimizerOverlap(Each([df.SplitModule("*layers.*")], split=2, lanes=2)),
}


@pytest.mark.parametrize(
    ("name", "operators", "scheduler"),
    [
        *(("stack", operators, scheduler) for operators in ("eager", "inductor") for scheduler in SCHEDULERS),
        ("llama", "eager", "split"),
        ("llama", "eager", "beside, split"),
        ("llama", "inductor", "beside, split"),
    ],
)
def test_steps_are_the_optimizers(name: str, operators: str, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Stack(blocks=3) if name == "stack" else ZOO[name].build()
    inputs = {"x": torch.randn(6, 8)} if name == "stack" else ZOO[name].inputs(4)
    plain = copy.deepcopy(model)
    both = Beside(monkeypatch, model, scheduler=SCHEDULERS[scheduler](), operators=operators)
    found = [both.step(**inputs) for _ in range(4)]
    assert sorted(both.updated) == sorted(name for name, _ in model.named_parameters())
    assert not both.copied or (operators == "inductor" and "beside" not in scheduler)
    assert both.fast.stats.graphs == 2 and not both.fast.stats.plain_graphs
    optimizer = adamw(plain.parameters())
    expected = losses(plain, compiled(plain, SCHEDULERS[scheduler](), operators="eager"), optimizer, inputs)
    if operators == "eager":  # compiled kernels may add up otherwise
        assert found == expected
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.9 * found[0]


def groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    quick = {"params": rest, "lr": 3e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)}
    return torch.optim.AdamW([{"params": matrices}, quick], lr=1e-3)


KINDS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1),
    "nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "maximize": lambda p: adamw(p, maximize=True),
    "foreach": lambda p: adamw(p, foreach=True),
    "fused": lambda p: adamw(p, fused=True),
    "groups": groups,
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_and_their_options(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    both = Beside(monkeypatch, Stack(), KINDS[kind], OptimizerOverlap(Each(STACK_RULES, split=2)))
    for step in range(4):
        both.step(x=torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))
    assert len(both.updated) == 14


class Tied(nn.Module):
    """One weight that is used twice, one part of which is looked at; one that is frozen; one that is no one's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = self.inner.weight.split(4)
        x = self.outer(torch.relu(self.fixed(self.inner(x)))) + self.inner(x)
        return self.own(x) + torch.cat([x @ lower.t(), x @ upper.t()], dim=-1)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_tied_frozen_and_other_parameters(operators: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rules = [df.SplitModule("inner"), df.SplitModule("outer"), df.SplitModule("own")]
    without_own = lambda parameters: adamw(list(parameters)[:3])  # noqa: E731
    for scheduler in (df.Sequential(), OptimizerOverlap(Each(rules, split=3, lanes=2))):
        both = Beside(monkeypatch, Tied(), without_own, scheduler, operators=operators)
        for _ in range(3):
            both.step(x=torch.randn(6, 8))
            assert sorted(both.updated) == ["inner.bias", "inner.weight", "outer.bias"]
            assert both.model.own.weight.grad is not None and both.model.fixed.weight.grad is None  # type: ignore[union-attr]


class Measured(nn.Module):
    """With results beside the loss, of which one has an infinite slope, and one a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return y.square().mean(), (y - y).sum().sqrt(), self.head(y).mean()


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)])
def test_unused_results(make: Make) -> None:
    """Weights of theirs alone are not updated, as by an optimizer that finds no gradients."""
    model = Measured()
    twin = copy.deepcopy(model)
    optimizers = [make(m.parameters()) for m in (model, twin)]
    fast = compiled(model, OptimizerOverlap(), optimizer=optimizers[0])
    for used in ([0], [0, 2], [0], [2]):
        for call, optimizer in zip((fast, twin), optimizers, strict=True):
            results = call(randn(6, 4))
            sum(results[i] for i in used).backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def test_settings_and_states_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    both, x = Beside(monkeypatch, Stack()), torch.randn(6, 8)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (both.optimizer, both.other)]
    for _ in range(3):
        both.step(x=x)
        for scheduler in schedulers:
            scheduler.step()
    assert both.optimizer.param_groups[0]["lr"] == 1e-2 / 8
    state = copy.deepcopy(both.optimizer.state_dict())
    both.step(x=x)
    for optimizer in (both.optimizer, both.other):
        optimizer.load_state_dict(copy.deepcopy(state))  # the states are other tensors from here on
    both.step(x=x)
    steps = {int(s["step"]) for s in both.optimizer.state_dict()["state"].values()}
    assert steps == {4}


def test_inference_and_other_batches_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Beside(monkeypatch, Stack())
    for rows in (6, 4, 7):
        x = torch.randn(rows, 8)
        both.step(x=x)
        with torch.no_grad():
            torch.testing.assert_close(both.fast(x), both.model(x))
        both.compare()


# Where steps run


class Noting(OptimizerOverlap):
    def schedule(self, ctx: df.ScheduleContext) -> Any:
        plan = super().schedule(ctx) or ctx.finish()
        if ctx.phase == "backward":
            self.plan, self.graph = plan, ctx.graph
        return plan


def planned(scheduler: Noting, model: nn.Module) -> df.Plan:
    fast = compiled(model, scheduler, optimizer=adamw(model.parameters()))
    fast(torch.randn(6, 8)).sum().backward()
    return scheduler.plan


def test_steps_have_a_lane_and_gradients_go_soon() -> None:
    plan = planned(Noting(Each(STACK_RULES, split=None)), Stack(blocks=4))
    steps = {task.items[0].op: i for i, task in enumerate(plan.tasks) if task.lane == "update"}
    assert list(steps) == ["head.update", *(f"layers.{n}.update" for n in (3, 2, 1, 0))]
    assert all("update" not in task.items[0].op for task in plan.tasks if task.lane != "update")
    others = [i for i, task in enumerate(plan.tasks) if task.lane != "update"]
    for name in list(steps)[:-1]:
        assert not plan.happens_before[next(i for i in others if i > steps[name])] >> steps[name] & 1, "not beside"
    assert plan.happens_before[others[-1]] >> steps["layers.2.update"] & 1, "gradients pile up"
    strict = planned(Noting(Each(STACK_RULES, split=None), behind=0), Stack())
    first = next(i for i, task in enumerate(strict.tasks) if task.lane == "update")
    assert strict.happens_before[first + 1] >> first & 1


def test_a_step_before_a_reader_of_the_weights_is_refused() -> None:
    scheduler = Noting(Each(STACK_RULES, split=None))
    plan = planned(scheduler, Stack())
    check(plan, scheduler.graph, 6)
    place = next(i for i, task in enumerate(plan.tasks) if task.items[0].op == "layers.1.update")
    reader = next(i for i, task in enumerate(plan.tasks) if task.items[0].op == "layers.1.attn")
    (gradient,) = [i for i, task in enumerate(plan.tasks) if task.items[0].op == "layers.1.attn.weights"]
    assert plan.happens_before[place] >> reader & 1
    tasks = list(plan.tasks)
    tasks[reader] = replace(tasks[reader], lane="other", after=tuple(range(reader)))
    tasks[place] = replace(tasks[place], after=(gradient,))  # and not for the other use of the weight
    for i in range(place + 1, len(tasks)):
        tasks[i] = replace(tasks[i], after=(*tasks[i].after, reader))
    lanes = (*plan.lanes, df.Lane(name="other"))
    with pytest.raises(df.PlanError, match=r"race: layers.1.attn .* must end before layers.1.update"):
        check(replace(plan, lanes=lanes, tasks=tuple(tasks)), scheduler.graph, 6)


def test_auto_measures_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Beside(monkeypatch, Stack(), scheduler=df.strategies.Auto(seconds=5, among=["branches", "nanoflow"]))
    for _ in range(3):
        both.step(x=torch.randn(6, 8))


def test_beside_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With saved activations in host memory."""
    torch.manual_seed(0)
    for scheduler in (OptimizerOverlap(df.strategies.Prefetch()), df.strategies.Prefetch(OptimizerOverlap())):
        both = Beside(monkeypatch, Stack(blocks=3), scheduler=scheduler, offload_saved=1)
        for _ in range(3):
            both.step(x=torch.randn(6, 8))


def test_nothing_holds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    optimizer = adamw(model.parameters())
    fast = compiled(model, OptimizerOverlap(), optimizer=optimizer)
    fast(torch.randn(6, 8)).sum().backward()
    weight = weakref.ref(model.head.weight)
    del model, fast
    gc.collect()
    optimizer.step(lambda: torch.zeros(()))  # its own again
    del optimizer
    gc.collect()
    assert weight() is None


# What can't be


def test_other_optimizers_are_refused() -> None:
    model = Stack()

    class Clipped(torch.optim.SGD):
        pass

    for optimizer in (torch.optim.RMSprop(model.parameters()), Clipped(model.parameters())):
        with pytest.raises(df.DynaFlowError, match=rf"{type(optimizer).__name__}.*\n(.|\n)*one of SGD, Adam, AdamW"):
            df.compile(model, optimizer=optimizer)
    with pytest.raises(df.DynaFlowError, match="differentiable=True"):
        df.compile(model, optimizer=adamw(model.parameters(), differentiable=True))
    mixed = [*model.parameters(), nn.Parameter(torch.empty(3, device="meta"))]
    with pytest.raises(df.DynaFlowError, match=r"on cpu and meta.*\n(.|\n)*foreach=True or foreach=False"):
        df.compile(model, optimizer=adamw(mixed))


def test_other_options_are_refused() -> None:
    model = Stack()
    optimizer = adamw(model.parameters())
    with pytest.raises(df.DynaFlowError, match="verify=True with optimizer="):
        df.compile(model, verify=True, optimizer=optimizer)

    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    with pytest.raises(df.DynaFlowError, match="DistributedDataParallel would not see the gradients"):
        df.compile(DistributedDataParallel(), optimizer=optimizer)


def test_gradients_that_are_there_already_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Beside(monkeypatch, Stack()), torch.randn(6, 8)
    both.step(x=x)
    both.model.head.weight.grad = torch.zeros(3, 8)  # type: ignore[union-attr]
    with pytest.raises(df.DynaFlowError, match="every backward pass is a step"):
        loss_of(both.fast(x)).backward()
    both.compare()  # nothing was updated
    both.step(x=x)
    handle = both.model.head.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr]
    with pytest.raises(df.DynaFlowError, match="hooks on its gradient"):
        loss_of(both.fast(x)).backward()
    both.compare()
    handle.remove()
    both.step(x=x)
    both.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(df.DynaFlowError, match="is no longer one of the optimizer's"):
        loss_of(both.fast(x)).backward()


def test_gradients_of_other_things_make_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Beside(monkeypatch, Stack()), torch.randn(6, 8, requires_grad=True)
    both.step(x=x)
    with pytest.raises(df.DynaFlowError, match="no gradient was requested"):
        torch.autograd.grad(loss_of(both.fast(x)), x)
    with pytest.raises(df.DynaFlowError, match="no gradient was requested"):
        loss_of(both.fast(x)).backward(inputs=[both.model.head.weight])  # type: ignore[union-attr, list-item]
    both.compare()
    both.step(x=x)


def test_a_second_backward_is_refused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Beside(monkeypatch, Stack()), torch.randn(6, 8)
    loss = loss_of(both.fast(x)) + loss_of(both.fast(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both, x = Beside(monkeypatch, Stack()), torch.randn(6, 8)
    both.step(x=x)
    with pytest.raises(df.DynaFlowError, match="step\\(closure\\)"):
        both.optimizer.step(lambda: torch.zeros(()))
    loss = loss_of(both.fast(x)) + both.model.head.weight.square().sum()  # type: ignore[union-attr, operator]
    with pytest.raises(df.DynaFlowError, match="got another gradient from outside"):
        loss.backward()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_scaled_gradients_are_refused(fused: bool, unscale: bool) -> None:
    model = Stack()
    optimizer = adamw(model.parameters(), fused=fused)
    fast = compiled(model, OptimizerOverlap(), optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    scaler.scale(fast(torch.randn(6, 8)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(df.DynaFlowError, match="GradScaler"):
        scaler.step(optimizer)
    del fast
    gc.collect()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused, "not as it was"


def test_models_that_break_the_graph_are_refused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            torch._dynamo.graph_break()
            return self.inner(x)

    model = Broken()
    fast = compiled(model, OptimizerOverlap(), optimizer=adamw(model.parameters()))
    with pytest.raises(df.DynaFlowError, match="breaks the graph"):
        fast(torch.randn(4, 8))


def test_sparse_gradients_are_refused() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.outer = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.table(x))

    model = Looked()
    fast = compiled(model, OptimizerOverlap(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(df.DynaFlowError, match="sparse"):
        fast(torch.randint(0, 10, (4,))).sum().backward()
