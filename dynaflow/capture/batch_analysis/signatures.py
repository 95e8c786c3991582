"""How the dimensions of an operator's arguments line up with those of its results.

A rule describes one operator call by a `Signature`: a label for every dimension of every tensor argument and of every
output. Dimensions with equal labels run in step (index i of one belongs to index i of the other); a dimension labelled
`MIXED` is one along which the operator combines, reorders or counts elements. `propagate` then follows the batch: the
call may be split by rows exactly when all tensors that carry the batch carry it under one label and every output has
that label too.

Nothing here knows single operators, and nothing here keeps state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from dynaflow import _torch

Label = Hashable | None
Labels = tuple[Label, ...]


class MergedDim(NamedTuple):
    """A dim that merges other dims, of size `outer` together, with the rows after them: `(s, rows)` viewed as `(s *
    rows,)`. No range of such a dim is a range of rows."""

    dim: int
    outer: int


BatchDim = int | MergedDim | None
"""The dim on which a tensor carries the batch; None if it does not."""
Dims = list[BatchDim]

T = TypeVar("T")

MIXED: Label = None

# Python and ATen write "to the end" as the largest int64, which is not a size.
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
    """Labels of a call. Arguments not among `operands` must be shared; an output without labels (None) does not depend
    on any row. The last entry of `outs` stands for all further outputs."""

    operands: list[Operand]
    outs: list[Labels | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call of the probe run, its arguments bound to the names of the schema."""

    func: _torch.OpOverload
    outs: list[torch.Tensor]
    rows: int
    batch_dim_of: Callable[[torch.Tensor], BatchDim]
    bound: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def bind(
        cls,
        func: _torch.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outs: list[torch.Tensor],
        rows: int,
        batch_dim_of: Callable[[torch.Tensor], BatchDim],
    ) -> Call:
        return cls(func, outs, rows, batch_dim_of, bind(_torch.schema_of(func), args, kwargs))

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def __str__(self) -> str:
        return str(self.func.overloadpacket)

    def refuse(self, why: str) -> Refusal:
        return Refusal(f"{self} {why}")

    def dim_of(self, tensor: torch.Tensor) -> int | None:
        return dim_in(self.batch_dim_of(tensor))

    def outer(self, tensor: torch.Tensor) -> int:
        """Size of the dims merged before the rows; 1 if none are."""
        place = self.batch_dim_of(tensor)
        return place.outer if isinstance(place, MergedDim) else 1

    def is_batch(self, size: object) -> bool:
        """Whether a size comes from the batch: `rows` is twice a prime that divides no other size."""
        return isinstance(size, int) and 0 < abs(size) < ENDLESS and size % (self.rows // 2) == 0

    def batch_dims(self, tensor: torch.Tensor) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if self.is_batch(size)]

    def inputs(self) -> list[torch.Tensor]:
        """The tensors the operator reads or updates, in the order of the schema (no `out=` ones)."""
        schema = _torch.schema_of(self.func)
        return [t for a in schema.arguments if not a.is_out for t in leaves(self.bound[a.name])]

    def written(self) -> list[torch.Tensor]:
        """The tensors the operator writes, in the order of the schema."""
        names = written_names(_torch.schema_of(self.func), self.bound)
        return [t for name in names for t in leaves(self.bound[name])]

    def returned(self) -> list[torch.Tensor | None]:
        """For each result, the written argument that the operator returns as this result; else None."""
        schema = _torch.schema_of(self.func)
        written = {frozenset(a.alias_info.before_set): self.bound[a.name] for a in schema.arguments if a.alias_info}
        aliases = [r.alias_info for r in schema.returns]
        found = [written.get(frozenset(a.before_set)) if a is not None and a.is_write else None for a in aliases]
        return [t if isinstance(t, torch.Tensor) else None for t in found]

    def given_out(self) -> list[torch.Tensor]:
        """The tensors given as `out=`."""
        return [t for a in _torch.schema_of(self.func).arguments if a.is_out for t in leaves(self.bound[a.name])]

    def carries(self) -> bool:
        return any(self.dim_of(t) is not None for t in (*self.inputs(), *self.written()))


def bind(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


_STATISTICS = {f"aten::{name}" for name in (
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
    "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts")}  # fmt: skip
"""Operators that write `running_mean` and `running_var` in training only. Their schemas say never, or always."""


def written_names(schema: Any, bound: dict[str, Any]) -> list[str]:
    """The arguments that a call writes, in the order of the schema."""
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if schema.name not in _STATISTICS:
        return names
    statistics = [name for name in ("running_mean", "running_var") if name in bound]
    others = [name for name in names if name not in statistics]
    return [*statistics, *others] if bound.get("training", True) else others


def dim_in(place: BatchDim) -> int | None:
    """The dim alone, merged or not."""
    return place.dim if isinstance(place, MergedDim) else place


def batch_dim_at(dim: int, outer: int) -> BatchDim:
    return dim if outer == 1 else MergedDim(dim, outer)


def by_name(table: dict[str, T]) -> dict[str, T]:
    """Splits the keys of a table, which may hold several names."""
    return {name: entry for names, entry in table.items() for name in names.split()}


def leaves(value: object) -> Iterator[torch.Tensor]:
    """The tensors in an argument: itself, or the members of a list of (optional) tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from leaves(member)


def wrap_dim(dim: int, ndim: int) -> int:
    """A non-negative dim."""
    return dim + ndim if dim < 0 else dim


def wrap_dims(dims: int | Iterable[int], ndim: int) -> set[int]:
    return {wrap_dim(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)}


def dim_labels(ndim: int, mixed: Iterable[int] = ()) -> Labels:
    """Labels 0, 1, 2, ..., with the given dims mixed."""
    mixed = set(mixed)
    return tuple(MIXED if dim in mixed else dim for dim in range(ndim))


def broadcast_labels(ndim: int) -> Labels:
    """Labels for broadcasting, which aligns the last dims."""
    return tuple(("*", dim - ndim) for dim in range(ndim))


def propagate(call: Call, signature: Signature) -> Dims | Refusal:
    """Follows the batch from the operands of a call to its outputs: the dim with the same label."""
    label: Label = MIXED
    size, outer = 0, 1
    listed = Counter(id(operand.tensor) for operand in signature.operands)
    for tensor in call.inputs():
        listed[id(tensor)] -= 1  # an argument may be passed twice, but listed once
        if listed[id(tensor)] < 0 and call.dim_of(tensor) is not None:
            shape = tuple(tensor.shape)
            return call.refuse(f"takes a tensor of shape {shape} whole, but it carries the batch")
    for operand in signature.operands:
        dim = call.dim_of(operand.tensor)
        if dim is None:
            continue
        if operand.labels[dim] is MIXED:
            return call.refuse(f"runs along the batch dimension (dim {dim})")
        here = operand.labels[dim], operand.tensor.shape[dim], call.outer(operand.tensor)
        if label is not MIXED and here != (label, size, outer):
            return call.refuse("takes tensors whose batch dimensions do not line up")
        label, size, outer = here
    if label is not MIXED:
        for operand in signature.operands:
            if call.dim_of(operand.tensor) is not None or label not in operand.labels:
                continue
            if not (operand.stretches and operand.tensor.shape[operand.labels.index(label)] == 1):
                shape = tuple(operand.tensor.shape)
                return call.refuse(f"aligns a tensor of shape {shape}, shared by all rows, with the batch")
    dims: Dims = []
    for i, out in enumerate(call.outs):
        labels = signature.outs[min(i, len(signature.outs) - 1)]
        if labels is None or label is MIXED:
            dims.append(None)
        elif label not in labels or out.shape[labels.index(label)] != size:
            return call.refuse("does not keep the batch dimension whole")
        else:
            dims.append(batch_dim_at(labels.index(label), outer))
    return dims


def parse_signature(call: Call, text: str) -> Signature:
    """Parses a signature, e.g. "?ik,iJ,Jk->ik" for addmm: one word for each tensor argument in the order of the schema,
    then one for each output.

    small letter   a dimension of independent slices, in step with all of the same letter
    capital        a mixed dimension
    * in front     any further leading dimensions, in step and broadcast against each other
    ~ at the end   any further trailing dimensions, mixed
    ? in front     the argument is broadcast: it may lack leading dimensions or have size 1
    -              an argument that must be shared; an output that depends on no row
    """
    left, right = text.split("->")
    words = left.split(",")
    schema = _torch.schema_of(call.func)
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
        return (broadcast_labels(spare) if spare > 0 else ()) + letters[max(-spare, 0) :]
    if word.endswith("~"):
        return letters[:ndim] + (MIXED,) * spare
    if spare > 0:
        return (MIXED,) * ndim
    return letters[-spare:]
