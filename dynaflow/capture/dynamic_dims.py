"""Marks the batch dynamic before the model is captured.

Dynamo specializes on sizes unless a dim is marked. The backend marks dims that it finds specialized and has the frame
traced again, which is slow for a large model. So dims that the arguments show are marked before the first trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.captured_graph import BatchDims, DynamicDims, dims_to_mark

DEPTH = 4
"""Depth of the search for tensors in an argument: cache.layers[i].keys is at depth three."""


def mark_arguments(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Sequence[str],
    declared: BatchDims | None,
    requests: int,
    dynamic: DynamicDims,
) -> Iterator[Callable[[], None]]:
    """Marks the dims that look like the batch, and the dims in `dynamic`. Yields functions that remove the marks."""
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
