"""Against tensors whose elements are numbered: what the sizes and strides say is what is there."""

from __future__ import annotations

import random

import pytest
import torch

from dynaflow.core.memory_layout import is_dense, overlaps_itself, span


def layouts(count: int) -> list[tuple[list[int], list[int]]]:
    dice = random.Random(0)
    found = []
    for _ in range(count):
        dims = dice.randrange(4)
        found.append(([dice.randrange(4) for _ in range(dims)], [dice.randrange(7) for _ in range(dims)]))
    return found


def test_against_numbered_memory() -> None:
    seen = set()
    for size, stride in layouts(3000):
        elements = torch.arange(64).as_strided(size, stride).flatten().tolist()
        reach = max(elements) + 1 if elements else 0
        assert span(size, stride) == reach, (size, stride)
        dense = sorted(elements) == list(range(len(elements)))
        assert not is_dense(size, stride) or dense, (size, stride)
        shared = len(set(elements)) < len(elements)
        assert overlaps_itself(size, stride) or not shared, (size, stride)
        seen.add((dense, is_dense(size, stride), shared, overlaps_itself(size, stride)))
    assert (True, True, False, False) in seen and (False, False, True, True) in seen


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5), (4,)])
def test_contiguous_and_permuted_tensors_are_dense(shape: tuple[int, ...]) -> None:
    t = torch.empty(shape)
    for view in (t, t.permute(*reversed(range(t.dim()))), torch.empty(())):
        assert is_dense(view.size(), view.stride()) and not overlaps_itself(view.size(), view.stride())


def test_expanded_and_sliced_tensors() -> None:
    expanded, sliced = torch.empty(1, 3).expand(4, 3), torch.empty(4, 6)[:, :3]
    assert overlaps_itself(expanded.size(), expanded.stride()) and not is_dense(expanded.size(), expanded.stride())
    assert not overlaps_itself(sliced.size(), sliced.stride()) and not is_dense(sliced.size(), sliced.stride())


def test_elements_that_are_wider_than_their_stride_overlap() -> None:
    assert overlaps_itself([3], [4], width=8) and not overlaps_itself([3], [8], width=8)
