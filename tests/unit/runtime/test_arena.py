"""Blocks and views; what plans put where is in lower/test_memory.py."""

from __future__ import annotations

import gc

import torch

from dynaflow.runtime.arena import Arena, BlockPool, View
from tests.helpers import assert_equal

CPU = torch.device("cpu")


def test_views_of_a_block() -> None:
    whole = View(offset=512, size=(4, 3), stride=(3, 1), dtype=torch.float32)
    part = whole.narrow(0, 1, 2)
    assert (part.offset, part.size, part.stride) == (512 + 12, (2, 3), (3, 1))
    column = whole.narrow(1, 2, 1)
    assert (column.offset, column.size, column.stride) == (512 + 8, (4, 1), (3, 1))
    block = torch.zeros(512 + 48 + 3, dtype=torch.uint8)  # no multiple of the element's size
    tensor = whole.of(block)
    tensor.copy_(torch.arange(12.0).view(4, 3))
    assert_equal(part.of(block), tensor[1:3])
    assert_equal(column.of(block), tensor[:, 2:])
    assert tensor.data_ptr() == block.data_ptr() + 512


def arena(nbytes: int, pool: BlockPool) -> Arena:
    return Arena((View(offset=0, size=(nbytes,), stride=(1,), dtype=torch.uint8),), nbytes, CPU, pool)


def test_block_is_handed_to_one_run_at_a_time() -> None:
    pool = BlockPool()
    mine = arena(100, pool)
    (block, first), (other, second) = mine.take(), mine.take()
    assert block is not other and first[0].data_ptr() != second[0].data_ptr()
    mine.give(block)
    again, third = mine.take()
    assert again is block and third[0] is first[0], "the views were cut once"
    assert mine.take()[0] not in (block, other), "both are taken"


def test_blocks_are_shared_by_plans_of_different_sizes() -> None:
    pool = BlockPool()
    small, large = arena(100, pool), arena(1000, pool)
    block, _ = large.take()
    large.give(block)
    mine, views = small.take()
    assert mine is block and views[0].numel() == 100
    small.give(mine)
    assert large.take()[0] is block


def test_larger_block_takes_the_place_of_the_others() -> None:
    pool = BlockPool()
    small, large = arena(100, pool), arena(1000, pool)
    block, _ = small.take()
    small.give(block)
    new, _ = large.take()
    large.give(new)
    assert pool.blocks(CPU) == [new]
    assert small.take()[0] is new


def test_smallest_block_that_fits_is_taken() -> None:
    pool = BlockPool()
    taken = [arena(n, pool).take()[0] for n in (3000, 1000, 2000)]
    for block in taken:
        pool.give(CPU, block)
    assert arena(1500, pool).take()[0] is taken[2]


def test_memory_taken_in_inference_mode_is_for_all_modes() -> None:
    """Other modes can't save an inference tensor, nor always write one."""
    with torch.inference_mode():
        block, (view,) = arena(100, BlockPool()).take()
    assert not block.memory.is_inference() and not view.is_inference()


def test_views_go_with_their_plan() -> None:
    pool = BlockPool()
    mine = arena(100, pool)
    block, _ = mine.take()
    mine.give(block)
    assert len(block.views) == 1
    del mine
    gc.collect()
    assert not block.views
