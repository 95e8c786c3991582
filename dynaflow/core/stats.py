"""Counters of a compiled model, which show the fast paths that it missed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True, kw_only=True)
class Stats:
    graphs: int = 0
    """Graphs captured."""
    graph_breaks: int = 0
    """Graph breaks: the code between two graphs runs in eager mode."""
    plain_graphs: int = 0
    """Graphs that run unscheduled: the analysis failed, or inputs of a call share memory that the graph writes."""
    plain_reasons: list[str] = field(default_factory=list)
    partitions: int = 0
    """Graphs partitioned."""
    scheduler_calls: int = 0
    """Calls of the user's schedule()."""
    plans: int = 0
    """Plans made, checked and lowered."""
    plans_loaded: int = 0
    """Of those, plans found on disk: the scheduler was not called."""
    plans_stored: int = 0
    """Plans stored on disk."""
    runs: int = 0
    """Graphs run under a plan, including the first use of each."""
    replays: int = 0
    """Of those, runs of a plan that existed already."""
    sequential_runs: int = 0
    """Of the runs, those of the uncut graph."""
    verified: int = 0
    """Plans compared with the eager model."""
    operators_compiled: int = 0
    operators_shared: int = 0
    """Operators that reuse the compilation of an equal one."""
    compile_failures: list[str] = field(default_factory=list)
    """What failed to compile, and why. It runs uncompiled."""
    joined_bytes: int = 0
    """Bytes copied to join micro-batches, in the last run."""
    arena_bytes: int = 0
    """Size of the last plan's arena for the values between operators."""
    captures: int = 0
    """CUDA graphs captured."""
    graph_replays: int = 0
    """CUDA graphs launched."""
    capture_failures: list[str] = field(default_factory=list)
    """What failed to be captured, and why. It runs without a CUDA graph."""
    partition_seconds: float = 0.0
    schedule_seconds: float = 0.0
    check_seconds: float = 0.0
    lower_seconds: float = 0.0

    def __str__(self) -> str:
        return "\n".join(f"{f.name:20} {getattr(self, f.name)}" for f in fields(self))
