"""Steps that treat each row by itself."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz.builder import Builder
from tests.fuzz.dice import NotHere
from tests.fuzz.inputs import WHOLE
from tests.fuzz.sizes import at_least, of_batch
from tests.fuzz.steps.register import step


@step(4)
def pointwise(b: Builder) -> Any:
    x = b.main()
    if b.dtype in WHOLE:
        return b.call(b.dice.pick([torch.neg, "abs", "clone", "contiguous", torch.bitwise_not]), x)
    function = b.dice.pick([torch.tanh, torch.sigmoid, torch.neg, torch.sin, "relu", "abs", "clone", "contiguous"])
    return b.call(function, x)


@step(4)
def binary(b: Builder) -> Any:
    x = b.main()
    y = b.like(x.shape)
    function = b.dice.pick([operator.add, operator.sub, torch.add, torch.maximum, operator.mul])
    made = b.call(function, x, y)
    return b.call(torch.tanh, made) if function is operator.mul and b.dtype not in WHOLE else made


@step()
def scaled(b: Builder) -> Any:
    return b.call(b.dice.pick([operator.mul, operator.add]), b.main(), b.constant())


@step(2)
def linear(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim > 0 and not of_batch(v.shape[-1]))
    w = b.main(lambda v: v.ndim == 2 and v.shape[-1] == x.shape[-1] and not of_batch(v.shape[0]))
    return b.call(F.linear, x, w)


@step(2)
def along_another_dim(b: Builder) -> Any:
    x = b.main(lambda v: bool(v.other_dims()))
    d = b.dice.pick(x.other_dims())
    kind = b.dice.below(7)
    if kind == 0:
        return b.call(torch.softmax, x, d)
    if kind == 1:
        return b.call("sum", x, d)
    if kind == 2:
        return b.call("mean", x, d, keepdim=True)
    if kind == 3:
        return b.call(torch.cumsum, x, d)
    if kind == 4:
        return b.call("flip", x, d)
    if kind == 5:
        return b.call(b.dice.pick(["any", "all", "count_nonzero"]), x, d)
    return b.call("amax", x, d)


@step()
def layer_norm(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim > 1 and not of_batch(v.shape[-1]))
    return b.call(F.layer_norm, x, (b.size_node(x.sizes(-1)),))


@step()
def several_results(b: Builder) -> Any:
    x = b.ordered(lambda v: any(s > 1 and not of_batch(s) for s in v.shape))
    d = b.dice.pick([d for d in x.other_dims() if x.shape[d] > 1])
    kind = b.dice.below(4)
    if kind == 0:
        return b.call("topk", x, 2, d)
    if kind == 1:
        return b.call("max", x, d)
    if kind == 2:
        return b.call("sort", x, d, stable=True)
    return b.call(torch.var_mean, x, d)


@step()
def attention(b: Builder) -> Any:
    q = b.main(lambda v: v.ndim in (3, 4) and not of_batch(v.shape[-1]) and not of_batch(v.shape[-2]))
    k = b.like(q.shape, exact=True)
    return b.call(F.scaled_dot_product_attention, q, k, q)


@step()
def bmm(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim == 3)
    y = b.like(x.shape, exact=True)
    made = b.call(torch.matmul, x, b.call("transpose", y, -1, -2))
    return b.call(torch.tanh, made)


@step()
def convolved(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim == 3 and not of_batch(v.shape[1]) and not of_batch(v.shape[2]))
    w = b.main(lambda v: v.ndim == 2 and v.shape[1] == x.shape[1] and not of_batch(v.shape[0]))
    return b.call(F.conv1d, x, b.call("unsqueeze", w, -1))


@step()
def joined(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim > 0)
    y = b.like(x.shape, exact=True)
    d = b.dice.pick(x.other_dims()) if x.other_dims() and not b.dice.one_in(4) else b.dice.below(x.ndim)
    return b.call(b.dice.pick([torch.cat, torch.stack]), [x, y], d)


@step()
def joined_turned(b: Builder) -> Any:
    """Stacks and joins of transposed values."""
    x = b.main(lambda v: v.ndim > 1)
    one, two = b.dice.below(x.ndim), b.dice.below(x.ndim)
    turned = b.call("transpose", x, one, two)
    same = [v for v in b.vars if v.shape == turned.shape and v.dtype == turned.dtype]
    other = b.dice.pick(same) if b.dice.one_in(2) else b.call("transpose", b.like(x.shape, exact=True), one, two)
    function = b.dice.pick([torch.stack, torch.cat, torch.hstack, torch.vstack])
    dims = (b.dice.below(turned.ndim),) if function in (torch.stack, torch.cat) else ()
    return b.call(function, [turned, other], *dims)


@step()
def chosen(b: Builder) -> Any:
    x = b.ordered()
    y = b.like(x.shape)
    return b.call(torch.where, b.call(operator.gt, x, b.dice.pick([0.0, 0.1])), x, y)


@step()
def picked(b: Builder) -> Any:
    index = b.some(lambda v: v.dtype == torch.int64 and v.ndim > 0)
    kind = b.dice.below(3)
    if kind == 0:
        weight = b.main(lambda v: v.ndim == 2 and not of_batch(v.shape[0]) and at_least(v.shape[0]) > 2)
        return b.call(F.embedding, b.call("clamp", index, 0, 1), weight)
    if kind == 1:
        x = b.main(lambda v: v.ndim == index.ndim and len(v.other_dims()) > 0)
        d = b.dice.pick(x.other_dims())
        return b.call(torch.gather, x, d, b.call("clamp", index, 0, at_least(x.shape[d]) - 1))
    return b.call("to", index, b.dtype)


@step()
def other_dtype(b: Builder) -> Any:
    """To another dtype, there and back, or as what a complex number has."""
    x = b.some()
    kind = b.dice.below(5)
    if kind == 0:
        return b.call("to", x, b.dtype)
    if kind == 1:
        made = b.call(b.dice.pick(["double", "float", "bool", "int", "long", "half", "bfloat16", "cdouble"]), x)
        return b.call(b.dice.pick(["clone", "neg", "contiguous"]), made)
    if kind == 2:
        return b.call(b.dice.pick([operator.eq, operator.ge, operator.ne]), b.ordered(), 0)
    if kind == 3 and x.dtype.is_complex:
        if b.dice.one_in(6):  # of -0 - 0j eager has two answers: that of its vectorized loop, and that of the rest
            return b.call("angle", b.call(operator.add, x, 1 + 1j))
        return b.call(b.dice.pick([torch.real, torch.imag, "conj", torch.view_as_real, "abs"]), x)
    y = b.some(lambda v: v.shape == x.shape)
    if {x.dtype, y.dtype} & {torch.float16, torch.bfloat16}:
        raise NotHere
    return b.call(b.dice.pick([operator.add, operator.mul]), x, y)
