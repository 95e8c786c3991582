"""Compiled code between operators that are called as they are, on CUDA: its own strides, lanes, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.capture import op_registry
from tests.unit.lower.test_opaque_ops import SEEN, Stretching, fresh, model, picked, weights

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
    op_registry.by_rows("dynaflow_tests::look_outside")
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


def test_pieces_in_cuda_graphs(given):
    """As a server captures them: each by itself, in one pool, and what is left alone between them."""
    pool, buffer = torch.cuda.graph_pool_handle(), torch.zeros(512, WIDTH, device="cuda")
    step = {"rows": 0, "capture": False}

    def captured(calls):
        def one(call):
            known = {}

            def run(box):
                if step["capture"]:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        results = call(box)
                    known[step["rows"]] = graph, [_weak(result) for result in results]
                    return results
                if step["rows"] not in known:
                    return call(box)
                graph, results = known[step["rows"]]
                graph.replay()
                return results

            return run

        return [one(call) for call in calls]

    fast = df.compile(model, Stretching(), batch_dims={"x": 0})
    engine_of(fast).operators.captured = captured
    for rows, capture in [(256, False), (64, False), (256, True), (64, True)]:
        step.update(rows=rows, capture=capture)
        fast(buffer[:rows], given)
    step["capture"] = False
    for rows in (64, 256, 100, 256, 64):
        step["rows"] = rows
        x = buffer[:rows].copy_(torch.randn(rows, WIDTH))
        torch.testing.assert_close(fast(x, given), model(x, given), rtol=1e-4, atol=1e-4)


@torch.library.custom_op("dynaflow_tests::told", mutates_args=())
def told(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + 1


@told.register_fake
def _(rows, x):
    return torch.empty_like(x)


def test_what_lies_on_the_host_slows_no_kernel():
    """Else Inductor takes what the operator makes for unaligned: kernels would read it element by element."""
    x, rows = torch.randn(64, WIDTH, device="cuda"), torch.arange(64, dtype=torch.int32)
    fast = df.compile(lambda x, rows: told(rows, x * 2) * 3, "sequential", batch_dims={"x": 0, "rows": 0})
    with fresh_cache():  # what was compiled otherwise would do as well
        result, code = run_and_get_code(fast, x, rows)
    torch.testing.assert_close(result, (x * 2 + 1) * 3)
    code = "".join(code)
    assert "dynaflow_tests.told" in code and "assert_alignment" in code
    assert "not aligned" not in code


def _weak(tensor):
    """The same memory, which it does not keep: the pool gives it to the pieces behind."""
    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
