"""One rank: runs the cases of a module one after the other, and writes down what became of each.

It stops at the first case that fails on any rank: after that, ranks may be out of step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

Case = Callable[[], None]


def main(module: str, rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # A collective that one rank never comes to must not keep the others for long.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    cases: dict[str, Case] = importlib.import_module(f"tests.distributed.{module}").CASES
    meetings = dist.PrefixStore("cases", store)
    with (folder / f"rank{rank}.jsonl").open("w") as said:
        for name, case in cases.items():
            start, wrong = time.monotonic(), ""
            try:
                case()
            except BaseException:
                wrong = traceback.format_exc()
            said.write(json.dumps([name, wrong, time.monotonic() - start]) + "\n")
            said.flush()
            meetings.set(f"{name}/{rank}", "wrong" if wrong else "right")
            everywhere = [meetings.get(f"{name}/{other}") for other in range(world)]
            if b"wrong" in everywhere:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    name, rank, world, port, folder = sys.argv[1:]
    main(name, int(rank), int(world), int(port), Path(folder))
