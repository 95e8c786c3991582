"""CUDA graphs: whole plans and pieces, with inputs that stay or move, results that are held, captures that fail."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.runtime import cuda_graphs
from tests.gpu.test_cuda import Lanes, decode_agrees, exact_matmuls, gap  # noqa: F401  (a fixture)
from tests.zoo import DECODE, ZOO, decode_setup, to

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))) + x)


CUTS = [("a", "a"), ("b", "attention"), ("c", "c")]


def block() -> Block:
    torch.manual_seed(0)
    return Block().cuda().eval()


def rows(seed: int, batch: int = 8) -> Tensor:
    return torch.randn(batch, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("mode", ["plan", "pieces"])
def test_static_cache_decode(name, operators, mode):
    setup = decode_setup(name, 6)
    to("cuda", torch.float32, setup.model)
    fast = df.compile(setup.model, Lanes(ZOO[name].cuts, 2, [4, 2]), operators=operators, cudagraph=mode)
    decode_agrees(setup, fast)
    stats = fast.stats
    assert stats.captures and stats.graph_replays >= setup.steps - 2
    assert stats.captures <= 2 or mode == "pieces" or stats.capture_failures
    check_failures(name, stats)


def check_failures(name: str, stats: df.Stats) -> None:
    """The experts of Mixtral copy from the CPU, which no graph can hold; all else is captured."""
    assert bool(stats.capture_failures) == (name == "mixtral")
    assert all("experts" in failure for failure in stats.capture_failures)


@pytest.mark.parametrize("name", ["llama", "mixtral", "branch_cnn", "bert"])
@pytest.mark.parametrize("mode", ["plan", "pieces"])
def test_models_agree(name, mode):
    entry = ZOO[name]
    model = to("cuda", torch.float32, entry.build())
    fast = df.compile(model, Lanes(entry.cuts, 3, [1, 3, 2]), operators="inductor", cudagraph=mode)
    with torch.no_grad():
        base = to("cuda", torch.float32, entry.inputs(6))
        for turn in range(8):
            inputs = {
                k: v.roll(turn, 0) if isinstance(v, Tensor) and v.dim() and v.size(0) == 6 else v
                for k, v in base.items()
            }
            assert gap(model(**inputs), fast(**inputs)) <= 1e-4
    assert fast.stats.captures and fast.stats.graph_replays
    check_failures(name, fast.stats)


@pytest.mark.parametrize("scheduler", [df.Sequential(), Lanes(CUTS, 2, 2)], ids=["sequential", "lanes"])
def test_results_that_are_held_stay(scheduler):
    model = block()
    fast = df.compile(model, scheduler, cudagraph="plan")
    with torch.inference_mode():
        held = [(fast(rows(i)), model(rows(i))) for i in range(12)]
        for found, expected in held:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert fast.stats.graph_replays >= 10


def test_a_caller_that_keeps_the_last_result():
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan")
    with torch.inference_mode():
        last = None
        for i in range(10):
            result = fast(rows(i))
            for found, seed in ((last, i - 1), (result, i)):
                if found is not None:
                    torch.testing.assert_close(found, model(rows(seed)), rtol=1e-5, atol=1e-5)
            last = result
    assert fast.stats.captures == 2 and fast.stats.graph_replays == 9


@pytest.mark.parametrize("scheduler", [df.Sequential(), Lanes(CUTS, 2, 2)], ids=["sequential", "lanes"])
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_results_that_are_held_stay_when_other_sizes_run(operators, scheduler):
    """Graphs share a pool: what one returns may lie where another one works."""
    model = block()
    fast = df.compile(model, scheduler, operators=operators, cudagraph="plan")
    sizes = (4096, 2048, 1024, 1030, 512)
    with torch.inference_mode():
        for size in sizes:
            fast(rows(0, size)), fast(rows(0, size))
        for size in sizes:
            found, expected = fast(rows(1, size)), model(rows(1, size))
            for other in sizes:
                fast(rows(2, other))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert fast.stats.graph_replays > len(sizes) ** 2


@pytest.mark.parametrize("sms", [None, 64])
def test_workspaces_that_torch_lets_go_of(sms):
    """torch.compile forgets all workspaces of cuBLAS when it makes graphs; ours go on using theirs."""
    deep = nn.Sequential(nn.Linear(32768, 64), nn.Linear(64, 32768)).cuda().bfloat16()
    model = nn.Sequential(*[nn.Sequential(deep, deep) for _ in range(2)]).eval()

    class Two(df.OpSchedulerBase):
        def partition(self):
            return [df.SplitModule("?")]

        def schedule(self, ctx):
            lanes = [ctx.lane("one", sms=sms), ctx.lane("two")]
            ctx.split(2)
            for op in ctx.ops:
                for item in ctx.items(op):
                    ctx.execute(item, lane=lanes[item.micro_batch % 2])

    fast = df.compile(model, Two(), operators="eager", cudagraph="plan")
    other = torch.compile(nn.Linear(256, 256).cuda(), mode="reduce-overhead")
    x = torch.randn(64, 32768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = [fast(x).clone() for _ in range(3)][-1]
        for _ in range(4):
            other(torch.randn(8, 256, device="cuda"))
        torch.cuda.empty_cache()
        others = [torch.full((4 << 20,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
        for _ in range(20):
            assert torch.equal(fast(x), expected)
        assert all(bool((t == 7).all()) for t in others)
    assert fast.stats.graph_replays >= 20


def test_promised_inputs_are_used_in_place_and_may_move():
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan", static_inputs=["x"])
    with torch.inference_mode():
        x = rows(0)
        for i in range(4):
            x.copy_(rows(i))
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        captures = fast.stats.captures
        y = rows(9)
        for _ in range(3):  # the promise is broken: found out, and captured again
            torch.testing.assert_close(fast(y), model(y), rtol=1e-5, atol=1e-5)
    assert captures and captures < fast.stats.captures <= captures + 2


def test_parameters_that_move_are_found_out():
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan")
    with torch.no_grad():
        x = rows(0)
        for _ in range(3):
            fast(x)
        model.b.weight.data = torch.randn_like(model.b.weight)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def test_written_inputs_are_written():
    def model(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.add_(x)
        return torch.relu(state) * 2, x[:, :3]

    fast = df.compile(model, df.Sequential(), cudagraph="plan")
    ours, theirs = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    with torch.no_grad():
        for i in range(6):
            x = rows(i, 4)[:, :8].contiguous()
            found, view = fast(x, ours)
            expected, _ = model(x, theirs)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(ours, theirs)
            view.zero_()  # a view of the argument is one of the caller's own
            assert not x[:, :3].any()
    assert fast.stats.graph_replays == 5


@torch.library.custom_op("dynaflow_test::stubborn", mutates_args=())
def stubborn(x: Tensor) -> Tensor:
    torch.cuda.current_stream().synchronize()
    return x * 2


@stubborn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(stubborn(torch.relu(self.a(x))))


class Named(df.OpSchedulerBase):
    def __init__(self, tag: str = "", lanes: int = 1) -> None:
        self.tag, self.lanes = tag, lanes

    def partition(self):
        tags = {"tag": self.tag} if self.tag else {}
        return [df.SplitModule("a"), df.SplitFunc("stubborn", **tags), df.SplitModule("b")]

    def schedule(self, ctx):
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch.index % self.lanes}")


@pytest.mark.parametrize("lanes", [1, 2])
def test_failed_capture_names_the_operator_and_goes_on_in_pieces(lanes):
    torch.manual_seed(0)
    model = Stubborn().cuda().eval()
    fast = df.compile(model, Named(lanes=lanes), cudagraph="plan")
    with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            torch.testing.assert_close(fast(rows(i)), model(rows(i)), rtol=1e-5, atol=1e-5)
    told = [w for w in caught if "can't be captured" in str(w.message)]
    assert len(told) == 1 and "stubborn" in str(told[0].message)
    assert len(fast.stats.capture_failures) == 1 and "stubborn" in fast.stats.capture_failures[0]
    assert fast.stats.captures and fast.stats.graph_replays, "the rest is captured"


def test_tagged_operators_stay_outside():
    torch.manual_seed(0)
    model = Stubborn().cuda().eval()
    for mode in ("plan", "pieces"):
        fast = df.compile(model, Named("no_capture", 2), cudagraph=mode)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(6):
                torch.testing.assert_close(fast(rows(i)), model(rows(i)), rtol=1e-5, atol=1e-5)
        assert not fast.stats.capture_failures and fast.stats.captures == 4 and fast.stats.graph_replays == 20


def test_a_bounded_number_is_kept(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan")
    with torch.inference_mode():
        for _ in range(3):
            for batch in (4, 6, 8, 10):
                for i in range(2):
                    x = rows(i, batch)
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert engine_of(fast).planner.lowerer.graphs.graphs == 2
    assert fast.stats.captures > 4, "what was dropped is captured again"


def test_callers_on_several_streams():
    """Graphs share memory: those of one model wait for one another."""
    model = nn.Sequential(*[Block(1024) for _ in range(4)]).cuda().eval()
    fast = df.compile(model, Lanes([("*.b", "attention")], 2, 2), operators="eager", cudagraph="plan")
    with torch.inference_mode():
        xs = [torch.randn(n, 1024, device="cuda") for n in (64, 96)]
        expected = [model(x) for x in xs]
        for x in xs:
            fast(x), fast(x)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        worst = torch.zeros((), device="cuda")
        for i in range(60):
            with torch.cuda.stream(streams[i % 2]):
                y = fast(xs[i % 2])
                gaps = (y - expected[i % 2]).abs().max()
                torch.cuda._sleep(20_000)
                del y
            torch.cuda.current_stream().wait_stream(streams[i % 2])
            worst = torch.maximum(worst, gaps)
    assert worst.item() < 1e-4


def test_random_numbers_go_on():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda().train()
    fast = df.compile(model, df.Sequential(), operators="eager", cudagraph="plan")
    with torch.no_grad():
        x = rows(0)
        found = [fast(x).clone() for _ in range(5)]
    assert fast.stats.graph_replays == 4
    assert len({tuple(f.flatten().tolist()) for f in found}) == 5


def test_gradients_mean_no_graphs():
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan")
    with pytest.warns(UserWarning, match="gradients"):
        for _ in range(3):
            fast(rows(0)).sum().backward()
    assert not fast.stats.captures and fast.stats.capture_failures


@pytest.mark.parametrize("mode", ["plan", "pieces"])
def test_partitions_inside_a_graph(mode):
    class Shares(Lanes):
        def schedule(self, ctx):
            ctx.lane("lane1", sms=32)
            super().schedule(ctx)

    model = block()
    fast = df.compile(model, Shares(CUTS, 2, 2), cudagraph=mode)
    with torch.inference_mode():
        for i in range(6):
            torch.testing.assert_close(fast(rows(i)), model(rows(i)), rtol=1e-5, atol=1e-5)
    assert fast.stats.graph_replays


def test_expanded_inputs_are_copied_in():
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x) + y

    fast = df.compile(model, df.Sequential(), cudagraph="plan")
    with torch.no_grad():
        for i in range(5):
            x, y = rows(i), rows(i + 50, 1).expand(8, 64)
            torch.testing.assert_close(fast(x, y), model(x, y))
    assert fast.stats.graph_replays == 4


@pytest.mark.parametrize("scheduler", [df.Sequential(), Lanes((), 2, 2)], ids=["sequential", "lanes"])
def test_results_share_memory_as_eager_ones_do(scheduler):
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.abs(x)
        return y, y.t(), torch.view_as_real(x), torch.cat((y, y), 1)

    fast = df.compile(model, scheduler, cudagraph="plan")
    with torch.no_grad():
        held = []
        for i in range(8):  # all are held, so that they are copied in the end
            x = torch.complex(rows(i), rows(i + 50))
            held.append((model(x), fast(x)))
        for expected, found in held:
            torch.testing.assert_close(found, expected)
            assert found[0].data_ptr() == found[1].data_ptr() and found[2].data_ptr() == expected[2].data_ptr()
            assert len({t.data_ptr() for t in found}) == 3
    assert fast.stats.graph_replays


def test_inputs_that_always_move_end_the_captures():
    model = block()
    fast = df.compile(model, Lanes(CUTS, 2, 2), cudagraph="plan", static_inputs=["x"])
    with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = [rows(i) for i in range(cuda_graphs.MAX_CAPTURES + 4)]
        for x in kept:
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert fast.stats.captures == cuda_graphs.MAX_CAPTURES and len(fast.stats.capture_failures) == 1
    assert any("elsewhere in memory" in str(w.message) for w in caught)


@pytest.mark.parametrize("scheduler", [df.Sequential(), Lanes(CUTS, 2, 2)], ids=["sequential", "lanes"])
def test_buckets_share_graphs(scheduler):
    class Buckets(type(scheduler)):
        def bucket(self, batch_size: int) -> int:
            return 1 << (batch_size - 1).bit_length()

    bucketed = Buckets(*([] if isinstance(scheduler, df.Sequential) else [CUTS, 2, 2]))
    model = block()
    fast = df.compile(model, bucketed, cudagraph="plan")
    with torch.inference_mode():
        for batch in (5, 7, 6, 8, 5, 3, 4, 3):
            x = rows(batch, batch)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert fast.stats.plans == 2 and fast.stats.captures <= 4 and fast.stats.graph_replays == 6
