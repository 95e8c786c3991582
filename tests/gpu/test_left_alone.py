"""Compiled code between operators that are called as they are, on CUDA: its own strides, lanes, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import dynaflow as df
from dynaflow.capture import declared
from tests.unit.test_left_alone import SEEN, Stretching, fresh, model, picked, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
__all__ = ["fresh"]  # a fixture that each test below uses

WIDTH = 64


class Halves(df.OpSchedulerBase):
    """Two micro-batches, each on a lane of its own."""

    def schedule(self, ctx):
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch.index}")


@pytest.fixture(autouse=True)
def exact_matmuls():
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def given():
    return [weight.cuda() for weight in weights(4, WIDTH)]


def test_one_compilation_serves_all_sizes_and_layers(given):
    fast = df.compile(model, Stretching(), batch_dims={"x": 0})
    for rows in (5, 64, 1024, 2, 31):
        x = torch.randn(rows, WIDTH, device="cuda")
        torch.testing.assert_close(fast(x, given), model(x, given), rtol=1e-4, atol=1e-4)
    assert fast.stats.plans == 1 and fast.stats.operators_compiled == 3
    assert all(SEEN)


@pytest.mark.parametrize("graphs", [None, "plan"])
def test_micro_batches_on_lanes(given, graphs):
    declared.by_rows("dynaflow_tests::look_outside")
    fast = df.compile(model, Halves(), batch_dims={"x": 0}, cudagraph=graphs)
    for _ in range(4):
        x = torch.randn(512, WIDTH, device="cuda")
        torch.testing.assert_close(fast(x, given), model(x, given), rtol=1e-4, atol=1e-4)
    assert len(fast.plan(x, given).micro_batches) == 2


def test_what_is_taken_from_a_tensor_is_taken_in_its_turn():
    x, order = torch.randn(6, 4, device="cuda"), torch.randperm(6, device="cuda")
    fast = df.compile(picked, Stretching(), batch_dims={"x": 0})
    torch.testing.assert_close(fast(x, order), picked(x, order))
    assert fast.stats.operators_compiled == 2
