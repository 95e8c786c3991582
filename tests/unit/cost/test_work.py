"""What operators do, counted without running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dynaflow as df
from dynaflow import _torch
from dynaflow.cost import work as work_module
from dynaflow.cost.kernels import Kernel, Recorder, describe
from dynaflow.cost.work import Work, operator_key, work_of
from dynaflow.partition.op_graph import OpGraph
from tests.helpers import STACK_RULES, Each, Stack, compiled, graph_of


def captured(model: Any, *inputs: Any, rules: Any = ()) -> OpGraph:
    fast = compiled(model, Each(rules, split=None))
    with torch.no_grad():
        fast.plan(*inputs)
    return graph_of(fast)


def whole(model: Any, *inputs: Tensor, rows: int | None = None) -> Work:
    """The work of all operators together, in their order."""
    graph = captured(model, *inputs)
    works = [work_of(graph, op, rows or len(inputs[0])) for op in graph.ops]
    assert not any(w.guessed for w in works)
    return Work(parts=tuple(p for w in works for p in w.parts))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(inside: int, outside: int) -> nn.Linear:
    return nn.Linear(inside, outside, bias=False, device="meta", dtype=torch.bfloat16)


# Exact counts


def test_linear_counts_exactly() -> None:
    found = whole(linear(64, 32), meta(8, 5, 64))
    (kernel,) = found.parts
    assert found.flops == 2 * 40 * 64 * 32
    assert found.bytes == 2 * (40 * 64 + 64 * 32 + 40 * 32)
    assert kernel.shape == (1, 40, 32, 64) and kernel.kind == "matmul"
    assert (found.dtype, found.kernels, found.tiles) == ("bfloat16", 1, 1)


def test_rows_scale_flops_but_not_weights() -> None:
    graph = captured(linear(64, 32), meta(8, 64))
    one, two = work_of(graph, graph.ops[0], 8), work_of(graph, graph.ops[0], 16)
    assert two.flops == 2 * one.flops
    assert two.bytes - one.bytes == 2 * 8 * (64 + 32), "the weights are read once, however many rows there are"


def test_attention_counts_exactly() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    found = whole(attend, meta(4, 8, 16, 32), meta(4, 8, 48, 32), meta(4, 8, 48, 32))
    assert [p.kind for p in found.parts] == ["attention"]
    assert found.flops == 4 * 4 * 8 * 16 * 48 * 32
    assert found.bytes == 2 * 4 * 8 * 32 * (16 + 48 + 48 + 16)


def test_causal_attention_does_half() -> None:
    def attend(q: Tensor, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=causal)

    full, half = (whole(lambda q, c=c: attend(q, c), meta(4, 8, 16, 32)) for c in (False, True))
    assert half.flops * 2 == full.flops


def test_grouped_keys_are_read_once_and_repeated_ones_are_written() -> None:
    """transformers repeats key heads in memory: what that costs is the difference."""

    def grouped(q: Tensor, kv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)

    def repeated(q: Tensor, kv: Tensor) -> Tensor:
        wide = kv[:, :, None].expand(-1, -1, 4, -1, -1).reshape(q.shape[0], 8, 48, 32)
        return F.scaled_dot_product_attention(q, wide, wide)

    q, kv = meta(4, 8, 1, 32), meta(4, 2, 48, 32)
    one, other = whole(grouped, q, kv), whole(repeated, q, kv)
    small, queries = 2 * kv.numel(), 2 * q.numel()
    assert one.flops == other.flops
    assert one.bytes == small + 2 * queries
    assert other.bytes == small + 4 * small + 4 * small + 2 * queries


def test_convolution_counts_exactly() -> None:
    conv = nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False, device="meta")
    found = whole(conv, meta(4, 8, 10, 12, dtype=torch.float32))
    (kernel,) = found.parts
    assert kernel.kind == "convolution" and kernel.dtype == "float32"
    assert found.flops == 2 * 4 * 16 * 10 * 12 * (8 // 2) * 9
    assert kernel.shape == (2, 4 * 10 * 12, 8, 4 * 9)
    assert found.bytes == 4 * (4 * 8 * 120 + 16 * 4 * 9 + 4 * 16 * 120)


def test_experts_that_no_row_goes_to_are_not_read() -> None:
    def experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=ends)

    weight, ends = meta(8, 64, 32), meta(8, dtype=torch.int32)
    with _torch.concrete_fake_mode():
        few = _recorded(experts, torch.empty(2, 64, dtype=torch.bfloat16), weight, ends)
    assert few.flops == 2 * 2 * 64 * 32
    assert few.bytes < 2 * (2 * 64 * 32) + 2 * (2 * 64 + 2 * 32) + 100, "two rows reach two experts of eight"


def _recorded(function: Any, *given: Tensor) -> Work:
    fakes = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in given]
    recorder = Recorder(fakes)
    with recorder:
        out = function(*fakes)
    return Work(parts=recorder.kernels(out))


# Fusion


def test_loops_become_one_kernel_and_what_stays_inside_is_not_traffic() -> None:
    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    found = whole(norm, meta(8, 256))
    assert [p.kind for p in found.parts] == ["loop"]
    assert found.bytes == 2 * 2 * 8 * 256
    assert found.tiles == 8, "a row is the smallest part of a reduction"


def test_a_kernel_between_keeps_loops_apart() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = linear(64, 128), linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.down(torch.relu(self.up(x * 2 + 1))) + x)

    found = whole(Gated(), meta(8, 64))
    assert [p.kind for p in found.parts] == ["loop", "matmul", "loop", "matmul", "loop"]


def test_results_of_different_sizes_come_from_loops_of_their_own() -> None:
    def turn(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        cos = angle.cos()
        return q * cos, k * cos

    found = whole(turn, meta(4, 32, 64), meta(4, 8, 64), meta(4, 1, 64))
    assert found.kernels == 2


def test_what_nobody_uses_costs_nothing() -> None:
    def wasteful(x: Tensor) -> Tensor:
        (x + 1).exp().sum()
        return x * 2

    with _torch.concrete_fake_mode():
        found = _recorded(wasteful, torch.empty(64, 64, dtype=torch.bfloat16))
    assert found.bytes == 2 * 2 * 64 * 64


def test_a_table_is_read_where_it_is_looked_at() -> None:
    found = whole(nn.Embedding(10000, 64, device="meta"), meta(8, 4, dtype=torch.long))
    assert found.bytes == 8 * 32 + 2 * 4 * 32 * 64


def test_a_cache_is_written_where_the_token_goes() -> None:
    def update(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
        cache.index_copy_(1, position, new)
        return cache.sum(-1)

    cache, new = meta(4, 512, 64), meta(4, 1, 64)
    found = whole(update, cache, meta(1, dtype=torch.long), new)
    write, read = found.parts
    assert write.bytes == 8 + 2 * 2 * new.numel()
    assert read.bytes == 2 * cache.numel() + 2 * 4 * 512


def test_views_cost_nothing() -> None:
    found = whole(lambda x: x.view(8, 2, 32).transpose(1, 2)[:, ::2] + 1, meta(8, 64))
    assert found.kernels == 1


# Copies, collectives, custom operators


def test_copies_between_host_and_device() -> None:
    with _torch.concrete_fake_mode():
        found = _recorded(lambda x: (x.to("cpu") + 1).to("meta"), torch.empty(64, 32))
    assert (found.copied_out, found.copied_in) == (64 * 32 * 4, 64 * 32 * 4)
    assert [p.kind for p in found.parts if p.kind != "loop"] == ["copy_out", "copy_in"]


def test_collectives_are_told_with_their_group() -> None:
    def reduce(x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", "tp")) + 1

    found = whole(reduce, meta(8, 64))
    assert found.collectives == (("all_reduce", 2 * 8 * 64, "tp"),)
    assert found.bytes == 2 * 2 * 8 * 64, "the sum goes over the link; the loop behind it over memory"


@torch.library.custom_op("dynaflow_tests::swap_out", mutates_args=())
def swap_out(x: Tensor) -> Tensor:
    return x.clone()


@swap_out.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_is_one_kernel_until_it_is_described() -> None:
    model = torch.ops.dynaflow_tests.swap_out
    (kernel,) = whole(lambda x: model(x), meta(8, 64)).parts
    assert (kernel.kind, kernel.bytes) == ("other", 2 * 2 * 8 * 64)
    describe(model, lambda args, kwargs, out: Kernel(kind="copy_out", bytes=2 * args[0].numel()))
    assert whole(lambda x: model(x), meta(8, 64)).copied_out == 2 * 8 * 64


def test_what_cannot_be_run_is_counted_by_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(linear(64, 32), meta(8, 64))

    def fail(*args: Any) -> Any:
        raise RuntimeError("no fake for this")

    monkeypatch.setattr(fx.Interpreter, "run", fail)
    found = work_of(graph, graph.ops[0], 16)
    assert found.guessed and found.flops == 0
    assert found.bytes == 2 * (16 * 64 + 64 * 32 + 16 * 32)


# Equal operators


def test_equal_operators_share_one_key_and_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(Stack(blocks=4), torch.randn(8, 8), rules=STACK_RULES)
    runs = []
    really = fx.Interpreter.run
    monkeypatch.setattr(fx.Interpreter, "run", lambda self, *args: runs.append(self.module) or really(self, *args))
    for op in graph.ops:
        work_of(graph, op, 8)
    keys = {op.name: operator_key(graph, op) for op in graph.ops}
    assert len({keys[f"layers.{i}.mlp"] for i in range(4)}) == 1
    assert keys["layers.0.mlp"] != keys["layers.0.attn"]
    assert len(runs) == len(set(keys.values())) < len(graph.ops)


def test_keys_tell_sizes_apart_but_not_batches() -> None:
    def key(width: int, batch: int) -> str:
        graph = captured(linear(width, 32), meta(batch, width))
        return operator_key(graph, graph.ops[0])

    assert key(64, 8) == key(64, 12)
    assert key(64, 8) != key(128, 8)


def test_keys_are_the_same_in_another_capture() -> None:
    first, second = (captured(Stack(), torch.randn(8, 8), rules=STACK_RULES) for _ in range(2))
    assert [operator_key(first, op) for op in first.ops] == [operator_key(second, op) for op in second.ops]
    texts = [work_module.operator_text(first, op) for op in first.ops]
    assert all("0x" not in text for text in texts), "an address is not the same elsewhere"


def test_requests_scale_with_their_tokens() -> None:
    class Facts(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.sequential()

    fast = compiled(lambda x, ends: x * ends.sum(), Facts(), facts={"num_tokens": (6, 6)})
    with torch.no_grad():
        fast.plan(torch.randn(12, 8), torch.randn(2, 8))
    sizes = work_module.concrete_sizes(graph_of(fast), 6)
    assert sorted(sizes.values()) == [1, 6]
