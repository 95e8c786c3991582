"""vLLM under a schedule, for a while: requests come and go at random, every answer is stock vLLM's, and memory is flat.

`python -m tests.systems.vllm_soak --seconds 600 --scheduler nanoflow --options '{"parts": 3}'`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.systems import vllm_model
from tests.systems.vllm_run import Request, pool, sampling

MARGIN = 1e-3
"""Prompts whose answer hangs on less than this, in logprobs, may be answered otherwise by right."""
GROWTH = 24.0
"""MiB that a process may gain from the second quarter of the time to the last: for the plans of rare batches."""
_WAITING = 20
"""Requests under way, at most: more than run at a time."""


class Soak:
    """Requests at random to an engine, and what came of them."""

    def __init__(self, llm: Any, stock: dict[str, Any], seed: int) -> None:
        self.engine, self.stock, self.draw = llm.llm_engine, stock, random.Random(seed)
        self.prompts = [r for r in pool() if stock[r.name]["margin"] > MARGIN]
        self.asked: dict[str, Request] = {}
        self.answered = self.aborted = self.steps = self.count = 0
        self.wrong: list[str] = []
        self.memory: list[float] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.parts: set[int] = set()

    def run(self, seconds: float) -> None:
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds or self.asked:
            if now < seconds:
                self.come()
                self.go()
            self.step()
            if now < seconds and len(self.memory) < 2 * now:  # twice a second
                self.memory.append(resident())

    def come(self) -> None:
        while len(self.asked) < _WAITING and self.draw.random() < 0.4:
            request, self.count = self.draw.choice(self.prompts), self.count + 1
            name = f"{self.count}"
            self.asked[name] = request
            answer = sampling(self.draw.randint(1, request.answer))
            self.engine.add_request(name, {"prompt_token_ids": request.prompt}, answer)

    def go(self) -> None:
        if self.asked and self.draw.random() < 0.02:
            name = self.draw.choice(list(self.asked))
            self.engine.abort_request([name])
            del self.asked[name]
            self.aborted += 1

    def step(self) -> None:
        from dynaflow.integrations.vllm_batches import Step

        for output in self.engine.step():
            request = self.asked.get(output.request_id)
            if output.finished and request is not None:
                del self.asked[output.request_id]
                self.answered += 1
                tokens = list(output.outputs[0].token_ids)
                if tokens != self.stock[request.name]["tokens"][: len(tokens)]:
                    self.wrong.append(f"{request.name}, a prompt of {len(request.prompt)}: {tokens}")
        self.steps += 1
        if Step.now is not None:
            self.shapes.add(tuple(Step.now.requests))
            self.parts.add(len(Step.now.parts) or 1)

    @property
    def growth(self) -> float:
        """MiB gained, once all has been seen that there is to see."""
        quarter = max(1, len(self.memory) // 4)
        return statistics.median(self.memory[-quarter:]) - statistics.median(self.memory[quarter : 2 * quarter])


def resident() -> float:
    """MiB of this process that are in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def warm(llm: Any) -> None:
    """Has vLLM's matrix products see all numbers of rows: for each they keep something, which looks like a leak. And it
    compiles what it samples with."""
    from vllm.model_executor.layers.linear import LinearBase

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    linear = [m for m in model.modules() if isinstance(m, LinearBase)]
    with torch.inference_mode():
        for rows in range(1, vllm_model.STEP + 1):
            for module in linear:
                module(torch.zeros(rows, module.input_size))
    llm.generate([{"prompt_token_ids": [5, 6]}] * 2, sampling(2), use_tqdm=False)


def stock_answers(folder: str) -> dict[str, Any]:
    """From a process of their own."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "stock.json"
        subprocess.run([sys.executable, "-m", "tests.systems.vllm_run", "stock", folder, str(result)], check=True)
        return dict(json.loads(result.read_text())["pool"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--scheduler", default="nanoflow")
    parser.add_argument("--options", type=json.loads, default={"parts": 3}, help="of the scheduler, as JSON")
    parser.add_argument("--growth", type=float, default=GROWTH, help="MiB that may be gained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="its folder; by default one is made")
    parser.add_argument("--stock", type=Path, help="what vllm_run stock wrote; by default it is made")
    parser.add_argument("--result", type=Path, help="a JSON file to write")
    given = parser.parse_args()
    vllm_model.prepare()
    with tempfile.TemporaryDirectory() as place:
        folder = given.model or vllm_model.small_llama(Path(place))
        stock = json.loads(given.stock.read_text())["pool"] if given.stock else stock_answers(folder)
        found = soak(folder, stock, {"scheduler": given.scheduler, "scheduler_options": given.options}, given)
    print(json.dumps(found, indent=1))
    if given.result:
        given.result.write_text(json.dumps(found))
    sys.exit(bool(found["wrong"]) or found["growth_mib"] > given.growth)


def soak(folder: str, stock: dict[str, Any], setting: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM

    from dynaflow.integrations.vllm import forwards

    # So few blocks that requests drive each other out, and that all of them are soon in memory.
    settings = vllm_model.settings(folder, num_gpu_blocks_override=56, additional_config={"dynaflow": setting})
    llm = LLM(**settings)
    warm(llm)
    run = Soak(llm, stock, given.seed)
    run.run(given.seconds)
    (forward,) = forwards()
    return {
        "answered": run.answered,
        "aborted": run.aborted,
        "wrong": run.wrong,
        "steps": run.steps,
        "shapes": len(run.shapes),
        "parts": sorted(run.parts),
        "plans": forward.stats.plans,
        "sequential_runs": forward.stats.sequential_runs,
        "runs": forward.stats.runs,
        "memory_mib": [round(m) for m in run.memory[:: max(1, len(run.memory) // 20)]],
        "growth_mib": round(run.growth, 1),
    }


if __name__ == "__main__":
    main()
