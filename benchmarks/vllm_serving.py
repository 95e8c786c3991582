"""vLLM under a schedule against stock vLLM: both are up at once, each in a process of its own, and serve in turns."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
SHORT = 3
"""Rounds of a workload of few requests, which takes seconds; one that takes half a minute has one."""
WARM = (128, 16)
"""Before a workload is timed, so many of its requests are served, with so many tokens out: most kinds of steps."""
CLOSE = 0.2
"""How far logarithms of probabilities may be apart in bfloat16."""

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "Qwen3-MoE of 12 layers": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 8192, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
}  # fmt: skip


class Server:
    """A vLLM of its own, with caches of compiled code of its own."""

    def __init__(self, model: Path, scheduler: str | None, options: dict[str, Any], log: Path) -> None:
        setting = json.dumps({"model": str(model), "scheduler": scheduler, "options": options})
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_server", setting],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".cache"))},
            start_new_session=True,  # so that what it has started can be ended with it
        )  # fmt: skip
        self.name = scheduler or "stock"
        self.log = log

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
        raise RuntimeError(f"vLLM ({self.name}) has stopped: {self.log.read_text().strip()[-300:]}")

    def serve(self, workload: tuple[int, int, int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(workload) + "\n")
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
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(shape))
    servers = once(lambda: _start(folder, stack, settings))
    for scheduler in SCHEDULERS:
        yield Trial(
            what=f"start-up with {scheduler}",
            baseline="stock vLLM",
            situation=name,
            limit=READY,
            run=lambda s=scheduler: _ready(servers(), s),  # type: ignore[misc]
        )
    for workload in TINY if settings.tiny else WORKLOADS:
        times = once(lambda w=workload: _serve(servers(), w, settings))  # type: ignore[misc]
        for scheduler in SCHEDULERS:
            yield Trial(
                what=f"tokens a second with {scheduler}",
                baseline="stock vLLM",
                situation=f"{name}, {workload[0]} requests of {workload[1]} in, {workload[2]} out",
                limit=LIMIT,
                at_least=True,
                run=lambda s=scheduler, t=times: _speed(t(), s),  # type: ignore[misc]
            )


def _tiny(shape: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 512,
             "torch_dtype": "float32"}  # fmt: skip
    return {**shape, **small}


def _start(folder: Path, stack: contextlib.ExitStack, settings: Settings) -> dict[str, tuple[Server, float]]:
    """One after the other, so that start-up times can be compared."""
    shape = json.loads((folder / "config.json").read_text())
    options: dict[str, Any] = {
        "max_model_len": 512 if settings.tiny else 4096,
        "dtype": shape["torch_dtype"],
        "gpu_memory_utilization": (0.3 if settings.tiny else 0.9) / (1 + len(SCHEDULERS)),  # of a CPU's memory, too
    }
    # The first on a machine reads all libraries from the disk, and looks at the model's class, which vLLM remembers.
    (small := folder / "small").mkdir()
    (small / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1}))
    with contextlib.closing(Server(small, None, options, folder / "small.log")) as first:
        first.answer()
    found = {}
    for scheduler in (None, *SCHEDULERS):
        server = Server(folder, scheduler, options, folder / f"{scheduler}.log")
        stack.callback(server.close)
        found[server.name] = (server, server.answer()["ready"])
        progress(f"  vLLM ({server.name}) is up after {found[server.name][1]:.1f} s")
    return found


def _ready(servers: dict[str, tuple[Server, float]], scheduler: str) -> Figure:
    ours, stock = servers[scheduler][1], servers["stock"][1]
    return figure([ours / stock], ours_seconds=ours, baseline_seconds=stock)


def _serve(
    servers: dict[str, tuple[Server, float]], workload: tuple[int, int, int], settings: Settings
) -> dict[str, list[dict[str, Any]]]:
    """Compares the probabilities of first tokens; then all serve the workload, in turns, and a part of it before."""
    requests, tokens_in, tokens_out = workload
    for few in (min(16, requests), tokens_in, 1), (3, 40, 1):  # the second is small enough to be captured
        expected = servers["stock"][0].serve(few)["first"]
        for name, (server, _) in servers.items():
            away = max(abs(a - b) for a, b in zip(expected, server.serve(few)["first"], strict=True))
            if away > CLOSE:
                raise WrongResult(f"{name}: probabilities are {away:.2g} apart from stock's")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for server, _ in servers.values():
        server.serve((min(WARM[0], requests), tokens_in, min(WARM[1], tokens_out)))
    for _ in range(settings.rounds or (SHORT if requests < 100 else 1)):
        for name, (server, _) in servers.items():
            found[name].append(server.serve(workload))
    return found


def _speed(found: dict[str, list[dict[str, Any]]], scheduler: str) -> Figure:
    ours, stock = found[scheduler], found["stock"]
    return figure(
        [s["seconds"] / o["seconds"] for o, s in zip(ours, stock, strict=True)],
        tokens_a_second=max(o["tokens"] / o["seconds"] for o in ours),
        baseline_tokens_a_second=max(s["tokens"] / s["seconds"] for s in stock),
        rounds=len(ours),
    )


BENCHMARK = Benchmark(
    name="vllm",
    title="vLLM under a schedule: tokens a second against stock vLLM, which serves the same in turns; and start-up.",
    suites=("systems",),
    trials=trials,
)
