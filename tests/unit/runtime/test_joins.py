from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaflow as df
from dynaflow.runtime.joins import Join, Regroup, unpack


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_joined_parts_lie_as_the_whole_would(order: tuple[int, ...], dim: int) -> None:
    """The whole has its dims in `order` from the widest stride to the narrowest."""
    shape = [4, 6, 8]
    back = [order.index(d) for d in range(3)]
    whole = torch.arange(4.0 * 6 * 8).view([shape[d] for d in order]).permute(back)
    cut = shape[dim] // 2 - 1
    parts = [whole.narrow(dim, 0, cut), whole.narrow(dim, cut, shape[dim] - cut)]
    joined = Join.along(dim, whole.stride())([p.clone() for p in parts])
    torch.testing.assert_close(joined, whole, rtol=0, atol=0)
    assert joined.stride() == whole.stride()


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_behind_another_dim_are_regrouped(transposed: bool) -> None:
    """(s*b, h), of which the micro-batches are columns of b."""
    s, b, h = 3, 5, 2
    whole = torch.arange(float(s * b * h)).view(s * b, h)
    whole = whole.t().contiguous().t() if transposed else whole
    rows = whole.unflatten(0, (s, b))
    parts = [rows[:, :2].flatten(0, 1), rows[:, 2:].flatten(0, 1)]
    ranges = ((0, 2), (0, 3))
    regrouped = Regroup.along(0, whole.stride(), s, ranges)(parts)
    torch.testing.assert_close(regrouped, whole, rtol=0, atol=0)
    assert regrouped.stride() == whole.stride()
    middle = Regroup.along(0, whole.stride(), s, ((1, 1), (0, 1)))(parts)
    torch.testing.assert_close(middle, rows[:, 1:3].flatten(0, 1), rtol=0, atol=0)


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("result", "count"), [(ONE, 1), ((ONE,), 1), ([ONE, TWO], 2), (None, 0), ((), 0)], ids=range(5)
)
def test_results_of_a_users_function(result: Any, count: int) -> None:
    assert len(unpack(result, count, test_results_of_a_users_function)) == count


@pytest.mark.parametrize(("result", "count", "said"), [(ONE, 2, 1), (None, 1, 0), ({"a": ONE}, 1, "dict"), ((), 1, 0)])
def test_a_wrong_number_of_results(result: Any, count: int, said: Any) -> None:
    def mine() -> None: ...

    with pytest.raises(df.ScheduleError, match=f"mine returned {said} results, not {count}") as caught:
        unpack(result, count, mine)
    assert "signature" in str(caught.value.advice)
