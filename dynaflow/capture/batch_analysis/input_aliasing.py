"""Arguments of a call that share memory which the graph writes.

*Contract.* `InputAliasing.find` takes the arguments of each call of one graph. Returns the overlapping pairs, and
inputs whose own elements overlap, of which one is written. Changes nothing. In doubt it reports an overlap.

The probe assumes that a write to one input is not seen through another. Dynamo guarantees that only for inputs that are
one
object: the same captured graph may be called with tensors that overlap in memory. So each call of a graph that writes
an input is checked, by bytes. If each row overlaps only the same row of the other input (`Overlap.in_step`), a probe
with aliased inputs can still split the graph. Any other overlap can't be split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn

from dynaflow import _torch
from dynaflow.capture.batch_analysis.node_facts import Probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.core.memory_layout import overlaps_itself, span

STEPS = 10_000
"""Limit of a search for an overlap. Beyond it, tensors count as overlapping."""

Way = tuple[int, int, int]
"""A stride, with the least and the greatest number of steps."""
Steps = list[tuple[int, int]]
"""Strides, each with the greatest number of steps."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of a tensor. All numbers but `size` are in bytes."""

    start: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    width: int
    kind: Any = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Extent:
        size, width = tuple(tensor.size()), tensor.element_size()
        start, kind = tensor.data_ptr(), (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        stride = tuple(s * width for s in tensor.stride())
        return Extent(start, start + span(size, tensor.stride()) * width, size, stride, width, kind)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Positions of two inputs that overlap; or of one, twice, whose own elements may overlap."""

    one: int
    other: int
    places: tuple[Extent, Extent]
    wrapped: bool = False
    """The memory belongs to tensors inside an input, such as a DTensor."""

    def describe(self, names: Sequence[str]) -> str:
        if self.one == self.other:
            return f"the input {names[self.one]!r} is written, and its elements share memory"
        return f"the inputs {names[self.one]!r} and {names[self.other]!r} share memory, and one of them is written"

    def in_step(self, graph: CapturedGraph, probe: Probe, sizes: Mapping[sympy.Symbol, int]) -> bool:
        """Whether each row of one input overlaps only the same row of the other, for a probe's batch.

        No node may take both: torch rejects writes to a part of what a call reads, but recognizes that for some slices
        only.
        """
        if self.one == self.other or self.wrapped:
            return False
        nodes = [graph.inputs[i].node for i in (self.one, self.other)]
        (first,), (second,) = (probe.facts[node].storages for node in nodes)
        if self.places[0] != self.places[1]:
            for fact in probe.facts.values():
                if {first, second} <= fact.reads | fact.writes and {first, second} & fact.writes:
                    return False
        for axis, *dims in zip(probe.batch_axes, *(probe.dims(node) for node in nodes), strict=True):
            if dims != [None, None] and meets_other_rows(*self.places, dims, sizes[next(iter(axis))]):
                return False
        return True


def overlap(one: Extent, other: Extent) -> bool:
    """Whether two extents have a byte in common."""
    if one.start >= other.end or other.start >= one.end:
        return False
    return _meet(one, other, _steps(one), _steps(other))


def meets_other_rows(one: Extent, other: Extent, dims: Sequence[int | None], rows: int) -> bool:
    """Whether a row of one overlaps a different row of the other. `dims`: their batch dims."""
    found: list[tuple[Steps, int]] = []
    for place, dim in zip((one, other), dims, strict=True):
        if dim is None:
            return True
        count, stride = place.size[dim] // rows, place.stride[dim]
        found.append(([*_steps(place, without=dim), (stride, count - 1)], stride * count))
    (back, row), (forth, other_row) = found
    if row != other_row or not row:
        return True
    further = (row, 1, rows - 1)
    return _meet(one, other, back, forth, further) or _meet(other, one, forth, back, further)


def _steps(place: Extent, without: int | None = None) -> Steps:
    dims = enumerate(zip(place.size, place.stride, strict=True))
    return [(stride, n - 1) for dim, (n, stride) in dims if dim != without]


def _meet(one: Extent, other: Extent, back: Steps, forth: Steps, *ways: Way) -> bool:
    """Whether elements overlap: `back` and `forth` are the steps inside each, `ways` are further steps of the other."""
    least, most = Counter[int](), Counter[int]()
    for stride, n in back:
        least[stride] -= n
    for stride, n in forth:
        most[stride] += n
    steps = ((stride, least[stride], most[stride]) for stride in {*least, *most} if stride)
    apart = one.start - other.start
    return _reaches(sorted((*ways, *steps), reverse=True), apart - other.width + 1, apart + one.width - 1, [STEPS])


def _reaches(ways: Sequence[Way], low: int, high: int, left: list[int]) -> bool:
    """Whether ways can add up to a number from `low` to `high`."""
    left[0] -= 1
    if left[0] < 0:
        return True
    if not ways:
        return low <= 0 <= high
    (stride, least, most), rest = ways[0], ways[1:]
    least = max(least, -((sum(s * n for s, _, n in rest) - low) // stride))
    most = min(most, (high - sum(s * n for s, n, _ in rest)) // stride)
    return any(_reaches(rest, low - stride * n, high - stride * n, left) for n in range(least, most + 1))


def written_inputs(graph: CapturedGraph, probe: Probe) -> frozenset[int]:
    """Positions of the inputs that the graph writes, if inputs don't overlap."""
    written = {s for fact in probe.facts.values() for s in fact.writes}
    return frozenset(n for n, i in enumerate(graph.inputs) if probe.facts[i.node].storages & written)


class InputAliasing:
    """Checks the arguments of one graph's calls. `written`: positions of the inputs that the graph writes; None if
    unknown, in which case all count as written."""

    def __init__(self, written: frozenset[int] | None = None) -> None:
        self.written = written
        self._seen: _Seen | None = None

    def find(self, args: list[Any]) -> tuple[Overlap, ...]:
        """The overlaps in which an input is written; usually none."""
        seen = self._seen
        return seen.found if seen is not None and seen.holds(args) else self.look(args)

    def look(self, args: list[Any]) -> tuple[Overlap, ...]:
        inside = {i: held for i, arg in enumerate(args) if (held := _torch.inner_tensors(arg)) is not None}
        places = {i: p for i, arg in enumerate(args) if i not in inside and (p := _place(arg)) is not None}
        written = frozenset(range(len(args))) if self.written is None else self.written
        if inside:
            return _in_order(_overlaps_inside(places, inside, written))
        written &= places.keys()
        found = _in_order(_overlaps(places, written))
        if self.written is not None:
            static = [i for i in places if i in written or isinstance(args[i], nn.Parameter)]
            seen = _Seen(args, places, written, static, found)
            # An overlap with a tensor that moves says nothing about the next call.
            self._seen = None if any(seen.meets(places[i].start, n) for i, n in seen.moving) else seen
        return found


def _in_order(found: Iterable[Overlap]) -> tuple[Overlap, ...]:
    return tuple(sorted(found, key=lambda overlap: (overlap.one, overlap.other)))


def _overlaps_inside(
    places: dict[int, Extent], inside: dict[int, list[torch.Tensor]], written: frozenset[int]
) -> Iterator[Overlap]:
    """Overlaps if some inputs are wrapper subclasses, whose inner tensors have the memory."""
    owners, found = list(places), list(places.values())
    for i, held in inside.items():
        for place in map(_place, held):
            if place is not None:
                owners.append(i)
                found.append(place)
    for overlap in _overlaps(dict(enumerate(found)), frozenset(n for n, i in enumerate(owners) if i in written)):
        one, other = sorted((owners[overlap.one], owners[overlap.other]))
        yield Overlap(one, other, overlap.places, wrapped=one in inside or other in inside)


def _place(arg: Any) -> Extent | None:
    """None for a value without data."""
    if not isinstance(arg, torch.Tensor) or arg.layout is not torch.strided:
        return None
    try:
        return Extent.of(arg) if arg.data_ptr() and arg.numel() else None
    except RuntimeError:  # no data pointer
        return None


def _overlaps(places: dict[int, Extent], written: frozenset[int]) -> Iterator[Overlap]:
    order = sorted(places, key=lambda i: (places[i].start, i))
    for n, i in enumerate(order):
        one = places[i]
        if i in written and overlaps_itself(one.size, one.stride, one.width):
            yield Overlap(i, i, (one, one))
        for j in order[n + 1 :]:
            other = places[j]
            if other.start >= one.end:
                break
            if (i in written or j in written) and overlap(one, other):
                yield Overlap(i, j, (one, other)) if i < j else Overlap(j, i, (other, one))


class _Seen:
    """The result for one call, and whether it holds for another: equal sizes, equal addresses of static inputs, and no
    other input near the written ones."""

    def __init__(
        self,
        args: list[Any],
        places: dict[int, Extent],
        written: frozenset[int],
        static: list[int],
        found: tuple[Overlap, ...],
    ) -> None:
        self.found = found
        self._numbers = [i for i, arg in enumerate(args) if isinstance(arg, int)]
        self._sizes = [args[i] for i in self._numbers]
        self._static, self._addresses = static, [places[i].start if i in places else 0 for i in range(len(args))]
        self.moving = [(i, place.end - place.start) for i, place in places.items() if i not in static]
        spans: list[list[int]] = []
        for start, end in sorted((places[i].start, places[i].end) for i in written):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([start, end])
        self._starts, self._ends = [start for start, _ in spans], [end for _, end in spans]

    def holds(self, args: list[Any]) -> bool:
        return (
            [args[i] for i in self._numbers] == self._sizes
            and _torch.same_addresses(args, self._addresses, self._static)
            and not any([self.meets(args[i].data_ptr(), n) for i, n in self.moving])
        )

    def meets(self, start: int, length: int) -> bool:
        """Whether a range of bytes overlaps written memory."""
        n = bisect_right(self._starts, start)
        return (n > 0 and self._ends[n - 1] > start) or (n < len(self._starts) and self._starts[n] < start + length)
