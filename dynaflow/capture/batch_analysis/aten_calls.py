"""Helpers to observe aten calls in a run on fake tensors: labels of tensors, and what a call writes."""

from __future__ import annotations

from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.batch_analysis.signatures import BatchDim, bind, written_names

RNG = -1
"""The random generator's state, as the number of a storage."""
Dims = tuple[BatchDim, ...]
"""For each batch axis, the dim of a tensor that carries it."""


def written_tensors(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that a call writes."""
    bound = bind(schema, args, kwargs)
    return tensors_in([bound[name] for name in written_names(schema, bound)])


def op_name(func: Any) -> str:
    """The name in an overload's schema: `mm` for aten, `dynaflow::fetch` for others."""
    name: str = _torch.schema_of(func).name
    return name.removeprefix("aten::")


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def label(tensor: torch.Tensor, dims: Dims) -> None:
    """Attaches dims to a fake tensor."""
    tensor._dynaflow_dims = dims  # type: ignore[attr-defined]


def dims_of(tensor: Any) -> Dims:
    """The dims attached to a tensor; empty if there are none."""
    found: Dims = getattr(tensor, "_dynaflow_dims", ())
    return found
