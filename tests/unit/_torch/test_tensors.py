from __future__ import annotations

import gc

import torch

from dynaflow._torch.tensors import (
    count_inner_tensors,
    inner_tensors,
    same_addresses,
    storage_id,
    storage_use_count,
    view_at,
)


def test_views_have_their_tensors_storage() -> None:
    t = torch.empty(4, 4)
    assert storage_id(t) == storage_id(t[1:].t()) != storage_id(t.clone())


def test_a_view_of_other_memory() -> None:
    like = torch.arange(12.0).view(3, 4).t()[1:]
    storage = torch.arange(100.0, 120.0).untyped_storage()
    made = view_at(like, storage, 5)
    assert (made.size(), made.stride(), made.dtype) == (like.size(), like.stride(), like.dtype)
    assert made[0, 0] == 105 and storage_id(made) == storage._cdata
    complex = view_at(torch.ones(2, dtype=torch.complex64).conj(), torch.tensor([1 + 2j, 3 + 4j]).untyped_storage(), 0)
    assert complex.is_conj() and complex.tolist() == [1 - 2j, 3 - 4j]


def test_users_of_a_storage_are_counted() -> None:
    t = torch.empty(3)
    storage = t.untyped_storage()
    before = storage_use_count(storage)
    views = [t[1:], t.view(3, 1)]
    assert storage_use_count(storage) == before + 2
    del views
    gc.collect()
    assert storage_use_count(storage) == before


def test_addresses_are_compared_at_some_positions() -> None:
    tensors = [torch.empty(2), 7, torch.empty(2)]
    addresses = [tensors[0].data_ptr(), 0, tensors[2].data_ptr()]  # type: ignore[union-attr]
    assert same_addresses(tensors, addresses, [0, 2]) and same_addresses(tensors, [1, 1, 1], [])
    assert not same_addresses([torch.empty(2), 7, tensors[2]], addresses, [0, 2])
    assert same_addresses([torch.empty(2), 7, tensors[2]], addresses, [2])


def test_tensors_that_others_wrap() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(2), torch.zeros(2)
    nested = TwoTensor(TwoTensor(a, b), TwoTensor(b, a))
    assert count_inner_tensors(nested) == 2 and count_inner_tensors(a) is None
    held = inner_tensors(nested)
    assert held is not None and [t is u for t, u in zip(held, [a, b, b, a], strict=True)] == [True] * 4
    assert inner_tensors(a) is None and inner_tensors(torch.nn.Parameter(a)) is None and inner_tensors(3) is None
