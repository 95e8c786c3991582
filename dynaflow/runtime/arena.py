"""The memory of a plan's buffers: one block, which a run takes and returns.

Plans of one model share blocks, so the memory is that of the largest plan, times the number of runs that overlap. The
views of a plan's buffers are made once for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from dynaflow.core import forks
from dynaflow.runtime.cuda_lanes import RunOrder, capturing


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor in the arena: where it starts, in bytes, and its layout."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def narrow(self, dim: int, start: int, length: int) -> View:
        size = (*self.size[:dim], length, *self.size[dim + 1 :])
        return replace(self, offset=self.offset + start * self.stride[dim] * self.dtype.itemsize, size=size)

    def of(self, block: torch.Tensor) -> torch.Tensor:
        elements = block[: block.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return elements.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


@dataclass(slots=True, eq=False)
class Block:
    memory: torch.Tensor
    views: WeakKeyDictionary[Arena, tuple[torch.Tensor, ...]] = field(default_factory=WeakKeyDictionary)
    order: RunOrder = field(default_factory=RunOrder)


class BlockPool:
    """The free blocks of one compiled model."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, list[Block]] = {}
        self._lock = forks.lock()

    def blocks(self, device: torch.device) -> list[Block]:
        with self._lock:
            return list(self._blocks.get(device, ()))

    def take(self, device: torch.device, nbytes: int) -> Block:
        with self._lock:
            blocks = self._blocks.setdefault(device, [])
            block = min((b for b in blocks if b.memory.numel() >= nbytes), key=lambda b: b.memory.numel(), default=None)
            if block is not None:
                blocks.remove(block)
        if block is None:  # a larger one replaces the others
            self.clear(device)
            return Block(_new(device, nbytes))
        if device.type == "cuda":
            block.order.enter(device)
        return block

    def clear(self, device: torch.device) -> None:
        """Releases the free blocks."""
        with self._lock:
            blocks = self._blocks.pop(device, [])
        if device.type == "cuda":
            for block in blocks:  # the last run on it may not have ended
                block.order.enter(device)
                block.memory.record_stream(torch.cuda.current_stream(device))

    def give(self, device: torch.device, block: Block) -> None:
        if device.type == "cuda":
            block.order.leave(device)
        with self._lock:
            self._blocks.setdefault(device, []).append(block)


class Arena:
    """The buffers of one plan in the blocks of a pool. Without a pool, each run allocates a block."""

    def __init__(self, views: Sequence[View], nbytes: int, device: torch.device, pool: BlockPool | None) -> None:
        self._views, self._nbytes, self._device, self._pool = tuple(views), nbytes, device, pool

    def take(self) -> tuple[Block, tuple[torch.Tensor, ...]]:
        """A block and the plan's buffers in it. During a CUDA graph capture, a new block, owned by the graph."""
        pool = self._shared()
        block = Block(_new(self._device, self._nbytes)) if pool is None else pool.take(self._device, self._nbytes)
        if self not in block.views:
            with torch.inference_mode(False), torch.no_grad():
                block.views[self] = tuple(view.of(block.memory) for view in self._views)
        return block, block.views[self]

    def give(self, block: Block) -> None:
        # Without a pool: the block was allocated on the caller's stream, which all lanes have joined by now.
        if (pool := self._shared()) is not None:
            pool.give(self._device, block)

    def _shared(self) -> BlockPool | None:
        return None if self._device.type == "cuda" and capturing() else self._pool


def _new(device: torch.device, nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):  # else only inference mode could write to it
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
