"""The uncut graph, as torch.compile would run it."""

from __future__ import annotations

from dynaflow import Sequential

__all__ = ["Sequential"]
