"""vLLM under a schedule against stock vLLM: both are up at once, each in processes of its own, and serve in turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Trial, WrongResult, figure, once
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.vllm_server import ANSWER

WORKLOADS = ((32, 512, 128), (32, 128, 512), (32, 2048, 32), (512, 512, 128), (512, 128, 512), (512, 2048, 32))
TINY = ((6, 20, 5), (3, 40, 3))
SCHEDULERS = ("sequential", "auto")
LIMIT = 0.99
READY = 1.1
ROUNDS, ENOUGH = 3, 30.0
"""A workload has so many rounds; but after so many seconds, none is begun."""
ALONE = 256
"""A server that has come up serves prompts of so many tokens, twice and three times as many and so on, each alone; and
of one token more. By such sizes vLLM picks kernels of experts, and Triton compiles them when they are first called, for
a second each: a second that hits whichever server, and whichever round, meets that size first."""
WARM = (128, 16)
"""Before a workload is timed, so many of its requests are served, with so many tokens out: most kinds of steps."""
CLOSE = 0.2
"""How far logarithms of probabilities may be apart in bfloat16."""
_seeds = itertools.count()

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 8192,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
    # 48 layers would not fit twice; of 12, rounds of stock vLLM with 512 requests differ by a fifth among themselves.
    "Qwen3-MoE of 36 layers": {**EXPERTS, "num_hidden_layers": 36},
}  # fmt: skip


class Server:
    """A vLLM of its own, with caches of compiled code of its own."""

    def __init__(self, model: Path, scheduler: str | None, options: dict[str, Any]) -> None:
        setting = json.dumps({"model": str(model), "scheduler": scheduler, "options": options})
        self.log = model / "log"
        self._log = self.log.open("w", buffering=1)  # by lines: the server writes to it, too
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_server", setting],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(model / "cache")},
            start_new_session=True,  # so that what it has started can be ended with it
        )  # fmt: skip
        self.name = scheduler or "stock"
        self.ready = 0.0
        """Seconds until it was up."""

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
            self._log.write(line)
        raise RuntimeError(f"vLLM ({self.name}) has stopped: {self.log.read_text().strip()[-300:]}")

    def serve(self, workload: tuple[int, int, int], seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*workload, seed]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def trials(settings: Settings) -> Iterator[Trial]:
    if importlib.util.find_spec("vllm") is None:
        yield Trial(what="vLLM", baseline="stock vLLM", skip="vLLM is not installed")
        return
    shapes = {k: v for k, v in SHAPES.items() if not settings.cells or k in settings.cells}
    for name, shape in {"tiny Llama": _tiny(SHAPES["Llama-3-8B"])}.items() if settings.tiny else shapes.items():
        with contextlib.ExitStack() as stack:
            yield from _of_model(name, shape, settings, stack)


def _of_model(name: str, shape: dict[str, Any], settings: Settings, stack: contextlib.ExitStack) -> Iterator[Trial]:
    stock = once(partial(_first, shape, settings, stack))
    for scheduler in SCHEDULERS:
        with contextlib.ExitStack() as meanwhile:
            ours = once(partial(_started, shape, scheduler, settings, meanwhile))
            yield Trial(
                what=f"start-up with {scheduler}",
                baseline="stock vLLM",
                situation=name,
                limit=READY,
                run=partial(_ready, stock, ours),
            )
            for workload in TINY if settings.tiny else WORKLOADS:
                yield Trial(
                    what=f"tokens a second with {scheduler}",
                    baseline="stock vLLM",
                    situation=f"{name}, {workload[0]} requests of {workload[1]} in, {workload[2]} out",
                    limit=LIMIT,
                    at_least=True,
                    run=partial(_speed, stock, ours, workload, settings),
                )


def _tiny(shape: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 512,
             "torch_dtype": "float32"}  # fmt: skip
    return {**shape, **small}


def _first(shape: dict[str, Any], settings: Settings, stack: contextlib.ExitStack) -> Server:
    """Stock vLLM, behind a smaller one: who is first on a machine reads all libraries from the disk, and looks at the
    model's class, which vLLM remembers."""
    with contextlib.ExitStack() as meanwhile:
        _started({**shape, "num_hidden_layers": 1}, None, settings, meanwhile)
    return _started(shape, None, settings, stack)


def _started(shape: dict[str, Any], scheduler: str | None, settings: Settings, stack: contextlib.ExitStack) -> Server:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(shape))
    options: dict[str, Any] = {
        "max_model_len": 512 if settings.tiny else 4096,
        "dtype": shape["torch_dtype"],
        "gpu_memory_utilization": (0.3 if settings.tiny else 0.9) / 2,  # there are two at a time; of a CPU's, too
    }
    server = Server(folder, scheduler, options)
    stack.callback(server.close)
    server.ready = server.answer()["ready"]
    progress(f"  vLLM ({server.name}) is up after {server.ready:.1f} s")
    for tokens in range(ALONE, options["max_model_len"], ALONE):
        server.serve((1, tokens, 1), next(_seeds))
        server.serve((1, tokens + 1, 1), next(_seeds))
    return server


def _ready(stock: Callable[[], Server], ours: Callable[[], Server]) -> Figure:
    usual, found = stock().ready, ours().ready
    return figure([found / usual], ours_seconds=found, baseline_seconds=usual)


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
        expected, found = (one["first"] for one in both(few))
        away = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        if away > CLOSE:
            raise WrongResult(f"{servers[1].name}: probabilities are {away:.2g} apart from stock's")
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
    title="vLLM under a schedule: tokens a second against stock vLLM, which serves the same in turns; and start-up.",
    suites=("systems",),
    trials=trials,
)
