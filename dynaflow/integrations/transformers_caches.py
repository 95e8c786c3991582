"""Memory for static caches that stays at the same address from one call of `generate` to the next.

`generate` makes a cache for each call and frees it at the end. A CUDA graph knows its inputs by address: if each cache
had other addresses, decoding would be captured again in each call. So caches get memory from a pool: each tensor of a
cache lies at the start of a block of its own, which is as large as the largest call needed. A smaller batch, or a
shorter one, then has the same addresses as well.

A cache has its memory for as long as the cache or one of its tensors is referenced: it may have been returned by
`generate`, or belong to another call that is still running. Until then other calls get other memory.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dynaflow import _torch
from dynaflow.core import forks
from dynaflow.integrations.hooks import replace

POOL_SIZE = 2
"""Caches whose memory stays in the pool: two threads may generate, or one may still hold a result."""


class NewLayer(NamedTuple):
    """A layer of a static cache without memory, and empty tensors with the shapes of its keys and values."""

    layer: Any
    keys: torch.Tensor
    values: torch.Tensor


class CacheMemory:
    """A pool of cache memory. A block is free again when no cache and no tensor refers to it."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._pool: list[_Blocks] = []
        """In the order of their last use."""
        self._made = 0

    def fill(self, cache: Any, layers: Sequence[NewLayer], made: int) -> None:
        """Gives the cache's layers zeroed memory: that of an earlier cache, if it is free.

        `made`: the number of captures and plans so far. Each leaves garbage that refers to the tensors it was made for.
        """
        known = []
        for one in layers:
            if _is_known(one.layer) and not cache.offloading:  # which moves them
                known.append(one)
            else:
                one.layer.lazy_initialization(one.keys, one.values)
        if known:
            self._lend(known, made)
            replace(cache, "reorder_cache", functools.partial(_reorder, cache.layers))

    def _lend(self, layers: Sequence[NewLayer], made: int) -> None:
        wanted = [shape for one in layers for shape in _shapes(one)]
        with self._lock, torch.inference_mode(False), torch.no_grad():
            blocks = self._free(wanted)
            if blocks is None and self._pool and made > self._made:
                gc.collect()
                blocks = self._free(wanted)
            self._made = made
            blocks = blocks or _Blocks()
            self._pool = [*(b for b in self._pool if b is not blocks), blocks][-POOL_SIZE:]
            tensors = blocks.tensors(wanted)
        for n, one in enumerate(layers):
            _initialize(one, *tensors[3 * n : 3 * n + 3])

    def _free(self, wanted: list[_Shape]) -> _Blocks | None:
        """Returns the free blocks that were last used for the same shapes, or else those that were used last."""
        free = [blocks for blocks in self._pool if blocks.free]
        return max(free, key=lambda blocks: (blocks.last == wanted, self._pool.index(blocks)), default=None)

    def clear(self) -> None:
        """Frees all memory that is not in use; caches that are in use keep theirs."""
        with self._lock:
            self._pool = []

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """Of all blocks."""
        with self._lock:
            return [storage for blocks in self._pool for storage in blocks.storages]

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)


class _Shape(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize


class _Blocks:
    """The memory of one cache: a storage for each of its tensors."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.last: list[_Shape] = []
        """The shapes of the last use."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def free(self) -> bool:
        return all(_torch.storage_use_count(storage) == 1 for storage in self.storages)

    def tensors(self, shapes: list[_Shape]) -> list[torch.Tensor]:
        """Returns a zeroed tensor for each shape, at the start of its block: an earlier call may have left NaNs."""
        self.storages = self.storages[: len(shapes)]
        for n, shape in enumerate(shapes):
            if n == len(self.storages):
                self.storages.append(_storage(shape))
            elif self.storages[n].device != shape.device or self.storages[n].nbytes() < shape.nbytes:
                self._await()
                self.storages[n] = torch.UntypedStorage(0)  # frees the old one first
                self.storages[n] = _storage(shape)
        self._follow({shape.device for shape in shapes})
        self.last = shapes
        made = [
            torch.empty(0, dtype=shape.dtype, device=shape.device).set_(
                storage, 0, shape.size, torch.empty(shape.size, device="meta").stride()
            )
            for shape, storage in zip(shapes, self.storages, strict=True)
        ]
        _torch.foreach_zero(made)
        return made

    def _await(self) -> None:
        """Waits until the last call is done with the memory: the allocator knows only the stream it was made on."""
        for stream in self._streams.values():
            stream.synchronize()

    def _follow(self, devices: set[torch.device]) -> None:
        """Orders this call after the last one that used the memory, possibly on another stream."""
        for device in devices:
            if device.type == "cuda":
                now, last = torch.cuda.current_stream(device), self._streams.get(device)
                if last is not None and last != now:
                    now.wait_stream(last)
                self._streams[device] = now


def _is_known(layer: Any) -> bool:
    """Whether the layer allocates keys, values and a length, and nothing else."""
    from transformers.cache_utils import StaticLayer

    return type(layer).lazy_initialization is StaticLayer.lazy_initialization


def _storage(shape: _Shape) -> torch.UntypedStorage:
    return torch.empty(shape.nbytes, dtype=torch.uint8, device=shape.device).untyped_storage()


def _shapes(one: NewLayer) -> tuple[_Shape, _Shape, _Shape]:
    """Returns the shapes of a layer's keys, values and length."""
    keys, values = (
        _Shape((*like.shape[:2], one.layer.max_cache_len, like.size(3)), like.dtype, like.device)
        for like in (one.keys, one.values)
    )
    return keys, values, _Shape((), one.layer.cumulative_length.dtype, keys.device)


def _initialize(one: NewLayer, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor) -> None:
    """Does what the layer's lazy_initialization does, with given tensors."""
    layer, longest = one.layer, one.layer.max_cache_len
    layer.max_cache_len, layer.cumulative_length = 0, length
    try:
        layer.lazy_initialization(one.keys, one.values)
    finally:
        layer.max_cache_len = longest
    layer.keys, layer.values = keys, values
    for tensor in (keys, values, length):
        _torch.mark_static(tensor)


def _reorder(layers: Sequence[Any], beams: torch.Tensor) -> None:
    """A cache's reorder_cache, for beam search. The layers' own replaces tensors whose addresses must stay."""
    for layer in layers:
        before = {name: getattr(layer, name, None) for name in ("keys", "values")}
        layer.reorder_cache(beams)
        for name, tensor in before.items():
            if tensor is not None and getattr(layer, name) is not tensor:
                tensor.copy_(getattr(layer, name))
                setattr(layer, name, tensor)
