"""`mark`: regions of model code that become operators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.errors import PartitionError, shown, user_line

MARK = "dynaflow"


@_torch.inline_only  # not by itself after a graph break: the result is valid inside a trace only
def mark(name: str, *, tag: str | tuple[str, ...] = (), splittable: bool | None = None) -> Any:
    """Marks a region of model code as one operator: `with mark("router"):`, or `@mark("router")` on a function.

    It leaves the graph whole under torch.compile and does nothing in eager mode.
    """
    if not isinstance(name, str) or not isinstance(splittable, (bool, NoneType)):
        raise PartitionError(
            f"mark({shown(name)}, splittable={shown(splittable)})",
            line=user_line(),
            advice='pass a name, mark("router"), and True, False or None',
        )
    note = (name, tag_tuple(tag), splittable)
    if torch.compiler.is_compiling():
        # Annotations with equal keys replace one another, so each entry of a region gets a key of its own.
        return _torch.annotate({f"{MARK}.{_next_entry()}": note})
    return _Mark(note)


@_torch.constant_in_trace
def _next_entry() -> int:
    return next(_entries)


_entries = itertools.count()


def marks_of(node: fx.Node) -> list[tuple[str, tuple[str, tuple[str, ...], bool | None]]]:
    """The marked regions around a node, outermost first: (entry, (name, tags, splittable))."""
    return [(k, note) for k, note in (node.meta.get("custom") or {}).items() if str(k).startswith(f"{MARK}.")]


class _Mark:
    """The result of `mark` outside of a trace: a context manager without effect, and a decorator."""

    def __init__(self, note: tuple[str, tuple[str, ...], bool | None]) -> None:
        self.note = note

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name, tag, splittable = self.note

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with mark(name, tag=tag, splittable=splittable):
                return function(*args, **kwargs)

        return marked


def tag_tuple(tag: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(tag, str):
        return (tag,)
    if not isinstance(tag, (tuple, list, set, frozenset)) or not all(isinstance(t, str) for t in tag):
        advice = 'pass a string, or several: tag=("mlp", "memory")'
        raise PartitionError(f"tag={shown(tag)}", line=user_line(), advice=advice)
    return tuple(tag)
