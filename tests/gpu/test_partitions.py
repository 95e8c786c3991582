"""Lanes with shares of the device: right results, and kernels that stay on their own SMs."""

from __future__ import annotations

import random

import pytest
import torch

import dynaflow as df
from dynaflow.core.plan import Lane
from dynaflow.runtime.cuda_lanes import StreamPool
from dynaflow.runtime.sm_partitions import CtypesDriver, carve, for_lanes
from tests.helpers import STACK_RULES, Stack

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

WIDTH, BLOCKS = 256, 4096


@triton.jit
def _smid(out):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0), sm)


class Shared(df.OpSchedulerBase):
    """Attention on "memory", the MLP on "compute", the rest on "main", in two halves; `lanes` are declared."""

    def __init__(self, *lanes: Lane, only: str | None = None) -> None:
        self.lanes, self.only = lanes, only

    def partition(self):
        return list(STACK_RULES)

    def schedule(self, ctx):
        for lane in self.lanes:
            ctx.lane(lane.name, sms=lane.sms, priority=lane.priority)
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                lane = "memory" if "attention" in op.tags else "compute" if "mlp" in op.tags else "main"
                ctx.execute(op, lane=self.only or lane)


class Smids:
    """An on_task hook: notes on which SMs a kernel of many blocks ran, lane by lane."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {
            lane: torch.full((BLOCKS,), -1, dtype=torch.int32, device="cuda") for lane in ("memory", "compute", "main")
        }

    def __call__(self, task: df.Task, moment: str) -> None:
        if moment == "start":
            _smid[(BLOCKS,)](self.found[task.lane])

    def clear(self) -> None:
        for ids in self.found.values():
            ids.fill_(-1)

    def sets(self) -> dict[str, set[int]]:
        torch.cuda.synchronize()
        return {lane: set(ids.tolist()) - {-1} for lane, ids in self.found.items()}


def total() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


SHARES = (Lane(name="memory", sms=24), Lane(name="compute", sms=48))
PLAN_LANES = (*SHARES, Lane(name="main"))


def model_and_input():
    torch.manual_seed(0)
    return Stack(WIDTH).cuda(), torch.randn(64, WIDTH, device="cuda")


def smids_on(stream: torch.cuda.Stream) -> set[int]:
    out = torch.full((BLOCKS,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        _smid[(BLOCKS,)](out)
    torch.cuda.synchronize()
    return set(out.tolist())


def granted(lanes: tuple[Lane, ...]) -> dict[str, int]:
    return {lane.name: part.sms for lane, part in zip(lanes, for_lanes(0, lanes), strict=True)}


def assert_apart(found: dict[str, set[int]], sms: dict[str, int]) -> None:
    for lane, ids in found.items():
        assert 0 < len(ids) <= sms[lane], (lane, sorted(ids))
        assert not any(ids & other for name, other in found.items() if name != lane), found


@pytest.mark.parametrize(
    "lanes",
    [
        SHARES,
        (Lane(name="compute", sms=48),),
        (Lane(name="main", sms=8), Lane(name="memory", sms=24, priority=-1), Lane(name="compute", sms=64)),
        (Lane(name="memory", priority=-1), Lane(name="compute", priority=-5)),
        (Lane(name="memory", sms=72), Lane(name="compute", sms=total())),
    ],
)
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_results_agree(lanes, operators):
    """100 replays with changing inputs, and lanes that are held up at random: nothing is read too early."""
    model, x = model_and_input()
    dice = random.Random(0)

    def delay(task, moment):
        if moment == "start" and dice.random() < 0.2:
            torch.cuda._sleep(dice.randrange(1000, 400_000))

    fast = df.compile(model, Shared(*lanes), operators=operators, on_task=delay)
    worst = torch.zeros((), device="cuda")
    with torch.no_grad():
        for i in range(100):
            inputs = x.roll(i, 0)
            worst = torch.maximum(worst, (fast(inputs) - model(inputs)).abs().max())
    assert worst.item() < 1e-4
    assert fast.stats.replays == 99


def test_a_lane_with_all_sms_is_everywhere():
    lanes = (Lane(name="memory", sms=72), Lane(name="compute", sms=total()))
    held, free = (smids_on(s) for s in StreamPool().get(torch.device("cuda", 0), lanes))
    assert len(held) <= 72 and held < free and len(free) > 0.9 * total()


def test_partitions_make_the_device():
    parts = for_lanes(0, PLAN_LANES)
    assert parts[0].sms >= 24 and parts[1].sms >= 48
    assert sum(p.sms for p in parts) == total()
    assert for_lanes(0, PLAN_LANES) is parts, "green contexts are made once"
    streams = StreamPool().get(torch.device("cuda", 0), PLAN_LANES)
    found = {lane.name: smids_on(stream) for lane, stream in zip(PLAN_LANES, streams, strict=True)}
    assert_apart(found, granted(PLAN_LANES))
    everywhere = smids_on(torch.cuda.current_stream())
    assert len(everywhere) > 0.9 * total(), "on a plain stream the same kernel is everywhere"


def test_all_that_is_left_is_a_share():
    rest = total() - for_lanes(0, (Lane(name="memory", sms=64), Lane(name="main")))[0].sms
    parts = for_lanes(0, (Lane(name="memory", sms=64), Lane(name="compute", sms=rest)))
    assert sum(p.sms for p in parts) == total()


def test_ctypes_gives_the_same():
    """Where cuda.bindings is installed, this is the other way to the driver; else it is the same one."""
    parts = carve(CtypesDriver(), 0, PLAN_LANES)
    assert [p.sms for p in parts] == [p.sms for p in for_lanes(0, PLAN_LANES)]
    found = {lane.name: smids_on(p.stream(lane)) for lane, p in zip(PLAN_LANES, parts, strict=True)}
    assert_apart(found, granted(PLAN_LANES))


def test_kernels_stay_in_their_partition():
    model, x = model_and_input()
    smids = Smids()
    fast = df.compile(model, Shared(*SHARES), operators="eager", on_task=smids)
    with torch.no_grad():
        fast(x)
        assert_apart(smids.sets(), granted(fast.plan(x).lanes))


def test_one_lane_stays_in_its_partition():
    model, x = model_and_input()
    smids = Smids()
    fast = df.compile(model, Shared(Lane(name="main", sms=16), only="main"), operators="eager", on_task=smids)
    stream = torch.cuda.current_stream()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert torch.cuda.current_stream() == stream
    assert 0 < len(smids.sets()["main"]) <= 16


def test_in_a_cuda_graph():
    """Captured and replayed with other inputs: right, and still on the SMs of each lane."""
    model, x = model_and_input()
    smids = Smids()
    fast = df.compile(model, Shared(*SHARES), operators="eager", on_task=smids)
    static = x.clone()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fast(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(static)
        smids.clear()
        for i in range(5):
            static.copy_(x.roll(i, 0))
            graph.replay()
            torch.testing.assert_close(y, model(static), rtol=1e-4, atol=1e-4)
        assert_apart(smids.sets(), granted(fast.plan(x).lanes))


def test_too_many():
    model, x = model_and_input()
    most = total() - 8
    fast = df.compile(model, Shared(Lane(name="memory", sms=most), Lane(name="compute", sms=48)), operators="eager")
    with torch.no_grad(), pytest.raises(df.PlanError, match=f"{most + 48} SMs .* the device has {total()}") as e:
        fast(x)
    assert "memory" in str(e.value) and "compute" in str(e.value)


def test_nothing_left():
    model, x = model_and_input()
    both = Lane(name="memory", sms=64), Lane(name="compute", sms=total() - 64)
    fast = df.compile(model, Shared(*both), operators="eager")
    with torch.no_grad(), pytest.raises(df.PlanError, match="what the others leave, but 0 SMs"):
        fast(x)


def test_priorities():
    device, pool = torch.device("cuda", 0), StreamPool()
    plain = (Lane(name="main"), Lane(name="memory", priority=-1), Lane(name="compute"))
    assert [stream.priority for stream in pool.get(device, plain)] == [-1, 0], "the first lane is the caller's own"
    shared = (Lane(name="main"), Lane(name="memory", sms=24, priority=-1))
    assert [stream.priority for stream in pool.get(device, shared)] == [0, -1]
    assert pool.get(device, shared) == pool.get(device, shared)


def test_a_context_knows_the_sms():
    model, x = model_and_input()
    found = []

    class Ask(Shared):
        def schedule(self, ctx):
            found.append(ctx.sms)
            super().schedule(ctx)

    with torch.no_grad():
        df.compile(model, Ask(), operators="eager")(x)
    assert found == [total()]
