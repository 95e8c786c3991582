"""The active recording: runners check it in each call."""

from __future__ import annotations

from typing import Any, Protocol


class Recorder(Protocol):
    """Records the calls of all compiled models in the process."""

    def run(self, marked: Any, args: list[Any], planner: Any) -> Any:
        """Runs a plan that takes marks, and records them."""

    def missed(self, reason: str) -> None:
        """Notes a call that can't be recorded."""


now: Recorder | None = None
"""One for the whole process, since autograd runs backward passes in its own threads."""
