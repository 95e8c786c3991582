"""The uncut graph, as torch.compile runs it."""

from __future__ import annotations

from dynaflow import Sequential

__all__ = ["Sequential"]
