"""Strategies on a GPU: right with and without CUDA graphs, offloaded weights captured, the tuner and its clocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dynaflow as df
from dynaflow.strategies import Branches, CommOverlap, DualBatch, NanoFlow, Prefetch, Solver
from tests.gpu.test_cuda import decode_agrees, exact_matmuls, gap  # noqa: F401  (a fixture)
from tests.zoo import ZOO, decode_setup, to

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALL = {
    "nanoflow": lambda: NanoFlow(),
    "nanoflow, shares": lambda: NanoFlow(parts=3, sms=32),
    "nanoflow, merged": lambda: NanoFlow(merged=("*.mlp",)),
    "dual_batch": lambda: DualBatch(),
    "branches": lambda: Branches(lanes=3, wait=0.0),
    "solver": lambda: Solver(seconds=1.0),
}


def agree(model, fast, base, batch, turns=5, limit=1e-4):
    """With inputs that change from call to call."""
    for turn in range(turns):
        inputs = {
            k: v.roll(turn, 0) if isinstance(v, Tensor) and v.dim() and v.size(0) == batch else v
            for k, v in base.items()
        }
        assert gap(model(**inputs), fast(**inputs)) <= limit


@pytest.mark.parametrize("cudagraph", [None, "plan"])
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "branch_cnn"])
def test_equal_to_the_plain_model(name, strategy, cudagraph):
    if strategy == "nanoflow, merged" and name == "branch_cnn":
        pytest.skip("has no mlp")
    entry = ZOO[name]
    model = to("cuda", torch.float32, entry.build())
    fast = df.compile(model, ALL[strategy](), operators="eager", cudagraph=cudagraph)
    with torch.no_grad():
        agree(model, fast, to("cuda", torch.float32, entry.inputs(6)), 6)
    if cudagraph and name != "deepseek_v3":  # some experts copy from the CPU
        assert fast.stats.graph_replays, fast.stats.capture_failures


@pytest.mark.parametrize("strategy", ["nanoflow", "solver"])
def test_decoding(strategy):
    setup = decode_setup("llama", 6)
    to("cuda", torch.float32, setup.model)
    decode_agrees(setup, df.compile(setup.model, ALL[strategy](), operators="inductor", cudagraph="plan"))


@torch.library.custom_op("dynaflow_tests::over_the_host", mutates_args=())
def over_the_host(x: Tensor) -> Tensor:
    """Stands for a collective over a slow link."""
    return x.to("cpu").to(x.device)


@over_the_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_comm_overlap():
    class Sending(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = x + over_the_host(torch.relu(block(x)))
            return x

    model = Sending(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
    scheduler = CommOverlap(parts=3, collectives="dynaflow_tests.over_the_host", by_rows=True)
    fast = df.compile(model, scheduler, operators="inductor")
    with torch.no_grad():
        for seed in range(20):
            x = torch.randn(9, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert {lane.name for lane in fast.plan(x).lanes} == {"compute", "network"}


@pytest.mark.parametrize("cudagraph", [None, "plan"])
@pytest.mark.parametrize("inner", [None, "nanoflow"])
def test_weights_on_the_host(inner, cudagraph):
    entry = ZOO["llama"]
    plain, model = (to("cuda", torch.float32, entry.build()) for _ in range(2))
    df.offload(model, "cuda", match="*.layers.*")
    scheduler = Prefetch(ALL[inner]() if inner else None)
    fast = df.compile(model, scheduler, operators="inductor", cudagraph=cudagraph)
    with torch.no_grad():
        agree(plain, fast, to("cuda", torch.float32, entry.inputs(6)), 6)
    assert bool(fast.stats.graph_replays) == bool(cudagraph), fast.stats.capture_failures
    assert fast.stats.arena_bytes < sum(p.numel() * p.element_size() for p in model.parameters())


def test_fetches_run_on_the_copy_engine_beside_compute():
    """A fetch of the next operator starts before the one that runs has ended."""
    width, layers = 4096, 6
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).cuda().bfloat16()
    model.requires_grad_(False)
    df.offload(model, "cuda")
    fast = df.compile(model, Prefetch(), operators="eager")
    x = torch.randn(16384, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        with df.record() as recording:
            fast(x)
    (call,) = recording.calls
    copies = [s for s, t in zip(call.spans, call.plan.tasks, strict=True) if t.lane == "copy"]
    others = [s for s, t in zip(call.spans, call.plan.tasks, strict=True) if t.lane != "copy"]
    assert len(copies) == layers
    beside = sum(min(a[1], b[1]) > max(a[0], b[0]) for a in copies for b in others)
    assert beside >= layers - 2, (copies, others)


def test_auto_never_loses():
    entry = ZOO["branch_cnn"]
    model = to("cuda", torch.float32, entry.build())
    fast = df.compile(
        model, "auto", scheduler_options={"seconds": 20.0, "most": 2}, operators="eager", cudagraph="plan"
    )
    with torch.no_grad():
        inputs = to("cuda", torch.float32, entry.inputs(8))
        agree(model, fast, inputs, 8)
        decision = fast.explain(**inputs).decision
    measured = [t for t in decision.tried if t.measured]
    assert measured, str(decision)
    chosen = next(t for t in decision.tried if t.name == decision.chosen)
    assert decision.chosen == "sequential" or chosen.measured.ratio < 0.99


def test_profile_is_the_devices_time():
    """A product that no card computes in less than 0.2 ms: to issue it takes the host a tenth of that."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(3))).cuda().bfloat16()

    class Each(df.OpSchedulerBase):
        def partition(self):
            return [df.SplitModule("?")]

        def schedule(self, ctx):
            for op in ctx.ops:
                ctx.execute(ctx.items(op))

    fast = df.compile(model, Each(), operators="eager")
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        profile = fast.profile(x)
        (seconds,) = profile.values()
    assert seconds > 2 * 8192**3 / 5e15
