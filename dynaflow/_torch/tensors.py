"""Tensors and their storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def count_inner_tensors(tensor: Any) -> int | None:
    """Number of tensors inside a wrapper subclass that AOTAutograd unwraps; None for other values. Seen on 2.11 and
    2.13."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return len(tensor.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(tensor) else None


def inner_tensors(value: Any) -> list[torch.Tensor] | None:
    """The plain tensors inside a wrapper subclass, such as a DTensor; None for anything else. Seen on 2.11 and 2.13."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or count_inner_tensors(value) is None:
        return None
    found: list[torch.Tensor] = []
    for name in value.__tensor_flatten__()[0]:
        inner = getattr(value, name)
        found.extend([inner] if (held := inner_tensors(inner)) is None else held)
    return found


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies a (fake) tensor's storage as long as the tensor lives. Seen on 2.11 and 2.13."""
    return tensor.untyped_storage()._cdata


def is_mutated(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or one that shares its version counter, was written since it was made. Seen on 2.11 and
    2.13."""
    return bool(tensor._version)


def is_autograd_view(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks the tensor as a view of another. Seen on 2.11 and 2.13."""
    return tensor._is_view()


def mark_static(tensor: torch.Tensor) -> None:
    """Has Dynamo take the tensor's address for fixed. Seen on 2.11 and 2.13."""
    torch._dynamo.mark_static_address(tensor)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that the module itself owns, by attribute name. Seen on 2.11 and 2.13."""
    return module._parameters


foreach_copy, foreach_zero = torch._foreach_copy_, torch._foreach_zero_
"""One launch for a list of tensors. Aliases, as a function would cost a call on the hot path. Seen on 2.11 and 2.13."""


def view_at(like: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A view of a storage at `offset` elements, with the layout and the conj and neg bits of `like`. Seen on 2.11."""
    made = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.size(), like.stride())
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of references to the storage: tensors, views and Python objects. Seen on 2.11 and 2.13."""
    return torch._C._storage_Use_Count(storage._cdata)


def same_addresses(tensors: Sequence[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at `positions` have the `addresses` at these positions. Seen on 2.11 and 2.13."""
    equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # CUDA builds only
    if equal is None:
        return all([tensors[i].data_ptr() == addresses[i] for i in positions])
    return equal(tensors, addresses, positions)
