"""How the dimensions of an operator's arguments line up with those of its results.

A rule describes one operator call by a `Signature`: a label for every dimension of every tensor
argument and of every output. Dimensions with equal labels run in step (index i of one belongs to
index i of the other); a dimension labelled `MIXED` is one along which the operator combines, reorders
or counts elements. `settle` then follows the batch: the call may be split by rows exactly when all
tensors that carry the batch carry it under one label and every output has that label too.

Nothing here knows single operators, and nothing here keeps state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dynaflow import _torch

Label = Hashable | None
Labels = tuple[Label, ...]
Dims = list[int | None]

T = TypeVar("T")

MIXED: Label = None

# Python and ATen write "to the end" as the largest int64; such a bound is no size.
ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call may not be split along the batch; `reason` is written for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument and its labels; `stretches` if size 1 is broadcast along any dimension."""

    tensor: torch.Tensor
    labels: Labels
    stretches: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """Labels of a call. Arguments not among `operands` must be shared; an output without labels
    (None) does not depend on any row. The last entry of `outs` stands for all further outputs."""

    operands: list[Operand]
    outs: list[Labels | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call of the probe run, its arguments bound to the names of the schema."""

    func: _torch.OpOverload
    outs: list[torch.Tensor]
    rows: int
    dim_of: Callable[[torch.Tensor], int | None]
    bound: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def bind(
        cls,
        func: _torch.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outs: list[torch.Tensor],
        rows: int,
        dim_of: Callable[[torch.Tensor], int | None],
    ) -> Call:
        bound = {}
        for place, argument in enumerate(func._schema.arguments):
            if place < len(args):
                bound[argument.name] = args[place]
            else:
                bound[argument.name] = kwargs.get(argument.name, argument.default_value)
        return cls(func, outs, rows, dim_of, bound)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def __str__(self) -> str:
        return str(self.func.overloadpacket)

    def refuse(self, why: str) -> Refusal:
        return Refusal(f"{self} {why}")

    def is_batch(self, size: object) -> bool:
        """Does this size come from the batch? (rows is twice a prime that divides no static size)"""
        return isinstance(size, int) and 0 < abs(size) < ENDLESS and size % (self.rows // 2) == 0

    def batch_dims(self, tensor: torch.Tensor) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if self.is_batch(size)]

    def inputs(self) -> list[torch.Tensor]:
        """The tensors the operator reads or updates, in the order of the schema (no `out=` ones)."""
        schema = self.func._schema
        return [t for a in schema.arguments if not a.is_out for t in leaves(self.bound[a.name])]

    def written(self) -> list[torch.Tensor]:
        """The tensors the operator writes, in the order of the schema."""
        schema = self.func._schema
        return [
            t
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for t in leaves(self.bound[a.name])
        ]

    def carries(self) -> bool:
        return any(self.dim_of(t) is not None for t in (*self.inputs(), *self.written()))


def by_name(table: dict[str, T]) -> dict[str, T]:
    """A table with one entry for each name, from one that gives many names in a key."""
    return {name: entry for names, entry in table.items() for name in names.split()}


def leaves(value: object) -> Iterator[torch.Tensor]:
    """The tensors in an argument: itself, or the members of a list of (optional) tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from leaves(member)


def wrap(dim: int, ndim: int) -> int:
    """A dimension counted from the left, whichever way it was written."""
    return dim + ndim if dim < 0 else dim


def wrapped(dims: int | Iterable[int], ndim: int) -> set[int]:
    return {wrap(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)}


def straight(ndim: int, mixed: Iterable[int] = ()) -> Labels:
    """Labels 0, 1, 2, ... with the given dimensions mixed."""
    mixed = set(mixed)
    return tuple(MIXED if dim in mixed else dim for dim in range(ndim))


def from_right(ndim: int) -> Labels:
    """Labels of broadcasting: dimensions are aligned at the last one."""
    return tuple(("*", dim - ndim) for dim in range(ndim))


def settle(call: Call, signature: Signature) -> Dims | Refusal:
    """Follows the batch from the operands of a call to its outputs."""
    label: Label = MIXED
    size = 0
    listed = Counter(id(operand.tensor) for operand in signature.operands)
    for tensor in call.inputs():
        listed[id(tensor)] -= 1  # a tensor may be given twice, and listed only once
        if listed[id(tensor)] < 0 and call.dim_of(tensor) is not None:
            shape = tuple(tensor.shape)
            return call.refuse(f"takes a tensor of shape {shape} whole, but it carries the batch")
    for operand in signature.operands:
        dim = call.dim_of(operand.tensor)
        if dim is None:
            continue
        if operand.labels[dim] is MIXED:
            return call.refuse(f"runs along the batch dimension (dim {dim})")
        if label is not MIXED and (operand.labels[dim], operand.tensor.shape[dim]) != (label, size):
            return call.refuse("takes tensors whose batch dimensions do not line up")
        label, size = operand.labels[dim], operand.tensor.shape[dim]
    if label is not MIXED:
        for operand in signature.operands:
            if call.dim_of(operand.tensor) is not None or label not in operand.labels:
                continue
            if not (operand.stretches and operand.tensor.shape[operand.labels.index(label)] == 1):
                shape = tuple(operand.tensor.shape)
                return call.refuse(f"aligns a tensor of shape {shape}, shared by all rows, with the batch")
    dims: Dims = []
    for place, out in enumerate(call.outs):
        labels = signature.outs[min(place, len(signature.outs) - 1)]
        if labels is None or label is MIXED:
            dims.append(None)
        elif label not in labels or out.shape[labels.index(label)] != size:
            return call.refuse("does not keep the batch dimension whole")
        else:
            dims.append(labels.index(label))
    return dims


def spelled(call: Call, text: str) -> Signature:
    """The signature written as text, e.g. "?ik,iJ,Jk->ik" for addmm: one word for each tensor
    argument in the order of the schema, then one for each output.

    small letter   a dimension of independent slices, in step with all of the same letter
    capital        a mixed dimension
    * in front     any further leading dimensions, in step and broadcast against each other
    ~ at the end   any further trailing dimensions, mixed
    ? in front     the argument is broadcast: it may lack leading dimensions or have size 1
    -              an argument that must be shared; an output that depends on no row
    """
    left, right = text.split("->")
    words = left.split(",")
    schema = call.func._schema
    named = [call[a.name] for a in schema.arguments if not a.is_out and "Tensor" in str(a.type)]
    operands = [
        Operand(tensor, _labels(word, tensor.ndim), word[0] in "?*")
        for tensor, word in zip(named, words, strict=False)
        if isinstance(tensor, torch.Tensor) and word != "-"
    ]
    outs: list[Labels | None] = []
    for place, out in enumerate(call.outs):
        word = right.split(",")[min(place, right.count(","))]
        outs.append(None if word == "-" else _labels(word, out.ndim))
    return Signature(operands, outs)


def _labels(word: str, ndim: int) -> Labels:
    letters = tuple(letter if letter.islower() else MIXED for letter in word.strip("?*~"))
    spare = ndim - len(letters)
    if word.startswith("*"):
        return (from_right(spare) if spare > 0 else ()) + letters[max(-spare, 0) :]
    if word.endswith("~"):
        return letters[:ndim] + (MIXED,) * spare
    if spare > 0:
        return (MIXED,) * ndim
    return letters[-spare:]
