"""Gradients under a schedule: forward and backward in micro-batches and on lanes, beside plain autograd."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from tests.helpers import STACK_RULES, Each, Stack, assert_equal, compiled, plans_of, randn
from tests.zoo import ZOO, to

Gradients = dict[str, Tensor]


def gradients(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any], weigh: bool = True) -> Gradients:
    """Of every parameter, for a loss that gives each element of each result a weight of its own."""
    model.zero_grad(set_to_none=True)
    results = [t for t in torch.utils._pytree.tree_leaves(call(**inputs)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) if weigh else 1 for t in results]
    sum((t * w).sum() for t, w in zip(results, weights, strict=True)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Gradients, expected: Gradients, tolerance: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (found[name] - gradient).abs().max().item() <= tolerance * scale, name


class Phases(Each):
    """Notes what it was asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[tuple[str, list[str], list[str]]] = []

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        cut = [op.name for op in ctx.ops if op.splittable]
        self.asked.append((ctx.phase, [op.name for op in ctx.ops if op.tags], cut))
        return super().schedule(ctx)


TRAINED = ("llama", "mixtral", "bert", "vit", "t5", "branch_cnn")


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    entry = ZOO[name]
    model = entry.build().double()
    tolerance = 1e-9
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")
        tolerance = 1e-5  # its router computes in float32
    inputs = to("cpu", torch.float64, entry.inputs(4))
    expected = gradients(model, model, inputs)
    rules = [df.SplitModule(path, tag=tag, optional=True) for path, tag in entry.cuts]
    schedulers = [Phases(rules, split=split, lanes=2) for split in (None, 2, [1, 3])]
    fast = df.compile(model, schedulers[0], operators="eager", verify=True)
    for scheduler in schedulers:
        fast.set_scheduler(scheduler)
        for _ in range(2):
            assert_same(gradients(model, fast, inputs), expected, tolerance)
        assert [phase for phase, *_ in scheduler.asked] == ["forward", "backward"]
    assert fast.stats.graphs == 2 and fast.stats.runs == 12 and not fast.stats.plain_graphs


def test_compiled_operators() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(6, 8)
    expected = gradients(model, model, {"x": x})
    fast = compiled(model, Each(STACK_RULES, split=3, lanes=2), operators="inductor")
    assert_same(gradients(model, fast, {"x": x}), expected, 1e-5)
    assert fast.stats.operators_compiled and fast.stats.runs == 2


def test_both_passes_have_the_same_names() -> None:
    scheduler = Phases(STACK_RULES, split=2)
    model = Stack()
    fast = compiled(model, scheduler)
    fast(torch.randn(4, 8)).sum().backward()
    (_, forward, _), (phase, backward, cut) = scheduler.asked
    assert phase == "backward"
    weights = {name for name in backward if name.endswith(".weights")}
    assert weights == {f"{name}.weights" for name in forward}
    assert set(backward) - weights == set(forward) - {"layers.0.attn"}  # before it is nothing that wants a gradient
    assert set(backward) - weights <= set(cut) and not weights & set(cut)


def test_calls_of_functions_are_found_in_both_passes() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.silu(self.inner(x))
            return self.outer(nn.functional.softmax(x, dim=-1)) * nn.functional.silu(x)

    rules = [df.SplitFunc(nn.functional.silu, tag="gate"), df.SplitFunc("*softmax*", tag="soft")]
    scheduler = Phases(rules, split=2, lanes=2)
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(4, 8)
    expected = gradients(model, model, {"x": x})
    assert_same(gradients(model, compiled(model, scheduler), {"x": x}), expected)
    (_, forward, _), (_, backward, _) = scheduler.asked
    assert forward == ["silu", "softmax", "silu#2"]
    assert set(forward) <= set(backward)  # what is computed again for other operators comes in pieces of its own
    assert {name.partition("#")[0] for name in backward} == {"silu", "softmax"}


def test_other_batch_sizes_need_no_other_capture() -> None:
    torch.manual_seed(0)
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, split=2, lanes=2))
    for rows in (6, 4, 7):
        x = torch.randn(rows, 8)
        assert_same(gradients(model, fast, {"x": x}), gradients(model, model, {"x": x}))
    assert fast.stats.graphs == 2


def test_gradients_accumulate_and_reach_the_inputs() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        model(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()} | {"x": x.grad}
    model.zero_grad()
    x.grad = None
    fast = compiled(model, Each(STACK_RULES, split=2, lanes=2))
    for _ in range(2):
        fast(x).square().sum().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()} | {"x": x.grad}, expected)  # type: ignore[dict-item]


def test_frozen_parameters_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.outer = nn.Linear(8, 8)
            self.outer.weight = self.inner.weight
            self.fixed = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.relu(self.fixed(self.inner(x)))) + self.inner(x)

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(6, 8)
    expected = gradients(model, model, {"x": x})
    rules = [df.SplitModule("inner"), df.SplitModule("outer"), df.SplitModule("fixed")]
    fast = compiled(model, Each(rules, split=3, lanes=2))
    found = gradients(model, fast, {"x": x})
    assert_same(found, expected)
    assert "fixed.weight" not in found


def test_a_backward_pass_of_nothing_but_gradients_of_weights() -> None:
    """Below the head all is frozen: a scheduler that splits whatever it gets is not to blame."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(6, 8)
    model.layers.requires_grad_(False)
    expected = gradients(model, model, {"x": x})
    fast = compiled(model, Each(STACK_RULES, split=2, lanes=2))
    for _ in range(2):
        assert_same(gradients(model, fast, {"x": x}), expected)
    assert fast.stats.plain_graphs == 1 and "can be split" in fast.stats.plain_reasons[0]


def test_a_loss_of_the_whole_batch() -> None:
    """The mean is taken over all rows, whatever the split."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.stack(x), target)

    torch.manual_seed(0)
    model, x, target = WithLoss(), torch.randn(7, 8), torch.randint(0, 3, (7,))
    inputs = {"x": x, "target": target}
    expected = gradients(model, model, inputs, weigh=False)
    rules = [df.SplitModule("stack.layers.*", tag="block")]
    fast = compiled(model, Each(rules, split=[4, 2, 1], lanes=2))
    assert_same(gradients(model, fast, inputs, weigh=False), expected)


def test_inference_between_steps() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 8)
    fast = compiled(model, Each(STACK_RULES, split=2, lanes=2))
    expected = gradients(model, model, {"x": x})
    assert_same(gradients(model, fast, {"x": x}), expected)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert_same(gradients(model, fast, {"x": x}), expected)


def test_steps_of_an_optimizer_follow_the_plain_model() -> None:
    def losses(compile_: bool) -> list[float]:
        torch.manual_seed(0)
        model = Stack()
        call = compiled(model, Each(STACK_RULES, split=2, lanes=2)) if compile_ else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(50):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            loss = (call(x) - x[:, :3]).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    found, expected = losses(True), losses(False)
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < 0.8 * expected[0], "nothing was learned"


def test_dropout_draws_for_the_whole_batch() -> None:
    """What is kept in the forward pass is what gradients flow through."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner(x), 0.5)

    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(8, 16, requires_grad=True)
    fast = compiled(model, Each([df.SplitModule("inner")], split=2, lanes=2))
    out = fast(x)
    out.backward(torch.ones_like(out))
    kept = (out != 0).to(x.dtype) * 2
    torch.testing.assert_close(x.grad, kept @ model.inner.weight)
    assert not torch.equal(kept[:4], kept[4:]), "both halves drew the same numbers"


def test_a_backward_that_cant_be_traced_says_so() -> None:
    @torch.library.custom_op("dynaflow_tests::forward_only", mutates_args=())
    def forward_only(x: Tensor) -> Tensor:
        return x * 2

    @forward_only.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(gradient.sum())  # looks at data

    torch.library.register_autograd("dynaflow_tests::forward_only", backward)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return forward_only(self.inner(x))

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(4, 8)
    expected = gradients(model, model, {"x": x})
    fast = compiled(model, Each([df.SplitModule("inner")], split=2))
    with pytest.warns(UserWarning, match="backward pass can't be traced"):
        found = gradients(model, fast, {"x": x})
    assert_same(found, expected)


def test_nothing_is_said_where_all_is_well() -> None:
    fast = compiled(Stack(), Each(STACK_RULES, split=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast(torch.randn(4, 8)).sum().backward()


def test_a_compiled_model_that_was_trained_can_go() -> None:
    fast = compiled(Stack(), Each(STACK_RULES, split=2))
    fast(torch.randn(4, 8)).sum().backward()
    engine = weakref.ref(engine_of(fast))
    del fast
    gc.collect()
    assert engine() is None


# What forward saves for backward, in host memory


class Noting(df.strategies.Prefetch):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: dict[str, df.Plan] = {}

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        plan = super().schedule(ctx) or ctx.finish()
        self.plans[ctx.phase] = plan
        return plan


def tasks_of(plan: df.Plan, part: str) -> list[tuple[int, df.Task]]:
    return [(i, task) for i, task in enumerate(plan.tasks) if part in task.items[0].op]


@pytest.mark.parametrize("operators", ["eager", "inductor"])
@pytest.mark.parametrize("split", [None, 2])
def test_saved_activations_go_to_the_host_and_come_back(split: int | None, operators: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(blocks=3), torch.randn(6, 8)
    expected = gradients(model, model, {"x": x})
    scheduler = Noting(Each(STACK_RULES, split=split), behind=1)
    fast = df.compile(model, scheduler, operators=operators, offload_saved=1, verify=True)  # type: ignore[arg-type]
    for _ in range(2):
        assert_same(gradients(model, fast, {"x": x}), expected, 1e-5)
    stored, fetched = tasks_of(scheduler.plans["forward"], "store"), tasks_of(scheduler.plans["backward"], "fetch")
    assert len(stored) >= 3 and len(fetched) == len(stored) * (split or 1)
    assert {task.lane for _, task in stored} == {"store"} and {task.lane for _, task in fetched} == {"copy"}
    assert not any("head" in task.items[0].op for _, task in stored), "a weight was stored"
    # With one result on its way, the one before it is gone when anything else is made.
    for (_, _), (second, _), (third, _) in zip(stored, stored[1:], stored[2:]):
        between = scheduler.plans["forward"].tasks[second + 1 : third]
        assert any(after for task in between for after in task.after), "nobody waits for what was stored"


def test_small_results_stay_and_so_do_all_without_the_option() -> None:
    model, x = Stack(), torch.randn(6, 8)
    for option in (None, 1 << 20):
        scheduler = Noting(Each(STACK_RULES, split=None))
        fast = df.compile(model, scheduler, operators="eager", offload_saved=option)
        fast(x).sum().backward()
        assert not tasks_of(scheduler.plans["forward"], "store")
        assert not tasks_of(scheduler.plans["backward"], "fetch")


def test_no_more_goes_to_the_host_than_said_and_it_is_spread_over_the_layers() -> None:
    torch.manual_seed(0)
    model, x = Stack(blocks=3), torch.randn(6, 8)
    expected = gradients(model, model, {"x": x})
    stored = {}
    for most in (None, 3 * x.nbytes, 2 * x.nbytes, x.nbytes - 1):
        scheduler = Noting(Each(STACK_RULES, split=None))
        fast = df.compile(model, scheduler, operators="eager", offload_saved=x.nbytes, offload_most=most)
        assert_same(gradients(model, fast, {"x": x}), expected, 1e-5)
        stored[most] = [task.items[0].op for _, task in tasks_of(scheduler.plans["forward"], "store")]
        assert len(tasks_of(scheduler.plans["backward"], "fetch")) == len(stored[most])
    whole, three, two, none = stored.values()
    assert len(whole) > 4 and not none
    assert [op.split(".")[:2] for op in three] == [["layers", str(i)] for i in range(3)], "one of each layer"
    assert len({op.split(".", 2)[2] for op in three}) == 1, "and the same of each"
    assert len(two) == 2 and all(op.startswith("layers.0.") for op in two), "the last are needed soonest"
    with pytest.raises(df.DynaFlowError, match="offload_most= without"):
        df.compile(model, offload_most=1)


def test_results_that_are_saved_as_well_stay_where_the_caller_looks_for_them() -> None:
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.inner(x))  # which is also what its gradient is made of

    torch.manual_seed(0)
    model, x = Exponential(), torch.randn(4, 8)
    expected = gradients(model, model, {"x": x})
    fast = df.compile(model, df.strategies.Prefetch(), operators="eager", offload_saved=1)
    assert_same(gradients(model, fast, {"x": x}), expected)
    torch.testing.assert_close(fast(x), model(x))


def test_results_that_are_copies_share_no_memory() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        total = x.sum(1)
        copy = total.clone()
        row = copy[1]
        kept = row.clone()
        row.add_(kept)
        return total, kept, copy, row, total

    x = torch.ones(6, 4, requires_grad=True)
    expected, found = model(x), compiled(model, "sequential")(x)
    for results in (expected, found):
        for place, number in ((0, 5.0), (2, 3.0)):
            results[place].detach().fill_(number)
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e)


@pytest.mark.parametrize("scheduler", ["sequential", Each(split=2)])
@pytest.mark.parametrize("more", [torch.zeros_like, lambda x: 0])
def test_a_result_that_equals_an_input_is_a_copy_of_it(more: Callable[[Tensor], Any], scheduler: Any) -> None:
    """Inductor's front end takes `x + 0` for `x`: what the caller writes to the result would be written to `x`."""
    x, y = randn(6, 4), randn(6, 4).requires_grad_()
    found, other = compiled(lambda x, y: (x + more(x), y.sin()), scheduler)(x, y)
    torch.testing.assert_close(found, x)
    found.zero_()
    torch.testing.assert_close(x, randn(6, 4))
    torch.testing.assert_close(other, y.sin())


class Remembering(nn.Module):
    """Counts its calls and has a running mean, by statements that make results of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.last *= 0.5
        self.last += x.detach().mean(0)
        return self.linear(x).tanh() * self.calls + self.last, self.calls


def test_a_model_that_counts_its_calls_is_scheduled() -> None:
    model, plain = Remembering(), Remembering()
    plain.load_state_dict(model.state_dict())
    fast = compiled(model, Each(split=2))
    for _ in range(3):
        x, same = randn(6, 4).requires_grad_(), randn(6, 4).requires_grad_()
        (found, calls), (expected, counted) = fast(x), plain(same)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close((found, calls, x.grad), (expected, counted, same.grad))
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
        assert calls is model.calls
    assert not fast.stats.plain_graphs
    assert any(len(plan.micro_batches) == 2 for plan in plans_of(fast))


@pytest.mark.filterwarnings("error:.*can't be traced")
@pytest.mark.parametrize("mapped", [False, True])
def test_constants_that_inductor_folds_before_their_sizes(mapped: bool) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.zeros(x.shape[0], 6)
        flat = zeros.view(-1)
        return torch.func.vmap(torch.sin)(x) if mapped else x.sin(), zeros.neg().view(x.shape[0] * 6), flat

    x = randn(6, 4).requires_grad_(not mapped)
    fast = compiled(model, Each(split=2))
    for found, expected in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("take", [lambda results: results[0], lambda results: results[1]])
def test_the_compiled_model_may_be_gone_when_backward_runs(take: Callable[[Any], Tensor]) -> None:
    model, x = nn.Linear(4, 4), randn(6, 4)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        return y.exp(), y.T

    def loss(function: Callable[[Tensor], Any]) -> Tensor:
        return take(function(x)).square().sum()

    held = loss(compiled(both, Each(split=2)))
    gc.collect()
    expected = torch.autograd.grad(loss(both), list(model.parameters()))
    for found, other in zip(torch.autograd.grad(held, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, other)


def test_a_result_that_is_a_copy_of_an_input_stays_when_that_is_written() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        flat = x.flatten(0, 1)
        kept = flat.copy_(flat).clone()
        flat.add_(kept)
        return kept, flat, y.sin()

    y = torch.ones(6, 4, requires_grad=True)
    fast = compiled(model, "sequential")
    for expected, found in zip(*(call(torch.ones(6, 4), y) for call in (model, fast)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("split", [None, 2])
def test_results_share_memory_as_eager_ones_do(split: int | None) -> None:
    """Where AOTAutograd has one tensor for several: one that is returned twice, and a copy that is another tensor."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([x, x.flip(0)], 1)
        column = joined[:, 1]
        added = column.add_(column.clone())
        negated = column.neg_()
        left = torch.empty_like(x)
        right = x.sin()
        return joined.clone(), added, negated, column, left.copy_(right), right, y.tanh()

    fast = compiled(model, Each(split=split))
    x, y = randn(6, 4), randn(6, 3).requires_grad_()
    found, expected = fast(x, y), model(x, y)
    assert_equal(found, expected)
    places = [[t.untyped_storage().data_ptr() for t in results] for results in (found, expected)]
    shared = [[[a == b for a in group] for b in group] for group in places]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("split", [None, 2])
def test_writes_to_float64_scalars(split: int | None) -> None:
    """torch 2.13 itself loses them: AOTAutograd has Dynamo trace again with the scalar's value as a constant."""

    def model(x: Tensor, count: Tensor, factor: float, size: float) -> Tensor:
        count.mul_(0.75)
        return torch.tanh(x) * factor + torch.full((4,), size)

    fast = compiled(model, Each(split=split))
    for factor, size in ((2.0, 1.0), (3.0, 1.0), (4.0, 2.0), (5.0, 3.0)):
        found = []
        for call in (model, fast):
            x, count = randn(6, 4).requires_grad_(), torch.tensor(2.0, dtype=torch.float64)
            result = call(x, count, factor, size)
            found.append((result, count, torch.autograd.grad(result.sum(), x)))
        assert_equal(found[1], found[0])


@pytest.mark.parametrize("of_input", [True, False])
def test_results_that_are_views_by_their_memory_alone(of_input: bool) -> None:
    """As the parts of `unsafe_split` are."""

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        whole = y.add_(1) if of_input else (y + 1).mul_(2)
        one, other = torch.unsafe_split(whole, 2, 1)
        return x.sin(), one, other

    fast = compiled(model, Each())
    x, y, z = randn(6, 4).requires_grad_(), randn(6, 4), randn(6, 4)
    found, expected = (y, *fast(x, y)), (z, *model(x, z))
    assert_equal(found, expected)
    places = [[t.untyped_storage().data_ptr() for t in results] for results in (found, expected)]
    assert [[a == b for a in places[0]] for b in places[0]] == [[a == b for a in places[1]] for b in places[1]]
    assert fast.stats.plain_reasons


def _no_grad_view(x: Tensor, of_input: bool) -> tuple[Tensor, ...]:
    y = x * 2
    with torch.no_grad():
        view = x[0] if of_input else y[0]
    return y, view


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "detached before a view": lambda x: ((y := x * 2).detach(), y[:, 0]),
    "detached before two": lambda x: ((y := x * 2).detach(), y[:, 0], y[:, 1] * 3),
    "a view and its detach": lambda x: ((y := x * 2).mT, y.mT.detach()),
    "an item and its detach": lambda x: ((y := x * 2)[:, 0], y[:, 0].detach()),
    "a view of what is detached": lambda x: ((y := x * 2), y.detach()[0]),
    "without gradients, of an input": lambda x: _no_grad_view(x, True),
    "without gradients, of a value": lambda x: _no_grad_view(x, False),
    "windows": lambda x: (x * 1).as_strided((2, 2), (1, 1)),
    "conjugates": lambda x: (x.conj().flatten(), x.conj() * 2),
    "equal calls": lambda x: (x.abs().topk(1)[1], x.abs().topk(1)[1], x * 2),
    "equal calls of two names": lambda x: (x.abs().sort(0)[1], x.abs().argsort(0), x * 2),
}


@pytest.mark.parametrize("given", ["whole", "slice", "conjugate"])
@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views(name: str, given: str) -> None:
    """AOTAutograd has other values, gradients or memory for some of them."""
    model = VIEWS[name]
    fast = compiled(model, "sequential")
    seen = []
    for call in (model, fast):
        leaf = torch.complex(randn(4, 3), randn(3, 4).mT) if given == "conjugate" else randn(4, 3)
        leaf.requires_grad_()
        x = leaf.conj() if given == "conjugate" else leaf[1:] if given == "slice" else leaf
        results = call(x)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [r for r in results if r.requires_grad]
        loss = sum((r.abs() * torch.arange(r.numel()).view(r.shape)).sum() for r in wanted)
        grads = torch.autograd.grad(loss, leaf)
        storages = [r.untyped_storage().data_ptr() for r in (x, *results)]
        shared = [[a == b for a in storages] for b in storages]
        seen.append(([r.resolve_conj() for r in results], grads, shared, [r.requires_grad for r in results]))
    assert_equal(seen[1][:2], seen[0][:2])
    assert seen[1][2:] == seen[0][2:]


def test_a_view_of_a_written_input_keeps_its_place() -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        view = x.view(x.shape)
        x.mul_(2)
        return view, weight * 2

    fast = compiled(model, "sequential")
    weight = torch.ones(4, 3, requires_grad=True)
    found, expected = (call(torch.arange(15.0).view(5, 3)[1:], weight) for call in (fast, model))
    assert_equal(found, expected)


@pytest.mark.parametrize("split", [None, 2])
@pytest.mark.parametrize("model", [lambda x: torch.cat([x, x], 1), lambda x: x + x], ids=["cat", "add"])
def test_results_may_be_written(model: Callable[[Tensor], Tensor], split: int | None) -> None:
    """Inductor's front end makes a view of a copy of that concatenation, and what joins parts may be a view, too."""
    fast, x = compiled(model, Each(split=split)), randn(4, 6).t().requires_grad_()
    result = fast(x)
    result.mul_(3)
    assert_equal(torch.autograd.grad(result.sum(), x), (torch.full((6, 4), 6.0),))


def test_a_copy_from_before_there_were_gradients_has_none() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        copy = x.mul_(2).clone()
        return copy, x.copy_(y) * 3

    fast = compiled(model, "sequential")
    found = []
    for call in (model, fast):
        y = randn(6, 4).requires_grad_()
        results = call(torch.ones(6, 4), y)
        grads = torch.autograd.grad(results[1].sum(), y)
        found.append(([r.requires_grad for r in results], results, grads))
    assert found[0][0] == found[1][0] == [False, True]
    assert_equal(found[1][1:], found[0][1:])


def test_a_copy_is_apart_from_what_views_are_made_of() -> None:
    """AOTAutograd leaves the copy out, and makes both views of what it returns as the copy."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        largest = x.topk(2, 1)[0]
        column = largest[:, 1]
        column.neg_()
        column.add_(2)
        return largest.clone(), column.unfold(0, 2, 2), column

    fast, x = compiled(model, "sequential"), randn(6, 4).requires_grad_()
    found, expected = fast(x), model(x)
    assert_equal(found, expected)
    assert len({t.untyped_storage().data_ptr() for t in found}) == 2
