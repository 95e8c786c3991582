"""Calls that change a tensor's own shape, and views that don't say so in their schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Each, assert_equal, compiled, randn


def _changed(change: Callable[[Tensor], Any], look: bool = True) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        seen = y.view(-1) if look else x
        before = y.dim()
        changed = change(y)
        return y * (y.dim() + before), y, seen + y.shape[-1], changed * changed.shape[0]

    return model


RESHAPED: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda y: y.unsqueeze_(1),
    "unsqueeze_ and squeeze_": lambda y: y.unsqueeze_(0).unsqueeze_(0).squeeze_(0),
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapaxes_": lambda y: y.swapaxes_(0, 1),
    "swapdims_": lambda y: y.swapdims_(0, 1),
    "as_strided_": lambda y: y.as_strided_((2, 2), (1, 2)),
    "set_": lambda y: y.set_(y.cos()),
    "aten": lambda y: torch.ops.aten.unsqueeze_(y, 1),
}


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Dynamo remembers of code where it broke, and all models here have the same."""
    torch._dynamo.reset()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", RESHAPED)
def test_a_shape_changed_in_place(name: str, uneven: bool) -> None:
    """The graph is broken there: Dynamo would go on with the shape from before."""
    model, x = _changed(RESHAPED[name]), randn(6, 4)
    fast = compiled(model, Each(split=lambda rows: [1, rows - 1] if uneven else 2, lanes=2))
    with torch.no_grad():
        for _ in range(2):
            assert_equal(fast(x.clone()), model(x.clone()))
    assert fast.stats.graph_breaks


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze(1), lambda x: x[1:]], ids=["unsqueeze", "slice"])
def test_data_of_another_shape(change: Callable[[Tensor], Tensor]) -> None:
    def model(x: Tensor) -> Tensor:
        x.data = change(x.data)
        return x * x.dim() + x.shape[0]

    fast = compiled(model, "sequential")
    for _ in range(2):
        given = randn(4, 2), randn(4, 2)
        assert_equal((fast(given[0]), given[0]), (model(given[1]), given[1]))


def test_a_shape_changed_inside_of_a_mapped_function() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row + 0).unsqueeze_(0) * 2)(x)

    fast = compiled(model, Each())
    assert_equal(fast(randn(6, 4)), model(randn(6, 4)))
    (reason,) = fast.stats.plain_reasons
    assert "unsqueeze_ changes a tensor's shape in place" in reason


@pytest.mark.parametrize("name", [n for n in RESHAPED if n not in ("set_", "as_strided_")])
def test_a_shape_changed_in_place_in_training(name: str) -> None:
    model = _changed(RESHAPED[name], look=False)  # with it, torch.compile itself fails on those that transpose
    plain, scheduled = randn(6, 4).requires_grad_(), randn(6, 4).requires_grad_()
    scheduled.data.copy_(plain.data)
    fast = compiled(model, Each(split=lambda rows: [1, rows - 1]))
    for given, call in ((plain, model), (scheduled, fast)):
        sum((r * r.cos()).sum() for r in call(given)).backward()
    torch.testing.assert_close(scheduled.grad, plain.grad)


UNSAFE: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2, 1),
    "unsafe_split": lambda y: torch.unsafe_split(y, 2, 1),
    "unsafe_split_with_sizes": lambda y: torch.unsafe_split_with_sizes(y, [1, 3], 1),
    "_unsafe_view": lambda y: torch.ops.aten._unsafe_view(y, [y.shape[0], 2, 2]).unbind(1),
    "by rows": lambda y: torch.unsafe_chunk(y, 2, 0),
}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("name", UNSAFE)
def test_views_by_another_name(name: str, write: bool) -> None:
    """The scheduler's dependencies and the check judge from the same facts: whatever is handed out may run."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        first, second = UNSAFE[name](y)
        other = y.cos()
        if write:
            second.mul_(3)
        return first.exp(), second + 1, other, y * 2

    x = randn(6, 4)
    for split in ([3, 3], [1, 5]):
        fast = compiled(model, Each(split=split, lanes=3))
        with torch.no_grad():
            assert_equal(fast(x), model(x))
