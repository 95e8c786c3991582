"""Counters: what a compiled model did, so that a fast path not taken can be seen."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True, kw_only=True)
class Stats:
    graphs: int = 0
    """Graphs captured."""
    graph_breaks: int = 0
    """Graphs that end where the model can't be captured; the code in between runs plainly."""
    plain_graphs: int = 0
    """Graphs that run plainly: they could not be analysed, or inputs of a call share memory that the graph writes."""
    plain_reasons: list[str] = field(default_factory=list)
    partitions: int = 0
    """Times that a graph was cut."""
    scheduler_calls: int = 0
    """Calls of the user's schedule()."""
    plans: int = 0
    """Plans made, checked and lowered."""
    plans_loaded: int = 0
    """Of those, plans found on disk: the scheduler was not asked."""
    plans_stored: int = 0
    """Plans left on disk for the next process."""
    runs: int = 0
    """Graphs run under a plan, the first use of each included."""
    replays: int = 0
    """Of those, runs of a plan that was there already."""
    sequential_runs: int = 0
    """Of the runs, those of the uncut graph."""
    verified: int = 0
    """Plans compared with the plain model."""
    operators_compiled: int = 0
    operators_shared: int = 0
    """Operators that found an equal one compiled."""
    compile_failures: list[str] = field(default_factory=list)
    """What the compiler failed on, and why: it runs uncompiled."""
    joined_bytes: int = 0
    """Bytes copied to join micro-batches, in the last run."""
    arena_bytes: int = 0
    """Size of the arena for the values between operators, of the last plan made."""
    captures: int = 0
    """CUDA graphs captured."""
    graph_replays: int = 0
    """CUDA graphs launched."""
    capture_failures: list[str] = field(default_factory=list)
    """What could not be captured, and why: it runs without a graph."""
    partition_seconds: float = 0.0
    schedule_seconds: float = 0.0
    check_seconds: float = 0.0
    lower_seconds: float = 0.0

    def __str__(self) -> str:
        return "\n".join(f"{f.name:20} {getattr(self, f.name)}" for f in fields(self))
