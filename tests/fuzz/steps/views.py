"""Steps that look at memory in another way, and those that change a tensor's own shape."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tests.fuzz.builder import EVERYTHING, Builder
from tests.fuzz.dice import NotHere
from tests.fuzz.sizes import HINT, at_least
from tests.fuzz.steps.register import step


@step(5)
def view(b: Builder) -> Any:
    x = b.some(lambda v: v.ndim > 0)
    kind = b.dice.below(10)
    others = x.other_dims()
    if kind == 0:
        return b.call("transpose", x, b.dice.below(x.ndim), b.dice.below(x.ndim))
    if kind == 1:
        return b.call("unsqueeze", x, b.dice.below(x.ndim + 1))
    if kind == 2:
        ones = [d for d in others if x.shape[d] == 1]
        return b.call("squeeze", x, b.dice.pick(ones)) if ones else None
    if kind == 3:
        ones = [d for d in others if x.shape[d] == 1]
        if not ones:
            raise NotHere
        grown = b.dice.pick(ones)
        return b.call("expand", x, *[3 if d == grown else -1 for d in range(x.ndim)])
    if kind == 4:
        return b.call("permute", x, *reversed(range(x.ndim)))
    if not others:
        raise NotHere
    d = b.dice.pick(others)
    n = at_least(x.shape[d])
    before = (EVERYTHING,) * d
    if kind == 5:
        return b.call(operator.getitem, x, (*before, b.dice.below(n)))
    if kind == 6:
        return b.call(operator.getitem, x, (*before, slice(b.dice.below(n), None, b.dice.pick([None, 2]))))
    if kind == 7:
        return b.call("narrow", x, d, b.dice.below(n), 1)
    if kind == 8:
        return b.call("unfold", x, d, min(n, 2), 1)
    return b.call("chunk" if b.dice.one_in(2) else "unbind", x, *([2, d] if b.dice.one_in(2) else [d]))


@step(3)
def reshaped(b: Builder) -> Any:
    x = b.some(lambda v: v.ndim > 0)
    kind = b.dice.below(5)
    if kind == 0:
        return b.call("reshape", x, b.size_node(x.sizes(0)), -1)
    if kind == 1:
        if x.ndim < 2:
            raise NotHere
        return b.call("flatten", x, 0, 1)
    if kind == 2:
        if x.ndim < 2:
            raise NotHere
        d = b.dice.below(x.ndim - 1)
        merged = b.size_node(tuple(s * t for s, t in zip(x.sizes(d), x.sizes(d + 1), strict=True)))
        rest = b.size_nodes(x)
        return b.call(b.dice.pick(["reshape", "view"]), x, *rest[:d], merged, *rest[d + 2 :])
    if kind == 3:
        d = b.dice.below(x.ndim)
        for n in (3, 2):
            if x.shape[d] % n == 0 and (x.shape[d] % HINT == 0) <= (x.shape[d] // n % HINT == 0):
                fewer = tuple(s // n for s in x.sizes(d))
                return b.call("unflatten", x, d, (-1, n) if b.dice.one_in(2) else (b.size_node(fewer), n))
        raise NotHere
    return b.call("view", x, -1)


@step(2)
def along_the_batch(b: Builder) -> Any:
    """Views that cut or pick along the batch."""
    x = b.some(lambda v: v.batch_dim() is not None)
    d = x.batch_dim()
    assert d is not None
    before = (EVERYTHING,) * d
    kind = b.dice.below(8)
    if kind == 0:
        return b.call(operator.getitem, x, (*before, b.dice.pick([0, -1, 1])))
    if kind == 1:
        return b.call(operator.getitem, x, (*before, slice(1, None, None)))
    if kind == 2:
        return b.call(operator.getitem, x, (*before, slice(None, b.varying(), None)))
    if kind == 3:
        half = b.call(operator.floordiv, b.batch(), 2)
        return b.call(operator.getitem, x, (*before, slice(None, half, None)))
    if kind == 4:
        return b.call(operator.getitem, x, (*before, slice(None, -1, None)))
    if kind == 5:
        return b.call(operator.getitem, x, (*before, slice(None, None, 2)))
    if kind == 6:
        return b.call("unfold", x, d, 2, b.dice.pick([2, 1]))
    return b.call("chunk", x, 2, d)


@step()
def unsafe_parts(b: Builder) -> Any:
    """Views that torch does not call views."""
    x = b.some(lambda v: v.ndim > 0)
    others = [d for d in x.other_dims() if x.shape[d] > 1]
    d = b.dice.pick(others) if others and not b.dice.one_in(4) else b.dice.below(x.ndim)
    if b.dice.one_in(2):
        return b.call("unsafe_chunk", x, 2, d)
    return b.call(torch.unsafe_split, x, max(1, at_least(x.shape[d]) // 2), d)


@step()
def strided(b: Builder) -> Any:
    """Windows over memory, as one says them by numbers."""
    x = b.some(lambda v: v.ndim == 2 and v.value.is_contiguous() and not v.given)
    rows, width = b.size_node(x.sizes(0)), b.size_node(x.sizes(1))
    kind = b.dice.below(3)
    if kind == 0:
        return b.call("as_strided", x, (rows, 1), (width, 1))
    if kind == 1:
        return b.call("as_strided", x, (width, rows), (1, width))
    return b.call("as_strided", x, (b.call(operator.sub, rows, 1), width), (width, 1), 1)


@step(2)
def shape_in_place(b: Builder) -> Any:
    """Calls that change the shape of the tensor itself; all its names see that."""
    inputs = {id(v.value) for v in b.vars if v.given}  # at an input Dynamo breaks the graph
    x = b.some(lambda v: id(v.value) not in inputs)
    kind = b.dice.below(6)
    if kind == 0:
        changed = b.call("unsqueeze_", x, b.dice.below(x.ndim + 1))
    elif kind == 1:
        ones = [d for d, s in enumerate(x.shape) if s == 1]
        changed = b.call("squeeze_", x, *([b.dice.pick(ones)] if ones and b.dice.one_in(2) else []))
    elif kind == 2:
        changed = b.call("t_", x)
    elif kind == 3:
        made = b.factory(torch.empty, 0, dtype=x.dtype)
        changed = b.call("set_", made, b.dice.pick([v for v in b.vars if v.dtype == x.dtype and v is not made]))
    else:
        if not x.ndim:
            raise NotHere
        name = b.dice.pick(["transpose_", "swapaxes_", "swapdims_"])
        changed = b.call(name, x, b.dice.below(x.ndim), b.dice.below(x.ndim))
    used = b.dice.pick([changed, x])
    return b.call("add" if b.dice.one_in(2) else "add_", used, 1) if used.dense else changed


@step(1)
def same(b: Builder) -> Any:
    """Calls that return what they are given, itself."""
    x = b.some(lambda v: v.value.is_floating_point())
    if b.dice.one_in(2):
        return b.call(torch.nn.functional.dropout, x, 0.5, False)
    return b.call(b.dice.pick(["contiguous", "double", "resolve_conj"]), x)


@step(1)
def neutral(b: Builder) -> Any:
    """Copies of what they are given, which compilers take for that itself."""
    x = b.some(lambda v: v.ndim > 0 and v.value.is_floating_point())
    one = b.dice.one_in(2)
    constant = b.call(torch.ones if one else torch.zeros, 1, dtype=x.value.dtype)
    functions = [operator.mul, operator.truediv] if one else [operator.add, operator.sub]
    return b.call(b.dice.pick(functions), x, constant)
