"""Collectives beside compute: two gloo processes, an all-reduce in each block, and a link as slow as one says.

gloo on one machine sends through its memory, and takes the cores for it that would compute. So each all-reduce takes at
least as long as it would over a link of a given speed; the lane that waits for it sleeps meanwhile, as it would for a
network card. The row "as gloo is" leaves that out. Of the ranks' times the longer one counts.

`python -m benchmarks.link --rank RANK ...` is one of the processes: rank 0 prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from benchmarks.llama import FP32_LIMIT
from benchmarks.measure import Figure, Timed, Trial, agree, figure, once, side_by_side
from benchmarks.report import HERE, progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark

WORLD = 2
LEAST = 1.0
TIMEOUT = 240
"""Seconds for the processes of one row: a hung one must not take the others along."""
ROUNDS = 15
LATENCY = 100e-6
LINKS: dict[str, float | None] = {"100 Mbit/s": 1e8 / 8, "400 Mbit/s": 4e8 / 8, "as gloo is": None}
"""Bytes a second, each way. Slow, since one core is: what counts is the share of the time."""
BALANCED = "100 Mbit/s"
STRATEGIES: dict[str, dict[str, Any]] = {"comm_overlap": {}, "token_weave": {}, "comet": {"parts": 2}}

# A block computes for some 15 to 20 ms on one core; its 256 KiB take 21 ms at 100 Mbit/s.
BLOCKS, HIDDEN, INSIDE, TOKENS = 4, 128, 4096, 512
TINY_BLOCKS, TINY_HIDDEN, TINY_INSIDE, TINY_TOKENS = 2, 16, 32, 8


class SlowLink(dist.ProcessGroup):
    """gloo, but a sum takes at least what a link of this speed would take."""

    def __init__(self, rank: int, size: int, inner: Any) -> None:
        super().__init__(rank, size)
        self.inner = inner
        self.speed: float | None = None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        end = time.perf_counter()
        if self.speed is not None:
            # Around a ring each rank sends, and receives, this much.
            sent = 2 * (self.size() - 1) / self.size() * sum(t.nbytes for t in tensors)
            end += LATENCY + sent / self.speed
        work = self.inner.allreduce(tensors, opts) if opts else self.inner.allreduce(tensors)
        work.wait()
        time.sleep(max(0.0, end - time.perf_counter()))
        return work

    def barrier(self, opts: Any = None) -> Any:
        return self.inner.barrier()

    # A group that is written in Python has to know its names itself.

    def getBackendName(self) -> str:
        return "slow_link"

    def _set_group_name(self, name: Any) -> None:
        self.name = name

    @property
    def group_name(self) -> Any:
        return self.name


def _slow_link(store: Any, rank: int, size: int, timeout: timedelta) -> SlowLink:
    return SlowLink(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class Block(nn.Module):
    """Its weights are spread over the ranks: each has a part of what is inside."""

    def __init__(self, hidden: int, inside: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up_proj, self.down_proj = nn.Linear(hidden, inside, bias=False), nn.Linear(inside, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        part = self.down_proj(F.gelu(self.up_proj(self.norm(x))))
        return x + functional.all_reduce(part, "sum", dist.group.WORLD)


def trials(settings: Settings) -> Iterator[Trial]:
    blocks, hidden, inside, tokens = sizes(settings.tiny)
    times = once(lambda: measure(settings))
    for link in LINKS:
        for strategy in STRATEGIES:
            yield Trial(
                what=f"speed-up of {strategy}",
                baseline="sequential",
                situation=f"{WORLD} ranks, link {link}, {blocks} blocks of {hidden}/{inside}, {tokens} tokens",
                limit=LEAST if link == BALANCED and strategy == "comm_overlap" and not settings.tiny else None,
                at_least=True,
                skip="a benchmark of the CPU" if settings.cuda else "",
                run=lambda link=link, strategy=strategy: _speed_up(times()[link], strategy),
            )


def sizes(tiny: bool) -> tuple[int, int, int, int]:
    return (TINY_BLOCKS, TINY_HIDDEN, TINY_INSIDE, TINY_TOKENS) if tiny else (BLOCKS, HIDDEN, INSIDE, TOKENS)


def _speed_up(times: dict[str, list[float]], strategy: str) -> Figure:
    medians = {f"{name}_ms": figure(times[name]).value * 1e3 for name in ("sequential", "compute", strategy)}
    ratios = [s / t for s, t in zip(times["sequential"], times[strategy], strict=True)]
    return figure(ratios, **medians, rounds=len(ratios))


Times = dict[str, dict[str, list[float]]]
"""Link -> strategy -> seconds of its calls, round by round."""


def measure(settings: Settings) -> Times:
    """As found by processes of their own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = [sys.executable, "-m", "benchmarks.link", "--port", str(store.port)]
    line += ["--operators", settings.operators, "--rounds", str(settings.rounds or ROUNDS)]
    line += ["--tiny"] if settings.tiny else []
    path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH")) if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as said:
        ranks = [
            subprocess.Popen(
                [*line, "--rank", str(rank)], env=env, cwd=HERE.parent, start_new_session=True, text=True,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=said,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        try:
            output = ranks[0].communicate(timeout=TIMEOUT)[0]
            failed = [rank.wait(timeout=30) for rank in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(failed):
            said.seek(0)
            raise RuntimeError(f"the ranks ended with {failed}: {said.read().strip()[-250:]}")
    found: Times = json.loads(output.strip().splitlines()[-1])
    for link, times in found.items():
        progress(f"  link {link}: " + ", ".join(f"{k} {figure(v).value * 1e3:.1f} ms" for k, v in times.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--operators", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.Backend.register_backend("slow_link", _slow_link, devices=["cpu"])
    store = dist.TCPStore("127.0.0.1", args.port, is_master=False)
    dist.init_process_group(
        "slow_link", store=store, rank=args.rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT)
    )
    with torch.no_grad():
        times = _times(args.rounds, args.operators, args.tiny)
    store.set(f"times/{args.rank}", json.dumps(times))
    everywhere = [json.loads(store.get(f"times/{rank}")) for rank in range(WORLD)]
    if args.rank == 0:
        print(json.dumps({link: _longest([t[link] for t in everywhere]) for link in LINKS}))
    store.set(f"done/{args.rank}", "")
    store.wait([f"done/{rank}" for rank in range(WORLD)])
    dist.destroy_process_group()


def _longest(everywhere: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The slower rank's time, round by round: the other one waits for it somewhere."""
    return {
        name: [max(both) for both in zip(*(times[name] for times in everywhere), strict=True)] for name in everywhere[0]
    }


def _times(rounds: int, operators: Any, tiny: bool) -> Times:
    blocks, hidden, inside, tokens = sizes(tiny)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(Block(hidden, inside) for _ in range(blocks))).eval().requires_grad_(False)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0))
    link: Any = dist.group.WORLD
    runs = {"sequential": df.compile(model, "sequential", operators=operators)}
    for name, options in STRATEGIES.items():
        runs[name] = df.compile(model, name, scheduler_options=options, operators=operators)
    expected = model(x)
    for fast in runs.values():
        agree([expected], [fast(x)], FP32_LIMIT)
        for _ in range(3):
            fast(x)

    def prepare(speed: float | None) -> None:
        link.speed = speed
        dist.barrier()

    def timed(speed: float | None) -> dict[str, Timed]:
        found = {
            name: Timed(run=lambda fast=fast: fast(x), prepare=lambda: prepare(speed)) for name, fast in runs.items()
        }
        # With gloo's own time: that much no link, however fast, would spare.
        found["compute"] = Timed(run=lambda: runs["sequential"](x), prepare=lambda: prepare(None))
        return found

    return {name: side_by_side(timed(speed), rounds) for name, speed in LINKS.items()}


BENCHMARK = Benchmark(
    name="link",
    title="Collectives of one micro-batch beside the compute of another, over a link of a given speed.",
    suites=("strategies",),
    trials=trials,
)

if __name__ == "__main__":
    main()
