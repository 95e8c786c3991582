"""Cases for two ranks that share one GPU: CUDA tensors over gloo, for what is right and not for how fast."""

from __future__ import annotations

from collections.abc import Callable

import torch

import dynaflow as df
from dynaflow.strategies.fused import Link
from tests.distributed.models import compare, lanes_of, numbers, tensor_parallel

SPLITTING = ("comm_overlap", "nanoflow", "token_weave", "comet")


def sums_in_lanes(operators: str) -> None:
    """Every strategy, again and again with other numbers: a lane that does not wait shows sooner or later."""
    model = tensor_parallel(blocks=4).cuda()
    fast = df.compile(model, operators=operators, fullgraph=True)  # type: ignore[arg-type]
    for name in SPLITTING:
        fast.set_scheduler(name)
        for turn in range(12):
            plan = compare(model, fast, numbers(7, 8, seed=turn).cuda(), tolerance=1e-3)
        assert lanes_of(plan, "all_reduce") == {"network"}, plan


def the_same_on_larger_data() -> None:
    torch.manual_seed(0)
    model = tensor_parallel(blocks=4).cuda()
    fast = df.compile(model, "comm_overlap", scheduler_options={"parts": 4}, operators="eager")
    for turn in range(6):
        compare(model, fast, numbers(65536, 8, seed=turn).cuda(), tolerance=1e-3)


def symmetric_memory() -> None:
    """Between two processes on one card it may not come up; then both ranks know it, and nothing is wrong."""
    link = Link()
    for seed in range(3):
        x = numbers(64, 32, seed=seed).cuda()
        found = link.sum(x, "0")
        print("symmetric memory:", "not here" if found is None else "in use", flush=True)
        if found is not None:
            torch.testing.assert_close(found, 2 * x)


CASES: dict[str, Callable[[], None]] = {
    "sums_in_lanes_eager": lambda: sums_in_lanes("eager"),
    "sums_in_lanes_inductor": lambda: sums_in_lanes("inductor"),
    "the_same_on_larger_data": the_same_on_larger_data,
    "symmetric_memory": symmetric_memory,
}
