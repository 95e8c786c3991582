"""Memoizes the calls of a fake run: identical calls, as a model's layers make them, run once.

Calls are identical if they call one function with arguments that can't be distinguished: equal numbers, and tensors of
equal layout, dtype, device and labels that share memory in the same way. Calls with other arguments, or with effects
other than on memory, are not memoized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from dynaflow import _torch
from dynaflow.capture.batch_analysis.aten_calls import RNG, Dims, dims_of, label, tensors_in
from dynaflow.core.memory_layout import span

_PLAIN = (int, float, complex, bool, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout,
          torch.memory_format)  # fmt: skip
Number = Callable[[torch.Tensor], int]
"""Numbers a tensor's storage."""


class NotMemoizable(Exception):
    """Identical calls can't be recognized, or replayed."""


class _TensorKey(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    dims: Dims

    @classmethod
    def of(cls, tensor: Any) -> _TensorKey:
        if not _torch.is_plain_fake(tensor):
            raise NotMemoizable
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return cls(shape, stride, offset, tensor.dtype, tensor.device, dims_of(tensor))


class FakeCall:
    """A call on fake tensors. Calls with equal keys are identical. Raises NotMemoizable if there is no such key."""

    def __init__(self, target: Any, args: Any, kwargs: Any, number: Number) -> None:
        self.tensors: list[torch.Tensor] = []
        self._number, self._places = number, dict[int, int]()
        self.key = (target, self._seen(args), self._seen(kwargs))

    def _seen(self, given: Any) -> Any:
        kind = type(given)
        if kind in _PLAIN:
            return kind, given  # 1 and True are equal
        if kind in (tuple, list, immutable_list, torch.Size):
            return kind, *map(self._seen, given)
        if kind is slice:
            return kind, *map(self._seen, (given.start, given.stop, given.step))
        if kind in (dict, immutable_dict):
            return kind, *((name, self._seen(value)) for name, value in given.items())
        look = _TensorKey.of(given)
        self.tensors.append(given)
        return self._places.setdefault(self._number(given), len(self._places)), look

    def memory(self, results: Sequence[torch.Tensor]) -> list[int]:
        """The storages that a call may access and other calls see, in the same order for identical calls."""
        return list(dict.fromkeys([RNG, *(self._number(t) for t in (*self.tensors, *results))]))


class _Result(NamedTuple):
    """An argument; a tensor with a layout, over an argument's storage or its own; or a plain value."""

    over: int | None = None
    look: _TensorKey | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class MemoEntry:
    """What a call did, relative to its arguments."""

    results: tuple[_Result, ...]
    tree: Any
    memory: int
    """Number of storages accessed, temporaries included."""
    reads: frozenset[int]
    writes: frozenset[int]

    @classmethod
    def of(cls, call: FakeCall, value: Any, reads: set[int], writes: set[int]) -> MemoEntry:
        leaves, tree = _torch.tree_flatten(value)
        results = tuple(_result(leaf, call.tensors) for leaf in leaves)
        new = [_torch.storage_id(t) for t, r in zip(leaves, results, strict=True) if r.look and r.over is None]
        if len(new) != len(set(new)):
            raise NotMemoizable
        accessed = dict.fromkeys([*call.memory(tensors_in(leaves)), *sorted(reads | writes)])
        place = {number: i for i, number in enumerate(accessed)}
        return cls(results, tree, len(place), frozenset(place[n] for n in reads), frozenset(place[n] for n in writes))

    def replay(self, call: FakeCall, mode: Any, fresh: Callable[[], int]) -> tuple[Any, set[int], set[int]]:
        """The result for another call, with the storages read and written. `fresh` numbers new storages."""
        leaves = [self._made(result, call.tensors, mode) for result in self.results]
        accessed = call.memory(tensors_in(leaves))
        accessed += [fresh() for _ in range(self.memory - len(accessed))]
        value = _torch.tree_unflatten(leaves, self.tree)
        return value, {accessed[i] for i in self.reads}, {accessed[i] for i in self.writes}

    @staticmethod
    def _made(result: _Result, given: list[torch.Tensor], mode: Any) -> Any:
        look, over = result.look, None if result.over is None else given[result.over]
        if look is None:
            return result.value if over is None else over
        made = _torch.make_fake(mode, look.size, look.stride, look.offset, look.dtype, look.device, over)
        label(made, look.dims)
        return made


def _result(leaf: Any, given: list[torch.Tensor]) -> _Result:
    if not isinstance(leaf, torch.Tensor):
        if type(leaf) in _PLAIN or (type(leaf) is torch.Size and all(type(n) is int for n in leaf)):
            return _Result(value=leaf)
        raise NotMemoizable
    same = next((i for i, tensor in enumerate(given) if tensor is leaf), None)
    if same is not None:
        return _Result(over=same)
    look, storage = _TensorKey.of(leaf), _torch.storage_id(leaf)
    over = next((i for i, tensor in enumerate(given) if _torch.storage_id(tensor) == storage), None)
    if over is not None and given[over].dtype != leaf.dtype:
        raise NotMemoizable
    alone = span(look.size, look.stride) * leaf.itemsize  # the size of a storage made for it alone
    if over is None and (look.offset or leaf.untyped_storage().nbytes() != alone):
        raise NotMemoizable  # a view of a temporary
    return _Result(over=over, look=look)
