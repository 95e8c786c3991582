"""Cases for two ranks that are to end in an error: soon, on every rank, and with no rank left waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dynaflow as df
from dynaflow.schedule import rank_consensus
from dynaflow.strategies.comm_overlap import CommOverlap
from tests.distributed import library
from tests.distributed.models import compare, in_double, numbers, tensor_parallel

SOON = 20.0
"""Seconds, on a machine that has other things to do."""
rank_consensus.PATIENCE = timedelta(seconds=5)


class ALaneEach(CommOverlap):
    """Each micro-batch has a lane of its own for its collectives: ranks may meet in another order."""

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                lane = f"network{op.micro_batch.index}" if "network" in op.tags else "compute"
                ctx.execute(op, lane=lane)


def unordered() -> None:
    fast = df.compile(tensor_parallel(), ALaneEach(), operators="eager")
    start = time.monotonic()
    with torch.no_grad(), pytest.raises(df.PlanError, match="wait for each other forever") as raised:
        fast(numbers(6, 8))
    assert raised.value.op == "0.all_reduce", raised.value.op
    assert "network0" in str(raised.value) and "network1" in str(raised.value)
    assert time.monotonic() - start < SOON


def decided_differently() -> None:
    """One rank cuts the batch in two, the other in three; and when both agree again, they go on."""
    model = tensor_parallel()
    fast = df.compile(model, CommOverlap(parts=2 + dist.get_rank()), operators="eager")
    start = time.monotonic()
    with torch.no_grad(), pytest.raises(df.PlanError, match="different orders"):
        fast(numbers(6, 8))
    assert time.monotonic() - start < SOON
    fast.set_scheduler("comm_overlap")
    assert not compare(model, fast, numbers(6, 8)).sequential


def declared() -> None:
    """The same with collectives that are declared to be some."""
    library.declare()
    model = library.team_model()
    with torch.no_grad(), pytest.raises(df.PlanError, match="wait for each other forever"):
        df.compile(model, ALaneEach(), operators="eager")(numbers(6, 8))
    fast = df.compile(model, CommOverlap(parts=2 + dist.get_rank()), operators="eager")
    with torch.no_grad(), pytest.raises(df.PlanError, match="different orders"):
        fast(numbers(6, 8))
    fast.set_scheduler("comm_overlap")
    assert not compare(model, fast, numbers(6, 8)).sequential


def one_in_sequence() -> None:
    model = tensor_parallel()
    fast = df.compile(model, "comm_overlap" if dist.get_rank() else "sequential", operators="eager")
    with torch.no_grad(), pytest.raises(df.PlanError, match="different orders"):
        fast(numbers(6, 8))


def other_sizes() -> None:
    """A sum of tensors of different sizes."""
    fast = df.compile(tensor_parallel(), "comm_overlap", operators="eager")
    with torch.no_grad(), pytest.raises(df.PlanError, match="different orders"):
        fast(numbers(6 + 2 * dist.get_rank(), 8))


def never_calls() -> None:
    """The last case: from here on the ranks are out of step."""
    if dist.get_rank() == 1:
        return
    fast = df.compile(tensor_parallel(), "comm_overlap", operators="eager")
    start = time.monotonic()
    with torch.no_grad(), pytest.raises(df.PlanError, match="rank 1 has planned nothing") as raised:
        fast(numbers(6, 8))
    assert rank_consensus.PATIENCE.total_seconds() - 1 < time.monotonic() - start < SOON
    assert "on all ranks" in raised.value.advice


CASES: dict[str, Callable[[], None]] = in_double(
    unordered, decided_differently, declared, one_in_sequence, other_sizes, never_calls
)
