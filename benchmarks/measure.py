"""Times side by side, ratios with their spread, and the check that comes before any number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Until = Literal["idle", "return"]
"""When a call counts as over: when the device is idle, or when the host has the call behind it."""


CHUNK = 1 << 27
"""Elements that are compared at once."""


class WrongResult(AssertionError):
    """What is to be measured computes something else than its baseline."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one trial found: a median and the 10-90% range of its rounds, and what else is worth keeping."""

    value: float
    low: float | None = None
    high: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One row of a table, not yet measured."""

    what: str
    baseline: str
    run: Callable[[], Figure] | None = None
    situation: str = ""
    limit: float | None = None
    at_least: bool = False
    """The value must reach the limit; else it must stay below."""
    unit: str = "x"
    skip: str = ""
    """Why the figure can't be had here, if it can't."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A call to be timed, and what must happen before it without being timed."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def rotated(things: Sequence[Any], turn: int) -> list[Any]:
    """In another order at each turn, so that nobody always runs after the same neighbour."""
    shift = turn % len(things)
    return [*things[shift:], *things[:shift]]


def side_by_side(
    runs: Mapping[str, Timed], rounds: int, until: Until = "idle", inner: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of each run, round by round: drift of the machine hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in rotated(names, turn):
            run = runs[name].run
            runs[name].prepare()
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                kept = run()
            if until == "idle":
                synchronize()
            found[name].append((time.perf_counter() - start) / inner)
            synchronize()
            del kept
    return found


def rounds_for(runs: Mapping[str, Timed], seconds: float, least: int = 10, most: int = 60) -> int:
    """As many rounds as fit into `seconds`, judged by one of them."""
    one = sum(times[0] for times in side_by_side(runs, 1).values())
    return max(least, min(most, int(seconds / max(one, 1e-9))))


def figure(values: Sequence[float], **details: Any) -> Figure:
    """The median of the rounds' values and their 10-90% range."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Figure(value=statistics.median(ordered), low=at(0.1), high=at(0.9), details=details)


def ratio(ours: Sequence[float], baseline: Sequence[float], **details: Any) -> Figure:
    """Ours to the baseline, a ratio for each round."""
    return figure(
        [a / b for a, b in zip(ours, baseline, strict=True)],
        ours_ms=statistics.median(ours) * 1e3,
        baseline_ms=statistics.median(baseline) * 1e3,
        rounds=len(ours),
        **details,
    )


def gap(expected: Tensor, found: Tensor) -> float:
    """The largest relative difference of a row: one wrong row of many must not drown in the others."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise WrongResult(f"{found.dtype} of {tuple(found.shape)}, not {expected.dtype} of {tuple(expected.shape)}")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, found) else float("inf")
    if expected.dim() < 2:
        expected, found = expected.reshape(1, -1), found.reshape(1, -1)
    worst = 0.0
    step = max(1, CHUNK * len(expected) // expected.numel())  # all logits in float32 might not fit
    for e, f in zip(expected.split(step), found.split(step), strict=True):
        e, f = e.flatten(1).float(), f.flatten(1).float()
        norm = e.norm(dim=1)
        away = (f - e).norm(dim=1) / torch.where(norm > 0, norm, 1.0)
        worst = max(worst, away.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())
    return worst


def agree(expected: Sequence[Tensor], found: Sequence[Tensor], limit: float) -> float:
    """How far the results are apart; raises WrongResult if too far."""
    if len(expected) != len(found):
        raise WrongResult(f"{len(found)} results, not {len(expected)}")
    worst = max((gap(e, f) for e, f in zip(expected, found, strict=True)), default=0.0)
    if not worst <= limit:
        raise WrongResult(f"differs from the baseline by {worst:.2e}, more than {limit:.0e}")
    return worst


def once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Calls the function once and keeps what it gave, be it an error: rows that share a measurement share both."""
    kept: list[tuple[Any, Exception | None]] = []

    def call() -> Any:
        if not kept:
            try:
                kept.append((function(), None))
            except Exception as e:
                kept.append((None, e))
        value, error = kept[0]
        if error is not None:
            raise error
        return value

    return call


def raising(error: Exception) -> Callable[[], Any]:
    """A function that raises: the row of something that could not be set up."""

    def call() -> Any:
        raise error

    return call


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
