"""Steps that mix rows, and tensors made of nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tests.fuzz.builder import Builder
from tests.fuzz.dice import NotHere
from tests.fuzz.sizes import of_batch
from tests.fuzz.steps.register import step

STATIC = (4, 3, 2, 6)


@step(2)
def mixing(b: Builder) -> Any:
    x = b.main(lambda v: v.batch_dim() is not None)
    d = x.batch_dim()
    assert d is not None
    kind = b.dice.below(11)
    if kind == 0:
        return b.call(torch.softmax, x, d)
    if kind == 1:
        return b.call("mean", x, d)
    if kind == 2:
        return b.call(torch.cumsum, x, d)
    if kind == 3:
        return b.call("flip", x, d)
    if kind == 4:
        return b.call("sort", b.ordered(lambda v: v.batch_dim() == d), d, stable=True)
    if kind == 5:
        return b.call(operator.sub, x, b.call("mean", x, d, keepdim=True))
    if kind == 6:
        y = b.main(lambda v: v.ndim == 2 and of_batch(v.shape[0]))
        return b.call(torch.tanh, b.call(torch.matmul, y, b.call("t", y)))
    if kind == 7:
        return b.call("roll", x, 1, d)
    if kind == 8:
        return b.call(b.dice.pick(["mean", "sum", "max"]), x)
    if kind == 9:
        return b.call("var", x, d)
    index = b.factory(torch.arange, b.batch())
    return b.call("index_select", x, d, index) if b.is_whole_batch(x, d) else None


@step(2)
def factory(b: Builder) -> Any:
    kind = b.dice.below(9)
    size = b.dice.pick(STATIC)
    if kind == 0:
        return b.factory(torch.zeros, b.batch(), size, dtype=b.dtype)
    if kind == 1:
        made = b.factory(torch.arange, b.varying())
        return b.call("to", made, b.dtype) if b.dice.one_in(2) else made
    if kind == 2:
        return b.factory(torch.full, (b.batch(),), b.constant(), dtype=b.dtype)
    if kind == 3:
        return b.call("new_ones", b.main(), b.varying(), size)
    if kind == 4:
        return b.factory(torch.ones, size, dtype=b.dtype)
    if kind == 5:
        return b.call(torch.zeros_like, b.main())
    if kind == 6:
        return b.factory(torch.full, (size,), b.varying(), dtype=b.dtype)
    if kind == 7:
        wide = b.main(lambda v: v.batch_dim() is None)
        return b.call("expand", b.call("unsqueeze", wide, 0), b.batch(), *[-1] * wide.ndim)
    if not b.lengths:
        raise NotHere
    return b.factory(torch.ones, b.batch(), b.lengths[0], dtype=b.dtype)
