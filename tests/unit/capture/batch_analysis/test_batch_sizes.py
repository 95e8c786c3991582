"""Numbers made of the batch's size: for a part of the batch they are still those of the whole, forward and backward."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import dynaflow.api
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


@pytest.mark.parametrize("split", [2, [5, 3]])
@pytest.mark.parametrize("times", [1, 2])
def test_the_size_of_a_dim_that_is_not_cut(times: int, split: Any) -> None:
    """A backward graph asks a gradient of [B, 2, 2 * B] for its last size: of a micro-batch it is that of all rows."""

    def model(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = F.embedding(ids, torch.cat([x.T, x.T], 1))
        return torch.ones(2 * times * x.shape[0], 3).sin(), y * 2

    options = {"scheduler": Each(split=split), "operators": "eager", "batch_dims": {"x": 0, "ids": 0}}

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        (ones,) = gm.graph.find_nodes(op="call_function", target=torch.ones)
        (y,) = gm.graph.find_nodes(op="call_function", target=F.embedding)
        y.append(ones)
        with gm.graph.inserting_before(ones):
            number = gm.graph.call_method("size", (y, 2))
            number.meta["example_value"] = y.meta["example_value"].size(2)
            for _ in range(times - 1):
                number = gm.graph.call_function(operator.add, (number, number), {})
                number.meta["example_value"] = 2 * y.meta["example_value"].size(2)
        ones.args = (number, 3)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return dynaflow.api.backend(gm, inputs, options=options)

    x, ids = randn(8, 4), torch.randint(0, 4, (8, 2))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x, ids), model(x, ids))
