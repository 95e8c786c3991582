"""Why a model runs as it does: the plan, its simulation, and what the tuner found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynaflow.core.plan import Plan
from dynaflow.cost.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    plan: Plan
    decision: Any
    """The scheduler's note on its choice; of `auto`, a Decision."""
    simulation: Simulation | None
    refusals: tuple[tuple[str, str], ...]
    """Operators that run unsplit, and why."""

    def __str__(self) -> str:
        parts = [str(self.decision)] if self.decision is not None else []
        lanes = ", ".join(map(str, self.plan.lanes))
        what = f"{len(self.plan.tasks)} tasks on lanes {lanes}" if self.plan.tasks else "the uncut graph, in sequence"
        sizes = ", ".join(str(m.size) for m in self.plan.micro_batches)
        parts.append(f"batch of {self.plan.batch_size} as [{sizes}]: {what}")
        if self.simulation is not None:
            parts.append(f"by the cost model: {self.simulation}")
        if len(self.plan.micro_batches) > 1:
            parts += [f"runs whole: {name}, since {why}" for name, why in self.refusals]
        return "\n".join(parts)
