"""What torch's operator database found, each through `dynaflow.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynaflow._torch import TORCH
from tests.helpers import Each, assert_equal, compiled, randn, whole


def _both(model: Callable[..., Any], *given: Tensor, split: Any = 2, dims: Any = None) -> Any:
    """Runs the model and a split one on arguments of their own, and compares results and arguments."""
    mine, theirs = [t.clone() for t in given], [t.clone() for t in given]
    fast = compiled(model, Each(split=split), batch_dims=dims)
    with torch.no_grad():
        expected, found = model(*mine), fast(*theirs)
        plan = fast.plan(*given)
    assert_equal(found, expected)
    assert_equal(theirs, mine)
    return found, theirs, plan


def test_cross_takes_no_dim_of_the_batch_by_its_size() -> None:
    """Without a dim it takes the first of size 3, which is the batch's in a micro-batch of three rows."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.cross(x.sin(), y.cos()) * 2

    _, _, plan = _both(model, randn(5, 3), randn(5, 3), split=[3, 2])
    assert whole(plan)


@pytest.mark.skipif(TORCH < (2, 13), reason="DTensor has no rule for it in earlier versions: it runs whole")
def test_cross_along_a_dim_is_split() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.cross(x.sin(), y.cos(), dim=1) * 2

    _, _, plan = _both(model, randn(5, 3), randn(5, 3), split=[3, 2])
    assert not whole(plan)


def test_linear_writes_to_the_memory_that_it_is_given() -> None:
    def model(x: Tensor, w: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        y = torch._C._nn.linear(x, w, out=out)
        return y, out + 1

    found, given, _ = _both(model, randn(4, 3), randn(6, 3), randn(4, 6), dims={"x": 0, "w": None, "out": 0})
    assert found[0].data_ptr() == given[2].data_ptr()


def test_each_of_several_results_is_the_memory_that_was_given() -> None:
    def model(x: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.ops.aten.sort.values(x, 1, values=values, indices=places)
        return a, b, values * 2

    given = randn(4, 6), randn(4, 6) + 1, torch.zeros(4, 6, dtype=torch.long)
    found, theirs, plan = _both(model, *given)
    assert [found[0].data_ptr(), found[1].data_ptr()] == [theirs[1].data_ptr(), theirs[2].data_ptr()]
    assert not whole(plan)


@pytest.mark.parametrize("dim", [0, 1])
def test_memory_with_gaps_is_not_given_to_kernels_that_ignore_them(dim: int) -> None:
    """avg_pool3d writes to `out=` as if it were contiguous; rows of it are not, unless they are outermost."""

    def model(x: Tensor, out: Tensor) -> Tensor:
        return torch._C._nn.avg_pool3d(x.neg(), 2, out=out) + 1

    _, _, plan = _both(model, randn(4, 4, 4, 4, 4), randn(4, 4, 2, 2, 2), dims={"x": dim, "out": dim})
    assert bool(whole(plan)) == (dim == 1)


@pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo can't trace quantile for symbolic sizes in earlier versions")
@pytest.mark.parametrize("dim", [1, -1])
def test_a_call_may_change_the_shape_of_a_tensor_of_its_own(dim: int) -> None:
    """quantile squeezes and transposes in place what it has made: nobody else holds that."""

    def model(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return torch.quantile(y, 0.3, dim=dim) * 2, torch.nanquantile(y, q, dim=dim, keepdim=True)

    _, _, plan = _both(model, randn(5, 6), torch.tensor([0.2, 0.5, 0.7]), split=[3, 2], dims={"x": 0, "q": None})
    assert not whole(plan)


def test_bilinear_is_split() -> None:
    def model(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.bilinear(x.sin(), y, w, b) * 2

    given = randn(5, 2, 3), randn(5, 2, 4), randn(6, 3, 4), randn(6)
    for dim in (0, 1):
        _, _, plan = _both(model, *given, dims={"x": dim, "y": dim, "w": None, "b": None})
        assert not whole(plan)


@pytest.mark.parametrize("dims", [{"x": 0, "mean": None, "var": None}, {"x": 1, "mean": 0, "var": 0}])
@pytest.mark.parametrize("given_out", [False, True])
def test_running_statistics_are_read_after_they_are_written(dims: dict[str, int | None], given_out: bool) -> None:
    """The schema of `native_batch_norm` does not tell that it writes them."""

    def model(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        if given_out:
            out = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(var)
            y, _, _ = torch.native_batch_norm(x.sin(), None, None, mean, var, True, 0.5, 1e-5, out=out)
        else:
            y = torch.nn.functional.batch_norm(x.sin(), mean, var, training=True)
        return y * 2, mean + 1, var * 2

    _both(model, randn(4, 6, 3), randn(6), randn(6).abs() + 1, dims=dims)


def test_batch_norm_without_running_statistics_is_split_along_channels() -> None:
    def model(x: Tensor) -> Tensor:
        return torch._native_batch_norm_legit(x.sin(), None, None, True, 0.5, 1e-5)[0] * 2

    _, _, plan = _both(model, randn(4, 6, 3), dims={"x": 1})
    assert not whole(plan)


def test_running_statistics_of_two_calls_are_written_in_order() -> None:
    def model(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.batch_norm(x.sin(), mean, var, training=True)
        z = torch.nn.functional.batch_norm(x.cos(), mean, var, training=True)
        return y, z, torch.nn.functional.batch_norm(x, mean, var)

    _both(model, randn(4, 6, 3), randn(6), randn(6).abs() + 1, dims={"x": 0, "mean": None, "var": None})


@pytest.mark.timeout(120)
def test_an_operator_without_a_rule_may_take_many_tensors() -> None:
    """DTensor would follow every combination of their placements through its decomposition."""

    def model(x: Tensor) -> Tensor:
        parts = [x * i for i in range(1, 13)]
        return torch._chunk_cat(parts, dim=0, num_chunks=2) + 1

    _, _, plan = _both(model, randn(4, 3, 2))
    assert whole(plan)
