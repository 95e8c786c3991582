"""What a run was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

NONE = "none"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    tiny: bool = False
    """A model of two small layers: to try the benchmarks, not to measure."""
    layers: int | None = None
    situations: tuple[str, ...] = ()
    """Only these; all that a benchmark has if empty. NONE: only the rows that have no situation."""
    cells: tuple[str, ...] = ()
    """Of the strategies' suite: only these; all if empty."""
    operators: Literal["inductor", "eager"] = "inductor"
    """With "eager" nothing is compiled, the baseline neither: to try the benchmarks quickly."""
    rounds: int | None = None
    """None: as many as fit into `seconds`."""
    seconds: float = 4.0
    """For the rounds of one row."""
    device: torch.device = field(default_factory=_device)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def can_hold_llama(self) -> bool:
        """The full model needs a GPU."""
        return self.tiny or self.cuda
