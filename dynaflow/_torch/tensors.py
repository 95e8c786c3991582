"""The memory behind tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def wrapped_tensors(tensor: Any) -> int | None:
    """How many tensors a tensor is made of that AOTAutograd takes apart; None for any other."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return len(tensor.__tensor_flatten__()[0]) if is_traceable_wrapper_subclass(tensor) else None


def held_tensors(value: Any) -> list[torch.Tensor] | None:
    """The tensors that have the memory of a tensor that wraps others, as a DTensor does; None for anything else."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or wrapped_tensors(value) is None:
        return None
    found: list[torch.Tensor] = []
    for name in value.__tensor_flatten__()[0]:
        inner = getattr(value, name)
        found.extend([inner] if (held := held_tensors(inner)) is None else held)
    return found


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a (fake) tensor, for as long as the tensor lives."""
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
    """A tensor that is to a storage what `like` is to its own, `offset` elements from its start."""
    made = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.size(), like.stride())
    made = made.conj() if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many hold the storage: tensors, views of them, and Python objects."""
    return torch._C._storage_Use_Count(storage._cdata)


def same_addresses(tensors: Sequence[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at `positions` are where `addresses`, a list for all tensors, says."""
    equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only where torch is built for CUDA
    if equal is None:
        return all([tensors[i].data_ptr() == addresses[i] for i in positions])
    return equal(tensors, addresses, positions)
