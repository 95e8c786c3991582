"""The zoo on CUDA: 1 to 4 lanes, fp32 and bf16, replays with fresh inputs and random delays in the lanes."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache, run_and_get_code

import dynaflow as df
from dynaflow.api import engine_of
from tests.zoo import DECODE, ZOO, decode_setup, tensors, to

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Lanes(df.OpSchedulerBase):
    """Micro-batches in turn on `lanes` lanes, as (sizes of) `split` says."""

    def __init__(self, cuts, lanes, split):
        self.cuts, self.lanes, self.split = cuts, lanes, split

    def partition(self):
        return [df.SplitModule(glob, tag=tag) for glob, tag in self.cuts]

    def schedule(self, ctx):
        ctx.split(self.split)
        turn = 0
        while ops := ctx.get_ready_ops():
            for op in ops:
                lane = op.micro_batch.index + turn * ("attention" in op.tags)
                ctx.execute(op, lane=f"lane{lane % self.lanes}")
            turn += 1


@pytest.fixture(autouse=True)
def exact_matmuls():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def gap(expected, found) -> float:
    """The largest difference, relative to the largest value."""
    worst = 0.0
    for e, f in zip(tensors(expected), tensors(found), strict=True):
        assert e.shape == f.shape and e.dtype == f.dtype and e.device == f.device
        if e.is_floating_point():
            worst = max(worst, ((e - f).abs().max() / e.abs().max().clamp(min=1.0)).item())
        else:
            assert torch.equal(e, f)
    return worst


def agree(name, dtype, operators, plans, limit):
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"needs {entry.requires}")
    model = to("cuda", dtype, entry.build())
    fast = df.compile(model, df.Sequential(), operators=operators)
    with torch.no_grad():
        for lanes, split in plans:
            fast.set_scheduler(Lanes(entry.cuts, lanes, split))
            for _ in range(2):
                inputs = to("cuda", dtype, entry.inputs(6))
                expected = model(**inputs)
                found = fast(**inputs)
                torch.cuda.synchronize()
                assert gap(expected, found) <= limit, (lanes, split)
    assert fast.stats.plans == len(plans) and fast.stats.graphs == 1 and not fast.stats.plain_graphs
    assert fast.stats.replays == len(plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ZOO))
def test_models_agree(name, dtype):
    agree(name, dtype, "eager", ((1, 2), (2, 2), (3, [1, 3, 2]), (4, 4)), LIMIT[dtype])


@pytest.mark.parametrize("name", list(ZOO))
def test_compiled_models_agree(name):
    # Compiled kernels add in another order than eager ones do, so the last digits differ.
    agree(name, torch.float32, "inductor", ((2, 2), (4, [1, 2, 2, 1])), 1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "branch_cnn"])
def test_compiled_models_agree_in_bf16(name):
    agree(name, torch.bfloat16, "inductor", ((2, 2), (3, [1, 3, 2])), LIMIT[torch.bfloat16])


@pytest.mark.parametrize("name", ["llama", "mixtral", "branch_cnn"])
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_replays_with_delays(name, operators):
    """200 replays with changing inputs, and lanes that are held up at random: nothing is read too early."""
    entry = ZOO[name]
    model = to("cuda", torch.float32, entry.build())
    dice = random.Random(0)

    def delay(task, moment):
        if moment == "start" and dice.random() < 0.2:
            torch.cuda._sleep(dice.randrange(1000, 400_000))  # up to about 0.2 ms on the lane

    fast = df.compile(model, Lanes(entry.cuts, 3, [2, 3, 1]), operators=operators, on_task=delay)
    with torch.no_grad():
        base = to("cuda", torch.float32, entry.inputs(6))
        worst = torch.zeros((), device="cuda")
        for _ in range(200):
            inputs = {
                k: v.roll(dice.randrange(6), 0) if isinstance(v, torch.Tensor) and v.dim() and v.size(0) == 6 else v
                for k, v in base.items()
            }
            found = tensors(fast(**inputs))
            for e, f in zip(tensors(model(**inputs)), found, strict=True):
                worst = torch.maximum(worst, ((e - f).abs().max() / e.abs().max().clamp(min=1.0)).float())
    assert worst.item() <= (1e-5 if operators == "eager" else 1e-4)
    assert fast.stats.replays == 199 and fast.stats.scheduler_calls == 1


def decode_agrees(setup, fast):
    """Every step, with a cache of its own on either side: results, keys and values, and counters."""
    ours, theirs = setup.cache(), setup.cache()
    with torch.no_grad():
        for i in range(setup.steps):
            expected = setup.model(**setup.step(i, theirs))
            found = fast(**setup.step(i, ours))
            assert gap(expected.logits, found.logits) <= 1e-5
            assert gap(theirs, ours) <= 1e-5
            for a, b in zip(theirs.layers, ours.layers, strict=True):
                assert torch.equal(a.cumulative_length, b.cumulative_length)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("name", DECODE)
def test_static_cache_decode(name, operators):
    setup = decode_setup(name, 6)
    to("cuda", torch.float32, setup.model)
    cuts = ZOO[name].cuts
    fast = df.compile(setup.model, Lanes(cuts, 2, [4, 2]), operators=operators, verify=True)
    decode_agrees(setup, fast)


def test_results_outlive_the_call_on_another_stream():
    """A result made on a side lane is used and freed on the caller's stream, which changes between calls."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
    fast = df.compile(model, Lanes([("*", "any")], 3, 3), operators="eager")
    with torch.no_grad():
        x = torch.randn(96, 512, device="cuda")
        expected = model(x)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        worst = torch.zeros((), device="cuda")
        for i in range(120):
            with torch.cuda.stream(streams[i % 3]):
                y = fast(x)
                torch.cuda._sleep(50_000)
                gaps = (y - expected).abs().max()
                del y
            torch.cuda.current_stream().wait_stream(streams[i % 3])
            worst = torch.maximum(worst, gaps)
    assert worst.item() < 1e-4


def test_failing_operator_leaves_the_lanes_joined():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x).relu())

    model = Model().cuda()
    broken = [True]

    def fail(task, moment):
        if broken[0] and moment == "start" and task.items[0].op == "b":
            raise ValueError("on purpose")

    fast = df.compile(model, Lanes([("a", "a"), ("b", "attention")], 2, 2), operators="eager", on_task=fail)
    x = torch.randn(4, 8, device="cuda")
    stream = torch.cuda.current_stream()
    with torch.no_grad():
        with pytest.raises(ValueError, match="on purpose") as caught:
            fast(x)
        assert any("task" in note for note in caught.value.__notes__)
        assert torch.cuda.current_stream() == stream
        broken[0] = False
        torch.testing.assert_close(fast(x), model(x))


def sums_by_rows_and_columns(x, y):
    """As the backward pass of a norm: Inductor reads the product once for both."""
    product = x * y
    by_column = product.sum((0, 1), keepdim=True)
    return product.sum(-1, keepdim=True) * x, by_column, product.view(-1, 8, 128).sum(0)


def test_sums_keep_their_dimensions():
    """Inductor of torch 2.11 would return the second and the third as one row of numbers."""
    x, y = (torch.randn(8, 1024, 1024, device="cuda") for _ in range(2))
    fast = df.compile(sums_by_rows_and_columns, df.Sequential())
    with torch.no_grad():
        assert gap(sums_by_rows_and_columns(x, y), fast(x, y)) < 1e-4


@pytest.mark.parametrize("tried", [False, True])
def test_one_kernel_for_two_sizes_where_inductor_is_told_so(tried):
    """If it is to try that out on the device, it does so while kernels of other operators are still on their way."""
    q, k = (torch.randn(64, heads, 128, device="cuda") for heads in (32, 4))
    weight = torch.rand(128, device="cuda")

    def norms(q, k):
        return [F.rms_norm(x, (128,), weight) for x in (q, k)]

    fast = df.compile(norms, "sequential", batch_dims={"q": 0, "k": 0})
    engine_of(fast).operators.settings = {"combo_kernels": True, "benchmark_combo_kernel": tried}
    with fresh_cache():
        found, code = run_and_get_code(fast, q, k)
    assert gap(norms(q, k), found) < LIMIT[torch.float32]
    assert tried or any("combo_grid_meta" in text for text in code)


KERNELS = """
import os, torch
import dynaflow as df

with torch.no_grad():
    df.compile(lambda x: torch.softmax(x.sin() * 2, -1), "sequential")(torch.ones(64, 1000, device="cuda"))
print(os.environ["TRITON_CACHE_DIR"], torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_looks_for_kernels_where_the_first_has_left_them(tmp_path):
    """Those of others, too; though Inductor, which finds its own in another way, would not say where."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_CACHE_DIR", None)
    command = [sys.executable, "-c", KERNELS]
    first, second = (subprocess.check_output(command, env=environment, text=True).split() for _ in range(2))
    assert first == [str(tmp_path / "triton" / "0"), "0"]
    assert second == [first[0], "1"]


def test_a_forked_child_gets_an_error():
    """Not a hang, and not a word of CUDA's."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).cuda()
    x = torch.randn(4, 16, device="cuda")
    fast = df.compile(model, Lanes([("0", "a"), ("2", "b")], 2, 2), operators="eager")
    with torch.no_grad():
        assert gap(model(x), fast(x)) <= 1e-5
        child = os.fork()
        if child == 0:
            status = 1
            try:
                fast(x)
            except df.DynaFlowError as e:
                status = 0 if "spawn" in str(e) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert gap(model(x), fast(x)) <= 1e-5


@pytest.mark.parametrize("split", [[1, 4, 2], [3, 4], 7])
def test_opt_in_uneven_parts(split):
    """Its layers work on [rows * tokens, width]. Inductor of torch 2.11 asserts where a size is known by a multiple
    alone."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, use_cache=False,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval().cuda()
    fast = df.compile(model, Lanes([("*.self_attn", "attention"), ("*.fc1", "mlp")], 2, split))
    with torch.no_grad():
        for rows, tokens in ((7, 12), (7, 9), (7, 12)):
            ids = torch.arange(rows * tokens, device="cuda").reshape(rows, tokens) % 64
            assert gap(model(input_ids=ids), fast(input_ids=ids)) <= 1e-5
    assert not fast.stats.compile_failures and fast.stats.operators_compiled
