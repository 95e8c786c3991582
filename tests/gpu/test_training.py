"""Training on CUDA: both passes on streams, and saved activations in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import Each
from tests.unit.test_training import assert_same, gradients
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
    rules = [df.SplitModule("layers.*")]

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
    theirs = peak(torch.compile(model))
    sequential = peak(df.compile(model, "sequential"))
    assert sequential <= 1.05 * theirs, (sequential, theirs)
    two_lanes = peak(df.compile(model, Each(rules, split=2, lanes=2)))
    assert two_lanes <= 1.5 * theirs, (two_lanes, theirs)  # it has an arena, and the lanes have workspaces


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
