"""torch's own operator database: its operators, their sample inputs, and every way to read a batch in them.

A sample has fixed sizes. A dim of it can be a batch if the operator also takes other sizes of that dim, so each
candidate is tried at sizes beside its own, on fake tensors. An operator may combine several tensors along the batch, so
candidates also join the dims of other arguments that have the same size. Integers among the arguments that equal the
size may stand for it (`x.view(5, -1)` for `x.view(len(x), -1)`), alone or all together.
"""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.complex64, torch.int64, torch.bool, torch.bfloat16)
"""The first that an operator takes is tested on all samples."""

OTHER_DTYPES = (torch.int64, torch.bool, torch.complex128)
"""Tested as well, on one sample each."""

NOT_COMPARED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Their results are whatever was in memory."""


UNCHECKED = {"lu_unpack", "_segment_reduce", "nn.functional.embedding_bag"}
"""They read or write beyond their memory when their arguments don't fit each other, so parts of them are not tried."""


REPEATS = {"diff"}
"""An integer among their arguments tells how often they do something. A probe that takes it for the batch's size does
it some thousand times: right, and refused in the end, but it takes minutes."""


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """An entry of the database. Some operators have several, told apart by a variant."""

    info: Any

    @property
    def name(self) -> str:
        variant = self.info.variant_test_name
        return f"{self.info.name}.{variant}" if variant else self.info.name

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those that are tested; none if the operator does not run on a CPU."""
        taken = self.info.supported_dtypes("cpu")
        first = next((d for d in DTYPES if d in taken), None)
        return () if first is None else (first, *(d for d in OTHER_DTYPES if d in taken and d != first))

    def samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        """Those that differ by more than values; always the same ones, in the same order."""
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        drawn = self.info.sample_inputs("cpu", dtype, requires_grad=False)
        seen: set[str] = set()
        for number, given in enumerate(drawn):
            leaves, spec = tree_flatten(((given.input, *given.args), given.kwargs))
            sample = Sample(self, dtype, number, leaves, spec)
            if (look := sample.look) not in seen:
                seen.add(look)
                yield sample


@cache
def operators() -> dict[str, Operator]:
    """By name."""
    found = [Operator(info) for info in op_db]
    return {op.name: op for op in found}


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Arguments for an operator, flattened."""

    operator: Operator
    dtype: torch.dtype
    number: int
    leaves: list[Any]
    spec: TreeSpec

    @property
    def look(self) -> str:
        """All but the values of tensors."""
        looks = [
            (str(t.layout), t.dtype, tuple(t.shape), t.stride() if is_plain(t) else ()) if isinstance(t, torch.Tensor)
            else t for t in self.leaves
        ]  # fmt: skip
        return f"{looks} {self.spec}"

    def cuts(self) -> Iterator[Cut]:
        """Each reading of a batch once. Whether the operator takes other sizes of it is not known yet."""
        seen: set[Cut] = set()
        tensors = {i: t for i, t in enumerate(self.leaves) if is_plain(t) and t.dim() > 0}
        for i, tensor in tensors.items():
            for dim, rows in enumerate(tensor.shape):
                if rows < 2:
                    continue
                for dims in self._joined(i, dim, rows, tensors):
                    for numbers in self._numbers(rows):
                        cut = Cut(rows, dims, numbers)
                        if cut not in seen:
                            seen.add(cut)
                            yield cut

    def _joined(
        self, place: int, dim: int, rows: int, tensors: dict[int, torch.Tensor]
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        """The dim alone, and with dims of other arguments: at the same place from the left or right, or anywhere."""
        from_right = dim - tensors[place].dim()

        def others(wanted: Callable[[torch.Tensor], int | None]) -> tuple[tuple[int, int], ...]:
            found = {i: wanted(t) for i, t in tensors.items()}
            found[place] = dim
            return tuple((i, d) for i, d in found.items() if d is not None)

        yield ((place, dim),)
        yield others(lambda t: dim if dim < t.dim() and t.shape[dim] == rows else None)
        yield others(lambda t: from_right % t.dim() if -from_right <= t.dim() and t.shape[from_right] == rows else None)
        yield others(lambda t: next((d for d, n in enumerate(t.shape) if n == rows), None))

    def _numbers(self, rows: int) -> Iterator[tuple[int, ...]]:
        """Integers that may stand for the batch's size: none, each, or all."""
        equal = tuple(i for i, leaf in enumerate(self.leaves) if type(leaf) is int and leaf == rows)
        yield ()
        if self.operator.info.name in REPEATS:
            return
        yield from ((i,) for i in equal)
        if len(equal) > 1:
            yield equal

    def at(self, cut: Cut, rows: int) -> list[Any]:
        """Fake arguments with this number of rows."""
        carriers = dict(cut.dims)
        leaves = list(self.leaves)
        with fake_mode() as mode:
            for i, leaf in enumerate(self.leaves):
                if i in cut.numbers:
                    leaves[i] = rows
                elif is_plain(leaf):
                    size, stride = resized(leaf, carriers[i], rows) if i in carriers else (leaf.shape, leaf.stride())
                    leaves[i] = torch.empty_strided(size, stride, dtype=leaf.dtype)
                elif isinstance(leaf, torch.Tensor):
                    leaves[i] = mode.from_tensor(leaf)
        return leaves

    def part(self, cut: Cut, start: int, stop: int) -> list[Any]:
        """Arguments for some of the rows."""
        leaves = copy.deepcopy(self.leaves)
        for i, dim in cut.dims:
            leaves[i] = leaves[i].narrow(dim, start, stop - start)
        for i in cut.numbers:
            leaves[i] = stop - start
        return leaves

    def call(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        torch.default_generator.manual_seed(0)
        return function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Cut:
    """A reading of the batch: which arguments carry it on which dim, and which integers stand for its size."""

    rows: int
    dims: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        """`0.1+2.0`: dim 1 of argument 0 and dim 0 of argument 2; `,3`: argument 3 is the size."""
        return "+".join(f"{i}.{dim}" for i, dim in self.dims) + "".join(f",{i}" for i in self.numbers)


def is_plain(value: Any) -> bool:
    """A tensor with memory as others have it."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_quantized
    )


def resized(tensor: torch.Tensor, dim: int, rows: int) -> tuple[list[int], list[int]]:
    """Size and strides with another number of rows: the tensor's own, or dense with its dims in the same order."""
    size, stride = list(tensor.shape), list(tensor.stride())
    if rows == size[dim]:
        return size, stride
    size[dim] = rows
    step = 1
    for d in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
        stride[d] = step
        step *= size[d]
    return size, stride


@cache
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


WAYS = ("function", "inplace", "out")


def target(operator: Operator, way: str) -> Callable[..., Any] | str | None:
    """What a graph calls: a function of torch's, or the name of a method; None if there is no such way."""
    info = operator.info
    if way == "inplace":
        method = info.inplace_variant
        return getattr(method, "__name__", None) if isinstance(method, _METHODS) else None
    function = info.op
    if way == "out" and not info.supports_out:
        return None
    if isinstance(function, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return function
    if isinstance(info.method_variant, _METHODS) and function.__name__ == "<lambda>":
        return info.method_variant.__name__
    return _named(operator)


_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


@cache
def _named(operator: Operator) -> Callable[..., Any]:
    """A function that code can call by a name of its own."""
    function = operator.info.op

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = "".join(c if c.isalnum() else "_" for c in operator.name)
    return call
