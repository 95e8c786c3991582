"""Training on CUDA: both passes on streams, saved activations in host memory, and steps beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.gpu.test_cuda import exact_matmuls  # noqa: F401  (a fixture)
from tests.helpers import Each
from tests.unit.capture.test_optimizer_ops import Beside, adamw
from tests.unit.training.test_gradients import assert_same, gradients
from tests.zoo import ZOO

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["llama", "bert", "branch_cnn"])
def test_gradients_on_two_streams(name: str, operators: Any) -> None:
    entry = ZOO[name]
    model = entry.build().cuda()
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in entry.inputs(6).items()}
    expected = gradients(model, model, inputs)
    rules = [df.SplitModule(path, tag=tag, optional=True) for path, tag in entry.cuts]
    fast = df.compile(model, Each(rules, split=2, lanes=2), operators=operators)
    for _ in range(3):
        assert_same(gradients(model, fast, inputs), expected, 1e-3)


class Layers(nn.Module):
    """What it saves is much larger than its weights."""

    def __init__(self, layers: int = 8, width: int = 512, activation: Callable[..., Tensor] = F.gelu) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def test_backward_lets_go_of_what_was_saved() -> None:
    """Gradients of weights are made while activations go: who holds these needs nearly twice as much."""
    torch.manual_seed(0)
    model = Layers(layers=24, width=2048, activation=torch.tanh).cuda()  # of which its result alone is saved
    x = torch.randn(2048, 2048, device="cuda")
    expected = gradients(model, model, {"x": x})

    def peak(compiled: Callable[..., Any]) -> int:
        for _ in range(3):
            assert_same(gradients(model, compiled, {"x": x}), expected, 1e-3)
        model.zero_grad(set_to_none=True)
        loss = compiled(x).sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
        model.zero_grad(set_to_none=True)
        return found

    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()  # of which `expected` is a part, for all of them alike
    theirs, ours = peak(torch.compile(model)), peak(df.compile(model, "sequential"))
    assert ours <= 1.05 * theirs, (ours, theirs)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_saved_activations_leave_the_device(operators: Any) -> None:
    torch.manual_seed(0)
    model, x = Layers().cuda(), torch.randn(8192, 512, device="cuda")
    expected = gradients(model, model, {"x": x})
    peaks = []
    for offload in (None, 1 << 20):
        fast = df.compile(model, "prefetch", operators=operators, offload_saved=offload)
        for _ in range(2):
            assert_same(gradients(model, fast, {"x": x}), expected, 1e-3)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fast(x).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.7 * peaks[0], peaks


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_micro_batches_of_a_step_are_on_two_streams(lanes: int, operators: Any) -> None:
    torch.manual_seed(0)
    model, x = Layers().cuda(), torch.randn(4096, 512, device="cuda")
    model(x).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    streams: dict[int, set[str]] = {}

    def note(task: df.Task, what: str) -> None:
        streams.setdefault(torch.cuda.current_stream().cuda_stream, set()).add(task.items[0].op)

    scheduler = Each([df.SplitModule("layers.*")], split=lanes, lanes=lanes)
    step = df.TrainStep(
        lambda x: model(x).square().mean(), scheduler, micro_batches=[1024, 512, 2048, 512], in_flight=2,
        operators=operators, on_task=note,
    )  # fmt: skip
    for _ in range(4):  # nothing waits in between but what the step itself sees to
        model.zero_grad(set_to_none=True)
        loss = step(x)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same(found, expected, 1e-3)
        torch.testing.assert_close(loss, model(x).square().mean(), rtol=1e-3, atol=1e-5)
    assert len(streams) >= 2 and torch.cuda.current_stream().cuda_stream in streams
    for ops in streams.values() if lanes == 1 else ():
        assert any(op.endswith(".weights") for op in ops), "a backward pass left the stream of its forward pass"


def test_activations_of_a_step_are_those_in_flight() -> None:
    model, x = Layers().cuda(), torch.randn(8192, 512, device="cuda")
    peaks = []
    for in_flight in (1, 4):
        step = df.TrainStep(lambda x: model(x).square().mean(), micro_batches=4, in_flight=in_flight, operators="eager")
        for _ in range(2):
            step(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 0.6 * peaks[1], peaks


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
def test_steps_beside_the_backward_pass(how: Any, operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for inner in (None, Each([df.SplitModule("layers.*")], split=2, lanes=2)):
        model = Layers(width=256).cuda()
        both = Beside(
            monkeypatch, model, partial(adamw, **how), df.strategies.OptimizerOverlap(inner), operators=operators
        )
        for _ in range(4):
            both.step(x=torch.randn(2048, 256, device="cuda"))
        assert len(both.updated) == len(list(model.parameters())) and not both.copied


def test_gradients_of_a_layer_go_before_the_last_is_there() -> None:
    """No more of them are in memory at a time than those of a few layers."""
    peaks = []
    for beside in (False, True):
        torch.manual_seed(0)
        model, x = Layers(layers=16, width=2048).cuda(), torch.randn(64, 2048, device="cuda")
        optimizer = adamw(model.parameters(), fused=True)
        fast = df.compile(model, "optimizer_overlap", operators="eager", optimizer=optimizer if beside else None)
        for _ in range(3):
            optimizer.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            fast(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.5 * peaks[0], peaks
