"""Batches padded to the sizes that a scheduler's bucket() names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import Each, compiled, randn


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


def test_a_result_that_counts_the_batch_is_refused() -> None:
    def model(x: Tensor) -> Any:
        return x * 2, x.size(0)

    with torch.no_grad():
        assert compiled(model, Buckets())(randn(8, 4))[1] == 8, "nothing to pad"
        try:
            assert compiled(model, Buckets())(randn(5, 4))[1] == 5, "a number of Dynamo's own is the caller's"
        except df.SplitError as e:
            assert "number" in str(e)


@pytest.mark.parametrize("answer", [3, "8", True, None])
def test_a_bucket_is_no_smaller_than_the_batch(answer: Any) -> None:
    class Wrong(Each):
        def bucket(self, batch_size: int) -> int:
            return answer

    with torch.no_grad(), pytest.raises(df.ScheduleError, match=r"Wrong.bucket\(5\)"):
        compiled(Model(), Wrong(RULES))(randn(5, 4), randn(5, 4))
