"""Steps for programs that Dynamo captures itself: transforms of functions, regions, and code that breaks the graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from tests.fuzz.builder import Builder, Var
from tests.fuzz.dice import NotHere
from tests.fuzz.inputs import WHOLE
from tests.fuzz.sizes import of_batch
from tests.fuzz.steps.register import Step


class Doubled(torch.autograd.Function):
    """With a backward pass of its own, which is not what autograd would make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


class Picky(torch.autograd.Function):
    """Which tells results that nothing was made of from those that have gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x - y, x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        away, product = grads
        if away is None:
            return None if product is None else product * torch.tanh(y), None
        return away, -away if product is None else product * torch.tanh(x)


def picky(x: Tensor) -> Tensor:
    return Picky.apply(torch.sin(x), x * 2)[1]  # type: ignore[no-any-return]


def custom_function(x: Tensor) -> Tensor:
    return Doubled.apply(x)  # type: ignore[no-any-return]


def by_vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(row) * row.sum())(x)


def by_vmap_inside(x: Tensor) -> Tensor:
    return torch.vmap(lambda column: column - column.mean(), in_dims=-1, out_dims=-1)(x)


def by_grad(x: Tensor) -> Tensor:
    return torch.func.grad(lambda t: torch.sin(t).sum())(x)


def by_per_sample_grad(x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda row: (row * torch.tanh(row)).sum()))(x)


def by_jvp(x: Tensor) -> Tensor:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


def by_cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t * 2, (x,))


def by_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda t: torch.tanh(t) * torch.sigmoid(t), x, use_reentrant=False)  # type: ignore[no-any-return]


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = torch.sigmoid(x)
    return x * factor


def detached(x: Tensor) -> Tensor:
    return x.detach()


def viewed_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.transpose(0, -1)


def conjugated(x: Tensor) -> Tensor:
    return x.conj().flatten(0, 0)


def one_of_several(x: Tensor) -> Tensor:
    return torch.var_mean(x, -1)[1]


def by_number(x: Tensor) -> Tensor:
    return x * float(x.detach().abs().mean().real)


def break_in_between(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    torch._dynamo.graph_break()
    return y + 1


def resized(x: Tensor) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    y.resize_(x.shape[::-1])
    return y + 1


def shape_of_given(x: Tensor) -> Tensor:
    """A shape changed in place, and changed back."""
    y = x.detach()
    y.unsqueeze_(0)
    z = y * 2
    y.squeeze_(0)
    return z.squeeze(0) + y


def looks_at_its_shape(x: Tensor) -> Tensor:
    """Python that looks at a shape that was changed in place."""
    y = x.clone()
    y.unsqueeze_(0).transpose_(0, y.dim() - 1)
    z = y * (y.dim() + y.shape[0]) + y.shape[-1]
    y.transpose_(0, -1).squeeze_(0)
    return z.transpose(0, -1).squeeze(0) + y * y.dim()


def scanned(x: Tensor) -> Tensor:
    return torch._higher_order_ops.associative_scan(operator.add, x, dim=0, combine_mode="generic")


def by_scan(x: Tensor) -> Tensor:
    return scan(lambda a, b: (a + b, a * b), torch.zeros_like(x[0]), x)[1]


def by_while_loop(x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, torch.tanh(v)), (start, x))[1]


def over_shapes(x: Tensor) -> Tensor:
    """Python that depends on a size."""
    total = x
    for _ in range(min(x.shape[0], 3)):
        total = total + x / x.shape[0]
    return total if x.shape[0] % 2 else -total


def variance(x: Tensor) -> Tensor:
    n = x.shape[0]
    away = x - x.mean(0)
    return (away * away.conj()).sum(0) / max(n - 1, 1) + (n + 1) ** 0.5


def sliced_by_number(x: Tensor) -> Tensor:
    """A size that is made of a float, which is another one in each call."""
    number = int(x.detach().abs().sum().nan_to_num(1.0, 1.0) % 5)
    return x[..., : number + 1].sum(-1, keepdim=True) + x


def tries(x: Tensor) -> Tensor:
    """Calls that fail, and are caught."""
    with contextlib.suppress(RuntimeError):
        x = x * torch.ones(x.numel() + 2)
    try:
        x = torch.cat([x.sin(), x.new_ones(x.dim() * (1,) + (1,))])
    except RuntimeError:
        x = x + 1
    try:
        x = x.view(-1, x.numel() + 1) + x[..., x.shape[-1]]
    except (RuntimeError, IndexError):
        x = x * 2
    return x


_BY_ROWS: list[Callable[..., Tensor]] = [by_vmap, by_per_sample_grad, by_vmap_inside]
_OTHERS: list[Callable[..., Tensor]] = [
    by_grad,
    by_jvp,
    by_checkpoint,
    custom_function,
    without_gradient,
    over_shapes,
    variance,
    by_cond,
    break_in_between,
    by_number,
    resized,
    shape_of_given,
    looks_at_its_shape,
    detached,
    viewed_without_gradient,
    conjugated,
    one_of_several,
    scanned,
    sliced_by_number,
    tries,
    picky,
    by_scan,
    by_while_loop,
]

COMPILE = ["by_cond", "by_scan", "by_while_loop"]
"""Those for which eager torch compiles."""


def transformed(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim > 1 and v.value.numel() > 0)
    if b.dtype in WHOLE:
        raise NotHere
    return b.call(b.dice.pick(_BY_ROWS), x)


def called(b: Builder) -> Any:
    x = b.main(lambda v: v.ndim > 0 and v.value.numel() > 0)
    if b.dtype in WHOLE:
        raise NotHere
    return b.call(b.dice.pick(_OTHERS), x)


def recurrent(b: Builder) -> Any:
    """A loop over time, in Python."""

    def fits(v: Var) -> bool:
        return v.ndim == 3 and not of_batch(v.shape[0]) and v.shape[0] < 8

    x = b.main(fits)
    state = b.call(operator.getitem, x, 0)
    for step in range(1, x.shape[0]):
        state = b.call(torch.tanh, b.call(operator.add, state, b.call(operator.getitem, x, step)))
    return state


CALLED: list[Step] = [transformed, transformed, called, called, called, recurrent]
