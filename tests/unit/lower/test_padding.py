"""Batches padded to the sizes that a scheduler's bucket() names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dynaflow as df
from tests.helpers import Each, assert_equal, compiled, plans_of, randn


class Buckets(Each):
    """Powers of two."""

    def bucket(self, batch_size: int) -> int:
        return 1 << (batch_size - 1).bit_length()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.b(torch.relu(self.a(x)) + y)
        return {"h": h, "view": h[:, :2], "shared": self.a.weight * 2, "turned": h.t()}


RULES = [df.SplitModule("a"), df.SplitModule("b")]


@pytest.mark.parametrize("scheduler", [Buckets(RULES, split=2, lanes=2), Buckets(RULES, split=None)])
def test_few_plans_serve_many_sizes(scheduler: df.OpSchedulerBase) -> None:
    model = Model()
    fast = compiled(model, scheduler)
    with torch.no_grad():
        for batch in (5, 6, 7, 8, 3, 4, 7):
            x, y = randn(batch, 4), randn(batch, 4)
            found, expected = fast(x, y), model(x, y)
            for name in expected:
                assert found[name].shape == expected[name].shape, name
                torch.testing.assert_close(found[name], expected[name])
    assert fast.stats.plans == 2, "one of 8 rows, one of 4"
    assert fast.plan(randn(5, 4), randn(5, 4)).batch_size == 8


def test_what_mixes_rows_is_refused_by_name() -> None:
    class Mixing(Model):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.b(self.a(x) - self.a(y).mean(0))

    with torch.no_grad(), pytest.raises(df.SplitError, match="would see the padding") as caught:
        compiled(Mixing(), Buckets(RULES))(randn(5, 4), randn(5, 4))
    assert "test_padding.py" in str(caught.value)


def test_written_inputs_are_refused() -> None:
    def model(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    x = randn(5, 4)
    with torch.no_grad(), pytest.raises(df.SplitError, match="writes to its input 'x'"):
        compiled(model, Buckets())(x)
    torch.testing.assert_close(x, randn(5, 4))


def test_a_result_that_counts_the_batch_counts_the_callers_rows() -> None:
    def model(x: Tensor) -> Any:
        return x * 2, x.size(0)

    with torch.no_grad():
        assert compiled(model, Buckets())(randn(8, 4))[1] == 8, "nothing to pad"
        assert compiled(model, Buckets())(randn(5, 4))[1] == 5, "a number of Dynamo's own is the caller's"


@pytest.mark.parametrize("answer", [3, "8", True, None])
def test_a_bucket_is_no_smaller_than_the_batch(answer: Any) -> None:
    class Wrong(Each):
        def bucket(self, batch_size: int) -> int:
            return answer

    with torch.no_grad(), pytest.raises(df.ScheduleError, match=r"Wrong.bucket\(5\)"):
        compiled(Model(), Wrong(RULES))(randn(5, 4), randn(5, 4))


SEE_THE_PADDING: dict[str, Callable[[Tensor], Any]] = {
    "the last row": lambda x: (x * 2)[-1],
    "the last row, of an input": lambda x: x[-1],
    "all rows but the first": lambda x: (x * 2)[1:],
    "all rows but the last": lambda x: (x * 2)[:-1],
    "chunks": lambda x: (x * 2).chunk(2),
    "splits": lambda x: (x * 2).split(2),
    "the batch's size as a tensor": lambda x: (x * 2, torch.tensor(x.shape[0])),
    "as the content of one": lambda x: (x * 2, torch.full((3,), x.shape[0])),
    "as a float": lambda x: (x * 2, x.shape[0] / 3),
    "as a length that is another": lambda x: (x * 2, x.new_zeros(x.shape[0] + 1)),
    "positions": lambda x: (x * 2, torch.arange(x.shape[0])),
    "a sum of ones": lambda x: (x * 2, torch.ones(x.shape[0]).sum()),
    "a sum over the batch": lambda x: x.sum(0),
    "rows turned round": lambda x: (x * 2).flip(0),
    "a product of rows with rows": lambda x: x.T @ x,
    "a view of the input": lambda x: (x * 2, x[:, :2]),
}


@pytest.mark.parametrize("name", SEE_THE_PADDING)
@pytest.mark.parametrize("split", [None, 2])
def test_results_that_would_see_the_padding_are_refused(name: str, split: int | None) -> None:
    model = SEE_THE_PADDING[name]
    fast = compiled(lambda x: model(x), Buckets(split=lambda rows: split if rows == 8 else None))
    with torch.no_grad():
        for rows in 5, 7:
            with pytest.raises(df.SplitError, match=r"bucket\(\)"):
                fast(randn(rows, 4))


ROW_BY_ROW: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda x: (x * 2, x.numel(), x.shape[0] + 1, x.shape[0] > 6, x.shape),
    "a number of a tensor's": lambda x: (x * 2, (x * 3).numel() > 21),
    "nothing of the batch": lambda x: (x * 2, torch.ones(3) * 4),
    "sizes": lambda x: (x * 2, torch.zeros(x.shape[0], 2)),
    "several elements of a row": lambda x: (x * 2).view(-1, 2),
    "rows inside": lambda x: torch.stack([x, x * 2]),
    "rows last": lambda x: (x * 2).T.contiguous(),
    "rows inside, the same all along another dim": lambda x: (x * 2).T.contiguous().expand(3, -1, -1),
    "one result twice, and equal numbers": lambda x: (lambda y: (y, y, x.shape[0] + 1, x.shape[0] // 4 + 7))(x * 2),
    "views of one another": lambda x: (lambda y: (y, y[:, :2], y.T))(x * 2),
    "the input": lambda x: (x, x * 2),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
@pytest.mark.parametrize("split", [None, 2])
def test_results_are_those_of_the_batch_as_it_was(name: str, split: int | None) -> None:
    model = ROW_BY_ROW[name]
    fast = compiled(lambda x: model(x), Buckets(split=split))
    with torch.no_grad():
        for rows in 5, 7, 8:
            x = randn(rows, 4)
            found, expected = fast(x), model(x)
            assert_equal(found, expected)
            leaves, others = tree_leaves(found), tree_leaves(expected)
            for one, other in zip(leaves, others, strict=True):
                if isinstance(other, Tensor):
                    assert [one is leaf for leaf in leaves] == [other is leaf for leaf in others]
                    assert one.stride() == other.stride()
                    assert (one.data_ptr() == x.data_ptr()) == (other.data_ptr() == x.data_ptr())
    assert [plan.batch_size for plan in plans_of(fast)] == [8]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x.T.contiguous().T,
    "a slice": lambda x: torch.cat([x, x], 1)[:, :4],
    "a slice, rows inside": lambda x: torch.cat([x.T, x.T], 1)[:, : len(x)].T,
    "one column": lambda x: x[:, :1].expand(-1, 4),
    "one row": lambda x: x[:1].expand(len(x), -1),
    "windows": lambda x: torch.cat([x, x]).flatten().as_strided((len(x), 4), (2, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_padded_inputs_lie_in_memory_as_the_graph_has_them(name: str, operators: str) -> None:
    """Compiled code knows strides."""

    def model(x: Tensor) -> Tensor:
        return x * 2 + x.flip(1)

    fast = compiled(model, Buckets(), operators=operators)
    with torch.no_grad():
        for rows in 5, 7:
            x = LAYOUTS[name](randn(rows, 4))
            assert_equal(fast(x), model(x))


def test_a_number_of_two_sizes_is_made_for_the_padded_batch() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * x.shape[1], 2) * y[:, None].expand(-1, x.shape[1]).reshape(-1, 1)

    fast = compiled(model, Buckets(), dynamic_dims={"x": [1]})
    with torch.no_grad():
        for rows, length in (5, 3), (7, 3), (6, 4):
            x, y = randn(rows, length, 2), randn(rows)
            assert_equal(fast(x, y), model(x, y))


def test_an_input_that_has_one_row_more_is_refused() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(y.shape[0] == x.shape[0] + 1)
        return x * 2, y * 3

    fast = compiled(model, Buckets(split=None), batch_dims={"x": 0}, dynamic_dims={"y": [0]})
    with torch.no_grad():
        for rows in 5, 6:
            with pytest.raises(df.SplitError, match="the input 'y' depends on the size of the batch"):
                fast(randn(rows, 4), randn(rows + 1, 4))
        assert_equal(fast(randn(8, 4), randn(9, 4)), model(randn(8, 4), randn(9, 4)))


def test_gradients_of_inputs_are_those_of_the_batch_as_it_was() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.tanh(x * 3) * x.T.contiguous().T

    fast = compiled(model, Buckets())
    for rows in 5, 7:
        x = randn(rows, 4).requires_grad_()
        grads = [torch.autograd.grad((f(x) ** 2).sum(), x)[0] for f in (fast, model)]
        torch.testing.assert_close(*grads)
    assert {plan.batch_size for plan in plans_of(fast)} == {8}


def test_a_view_of_an_input_is_refused_in_training_too() -> None:
    """AOTAutograd makes it anew, and looks at ours to know how."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), y.flatten(0, 1)

    fast = compiled(model, Buckets())
    x, y = randn(10, 4).requires_grad_(), torch.arange(20).view(10, 2)
    assert_equal(fast(x[:8], y[2:])[1], y[2:].flatten())
    with pytest.raises(df.SplitError, match="result 1 is a view of 'y'"):
        fast(x[:5], y[2:7])


def test_the_padding_can_be_computed_as_any_row() -> None:
    def model(x: Tensor) -> Tensor:
        return 100 // x

    fast = compiled(model, Buckets())
    with torch.no_grad():
        x = torch.arange(1, 11).view(5, 2)
        assert_equal(fast(x), model(x))
