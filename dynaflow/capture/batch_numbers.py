"""Which numbers in a graph follow from the size of the batch, and which of them are a multiple of it.

A number that follows from the batch's size is recomputed for each micro-batch. That is right where it is a size, and
wrong where it is a value: `x / (B - 1)` means the whole batch. So every such number is known for what it is, whether
the graph computes it or is given it: a backward pass gets `B - 1` as an input of its own.

A multiple of the batch is a number that is `k * n` for every batch size `n`. That is not read off one expression, which
may be simplified by what holds for the whole batch alone: the number is computed for several batch sizes, by the same
calls that compute it for a micro-batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.calls import tensors_in

_SAMPLES = (1, 2, 3, 5, 8, 13)
"""Batch sizes for which numbers are computed, beside the probe's own."""

Values = Mapping[sympy.Symbol, int]


class BatchNumbers:
    """The numbers of one graph, visited node by node in the graph's order."""

    def __init__(self, spaces: Sequence[frozenset[sympy.Symbol]], values: Values, primes: Sequence[int]) -> None:
        self._spaces, self._primes = spaces, primes
        self._sizes: list[tuple[int, int, Values]] = [
            (space, rows, {**values, **dict.fromkeys(symbols, rows)})
            for space, symbols in enumerate(spaces)
            for rows in _SAMPLES
        ]
        """Space, batch size, and what all symbols stand for then."""
        self._at: dict[fx.Node, list[Any]] = {}
        """The value of a number for each of `_sizes`; nothing where that can't be computed."""
        self._follow: dict[fx.Node, frozenset[int]] = {}
        self._multiples: dict[fx.Node, bool] = {}

    def visit(self, node: fx.Node, value: Any) -> None:
        """Notes what the node's result, which is `value` in the probe, has to do with the batch."""
        if node.op == "output" or tensors_in(value):
            return
        if node.op == "placeholder" and isinstance(value, float):  # handed to every part as it is
            return
        found = frozenset(self._spaces_of(node, value))
        if not found:
            return
        self._follow[node] = found
        self._at[node] = [self._sample(node, i) for i in range(len(self._sizes))]
        self._multiples[node] = self._is_multiple(node, value)

    def follows(self, node: fx.Node) -> frozenset[int]:
        """The spaces of rows from whose size the node's number follows."""
        return self._follow.get(node, frozenset())

    def is_multiple(self, node: fx.Node) -> bool:
        return self._multiples[node]

    def _spaces_of(self, node: fx.Node, value: Any) -> Iterator[int]:
        given = frozenset[int]()
        if node.target is not operator.getitem:  # which takes one of several numbers
            given = given.union(*(self.follows(a) for a in node.all_input_nodes))
        symbols = {s for expr in _expressions(node) for s in expr.free_symbols}
        for space, (own, prime) in enumerate(zip(self._spaces, self._primes, strict=True)):
            if space in given or symbols & own or any(_divides(prime, n) for n in _numbers(value)):
                yield space

    def _sample(self, node: fx.Node, i: int) -> Any:
        """The number for one of the batch sizes, by the same call; None if there is no telling."""
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
        return _torch.tree_map(lambda leaf: evaluated(leaf, self._sizes[i][2]), node.meta["example_value"])

    def _is_multiple(self, node: fx.Node, value: Any) -> bool:
        """Whether all numbers of the result that follow from the batch are multiples of it."""
        numbers = list(_numbers(value))
        for (space, rows, _), sampled in zip(self._sizes, self._at[node], strict=True):
            at = list(_numbers(sampled))
            if len(at) != len(numbers):
                return False
            for number, then in zip(numbers, at, strict=True):
                if number != then and number * rows != then * 2 * self._primes[space]:
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
    """A symbolic number with the values put in."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    found = _torch.expression(leaf).xreplace({s: sympy.Integer(n) for s, n in values.items()})
    kind = int if isinstance(leaf, torch.SymInt) else float if isinstance(leaf, torch.SymFloat) else bool
    return kind(found)
