"""Which numbers in a graph follow from the batch size, and which of them are multiples of it.

*Contract.* `BatchNumbers.visit` takes the nodes in the graph's order, with their results in the probe. Then `follows`
and `is_multiple` answer for each node. Nothing is changed.

Numbers that follow from the batch size are recomputed for each micro-batch. That is right for a size, and wrong for a
value: `x / (B - 1)` means the whole batch. This includes inputs: a backward pass may get `B - 1` as an input.

A multiple of the batch is `k * n` for every batch size `n` and for all other sizes: `4 * B * T // 3` is none, though it
is for `T = 3`. One expression does not show that, as it may be simplified for the whole batch. So the number is
computed for several sizes, by the calls that compute it for a micro-batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.aten_calls import tensors_in

_SAMPLES = (1, 2, 3, 5, 8, 13)
"""Batch sizes for which numbers are computed, besides that of the probe."""

Values = Mapping[sympy.Symbol, int]


class _Sizes(NamedTuple):
    """Values of all symbols in a sample. Its batch is `rows` of the `total` rows of the sample `other`."""

    values: Values
    rows: int
    total: int
    other: int


def _sizes(batch_axes: Sequence[frozenset[sympy.Symbol]], values: Values, primes: Sequence[int]) -> Iterator[_Sizes]:
    count = 0
    for around in with_other_sizes(values, frozenset().union(*batch_axes)):
        first = count
        yield _Sizes(around, 1, 1, first)
        for symbols, prime in zip(batch_axes, primes, strict=True):
            for rows in _SAMPLES:
                yield _Sizes({**around, **dict.fromkeys(symbols, rows)}, rows, 2 * prime, first)
                count += 1
        count += 1


def with_other_sizes(values: Values, batch: frozenset[sympy.Symbol]) -> Iterator[Values]:
    """The same values, and others for the symbols that are not the batch."""
    yield values
    if others := sorted((s for s in values if s not in batch), key=str):
        for step in (1, 3):
            yield {**values, **{s: values[s] + step + i for i, s in enumerate(others)}}


class BatchNumbers:
    """The numbers of one graph."""

    def __init__(self, batch_axes: Sequence[frozenset[sympy.Symbol]], values: Values, primes: Sequence[int]) -> None:
        self._batch_axes, self._primes = batch_axes, primes
        self._sizes = [*_sizes(batch_axes, values, primes)]
        self._at: dict[fx.Node, list[Any]] = {}
        """The value of a number for each of `_sizes`; None if it can't be computed."""
        self._follow: dict[fx.Node, frozenset[int]] = {}
        self._multiples: dict[fx.Node, bool] = {}
        self._fixed = set[fx.Node]()
        """Numbers that are the same in a micro-batch and in the whole batch."""

    def visit(self, node: fx.Node, value: Any, fixed: bool = False) -> None:
        """Records how the node's result, which is `value` in the probe, depends on the batch size. `fixed`: it is the
        size of a dim that is not cut."""
        if node.op == "output" or tensors_in(value):
            return
        if node.op == "placeholder" and isinstance(value, float):  # passed to each micro-batch unchanged
            return
        found = frozenset(self._axes_of(node, value))
        if not found:
            return
        self._follow[node] = found
        if fixed or not self._fixed.isdisjoint(node.all_input_nodes):
            self._fixed.add(node)
        self._at[node] = [self._sample(node, i) for i in range(len(self._sizes))]
        self._multiples[node] = self._is_multiple(node, value)

    def follows(self, node: fx.Node) -> frozenset[int]:
        """The batch axes that the node's number follows from."""
        return self._follow.get(node, frozenset())

    def is_multiple(self, node: fx.Node) -> bool:
        """Whether the number, recomputed for a micro-batch, is proportional to its rows."""
        return self._multiples[node] and node not in self._fixed

    def _axes_of(self, node: fx.Node, value: Any) -> Iterator[int]:
        given = frozenset[int]()
        if node.target is not operator.getitem:  # it takes one of several numbers
            given = given.union(*(self.follows(a) for a in node.all_input_nodes))
        symbols = {s for expr in _expressions(node) for s in expr.free_symbols}
        for axis, (own, prime) in enumerate(zip(self._batch_axes, self._primes, strict=True)):
            if axis in given or symbols & own or any(_divides(prime, n) for n in _numbers(value)):
                yield axis

    def _sample(self, node: fx.Node, i: int) -> Any:
        """The number in a sample, by the same call; None if that fails."""
        try:
            if not any(a in self._at for a in node.all_input_nodes):  # a graph's input, or the size of a tensor
                return self._given(node, i)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._given(a, i))
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            return None

    def _given(self, node: fx.Node, i: int) -> Any:
        if node in self._at:
            return self._at[node][i]
        return _torch.tree_map(lambda leaf: evaluated(leaf, self._sizes[i].values), node.meta["example_value"])

    def _is_multiple(self, node: fx.Node, value: Any) -> bool:
        """Whether all numbers of the result are multiples of the batch, or independent of it."""
        found = [list(_numbers(sampled)) for sampled in self._at[node]]
        if found[0] != list(_numbers(value)):
            return False
        for sizes, numbers in zip(self._sizes, found, strict=True):
            if len(numbers) != len(found[sizes.other]):
                return False
            for part, whole in zip(numbers, found[sizes.other], strict=True):
                if part != whole and part * sizes.total != whole * sizes.rows:
                    return False
        return True


def _numbers(value: Any) -> Iterator[int | float]:
    return (n for n in _torch.tree_leaves(value) if isinstance(n, int | float))


def _divides(prime: int, number: int | float) -> bool:
    return isinstance(number, int) and number != 0 and number % prime == 0


def _expressions(node: fx.Node) -> Iterator[sympy.Expr]:
    for leaf in _torch.tree_leaves(node.meta.get("example_value")):
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            yield _torch.expression(leaf)


def evaluated(leaf: Any, values: Values) -> Any:
    """The value of a symbolic number; any other leaf as it is."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    found = _torch.expression(leaf).xreplace({s: sympy.Integer(n) for s, n in values.items()})
    kind = int if isinstance(leaf, torch.SymInt) else float if isinstance(leaf, torch.SymFloat) else bool
    return kind(found)
