"""What pages take for granted: a model, its inputs, a scheduler. All of it small, and on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import dynaflow as df
from dynaflow.models.build import Workload, build
from dynaflow.models.build import inputs as inputs_of
from dynaflow.strategies import NanoFlow, Prefetch

Names = dict[str, Any]


def of(page: str, section: str) -> Names:
    """What a section of a page may use beside what stands on the page before it."""
    torch.manual_seed(0)
    found: Names = {}
    for (name, heading), prelude in PRELUDES.items():
        if fnmatchcase(page, name) and heading in ("*", section):
            found |= prelude()
    return found


def _small() -> Names:
    model = build("llama-tiny", layers=1, device="cpu", dtype=torch.float32, attention="sdpa")
    return {
        "df": df, "torch": torch, "F": F, "Path": Path,
        "model": model, "inputs": inputs_of(model, Workload(batch=8, prompt=16)), "scheduler": NanoFlow(),
        "Prefetch": Prefetch,
    }  # fmt: skip


def _training() -> Names:
    names = _small()
    model = names["model"].train().requires_grad_(True)
    ids = names["inputs"]["input_ids"]
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {**names, "batch": batch, "batches": [batch] * 2, "data": [batch], "optimizer": optimizer,
            "learning_rate": rate}  # fmt: skip


def _seeing() -> Names:
    names = _small()
    fast, inputs = df.compile(names["model"], "nanoflow"), names["inputs"]
    with torch.profiler.profile() as profile:
        fast(**inputs)
    return {**names, "fast": fast, "plan": fast.plan(**inputs), "batches": [inputs] * 3, "profile": profile}


def _collectives() -> Names:
    """A library of collectives that is not torch's own."""

    class Mine:
        teams: Names = {}

    return {"mine": Mine}


def _generation() -> Names:
    import transformers
    from transformers import CompileConfig, ContinuousBatchingConfig, StaticCache, Trainer

    names = _small()
    model = names["model"]
    model.generation_config.max_new_tokens = 4
    ids = names["inputs"]["input_ids"]
    return {
        **names, "transformers": transformers, "CompileConfig": CompileConfig, "Trainer": Trainer,
        "ContinuousBatchingConfig": functools.partial(  # which would take all memory that there is
            ContinuousBatchingConfig, block_size=8, num_blocks=64, max_batch_tokens=64,
            q_padding_interval_size=16, kv_padding_interval_size=32,
        ),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "cache": StaticCache(config=model.config, max_cache_len=32),
        "requests": [row.tolist() for row in ids[:2]],
    }  # fmt: skip


PRELUDES: dict[tuple[str, str], Callable[[], Names]] = {
    ("README.md", "*"): _small,
    ("docs/guide.md", "*"): _small,
    ("docs/guide.md", "Training"): _training,
    ("docs/guide.md", "Seeing it"): _seeing,
    ("docs/strategies.md", "*"): _small,
    ("docs/strategies.md", "Collectives"): _collectives,
    ("docs/strategies.md", "The simulator"): _seeing,
    ("docs/strategies/*.md", "*"): _small,
    ("docs/systems/transformers.md", "*"): _generation,
    ("docs/systems/vllm.md", "*"): _small,
}
"""By page (a glob) and section."""
