"""A lowered plan as data: steps of code, by lanes, and what they use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynaflow.lower.compile_ops import Condition
from dynaflow.runtime.arena import View


@dataclass(slots=True, kw_only=True)
class Step:
    """One call as lines of code."""

    tasks: tuple[int, ...]
    lane: str
    title: str
    after: tuple[int, ...]
    """Steps of other lanes that this one waits for."""
    before: list[str] = field(default_factory=list)
    call: str = ""
    box: list[str] | None = None
    """What the function that `call` ends with gets, in a list that it empties; None if `call` is the whole line."""
    behind: list[str] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)
    frees_first: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Program:
    """Straight-line code, by lanes. The first lane is the caller's own."""

    arguments: int
    lanes: list[str]
    partitioned: bool = False
    """Lanes have shares of the device: then none of them is the caller's own."""
    used: list[int]
    """Positions of the arguments that some step uses."""
    boxed: bool = False
    """The list of arguments is emptied, and they are let go like other variables."""
    start: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    results: str = "()"
    made_aside: list[str] = field(default_factory=list)
    """Results in the device's memory that were made on a lane other than the caller's."""
    names: dict[str, Any] = field(default_factory=dict)
    """What the code refers to: operators, joins."""
    variables: list[str] = field(default_factory=list)
    final_reads: list[str] = field(default_factory=list)
    """Variables that the end needs."""
    views: dict[str, View] = field(default_factory=dict)
    """Variables that look at the arena."""
    arena_bytes: int = 0
    joined_bytes: int = 0
    """Bytes that a run copies to join micro-batches."""
    conditions: set[tuple[tuple[int, ...], Condition]] = field(default_factory=set)
    """Of an elastic program: for which sizes of these micro-batches its operators were compiled."""
