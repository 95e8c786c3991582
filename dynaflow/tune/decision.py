"""What the tuner decided for one situation, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from dynaflow.core.json_codec import decode, encode
from dynaflow.tune.measure import Timing

SEQUENCE = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One schedule that was considered."""

    name: str
    predicted: float | None = None
    """Seconds, by the simulator."""
    limit: str = ""
    """What limits it, by the simulator."""
    measured: Timing | None = None
    problem: str = ""
    """Why it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice and all schedules that were considered, the sequence first."""

    chosen: str
    why: str
    tried: tuple[Attempt, ...]
    seconds: float = 0.0
    """The time that tuning took."""

    def __str__(self) -> str:
        width = max(len(t.name) for t in self.tried)
        lines = [self.head, f"  {'schedule':<{width}}  predicted   measured   against sequence   limited by"]
        for mark, name, predicted, measured, against, limit in self.rows:
            lines.append(f"{mark:1} {name:<{width}} {predicted:>10} {measured:>10}   {against:<18} {limit}")
        return "\n".join(line.rstrip() for line in lines)

    @property
    def head(self) -> str:
        return f"chosen: {self.chosen} ({self.why}; {len(self.tried)} schedules in {self.seconds:.1f} s)"

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yields for each schedule: a mark if it is chosen, its name, the predicted and the measured time, the speed-up
        over the sequence, and what limits it."""
        for t in self.tried:
            predicted = f"{t.predicted * 1e3:.3f} ms" if t.predicted is not None else ""
            measured = f"{t.measured.seconds * 1e3:.3f} ms" if t.measured else ""
            against = (
                f"{1 / t.measured.ratio:.3f}x ({1 / t.measured.high:.2f}-{1 / t.measured.low:.2f})"
                if t.measured
                else ""
            )
            mark = "*" if t.name == self.chosen else ""
            yield mark, t.name, predicted, measured, against, t.problem or t.limit

    def to_json(self) -> str:
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> Decision:
        """Raises ValueError if the text is not a decision."""
        return decode(Decision, json.loads(text))
