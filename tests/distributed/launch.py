"""Starts the ranks of a test as processes of their own, and ends them all, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
START = 120.0
"""Seconds in which the ranks must have come to their first case."""


@dataclass(kw_only=True)
class Outcome:
    """What became of each case, on each rank."""

    ended: bool
    """All ranks ended by themselves in time."""
    cases: dict[str, dict[int, str]] = field(default_factory=dict)
    """Case -> rank -> "" or what went wrong."""
    seconds: dict[str, float] = field(default_factory=dict)
    logs: str = ""

    def check(self, case: str, world: int) -> None:
        """Raises if the case went wrong on a rank, or never came to its end on one."""
        found = self.cases.get(case, {})
        wrong = {rank: text for rank, text in found.items() if text}
        assert not wrong, "\n".join(f"on rank {rank}:\n{text}" for rank, text in wrong.items())
        how = "never came to its end" if self.ended else "was still under way when time was up"
        missing = [rank for rank in range(world) if rank not in found]
        assert not missing, f"{case} {how} on ranks {missing}; their output:\n{self.logs}"


def launch(module: str, world: int, folder: Path, *, seconds: float) -> Outcome:
    """Runs the cases of a module of tests.distributed on `world` ranks, for `seconds` at most once all have begun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DYNAFLOW_CACHE": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            command = [sys.executable, "-m", "tests.distributed.worker", module]
            command += [str(rank), str(world), str(store.port), str(folder)]
            with (folder / f"rank{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
        said = [folder / f"rank{rank}.jsonl" for rank in range(world)]
        ended = _wait(ranks, START, until=lambda: all(path.exists() for path in said)) or _wait(ranks, seconds)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
    outcome = Outcome(ended=ended)
    for rank in range(world):
        log = folder / f"rank{rank}.log"
        outcome.logs += f"--- rank {rank}\n{log.read_text(errors='replace')[-3000:]}\n"
        said = folder / f"rank{rank}.jsonl"
        for line in said.read_text().splitlines() if said.exists() else ():
            case, text, took = json.loads(line)
            outcome.cases.setdefault(case, {})[rank] = text
            outcome.seconds[case] = max(took, outcome.seconds.get(case, 0.0))
    return outcome


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
    """Whether all ranks have ended, now that `seconds` are over or something else has come first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        if all(process.poll() is not None for process in ranks):
            return True
        time.sleep(0.05)
    return False
