"""Memory for static caches that stays where it is from one call of `generate` to the next.

`generate` makes a cache for each call and lets go of it at the end. A CUDA graph knows its inputs by address: if each
cache lay elsewhere, decoding would be captured anew in each call. So caches get memory that is kept: each tensor of a
cache is laid at the start of a block of its own, which is as large as the largest call needed. Then the cache of a
smaller batch, or of a shorter one, lies at the same addresses each time too.

A cache has its memory for as long as anybody holds the cache or a tensor of it: one that `generate` returned, one of
another call that is still running. Who comes meanwhile gets other memory.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dynaflow import _torch
from dynaflow.core import forks

KEPT = 2
"""Caches whose memory is kept, if as many are in use at once: two threads that generate, or one that holds a result."""


class Layer(NamedTuple):
    """A layer of a static cache that has no memory yet, and what its keys and values are like: tensors of no tokens."""

    layer: Any
    keys: torch.Tensor
    values: torch.Tensor


class CacheMemory:
    """Lends memory to caches, and takes it back when nobody holds it any more."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._kept: list[_Blocks] = []
        """In the order of their use."""
        self._made = 0

    def fill(self, cache: Any, layers: Sequence[Layer], made: int) -> None:
        """Gives the cache's layers their memory, zeroed: that of an earlier cache, if it is free.

        `made`: how much was captured and planned so far, which leaves garbage that holds the tensors it was made for.
        """
        known = []
        for one in layers:
            if _is_known(one.layer) and not cache.offloading:  # which moves them
                known.append(one)
            else:
                one.layer.lazy_initialization(one.keys, one.values)
        if known:
            self._lend(known, made)
            cache.reorder_cache = functools.partial(_reorder, cache.layers)

    def _lend(self, layers: Sequence[Layer], made: int) -> None:
        wanted = [shape for one in layers for shape in _shapes(one)]
        with self._lock, torch.inference_mode(False), torch.no_grad():
            blocks = self._free(wanted)
            if blocks is None and self._kept and made > self._made:
                gc.collect()
                blocks = self._free(wanted)
            self._made = made
            blocks = blocks or _Blocks()
            self._kept = [*(b for b in self._kept if b is not blocks), blocks][-KEPT:]  # who holds another one keeps it
            tensors = blocks.tensors(wanted)
        for n, one in enumerate(layers):
            _settle(one, *tensors[3 * n : 3 * n + 3])

    def _free(self, wanted: list[_Shape]) -> _Blocks | None:
        """Of those that nobody holds, the one that was used for the same last; or used last at all."""
        free = [blocks for blocks in self._kept if blocks.free]
        return max(free, key=lambda blocks: (blocks.last == wanted, self._kept.index(blocks)), default=None)

    def clear(self) -> None:
        """Lets go of all; caches that somebody holds keep theirs."""
        with self._lock:
            self._kept = []

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory that is kept, of all caches."""
        with self._lock:
            return [storage for blocks in self._kept for storage in blocks.storages]

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
    """The memory of one cache: a storage for each of its tensors, so that no two of them share one."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.last: list[_Shape] = []
        """What it was used for."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def free(self) -> bool:
        return all(_torch.storage_users(storage) == 1 for storage in self.storages)

    def tensors(self, shapes: list[_Shape]) -> list[torch.Tensor]:
        """One for each shape, at the start of its block, zeroed: what an earlier call left might be no number."""
        self.storages = self.storages[: len(shapes)]
        for n, shape in enumerate(shapes):
            if n == len(self.storages):
                self.storages.append(_storage(shape))
            elif self.storages[n].device != shape.device or self.storages[n].nbytes() < shape.nbytes:
                self._await()
                self.storages[n] = torch.UntypedStorage(0)  # lets go of the old one first
                self.storages[n] = _storage(shape)
        self._follow({shape.device for shape in shapes})
        self.last = shapes
        made = [
            torch.empty(0, dtype=shape.dtype, device=shape.device).set_(
                storage, 0, shape.size, torch.empty(shape.size, device="meta").stride()
            )
            for shape, storage in zip(shapes, self.storages, strict=True)
        ]
        torch._foreach_zero_(made)
        return made

    def _await(self) -> None:
        """Until the last call is done with the memory: the allocator knows only the stream that it was made on."""
        for stream in self._streams.values():
            stream.synchronize()

    def _follow(self, devices: set[torch.device]) -> None:
        """What this call does to the memory comes after what the last one did, which may have used another stream."""
        for device in devices:
            if device.type == "cuda":
                now, last = torch.cuda.current_stream(device), self._streams.get(device)
                if last is not None and last != now:
                    now.wait_stream(last)
                self._streams[device] = now


def _is_known(layer: Any) -> bool:
    """Whether the layer has keys, values and a length, and nothing else that it would make beside them."""
    from transformers.cache_utils import StaticLayer

    return type(layer).lazy_initialization is StaticLayer.lazy_initialization


def _storage(shape: _Shape) -> torch.UntypedStorage:
    return torch.empty(shape.nbytes, dtype=torch.uint8, device=shape.device).untyped_storage()


def _shapes(one: Layer) -> tuple[_Shape, _Shape, _Shape]:
    """Of a layer's keys, values and length."""
    keys, values = (
        _Shape((*like.shape[:2], one.layer.max_cache_len, like.size(3)), like.dtype, like.device)
        for like in (one.keys, one.values)
    )
    return keys, values, _Shape((), one.layer.cumulative_length.dtype, keys.device)


def _settle(one: Layer, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor) -> None:
    """As the layer's lazy_initialization does, but with tensors that are there."""
    layer, longest = one.layer, one.layer.max_cache_len
    layer.max_cache_len, layer.cumulative_length = 0, length
    try:
        layer.lazy_initialization(one.keys, one.values)
    finally:
        layer.max_cache_len = longest
    layer.keys, layer.values = keys, values
    for tensor in (keys, values, length):
        torch._dynamo.mark_static_address(tensor)


def _reorder(layers: Sequence[Any], beams: torch.Tensor) -> None:
    """A cache's reorder_cache, for beams. The layers' own puts new tensors in the place of those that must stay."""
    for layer in layers:
        before = {name: getattr(layer, name, None) for name in ("keys", "values")}
        layer.reorder_cache(beams)
        for name, tensor in before.items():
            if tensor is not None and getattr(layer, name) is not tensor:
                tensor.copy_(getattr(layer, name))
                setattr(layer, name, tensor)
