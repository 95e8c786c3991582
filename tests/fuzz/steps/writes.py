"""Steps that write to memory that is there already."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tests.fuzz.builder import EVERYTHING, Builder, Var
from tests.fuzz.dice import NotHere
from tests.fuzz.sizes import at_least
from tests.fuzz.steps.register import step


def _apart(x: Var, y: Var) -> bool:
    """Writing one can't change the other while it is read."""
    return x.node is y.node or x.storage != y.storage


def target(b: Builder) -> Var:
    """What may be written."""
    owners = {v.storage for v in b.vars if not v.writable}
    return b.main(lambda v: v.dense and v.storage not in owners)


def _source(b: Builder, x: Var, shape: tuple[int, ...]) -> Var:
    y = b.like(shape)
    if not _apart(x, y):
        y = b.call("clone", y)
    return y


@step(4)
def write(b: Builder) -> Any:
    x = target(b)
    kind = b.dice.below(6)
    if kind == 0:
        return b.call("add_", x, _source(b, x, x.shape))
    if kind == 1:
        return b.call("mul_", x, b.constant())
    if kind == 2:
        return b.call("copy_", x, _source(b, x, x.shape))
    if kind == 3:
        return b.call("tanh_", b.call("mul_", x, _source(b, x, x.shape)))
    if kind == 4:
        return b.call(b.dice.pick(["zero_", "sigmoid_", "neg_"]), x)
    return b.call("add_", x, 1)


@step(2)
def write_part(b: Builder) -> Any:
    x = target(b)
    if not x.ndim:
        raise NotHere
    others = x.other_dims()
    d = b.dice.pick(others) if others and not b.dice.one_in(5) else b.dice.below(x.ndim)
    kind = b.dice.below(5)
    n = at_least(x.shape[d])
    before = (EVERYTHING,) * d
    if kind == 0:
        rest = x.shape[:d] + x.shape[d + 1 :]
        value: Any = b.constant() if b.dice.one_in(3) else _source(b, x, rest)
        return b.call(operator.setitem, x, (*before, b.dice.below(n)), value)
    if kind == 1:
        return b.call(operator.setitem, x, (*before, slice(b.dice.below(n), None, None)), b.constant())
    if kind == 2:
        index = b.factory(torch.arange, 1, 2 if n > 1 else 1)
        part = (*x.shape[:d], index.shape[0], *x.shape[d + 1 :])
        if not index.shape[0]:
            raise NotHere
        source = b.like(part, exact=True)
        return b.call("index_copy_", x, d, index, source if _apart(x, source) else b.call("clone", source))
    if kind == 3:
        halves = b.call("chunk", x, 2, d)
        if len(halves) < 2:
            return None
        return b.call("add_", halves[0], b.call("clone", halves[-1]))
    part_of = b.call(operator.getitem, x, (*before, b.dice.below(n)))
    return b.call("add_", part_of, _source(b, x, part_of.shape))


@step()
def write_to_copy_or_view(b: Builder) -> Any:
    """Which of the two it is depends on the strides, and may be another for a few rows than for all."""
    x = target(b)
    if x.ndim and b.dice.one_in(2):
        x = b.call("transpose", x, 0, b.dice.below(x.ndim))
    kind = b.dice.below(3)
    if kind == 0:
        y = b.call("contiguous", x)
    elif kind == 1 and x.ndim > 1:
        y = b.call("flatten", x, 0, 1)
    else:
        y = b.call("reshape", x, b.size_node(x.sizes(0)) if x.ndim else 1, -1)
    return b.call("add_", b.dice.pick([y, x]), 1)


@step(2)
def write_and_read_the_other(b: Builder) -> Any:
    """One of two tensors that share memory is written, the other one is read."""
    owners = {v.storage for v in b.vars if not v.writable}
    mine = [v for v in b.vars if v.dtype == b.dtype and v.storage not in owners]
    pairs = [(v, o) for v in mine for o in mine if v.storage == o.storage and v.node is not o.node and v.dense]
    if not pairs:
        raise NotHere
    x, other = b.dice.pick(pairs)
    b.call("neg_", x) if b.dice.one_in(3) else b.call(b.dice.pick(["mul_", "add_"]), x, 2)
    function = b.dice.pick([torch.neg, "clone", torch.add, "sum"])
    return b.call(function, other, *([other] if function is torch.add else [-1] if function == "sum" else []))


@step()
def count(b: Builder) -> Any:
    counter = b.some(lambda v: v.writable and v.ndim == 0 and v.given)
    return b.call("add_", counter, 1)


@step()
def running_mean(b: Builder) -> Any:
    x = b.main(lambda v: v.batch_dim() == 0 and v.ndim == 2)
    state = b.main(lambda v: v.given and v.writable and v.shape == (x.shape[1],))
    return b.call("add_", b.call("mul_", state, 0.5), b.call("mean", x, 0))
