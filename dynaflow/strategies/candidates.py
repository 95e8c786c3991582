"""The schedules that the tuner tries: all strategies, with the options that make a difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext
from dynaflow.strategies import make
from dynaflow.strategies.prefetch import FETCH


def candidates(ctx: ScheduleContext) -> Iterator[tuple[str, OpSchedulerBase]]:
    """Yields each with its name and options as text. Those that don't apply to this model plan a sequence."""
    offloaded = any(FETCH in op.functions for op in ctx.ops)
    if offloaded:
        yield "prefetch()", make("prefetch")
    for name, options in _options(ctx):
        shown = f"{name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        scheduler = make(name, **options)
        yield (f"prefetch({shown})", make("prefetch", inner=scheduler)) if offloaded else (shown, scheduler)


def _options(ctx: ScheduleContext) -> Iterator[tuple[str, dict[str, Any]]]:
    for lanes in (2, 4):
        yield "branches", {"lanes": lanes}
    parts = [n for n in (2, 3, 4) if ctx.has_batch and n <= ctx.batch_size]
    for n in parts:
        if any(op.groups for op in ctx.ops):
            yield "comm_overlap", {"parts": n}
            yield "token_weave", {"parts": n}
            yield "comet", {"parts": n}
        if n < 4:
            yield "dual_batch", {"parts": n}
            yield "nanoflow", {"parts": n}
    if parts and ctx.device.type == "cuda":
        for share in (0.37, 0.49):
            yield "nanoflow", {"parts": 2, "sms": int(ctx.sms * share) // 8 * 8}
    if parts:
        yield "solver", {"parts": 2}
