"""From the first call to its output, in a fresh process with empty caches.

`python -m benchmarks.cold_start KIND SITUATION` is such a process: it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dynaflow as df
from benchmarks.llama import SITUATIONS, TWO_BATCHES, build, case, label
from benchmarks.measure import Figure, Trial, agree, synchronize
from benchmarks.report import HERE, progress
from benchmarks.schedulers import TwoBatches
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark

LIMIT = 0.5
TIMEOUT = 280
"""Seconds for one process: a hung one must not take the others along."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DYNAFLOW_CACHE_DIR")
KINDS = ("torch", "two", "sequential")
CHOSEN = ("prefill8x512", "decode8")
ROUNDS = 2
"""A process takes half a minute and more."""


def trials(settings: Settings) -> Iterator[Trial]:
    if not settings.can_hold_llama:
        return
    for situation in (s for s in TWO_BATCHES if s in (settings.situations or CHOSEN)):
        yield Trial(
            what="two micro-batches on two lanes, cut at attention and mlp",
            baseline="torch.compile(model)",
            situation=label(situation, settings),
            limit=LIMIT,
            run=lambda situation=situation: _compare("two", situation, settings),
        )


def _compare(kind: str, situation: str, settings: Settings) -> Figure:
    rounds = [[measure(k, situation, settings) for k in (kind, "torch")] for _ in range(settings.rounds or ROUNDS)]
    ratios = [ours["seconds"] / baseline["seconds"] for ours, baseline in rounds]
    seconds = {
        "ours_s": statistics.median(ours["seconds"] for ours, _ in rounds),
        "baseline_s": statistics.median(baseline["seconds"] for _, baseline in rounds),
        "rounds": len(rounds),
    }
    details = {**seconds, **rounds[-1][0]["stats"]}
    return Figure(value=statistics.median(ratios), low=min(ratios), high=max(ratios), details=details)


def measure(kind: str, situation: str, settings: Settings) -> dict[str, Any]:
    """What a fresh process found."""
    line = [sys.executable, "-m", "benchmarks.cold_start", kind, situation, "--operators", settings.operators]
    line += ["--tiny"] if settings.tiny else []
    line += ["--layers", str(settings.layers)] if settings.layers else []
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, name) for name in CACHES}
        path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, **caches, "DYNAFLOW_CACHE": "1", "PYTHONPATH": path}
        process = subprocess.run(
            line, env=env, cwd=HERE.parent, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    if process.returncode:
        raise RuntimeError(f"{kind} ended with {process.returncode}: {process.stderr.strip()[-250:]}")
    found: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    progress(f"  {kind}, {situation}: {found['seconds']:.1f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("situation", choices=list(SITUATIONS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--operators", default="inductor", choices=["inductor", "eager"])
    args = parser.parse_args()
    settings = Settings(tiny=args.tiny, layers=args.layers, operators=args.operators)
    with torch.no_grad():
        print(json.dumps(first_call(args.kind, args.situation, settings)))


def first_call(kind: str, situation: str, settings: Settings) -> dict[str, Any]:
    """Times the first call, then checks what it gave."""
    model = build(settings)
    ready = case(model, SITUATIONS[situation], settings)
    call: Callable[..., Any]
    if kind == "torch":
        call = torch.compile(model, backend="inductor" if settings.operators == "inductor" else "eager")
    else:
        scheduler = TwoBatches() if kind == "two" else df.Sequential()
        call = df.compile(model, scheduler, operators=settings.operators)
    ready.reset()
    synchronize()
    start = time.perf_counter()
    output = call(**ready.inputs)
    synchronize()
    seconds = time.perf_counter() - start
    found = ready.results(output)
    ready.reset()
    agree(ready.results(model(**ready.inputs)), found, ready.limit)
    if kind == "torch":
        if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise RuntimeError("torch.compile compiled nothing")
        return {"seconds": seconds, "stats": {}}
    stats = dataclasses.asdict(call.stats)  # type: ignore[attr-defined]
    if stats["plain_graphs"] or stats["graph_breaks"]:
        raise RuntimeError(f"not one planned graph: {stats['plain_reasons']}")
    kept = {k: v for k, v in stats.items() if k.endswith("_seconds") or k.startswith("operators_")}
    return {"seconds": seconds, "stats": kept}


BENCHMARK = Benchmark(
    name="cold_start",
    title="The first call, in a fresh process with empty caches, until its output is there.",
    suites=("fast",),
    trials=trials,
)

if __name__ == "__main__":
    main()
