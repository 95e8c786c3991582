"""Cases for the launcher: one rank waits for another that never comes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def ends() -> None:
    dist.all_reduce(torch.ones(1))


def hangs() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(3600)


CASES: dict[str, Callable[[], None]] = {"ends": ends, "hangs": hangs}
