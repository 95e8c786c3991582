"""vLLM under a schedule against stock vLLM: both are up at once, and serve in turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.measure import Figure, Trial, figure, once
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.vllm_servers import SCHEDULERS, Server, compare, folder_of, for_each_model, server

WORKLOADS = ((32, 512, 128), (32, 128, 512), (32, 2048, 32), (512, 512, 128), (512, 128, 512), (512, 2048, 32))
TINY = ((6, 20, 5), (3, 40, 3))
LIMIT = 0.99
ROUNDS, ENOUGH = 3, 30.0
"""A workload has so many rounds; but after so many seconds, none is begun."""
ALONE = 256
"""A server that has come up serves prompts of so many tokens, twice and three times as many and so on, each alone; and
of one token more. By such sizes vLLM picks kernels of experts, and Triton compiles them when they are first called, for
a second each: a second that hits whichever server, and whichever round, meets that size first."""
WARM = (128, 16)
"""Before a workload is timed, so many of its requests are served, with so many tokens out: most kinds of steps."""
_seeds = itertools.count()


def trials(settings: Settings) -> Iterator[Trial]:
    return for_each_model(settings, partial(_of_model, settings))


def _of_model(settings: Settings, name: str, shape: dict[str, Any]) -> Iterator[Trial]:
    with contextlib.ExitStack() as stack:
        stock = once(partial(_started, shape, None, settings, stack))
        for scheduler in SCHEDULERS:
            with contextlib.ExitStack() as meanwhile:
                ours = once(partial(_started, shape, scheduler, settings, meanwhile))
                for workload in TINY if settings.tiny else WORKLOADS:
                    yield Trial(
                        what=f"tokens a second with {scheduler}",
                        baseline="stock vLLM",
                        situation=f"{name}, {workload[0]} requests of {workload[1]} in, {workload[2]} out",
                        limit=LIMIT,
                        at_least=True,
                        run=partial(_speed, stock, ours, workload, settings),
                    )


def _started(shape: dict[str, Any], scheduler: str | None, settings: Settings, stack: contextlib.ExitStack) -> Server:
    folder = stack.enter_context(folder_of(shape))
    up = stack.enter_context(server(folder, scheduler, settings, share=0.5))  # there are two at a time
    for tokens in range(ALONE, up.longest, ALONE):
        up.serve((1, tokens, 1), next(_seeds))
        up.serve((1, tokens + 1, 1), next(_seeds))
    return up


def _speed(
    stock: Callable[[], Server], ours: Callable[[], Server], workload: tuple[int, int, int], settings: Settings
) -> Figure:
    """Compares the probabilities of first tokens; then both serve the workload in turns, and a part of it before."""
    servers = stock(), ours()

    def both(workload: tuple[int, int, int]) -> list[dict[str, Any]]:
        seed = next(_seeds)
        return [server.serve(workload, seed) for server in servers]

    requests, tokens_in, tokens_out = workload
    for few in (min(16, requests), tokens_in, 1), (3, 40, 1):  # the second is small enough to be captured
        compare(servers[1].name, *(one["first"] for one in both(few)))
    both((min(WARM[0], requests), tokens_in, min(WARM[1], tokens_out)))
    most, end = settings.rounds or ROUNDS, time.perf_counter() + (math.inf if settings.rounds else ENOUGH)
    speeds: list[list[float]] = []
    while len(speeds) < most and time.perf_counter() < end:
        speeds.append([one["tokens"] / one["seconds"] for one in both(workload)])
    return figure(
        [mine / usual for usual, mine in speeds],
        tokens_a_second=max(mine for _, mine in speeds),
        baseline_tokens_a_second=max(usual for usual, _ in speeds),
        baseline_slowest=min(usual for usual, _ in speeds),
        rounds=len(speeds),
    )


BENCHMARK = Benchmark(
    name="vllm",
    title="vLLM under a schedule: tokens a second against stock vLLM, which serves the same in turns.",
    suites=("systems",),
    trials=trials,
)
