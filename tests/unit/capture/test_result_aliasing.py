"""Which results share memory with which tensors, and which have gradients: as in eager torch, compiled or not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import Each, compiled, randn

WEIGHT = nn.Parameter(torch.ones(4))


def written_after(x: Tensor) -> Tensor:
    y = x * torch.ones(4)
    x.mul_(2)
    return y


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y * torch.ones(1)


NEUTRAL: dict[str, Callable[[Tensor], Any]] = {
    "times ones": lambda x: x * torch.ones(x.shape[1]),
    "plus zeros": lambda x: (x + torch.zeros_like(x)).view(-1),
    "minus zero, by one": lambda x: (x - torch.zeros(1), x / torch.ones(1)),
    "a parameter": lambda x: (x.sin(), WEIGHT * torch.ones(4)),
    "one another": both,
    "written after": written_after,
    "views": lambda x: (x.view(-1), *x.unbind(1)),
    "a copy before views": lambda x: (x * torch.ones(4), *x.unbind(1), x + 0),
}


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "columns": lambda y: y[:, ::2],
    "a turn": lambda y: y.T[1:],
    "a part": lambda y: y.chunk(2, 1)[1],
    "windows": lambda y: y.as_strided((3, 2), (4, 1), 1),
    "a window of a view": lambda y: y[2:].as_strided((2, 2), (2, 1), 1),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_views_of_what_inductor_takes_for_an_input(operators: str, name: str, alone: bool, grad: bool) -> None:
    """That may start anywhere in memory; what it is taken for starts at 0. And all views of it share memory."""

    def model(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x * torch.ones(4)
        return (VIEWS[name](y), w * 2) if alone else (VIEWS[name](y), y, VIEWS[name](y), w * 2)

    fast = df.compile(model, Each(), operators=operators, batch_dims={"x": 0})
    for rows in (6, 5):
        x = randn(rows * 4 + 1)[1:].view(rows, 4).detach().requires_grad_(grad)
        w = WEIGHT.detach().requires_grad_(grad)
        found, expected = fast(x, w), model(x, w)
        torch.testing.assert_close(found, expected)
        if grad:
            gradients = [torch.autograd.grad(sum(r.sum() for r in results), [x, w]) for results in (found, expected)]
            torch.testing.assert_close(*gradients)
        (found, expected), before = ([r.detach() for r in results] for results in (found, expected)), x.detach().clone()
        for result in (found[0], expected[0]):
            result.mul_(3)
        torch.testing.assert_close([*found, x.detach()], [*expected, before])


def memory(results: Any, *tensors: Tensor) -> list[bool]:
    given = [*(results if isinstance(results, tuple) else (results,))]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*given, *tensors)]
    return [one == other for one in places for other in places]


@pytest.mark.parametrize("scheduler", ["sequential", Each(split=2)])
@pytest.mark.parametrize("name", NEUTRAL)
def test_compiled_results_share_memory_as_eager_ones_do(name: str, scheduler: Any) -> None:
    """Inductor takes `x * torch.ones(4)` for `x`."""
    model, x, same = NEUTRAL[name], randn(4, 4), randn(4, 4)
    fast = df.compile(model, scheduler)
    with torch.no_grad():
        try:
            found = fast(x)
        except df.SplitError:
            pytest.skip("nothing to split")
        expected = model(same)
    assert not fast.stats.compile_failures
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x, same)
    assert memory(found, x, WEIGHT) == memory(expected, same, WEIGHT)


def test_a_result_written_behind_a_graph_break() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * torch.ones(4)
        torch._dynamo.graph_break()
        y.mul_(2)
        return y + x

    with torch.no_grad():
        torch.testing.assert_close(df.compile(model, "sequential")(randn(4, 4)), model(randn(4, 4)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        e = self.linear(x)
        h = self.dropout(e)
        h += x
        return self.linear(h) + e


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
def test_dropouts_that_drop_nothing_return_what_they_are_given(operators: Any, grad: bool) -> None:
    model = Residual().eval()
    fast = df.compile(model, Each(split=2), operators=operators)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(fast(randn(6, 4)), model(randn(6, 4)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, p=0.0),
        lambda x: F.dropout2d(x.view(-1, 2, 2), 0.3, False),
        lambda x: F.alpha_dropout(x, training=False),
        lambda x: torch.dropout(x, 0.5, False).add_(1),
        lambda x: F.dropout(x.sin(), 0.5, True) * 0,
        lambda x: F.dropout(x, 0.5, False).chunk(2, 1)[1],
    ],
)
def test_dropouts_by_function(function: Callable[[Tensor], Tensor], grad: bool) -> None:
    x, same = randn(6, 4), randn(6, 4)
    with torch.set_grad_enabled(grad):
        found, expected = compiled(lambda x, w: (function(x), w * 2), "sequential")(x, WEIGHT)[0], function(same)
    torch.testing.assert_close((found, x), (expected, same))
    assert memory(found, x) == memory(expected, same)


class Heads(nn.Module):
    """Of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor, zeroed: bool = False) -> tuple[Tensor, ...]:
        y = self.body(x).tanh()
        one, other = self.first(y), self.second(y)
        return one, other.mul(1).zero_() + 1 if zeroed else other.T, other.sum().detach()


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_what_only_unused_results_depend_on_has_no_gradients(used: tuple[int, ...], zeroed: bool) -> None:
    model, plain = Heads(), Heads()
    plain.load_state_dict(model.state_dict())
    fast = compiled(model, Each(split=2))
    for _ in range(2):
        for call in (fast, plain):
            results = call(randn(6, 4), zeroed)
            sum(results[i].square().sum() for i in used).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


class Shifted(torch.autograd.Function):
    """Whose gradients are no zeros where it gets zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 + (grads[1] + 1) * 3


BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "by zero": lambda y: y / 0,
    "a spread of one row": lambda y: y.var(0, keepdim=True) / (len(y) - len(y)),
    "by itself": lambda y: (y - y).sqrt(),
    "a distance": lambda y: ((y - y) ** 2).sum(-1).sqrt(),
    "a part": lambda y: y.sub(y).chunk(2, 1)[1].log(),
}


@pytest.mark.parametrize(
    ("operators", "scheduler"), [("eager", "sequential"), ("eager", Each(split=2)), ("inductor", Each(split=2))]
)
@pytest.mark.parametrize("name", BESIDE)
def test_what_leads_to_unused_results_is_not_computed(name: str, operators: str, scheduler: Any) -> None:
    """Zeros by an infinite slope would be nan."""

    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = (x @ weight).tanh()
        return BESIDE[name](y), y * 2, y.exp()

    fast = df.compile(model, scheduler, operators=operators, batch_dims={"x": 0})
    for used in (1, 2, 1, 0):
        leaves = [randn(6, 4).requires_grad_(), randn(4, 4).requires_grad_()]
        found, expected = (torch.autograd.grad(f(*leaves)[used].sum(), leaves) for f in (fast, model))
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert used == 0 or expected[0].isfinite().all()
    assert not fast.stats.plain_graphs


@pytest.mark.parametrize("scheduler", ["sequential", Each(split=2)], ids=["sequential", "split"])
def test_no_gradient_flows_from_a_result_that_is_used(scheduler: Any) -> None:
    """Then all gradients of the backward graph are those of unused results."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.layer_norm(x, (6,)).fill_(2.0), (x - x).sqrt()

    fast, x = df.compile(model, scheduler, operators="eager", batch_dims={"x": 0}), randn(4, 6).requires_grad_()
    found, expected = (torch.autograd.grad(f(x)[0].sum(), x) for f in (fast, model))
    torch.testing.assert_close(found, expected)
    assert not found[0].any()


@pytest.mark.parametrize("used", [0, 1])
def test_functions_get_zeros_for_results_that_are_unused(used: int) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        one, other = Shifted.apply(x.sin())
        return one.cos(), other * 2

    x = randn(6, 4).requires_grad_()
    found, expected = (torch.autograd.grad(f(x)[used].sum(), x) for f in (compiled(model, Each(split=2)), model))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_what_is_made_while_gradients_are_off_leads_nowhere(used: int) -> None:
    """In eager torch too, though a view of something with gradients says that it has some."""

    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        with torch.no_grad():
            view, constant = y.T, y.cos()
        return view.reshape(-1), y @ weight, constant * weight.sum()

    def gradients(function: Callable[..., Any]) -> tuple[Any, ...]:
        x, weight = randn(6, 4).requires_grad_(), WEIGHT.clone().requires_grad_()
        return torch.autograd.grad(function(x, weight)[used].sum(), (x, weight), allow_unused=True)

    expected, found = gradients(model), gradients(compiled(model, Each(split=2)))
    assert [g is None for g in found] == [g is None for g in expected] == [used != 1, used == 0]
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda other, x: other.copy_(x),
        lambda other, x: other.T.copy_(x.T),
        lambda other, x: other.copy_(x).mul_(x),
        lambda other, x: operator.setitem(other, slice(None), x),
    ],
)
@pytest.mark.parametrize("through", [False, True])
def test_what_is_overwritten_has_gradients_of_zeros(overwrite: Callable[[Tensor, Tensor], Any], through: bool) -> None:
    """Also where what it was written to is returned, and was made before."""
    linear = nn.Linear(4, 4)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y, other = x.sin(), linear(x)
        if not through:
            overwrite(other, y)
            return other * 2, x.cos()
        z = y * 1
        overwrite(other, y)
        z.mul_(other)
        return torch.zeros(len(x)), z

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        linear.zero_grad()
        x = randn(6, 4).requires_grad_()
        first, second = function(x)
        (second if through else first).sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    torch.testing.assert_close(gradients(compiled(model, Each(split=2))), gradients(model))


def test_a_counter_beside_an_input_that_gets_gradients() -> None:
    """AOTAutograd would return the counter in the place of another result."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(6))

        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            y = torch.sin(x * self.weight)
            total.add_(x * self.weight)
            return torch.full((4,), x.shape[0]), y

    model, plain = Counting(), Counting()
    found = compiled(model, "sequential")(randn(6, 4), torch.zeros(6, 4))
    torch.testing.assert_close(found, plain(randn(6, 4), torch.zeros(6, 4)))
    torch.testing.assert_close(model.calls, plain.calls)


def test_casts_that_round_do_so_in_training() -> None:
    linear = nn.Linear(4, 4)

    def model(x: Tensor) -> Tensor:
        return linear(x).half().float() * 2

    assert torch.equal(compiled(model, "sequential")(randn(6, 4)), model(randn(6, 4)))


def test_a_function_of_several_results_of_which_one_is_used() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = randn(6, 3, 4)
    compiled(lambda x: attention(x, x, x), "sequential")(x)[1].square().sum().backward()
    assert attention.out_proj.weight.grad is None
    assert attention.in_proj_weight.grad is not None


@pytest.mark.parametrize("mapped", [False, True])
def test_what_lies_between_windows_stays_when_they_are_written(mapped: bool) -> None:
    """AOTAutograd would make zeros of it."""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        x.unfold(0, 2, 2).transpose(0, 1).add_(1)
        return torch.func.vmap(torch.sin)(weight) if mapped else weight * 2

    weight = nn.Parameter(torch.ones(4), requires_grad=not mapped)
    x, same = randn(7, 4), randn(7, 4)
    found, expected = compiled(model, "sequential")(x, weight), model(same, weight)
    torch.testing.assert_close((found, x), (expected, same))
