"""Where a recording stands while it is on: runners look here at each call."""

from __future__ import annotations

from typing import Any, Protocol


class Recorder(Protocol):
    """Notes the calls of all compiled models in the process."""

    def run(self, marked: Any, args: list[Any], planner: Any) -> Any:
        """Runs a plan that takes marks, and notes them."""

    def missed(self, reason: str) -> None:
        """A call that can't be recorded."""


now: Recorder | None = None
"""The one that is on, in the whole process: a backward pass runs in threads of autograd's."""
