"""The batch made dynamic before the model is captured, as far as the arguments show it.

Dynamo takes sizes as constants unless a dim is marked on the tensor. The backend marks what it finds constant and has
the frame traced again; for a large model that takes long, so what can be seen beforehand is marked beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.captured_graph import BatchDims, DynamicDims, dims_to_mark

DEPTH = 4
"""How far into an argument tensors are looked for: cache.layers[i].keys is three steps."""


def mark_arguments(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Sequence[str],
    declared: BatchDims | None,
    requests: int,
    dynamic: DynamicDims,
) -> Iterator[Callable[[], None]]:
    """Marks the dims that look like the batch, and `dynamic`, one by one; yields the functions that take the marks
    back."""
    names = [parameters[i] if i < len(parameters) else f"args.{i}" for i in range(len(args))]
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    tensors = {name: (tensor, False) for key, value in given.items() for name, tensor in _tensors(value, key, DEPTH)}
    dims = dims_to_mark(tensors, declared, requests, True, parameters, dynamic)
    for n, varying in dims.items():
        if varying:
            yield _torch.mark_dynamic(tensors[n][0], sorted(varying))


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield name, value
        return
    if not depth or isinstance(value, (torch.nn.Module, type, str, bytes)):
        return
    if isinstance(value, Mapping):
        inside: Mapping[Any, Any] = value
    elif isinstance(value, (list, tuple)):
        inside = dict(enumerate(value))
    else:
        inside = getattr(value, "__dict__", {})
    for key, member in inside.items():
        yield from _tensors(member, f"{name}.{key}", depth - 1)
