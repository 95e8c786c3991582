"""What an aten call's schema and arguments tell, for those who watch a run on fake tensors."""

from __future__ import annotations

from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.batch_analysis.signatures import Place, bind, written_names

RNG = -1
"""Stands for the random generator's state among the storages."""
Dims = tuple[Place, ...]
"""On which dim a tensor carries each batch axis."""


def written_tensors(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Those among the arguments that the call writes."""
    bound = bind(schema, args, kwargs)
    return tensors_in([bound[name] for name in written_names(schema, bound)])


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def label(tensor: torch.Tensor, dims: Dims) -> None:
    tensor._dynaflow_dims = dims  # type: ignore[attr-defined]


def dims_of(tensor: Any) -> Dims:
    """As it was labelled; of what was not, nothing."""
    found: Dims = getattr(tensor, "_dynaflow_dims", ())
    return found
