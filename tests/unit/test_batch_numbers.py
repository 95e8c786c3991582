"""Numbers made of the batch's size: for a part of the batch they are still those of the whole, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers import Each, compiled, randn


def _written(x: Tensor) -> Tensor:
    y = torch.sin(x)
    y[:, 0] = x.shape[0]
    return y.exp()


def _written_as_far_as(x: Tensor) -> Tensor:
    y = torch.sin(x)
    y[:, x.shape[0] // 3 :] = 2.0
    return y.exp()


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bessel": lambda x: torch.tanh(x / (x.shape[0] - 1)) * 2,
    "one more": lambda x: torch.tanh(x * (x.shape[0] + 1)).exp(),
    "variance by hand": lambda x: ((x - x.mean(0)) ** 2).sum(0) / (x.shape[0] - 1) + torch.sin(x),
    "root": lambda x: torch.tanh(x / math.sqrt(x.shape[0])) * torch.sin(x),
    "half power": lambda x: torch.tanh(x / x.shape[0] ** 0.5) * torch.sin(x),
    "the batch": lambda x: torch.tanh(x / x.shape[0]) * torch.sin(x),
    "elements": lambda x: torch.tanh(x / x.numel()) * torch.sin(x),
    "half": lambda x: torch.tanh(x / (x.shape[0] // 2)) * torch.sin(x),
    "at most": lambda x: torch.tanh(x / min(x.shape[0], 4)) * torch.sin(x),
    "reciprocal": lambda x: torch.tanh(x * (1.0 / (x.shape[0] + 2))) * torch.sin(x),
    "tensor": lambda x: torch.tanh(x * torch.tensor(float(x.shape[0] - 6))) * torch.sin(x),
    "written": _written,
    "written as far as": _written_as_far_as,
    "filled": lambda x: torch.sin(x) * torch.empty_like(x).fill_(x.shape[0]),
    "pairs": lambda x: torch.tanh(x / (x.shape[0] * (x.shape[0] - 1))) * torch.sin(x),
}


@pytest.mark.parametrize("split", [[4, 3], [1, 2, 4]])
@pytest.mark.parametrize("name", NUMBERS)
def test_gradients(name: str, split: list[int]) -> None:
    model = NUMBERS[name]
    fast = compiled(lambda x: model(x), Each(split=split))
    for rows in (7, 7):
        x = randn(rows, 4).double()
        plain, scheduled = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = model(plain), fast(scheduled)
        weight = randn(*expected.shape).double()
        (expected * weight).sum().backward()
        (found * weight).sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(scheduled.grad, plain.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NUMBERS)
def test_inference(name: str) -> None:
    model, x = NUMBERS[name], randn(7, 4).double()
    with torch.no_grad():
        found = compiled(lambda x: model(x), Each(split=[2, 4, 1]))(x)
        torch.testing.assert_close(found, model(x), rtol=1e-9, atol=1e-9)
