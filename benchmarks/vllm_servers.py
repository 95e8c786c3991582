"""The models that vLLM serves in benchmarks, and its servers: each in processes of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Trial, WrongResult
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.vllm_server import ANSWER

SCHEDULERS = ("sequential", "auto")
CLOSE = 0.2
"""How far logarithms of probabilities may be apart in bfloat16."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "DYNAFLOW_CACHE_DIR")
"""The folders of compiled code and of plans; vLLM's own has a place for each folder that a model is in. Of
Triton's it is the one around its cache: which one a server uses, and if it is the same each time, is its own affair."""
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
    # 48 layers would not fit twice; of 12, rounds of stock vLLM with 512 requests differ by a fifth among themselves.
    "Qwen3-MoE of 36 layers": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 8192, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
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
            env={**os.environ, **{name: str(model / name) for name in CACHES}},
            start_new_session=True,  # so that what it has started can be ended with it
        )  # fmt: skip
        self.name, self.longest = scheduler or "stock", options["max_model_len"]
        self.seconds: dict[str, float] = {}
        """Until it was up ("ready"), and of these, until all was imported ("imported")."""

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


def compare(name: str, expected: list[float], found: list[float]) -> None:
    """The probabilities of first tokens, as stock vLLM and another one say."""
    away = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not away <= CLOSE:
        raise WrongResult(f"{name}: probabilities are {away:.2g} apart from stock's")


def for_each_model(settings: Settings, trials: Callable[[str, dict[str, Any]], Iterator[Trial]]) -> Iterator[Trial]:
    """The trials of all models that are to be measured, each given by its name and its shape."""
    if importlib.util.find_spec("vllm") is None:
        yield Trial(what="vLLM", baseline="stock vLLM", skip="vLLM is not installed")
        return
    chosen = {k: v for k, v in SHAPES.items() if not settings.cells or k in settings.cells}
    for name, shape in {"tiny Llama": _tiny(SHAPES["Llama-3-8B"])}.items() if settings.tiny else chosen.items():
        yield from trials(name, shape)


@contextlib.contextmanager
def folder_of(shape: dict[str, Any]) -> Iterator[Path]:
    """A model as vLLM takes it, without weights; in a folder that no cache of compiled code knows."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        yield Path(folder)


@contextlib.contextmanager
def server(folder: Path, scheduler: str | None, settings: Settings, share: float = 1.0) -> Iterator[Server]:
    """`share`: of the memory that vLLM takes by itself."""
    shape = json.loads((folder / "config.json").read_text())
    up = Server(
        folder,
        scheduler,
        {
            "max_model_len": 512 if settings.tiny else 4096,
            "dtype": shape["torch_dtype"],
            "gpu_memory_utilization": (0.3 if settings.tiny else 0.9) * share,  # of a CPU's, too
        },
    )
    try:
        up.seconds = up.answer()
        progress(f"  vLLM ({up.name}) is up after {up.seconds['ready']:.1f} s")
        yield up
    finally:
        up.close()


def _tiny(shape: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 512,
             "torch_dtype": "float32"}  # fmt: skip
    return {**shape, **small}
