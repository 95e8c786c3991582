"""Sizes and numbers that change from call to call: what is captured and planned again, and what is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import STACK_RULES, Each, Stack, compiled, randn

RULES = [*STACK_RULES]


class OfLength(nn.Module):
    """Rows of some length, of which each place goes through the stack; `bias` is as long."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.stack(x) + bias[None, :, None]


@pytest.mark.parametrize("named", [True, False])
def test_dims_that_are_named_are_captured_once(named: bool) -> None:
    """Without names, Dynamo takes the first length for a constant, and captures the second for all."""
    model = OfLength()
    dims = {"x": [1], "bi*": [-1, 3]}  # dims that an input does not have are no mistake: names may be globs
    fast = compiled(model, Each(RULES), batch_dims={"x": 0}, **({"dynamic_dims": dims} if named else {}))
    for rows, length in [(4, 5), (6, 9), (4, 4), (8, 2)]:
        x, bias = randn(rows, length, 8), randn(length)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, bias), model(x, bias))
            assert len(fast.plan(x, bias).micro_batches) == 2
        assert "_dynamo_weak_dynamic_indices" not in vars(x), "marks are taken back"
    assert fast.stats.graphs == (1 if named else 2)


def test_dims_are_named_for_later_captures_too() -> None:
    """A batch of one row is a graph of its own."""
    model = OfLength()
    fast = compiled(model, Each(RULES, split=None), dynamic_dims={"x": [1], "bias": [0]})
    for rows, length in [(4, 5), (1, 5), (1, 9), (1, 7), (3, 6)]:
        x, bias = randn(rows, length, 8), randn(length)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, bias), model(x, bias))
    assert fast.stats.graphs == 2


@dataclass
class Count:
    calls: int = 1
    rows: int = 0


class Counting(nn.Module):
    """Keeps counters in Python, as transformers' sliding caches do; `used`: and computes with one."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.stack, self.used = Stack(), used

    def forward(self, x: Tensor, count: Count) -> tuple[Tensor, int]:
        y = self.stack(x)
        count.calls += 1
        count.rows = count.rows + x.shape[0] * 2
        return (y * count.calls if self.used else y), count.calls * 3


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("split", [2, None])
def test_a_counter_asks_for_no_other_plan(used: bool, split: int | None) -> None:
    """Unless something is computed with it: then its value is a part of the code."""
    model, mine, other = Counting(used), Count(), Count()
    fast = compiled(model, Each(RULES, split=split))
    with torch.no_grad():
        for call in range(8):
            x = randn(4 + 2 * (call % 2), 8)
            found, expected = fast(x, mine), model(x, other)
            torch.testing.assert_close(found[0], expected[0])
            assert found[1] == expected[1] == 3 * (call + 2)
            assert mine == other == Count(call + 2, other.rows)
            if call == 3:
                plans = fast.stats.plans
    assert fast.stats.graphs <= 3
    assert fast.stats.plans == (plans + 4 if used else plans)


def test_a_counter_with_compiled_operators() -> None:
    model, mine, other = Counting(False), Count(), Count()
    fast = compiled(model, Each(RULES, split=None), operators="inductor")
    with torch.no_grad():
        for _ in range(5):
            x = randn(4, 8)
            assert fast(x, mine)[1] == model(x, other)[1]
            assert mine == other
    assert fast.stats.runs == 5


@pytest.mark.parametrize("grad", [False, True])
def test_a_size_that_is_a_multiple_of_the_batch_for_some_lengths_alone(grad: bool) -> None:
    """Of 8 x 3 x 4 elements every third is 4 for each row; of 4 x 7 x 4 it is not."""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return ((x * 2).reshape(-1)[::3] * w).tanh(), x.sin()

    fast = compiled(lambda x, w: model(x, w), Each([df.SplitFunc("*")], split=2))
    for rows, length in ((8, 6), (8, 3), (4, 7), (5, 7)):
        x, w, same = randn(rows, length, 4), torch.ones((), requires_grad=grad), torch.ones((), requires_grad=grad)
        found, expected = fast(x, w), model(x, same)
        torch.testing.assert_close(found, expected)
        if grad:
            found[0].sum().backward(), expected[0].sum().backward()
            torch.testing.assert_close(w.grad, same.grad)
