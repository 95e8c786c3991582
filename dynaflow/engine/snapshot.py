"""Copies of arguments, and restoring the inputs that a model writes, so that a call can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynaflow.capture.optimizer_ops import UPDATE
from dynaflow.partition.op_graph import OpGraph


class NoRoom(Exception):
    """State can't be restored: it is too large for a copy, or not accessible."""


def copied(args: Sequence[Any], *, keep: frozenset[int]) -> tuple[Any, ...]:
    """The arguments with tensors copied, except at the positions in `keep`."""
    taken = [a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in keep]
    _check_room(taken)
    return tuple(a.clone() if isinstance(a, torch.Tensor) and i not in keep else a for i, a in enumerate(args))


def _check_room(tensors: Sequence[torch.Tensor]) -> None:
    needed = sum(t.numel() * t.element_size() for t in tensors)
    if any(t.is_cuda for t in tensors) and needed > torch.cuda.mem_get_info()[0] // 2:
        raise NoRoom(f"there is not enough memory for copies of {needed / 2**30:.1f} GiB of the model's inputs")


class Snapshot:
    """Copies of the inputs that a graph writes."""

    def __init__(self, graph: OpGraph, args: Sequence[Any]) -> None:
        if any(UPDATE in op.tags for op in graph.ops):
            raise NoRoom("the steps of an optimizer can't be taken back, so nothing is measured")
        if keeps := next((op.name for op in graph.ops if op.has_hidden_state), None):
            raise NoRoom(f"the state that {keeps} keeps can't be put back, so nothing is measured")
        written = {v.input for v in graph.values if v.input is not None and v.storage in graph.written}
        inputs = [args[i] for i in sorted(written)]
        _check_room(inputs)
        self._copies = [(t, t.clone()) for t in inputs]

    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
