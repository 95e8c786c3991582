"""verify=True: the first run of each plan is held against the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.engine.verify import difference
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, randn, run_rest

X = randn(6, 8)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("lanes", [1, 3])
def test_good_plan_passes(lanes: int) -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, split=3, lanes=lanes), verify=True)
    assert_equal(fast(X), model(X))
    assert fast.stats.verified == 1


def test_only_the_first_run_of_each_plan_is_compared() -> None:
    fast = compiled(Stack(), Each(STACK_RULES), verify=True)
    for batch in (6, 6, 4, 6, 4):
        fast(randn(batch, 8))
    assert fast.stats.verified == 2
    fast.set_scheduler(Each(STACK_RULES, split=3))
    fast(X)
    assert fast.stats.verified == 3


def test_off_by_default() -> None:
    fast = compiled(Stack(), Each(STACK_RULES))
    fast(X)
    assert fast.stats.verified == 0


class Wrong(nn.Module):
    """The softmax over the batch is declared to be row-wise; what follows it is wrong only in consequence."""

    def forward(self, x: Tensor) -> Tensor:
        with df.mark("good"):
            x = x + 1
        with df.mark("liar", splittable=True):
            x = x.softmax(0)
        with df.mark("victim"):
            return x * 2


def test_wrong_declaration_is_caught() -> None:
    fast = compiled(Wrong(), Each(), verify=True)
    with pytest.raises(df.VerifyError) as caught:
        fast(X)
    assert caught.value.op == "liar"
    assert "first operator that differs is liar" in str(caught.value)
    assert caught.value.line and "test_verify.py" in caught.value.line
    assert "splittable=True" in caught.value.advice


def test_without_verify_the_lie_goes_through() -> None:
    """Shows that the test above can fail: the declaration is believed."""
    assert not torch.allclose(compiled(Wrong(), Each())(X), Wrong()(X))


def test_caught_again_until_it_is_mended() -> None:
    fast = compiled(Wrong(), Each(), verify=True)
    for _ in range(2):
        with pytest.raises(df.VerifyError):
            fast(X)
    fast.set_scheduler(Each(split=None))
    assert_equal(fast(X), Wrong()(X))


def fused_schedule(function: Any, names: tuple[str, ...]) -> Scheduler:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for m in range(2):
            ctx.execute(ctx.items(ctx.ops[0])[m])
        for m in range(2):
            ctx.execute([ctx.items(name)[m] for name in names], replace_func=function)
        run_rest(ctx)

    return Scheduler(schedule)


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with df.mark("a"):
            x = x * 2
        with df.mark("b"):
            x = x.sin()
        with df.mark("c"):
            x = x + 3
        with df.mark("d"):
            return x * x


def test_wrong_replace_func_is_caught() -> None:
    fast = compiled(Chain(), fused_schedule(lambda x: x.sin() + 3.01, ("b", "c")), verify=True)
    with pytest.raises(df.VerifyError) as caught:
        fast(X)
    assert caught.value.op == "c", "the result of the fusion, not `d`, which only shows it"
    assert "replace_func" in caught.value.advice


def test_right_replace_func_passes() -> None:
    fast = compiled(Chain(), fused_schedule(lambda x: x.sin() + 3, ("b", "c")), verify=True)
    assert_equal(fast(X), Chain()(X))
    assert fast.stats.verified == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: (x.sin() + 3).double(),
        lambda x: (x.sin() + 3)[:, :4],
        lambda x: (x.sin() + 3) * torch.where(torch.arange(8) == 7, float("nan"), 1.0),
        lambda x: x.sin() + 3 + 1e-2 * (torch.arange(8) == 3),
    ],
    ids=["dtype", "shape", "nan", "one column"],
)
def test_kinds_of_difference(wrong: Any) -> None:
    fast = compiled(Chain(), fused_schedule(wrong, ("b", "c")), verify=True)
    with pytest.raises(df.VerifyError):
        fast(X)


def test_complex_numbers_are_rounded_like_others() -> None:
    x = torch.randn(64, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert difference(x.conj(), x.conj() * (1 + 1e-6)) is None
    assert difference(x, x + 1e-2j) is not None
    assert difference(x.resolve_conj(), torch.where(torch.arange(64) == 3, complex("nan"), x)) is not None


def test_infinities_are_told_apart() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan")])
    assert difference(x, x.clone()) is None
    assert difference(x, torch.tensor([1.0, -float("inf"), float("nan")])) is not None
    assert difference(x, torch.tensor([1.0, float("nan"), float("nan")])) is not None


class Cached(nn.Module):
    """Its result says nothing of the cache, which is all that a wrong fusion damages."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        with df.mark("first"):
            y = x * 2
        with df.mark("write"):
            cache.add_(y)
        return y


@pytest.mark.parametrize("extra", [0, 1])
def test_written_inputs_are_compared(extra: int) -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for item in ctx.items("first"):
            ctx.execute(item)
        for item in ctx.items("write"):
            reads, writes = ctx.signature([item])
            assert writes == [], "it makes no value, it writes"

            def write(*given: Tensor, reads: list[str] = reads) -> None:
                values = dict(zip(reads, given, strict=True))
                cache = values.pop("cache")
                (y,) = values.values()
                cache.add_(y + extra)

            ctx.execute([item], replace_func=write)

    fast = compiled(Cached(), Scheduler(schedule), verify=True)
    mine, plain = X.clone(), X.clone()
    if extra:
        with pytest.raises(df.VerifyError, match="'cache' after the call"):
            fast(X, mine)
    else:
        assert_equal(fast(X, mine), Cached()(X, plain))
        assert_equal(mine, plain)


def test_state_is_as_after_one_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            with df.mark("bump"):
                self.count += 1
            with df.mark("cache"):
                cache.add_(x)
            with df.mark("out"):
                return x * self.count + cache

    mine, plain = Net(), Net()
    fast = compiled(mine, Each(lanes=2), verify=True)
    a, b = X.clone(), X.clone()
    for _ in range(3):
        assert_equal(fast(X, a), plain(X, b))
        assert_equal(a, b)
    assert_equal(mine.count, plain.count)
    assert mine.count == 3


def test_inputs_that_share_memory_do_so_in_the_plain_run_too() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with df.mark("write"):
                x.add_(1)
            with df.mark("read"):
                return y * 2

    fast, base = compiled(Net(), Each(lanes=2), verify=True), X.clone()
    assert_equal(fast(base, base[:, :4]), (X[:, :4] + 1) * 2)
    assert_equal(base, X + 1)


def test_random_operators_draw_the_same_numbers() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("noise"):
                x = x + torch.rand_like(x)
            with df.mark("more"):
                return x * 2

    fast = compiled(Net(), Each(), verify=True)
    torch.manual_seed(3)
    expected = Net()(X)
    torch.manual_seed(3)
    assert_equal(fast(X), expected)
    assert fast.stats.verified == 1


class Noisy(nn.Module):
    """Draws twice, and has a liar behind that."""

    def __init__(self, lies: bool) -> None:
        super().__init__()
        self.lies, self.inner = lies, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.inner(x), 0.5)
        x = nn.functional.dropout(x + 1, 0.1)
        with df.mark("liar", splittable=True):
            return x.softmax(0 if self.lies else 1)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_dropout_is_no_difference_and_hides_none(operators: Any, train: bool) -> None:
    """Compiled code draws other numbers than torch; what is named is what differs, and not what drew."""
    rules = [df.SplitModule("inner")]
    with torch.set_grad_enabled(train):
        for scheduler in (df.Sequential(), Each(rules, lanes=2)):
            fast = compiled(Noisy(lies=False), scheduler, operators=operators, verify=True)
            result = fast(X)
            if train:
                result.square().sum().backward()
            assert fast.stats.verified == 1 + train
        with pytest.raises(df.VerifyError) as caught:
            compiled(Noisy(lies=True), Each(rules), operators=operators, verify=True)(X)
    assert caught.value.op == "liar"


def test_gradients_after_a_verified_run() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES), verify=True)
    with torch.enable_grad():
        fast(X).sum().backward()
        found = model.head.weight.grad.clone()  # type: ignore[union-attr]
        model.zero_grad()
        model(X).sum().backward()
    assert_equal(found, model.head.weight.grad)


def test_verify_with_inductor_and_a_sequential_plan() -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + 1

    fast = df.compile(Tiny(), verify=True)
    assert_equal(fast(X), Tiny()(X))
    assert fast.stats.verified == 1


def test_conjugates_are_copied_as_such() -> None:
    """The backward pass is given one."""

    def model(x: Tensor) -> Tensor:
        y = x @ x.mT
        return torch.tanh(y) * y.sum(-1, keepdim=True)

    fast = compiled(model, Each(split=2), verify=True)
    x = torch.complex(randn(4, 3, 2), randn(4, 2, 3).mT).requires_grad_()
    with torch.enable_grad():
        found, expected = (torch.autograd.grad(call(x).abs().sum(), x) for call in (fast, model))
    assert_equal(found, expected)
    assert fast.stats.verified == 2
