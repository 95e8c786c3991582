"""Steps that use a size as a number: that of the batch, a length, and what can be made of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tests.fuzz.builder import EVERYTHING, Builder
from tests.fuzz.dice import NotHere
from tests.fuzz.inputs import WHOLE
from tests.fuzz.sizes import at_least, of_batch
from tests.fuzz.steps.register import step
from tests.fuzz.steps.writes import target


def whole(b: Builder) -> fx.Node:
    """A number that follows from the sizes."""
    n = b.varying()
    kind = b.dice.below(8)
    if kind == 0:
        return n
    if kind in (1, 2):
        return b.call(b.dice.pick([operator.sub, operator.add]), n, 1)
    if kind == 3:
        return b.call(operator.mul, n, b.dice.pick([2, 3]))
    if kind == 4:
        return b.call("numel", b.some())
    if kind == 5:
        x = b.some(lambda v: v.batch_dim() is not None)
        return b.call("size", x, x.batch_dim())
    if kind == 6:
        return b.call(operator.mul, n, b.varying())
    return b.call(operator.floordiv, b.call(operator.add, n, 1), 2)


def real(b: Builder) -> fx.Node:
    kind = b.dice.below(4)
    if kind == 0:
        return b.call(operator.truediv, 1.0, whole(b))
    if kind == 1:
        return b.call(torch._sym_sqrt, whole(b))
    if kind == 2:
        return b.call(torch.sym_float, whole(b))
    return b.call(operator.mul, whole(b), 0.25)


@step(2)
def size_as_number(b: Builder) -> Any:
    x = b.main()
    if b.dtype in WHOLE:
        return b.call(b.dice.pick([operator.add, operator.mul]), x, whole(b))
    kind = b.dice.below(9)
    if kind == 0:
        return b.call(operator.truediv, x, whole(b))
    if kind == 1:
        return b.call(operator.mul, x, real(b))
    if kind == 2:
        return b.call(torch.tanh, b.call(operator.add, x, whole(b)))
    if kind == 3:
        return b.call(torch.add, x, x, alpha=b.call(operator.truediv, 0.5, whole(b)))
    if kind == 4:
        return b.call(operator.mul, b.call(torch.tanh, b.call(operator.truediv, x, whole(b))), 2)
    if kind == 5:
        made = b.call(torch._refs.tensor, b.dice.pick([whole, real])(b))
        return b.call(torch.tanh, b.call(operator.add, x, made))
    if kind == 6:
        return b.call("clamp", x, None, real(b))
    if kind == 7:
        return b.call(torch.sin, b.call(operator.mul, x, whole(b)))
    return b.call(operator.truediv, x, b.call(torch._sym_sqrt, whole(b)))


@step()
def endless_slope(b: Builder) -> Any:
    """A result with a gradient of nan or inf, which must not show unless the loss depends on it."""
    x = b.main()
    if b.dtype in WHOLE:
        raise NotHere
    nothing = b.call(operator.sub, x, x)
    kind = b.dice.below(4)
    if kind == 0:
        return b.call(torch.sqrt, nothing)
    if kind == 1:
        return b.call(torch.tanh, b.call(operator.truediv, x, 0))
    if kind == 2:
        n = whole(b)
        return b.call(operator.truediv, x, b.call(operator.sub, n, n))
    return b.call("sum", b.call(torch.sqrt, nothing), 0, keepdim=b.dice.one_in(2)) if x.ndim else nothing


@step()
def variance_by_hand(b: Builder) -> Any:
    """Bessel's correction is a number made of the batch."""
    x = b.main(lambda v: v.ndim > 0 and not v.dtype.is_complex)
    d = b.dice.below(x.ndim)
    if not of_batch(x.shape[d]) and not b.lengths:
        raise NotHere
    away = b.call(operator.sub, x, b.call("mean", x, d, keepdim=True))
    total = b.call("sum", b.call(operator.mul, away, away), d, keepdim=b.dice.one_in(2))
    n = b.call("size", x, d) if b.dice.one_in(2) else b.varying()
    return b.call(operator.truediv, total, b.call(operator.sub, n, 1))


@step()
def summed_and_scaled(b: Builder) -> Any:
    """A sum over one dim times that dim's size, or another's."""
    x = b.main(lambda v: len(v.other_dims()) > 0 and v.ndim > 1)
    d = b.dice.pick(x.other_dims())
    total = b.call("sum", x, d)
    n = b.call("size", x, b.dice.pick([d, *range(x.ndim)])) if b.dice.one_in(2) else b.varying()
    return b.call(operator.mul, total, n)


@step()
def number_as_tensor(b: Builder) -> Any:
    """A result, or a part of one, that holds nothing but a number."""
    made = b.call(torch._refs.tensor, b.dice.pick([whole, real])(b))
    if b.dice.one_in(2):
        return b.call("to", made, b.dtype)
    return b.call("reshape", made, 1)


@step()
def number_written(b: Builder) -> Any:
    """A number as what is written, or as where."""
    x = target(b)
    n = whole(b) if b.dtype in WHOLE or b.dice.one_in(2) else real(b)
    kind = b.dice.below(4)
    if kind == 0 or not x.ndim:
        return b.call(b.dice.pick(["fill_", "add_", "mul_"]), x, n)
    d = b.dice.below(x.ndim)
    before = (EVERYTHING,) * d
    if kind == 1:
        return b.call(operator.setitem, x, (*before, b.dice.below(at_least(x.shape[d]))), n)
    if kind == 2:
        return b.call(operator.setitem, x, (*before, slice(None, 1 + b.dice.below(3), None)), n)
    return b.call(operator.setitem, x, (*before, slice(whole(b), None, None)), b.constant())


@step()
def counted(b: Builder) -> Any:
    """Positions along a dim that varies, beside the data."""
    x = b.main(lambda v: v.ndim > 0)
    positions = b.factory(torch.arange, b.dice.pick([b.varying(), whole(b)]), dtype=torch.float64)
    if b.dtype in WHOLE or positions.shape[0] != x.shape[-1]:
        return b.call(operator.mul, positions, 2)
    return b.call(operator.add, x, b.call("to", positions, b.dtype))
