"""Compute beside the copy engines: each block's output goes to the host and back, as over a slow link.

Two nano-batches: while one is on its way, the other computes. The bound is the largest of what can't overlap with
itself: all compute, all copies of one direction, and one nano-batch's own chain of blocks and round trips. Each is
measured alone, with the same half-size operators, in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from benchmarks.llama import BF16_LIMIT, FP32_LIMIT
from benchmarks.measure import Figure, Timed, Trial, agree, figure, once, rounds_for, side_by_side
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from dynaflow.cost.kernels import Kernel, describe

FRACTION = 0.95
"""Of the bound, at least."""

# At 790 TFLOP/s and 54 GB/s each way a block computes for 3.7 ms and its round trip takes 2.5 ms. Tokens cancel out:
# the balance is set by the width inside a block.
BLOCKS, HIDDEN, INSIDE, TOKENS = 16, 4096, 14336, 8192
TINY_BLOCKS, TINY_HIDDEN, TINY_INSIDE, TINY_TOKENS = 2, 16, 32, 8


class Host:
    """Pinned buffers, one for each round trip of a forward: no two that may be under way share one."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.turn = 0
        self.reached = True
        """False leaves the copies out, to time what is left."""
        self.stand_in = torch.empty(0)
        """What comes back then. Real numbers: how fast a power-limited card multiplies depends on them."""

    def prepare(self, like: Tensor, count: int) -> None:
        pin = like.is_cuda
        self.buffers = [torch.empty(like.shape, dtype=like.dtype, pin_memory=pin) for _ in range(count)]
        self.stand_in = torch.randn_like(like)

    def free(self) -> None:
        self.__init__()  # type: ignore[misc]

    def take(self, x: Tensor) -> Tensor:
        self.turn = (self.turn + 1) % len(self.buffers)
        return self.buffers[self.turn][: x.size(0)]


HOST = Host()


@torch.library.custom_op("dynaflow_benchmarks::round_trip", mutates_args=())
def round_trip(x: Tensor) -> Tensor:
    """To the host and back, on the current stream."""
    if not HOST.reached:
        return HOST.stand_in[: x.size(0)]
    buffer, back = HOST.take(x), torch.empty_like(x)
    buffer.copy_(x, non_blocking=True)
    back.copy_(buffer, non_blocking=True)
    return back


@round_trip.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _two_copies(args: tuple[Tensor, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Kernel, Kernel]:
    nbytes = result.numel() * result.element_size()
    return Kernel(kind="copy_out", bytes=nbytes), Kernel(kind="copy_in", bytes=nbytes)


describe(torch.ops.dynaflow_benchmarks.round_trip, _two_copies)


class Block(nn.Module):
    def __init__(self, hidden: int, inside: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inside, bias=False), nn.Linear(hidden, inside, bias=False)
        self.down = nn.Linear(inside, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:])
        return x + round_trip(self.down(F.silu(self.gate(normed)) * self.up(normed)))


class BesideCopies(df.OpSchedulerBase):
    """Nano-batches take turns at computing; each has a lane for its copies, so both directions are used at once."""

    def __init__(self, parts: int = 2) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return [df.SplitFunc(torch.ops.dynaflow_benchmarks.round_trip, tag="copy", splittable=True)]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        turn = 0
        while ops := ctx.get_ready_ops():
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            if "copy" in op.tags:
                ctx.execute(op, lane=f"copy{op.micro_batch.index}")
                turn = (turn + 1) % self.parts
            else:
                ctx.execute(op, lane="compute")


def trials(settings: Settings) -> Iterator[Trial]:
    if not settings.can_hold_llama:
        return
    sizes = (TINY_BLOCKS, TINY_HIDDEN, TINY_INSIDE, TINY_TOKENS) if settings.tiny else (BLOCKS, HIDDEN, INSIDE, TOKENS)
    blocks, hidden, inside, tokens = sizes
    x = torch.randn(tokens, hidden, device=settings.device, dtype=torch.bfloat16 if settings.cuda else torch.float32)
    HOST.prepare(x, 2 * blocks)
    model = make_model(blocks, hidden, inside, x)
    situation = f"{blocks} blocks of {hidden}/{inside}, {tokens} tokens"
    skip = "" if settings.cuda else "copy engines and lanes beside them need CUDA"
    for cudagraph in (None, "plan"):
        times = once(lambda cudagraph=cudagraph: _times(model, x, cudagraph, settings))
        suffix = ", one graph" if cudagraph else ""
        yield Trial(
            what=f"fraction of the bound{suffix}",
            baseline="largest of compute, copies one way, one nano-batch's chain",
            situation=situation,
            limit=FRACTION,
            at_least=True,
            skip=skip,
            run=lambda times=times: fraction(times()),
        )
        yield Trial(
            what=f"speed-up{suffix}",
            baseline=f"sequential{suffix}",
            situation=situation,
            skip=skip,
            run=lambda times=times: speed_up(times()),
        )
    yield Trial(
        what="difference from the plain model",
        baseline="",
        unit="relative",
        situation=situation,
        limit=BF16_LIMIT if settings.cuda else FP32_LIMIT,
        run=lambda: Figure(value=_checked(model, _compiled(model, BesideCopies(), None, settings), x, settings)),
    )
    HOST.free()


def make_model(blocks: int, hidden: int, inside: int, like: Tensor) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(hidden, inside) for _ in range(blocks)))
    model = model.to(like.dtype).to_empty(device=like.device).eval().requires_grad_(False)
    generator = torch.Generator(like.device).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02, generator=generator)
    return model


def _compiled(model: nn.Module, scheduler: df.OpSchedulerBase, cudagraph: str | None, settings: Settings) -> Any:
    return df.compile(model, scheduler, cudagraph=cudagraph, operators=settings.operators)  # type: ignore[arg-type]


def _checked(model: nn.Module, fast: df.CompiledModel, x: Tensor, settings: Settings) -> float:
    return agree([model(x)], [fast(x).clone()], BF16_LIMIT if settings.cuda else FP32_LIMIT)


def _times(model: nn.Module, x: Tensor, cudagraph: str | None, settings: Settings) -> dict[str, list[float]]:
    both = _compiled(model, BesideCopies(), cudagraph, settings)
    sequential = _compiled(model, df.Sequential(), cudagraph, settings)
    plain = _compiled(model, BesideCopies(), None, settings)
    chain = _compiled(model, BesideCopies(parts=1), None, settings)
    half = x[: len(x) // 2]
    for fast, given in ((both, x), (sequential, x), (plain, x), (chain, half)):
        _checked(model, fast, given, settings)
        for _ in range(3):
            fast(given)
    progress("  all forms are warm")
    hosted = [b[: len(half)] for b in HOST.buffers]
    aside = torch.empty_like(half)

    def reach(yes: bool) -> None:
        HOST.reached = yes

    def to_host() -> None:
        for buffer in hosted:
            buffer.copy_(half, non_blocking=True)

    def from_host() -> None:
        for buffer in hosted:
            aside.copy_(buffer, non_blocking=True)

    # The components run without a graph: kernels of milliseconds hide the host.
    runs = {
        "both": Timed(run=lambda: both(x), prepare=lambda: reach(True)),
        "sequential": Timed(run=lambda: sequential(x), prepare=lambda: reach(True)),
        "compute": Timed(run=lambda: plain(x), prepare=lambda: reach(False)),
        "chain": Timed(run=lambda: chain(half), prepare=lambda: reach(True)),
        "to host": Timed(run=to_host),
        "from host": Timed(run=from_host),
    }
    try:
        return side_by_side(runs, settings.rounds or rounds_for(runs, 3 * settings.seconds))
    finally:
        reach(True)


PARTS = ("compute", "chain", "to host", "from host")


def fraction(times: dict[str, list[float]]) -> Figure:
    bounds = [max(parts) for parts in zip(*(times[p] for p in PARTS), strict=True)]
    medians = {f"{name.replace(' ', '_')}_ms": figure(times[name]).value * 1e3 for name in times}
    return figure([b / t for b, t in zip(bounds, times["both"], strict=True)], **medians, rounds=len(bounds))


def speed_up(times: dict[str, list[float]]) -> Figure:
    return figure([s / t for s, t in zip(times["sequential"], times["both"], strict=True)])


BENCHMARK = Benchmark(
    name="copies",
    title="Compute beside copies to the host and back, two nano-batches: how near to the bound.",
    suites=("fast",),
    trials=trials,
)
