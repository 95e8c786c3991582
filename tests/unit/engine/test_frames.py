"""How many of our Python functions a call with a plan passes: they are host time in every step of a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import dynaflow as df
from dynaflow.strategies.optimizer_overlap import OptimizerOverlap
from dynaflow.strategies.prefetch import Prefetch
from tests.helpers import STACK_RULES, Stack, compiled, randn

OURS = str(Path(df.__file__).parent)


def frames(call: Callable[[], Any]) -> list[str]:
    """The functions of the package, and those that it has written, that a call enters in this thread."""
    found: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((OURS, "<dynaflow")):
            found.append(f"{Path(code.co_filename).name} {code.co_qualname}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


class Lanes(df.OpSchedulerBase):
    """Two micro-batches, each on a lane of its own."""

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return STACK_RULES

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ready := ctx.get_ready_ops():
            ctx.execute(ready[0], lane=f"lane {ready[0].micro_batches[0]}")


PLAIN: dict[str, Callable[[], df.OpSchedulerBase]] = {
    "alone": df.Sequential,
    "chosen": lambda: df.choose(lambda ctx: "sequential"),
}
SPLIT: dict[str, Callable[[], df.OpSchedulerBase]] = {
    "alone": Lanes,
    "chosen": lambda: df.choose(lambda ctx: Lanes()),
}
WRAPPED: dict[str, Callable[[df.OpSchedulerBase], df.OpSchedulerBase]] = {
    "bare": lambda inner: inner,
    "prefetch": Prefetch,
    "optimizer_overlap": OptimizerOverlap,
    "both": lambda inner: Prefetch(OptimizerOverlap(inner)),
}


def second_call(scheduler: df.OpSchedulerBase, facts: Any = None) -> list[str]:
    fast = compiled(Stack(), scheduler, facts=facts)
    x = randn(6, 8)
    with torch.no_grad():
        for _ in range(2):
            fast(x)
        return frames(lambda: fast(x))


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("kind", PLAIN)
def test_in_sequence(kind: str, wrap: str) -> None:
    found = second_call(WRAPPED[wrap](PLAIN[kind]()))
    assert len(found) <= 8, found


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("kind", SPLIT)
def test_under_a_split(kind: str, wrap: str) -> None:
    found = second_call(WRAPPED[wrap](SPLIT[kind]()))
    assert len(found) <= 12, found


@pytest.mark.parametrize(("facts", "most"), [({"phase": "decode"}, 12), (lambda: {"phase": "decode"}, 14)])
def test_with_facts_that_the_scheduler_reads(facts: Any, most: int) -> None:
    class Reads(Lanes):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            assert ctx.facts["phase"] == "decode"
            super().schedule(ctx)

    found = second_call(Reads(), facts)
    assert len(found) <= most, found
