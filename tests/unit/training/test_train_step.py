"""Whole steps of training in micro-batches: the loss and the gradients are those of the whole batch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput

import dynaflow as df
from tests.helpers import CUTS, STACK_RULES, Each, Stack
from tests.unit.training.test_gradients import Gradients, assert_same
from tests.zoo import ZOO, ids_of

EXACT = 1e-9


def stack_and_batch(rows: int = 7) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Stack().double(), torch.randn(rows, 8).double(), torch.randint(0, 3, (rows,))


def step_of(model: Callable[..., Any], scheduler: Any = None, **options: Any) -> df.TrainStep:
    return df.TrainStep(model, scheduler, **{"operators": "eager", **options})


def after(model: nn.Module, call: Callable[[], Tensor], backward: bool = False) -> tuple[Tensor, Gradients]:
    """The loss of a step, and the gradients that it leaves."""
    model.zero_grad(set_to_none=True)
    loss = call()
    if backward:
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(
    model: nn.Module, plain: Callable[[], Tensor], step: Callable[[], Tensor], tolerance: float = EXACT
) -> None:
    expected, expected_gradients = after(model, plain, backward=True)
    for _ in range(2):
        loss, gradients = after(model, step)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        assert_same(gradients, expected_gradients, tolerance)


@pytest.mark.parametrize(("micro_batches", "reduction"), [(2, "mean"), ([4, 2, 1], "mean"), ([5, 2], "sum")])
def test_loss_and_gradients_are_those_of_the_whole(micro_batches: Any, reduction: Any) -> None:
    model, x, y = stack_and_batch()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y, reduction=reduction)

    inner = 2 if micro_batches == 2 else None  # a row can't be split again
    step = step_of(
        loss, Each(STACK_RULES, split=inner, lanes=2), micro_batches=micro_batches, reduction=reduction, verify=True
    )
    compare(model, lambda: loss(x, y), lambda: step(x, y=y))


def test_items_that_do_not_count() -> None:
    """The mean is over those that do; a micro-batch without any has no part in it."""
    model, x, y = stack_and_batch()
    y[0] = y[3:5] = -100

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    step = step_of(loss, micro_batches=[3, 2, 2], weight=lambda inputs: (inputs["y"] != -100).sum())
    compare(model, lambda: loss(x, y), lambda: step(x, y))
    y[:] = -100
    assert step(x, y).isnan(), "as that of the whole"


def test_the_batch_may_lie_elsewhere() -> None:
    model, x, y = stack_and_batch(6)
    scale = torch.rand(3).double()

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return cross_entropy(model(x.t()) * scale, y)

    step = step_of(loss, micro_batches=3, batch_dims={"x": 1, "y": 0})
    compare(model, lambda: loss(x.t(), y, scale), lambda: step(x.t(), y, scale))


def test_gradients_stay_where_the_first_micro_batch_put_them() -> None:
    model, x, y = stack_and_batch(6)
    places: dict[str, list[int]] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=name: places.setdefault(n, []).append(p.grad.data_ptr()))
    step = step_of(lambda x, y: cross_entropy(model(x), y), micro_batches=3)
    _, once = after(model, lambda: step(x, y))
    once = {name: gradient.clone() for name, gradient in once.items()}
    assert all(len(seen) == 3 and len(set(seen)) == 1 for seen in places.values()), places
    step(x, y)  # adds to what is there
    assert all(len(seen) == 6 and len(set(seen)) == 1 for seen in places.values()), places
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                {n: 2 * gradient for n, gradient in once.items()}, EXACT)  # fmt: skip


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_activations_are_kept_for_those_in_flight(in_flight: int) -> None:
    model, x, y = stack_and_batch(8)
    step = step_of(lambda x, y: cross_entropy(model(x), y), micro_batches=4, in_flight=in_flight)
    step(x, y)
    kept: list[weakref.ref[Any]] = []
    peak = 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def save(tensor: Tensor) -> Any:
        nonlocal peak
        if tensor.size(0) != 2:  # none of the activations of two rows
            return tensor
        saved = Saved(tensor)
        kept.append(weakref.ref(saved))
        peak = max(peak, sum(ref() is not None for ref in kept))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: getattr(saved, "tensor", saved)):
        step(x, y)
    assert len(kept) >= 4 and len(kept) % 4 == 0
    assert peak == in_flight * len(kept) // 4


# Models that have their loss with them


def labelled(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The labels that count are spread unevenly over the rows."""
    inputs = ZOO[name].inputs(6)
    inputs.pop("decoder_input_ids", None)
    labels = inputs["input_ids"].clone() if name == "llama" else ids_of(6, 7, torch.Generator().manual_seed(3))
    labels[0, 1:] = labels[1, :3] = labels[4, 5:] = -100
    return ZOO[name].build().double(), {**inputs, "labels": labels}


def test_an_encoder_and_decoder_with_labels() -> None:
    model, inputs = labelled("t5")
    step = step_of(model, micro_batches=3)
    compare(model, lambda: model(**inputs).loss, lambda: step(**inputs))


@pytest.mark.parametrize("kind", [dict, CausalLMOutput])
def test_other_results_have_no_gradients(kind: Callable[..., Any]) -> None:
    """The backward pass would get one of zeros for each: of the size of all logits."""
    model, x, y = stack_and_batch(4)

    def alone(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    def both(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return kind(logits=logits, loss=cross_entropy(logits, y))

    class Given(df.Sequential):
        """How many inputs each pass has."""

        def schedule(self, ctx: df.ScheduleContext) -> Any:
            self.count = {**getattr(self, "count", {}), ctx.phase: len(ctx.graph.graph.inputs)}
            return super().schedule(ctx)

    schedulers = [Given() for _ in range(3)]
    for loss, scheduler in zip((alone, both), schedulers, strict=False):
        compare(model, lambda: alone(x, y), lambda: step_of(loss, scheduler, micro_batches=1)(x, y))  # noqa: B023
    fast = df.compile(both, schedulers[2], operators="eager")
    result = fast(x, y)
    result["loss"].backward()
    first, second, plain = (scheduler.count["backward"] for scheduler in schedulers)
    assert first == second == plain - 1


def test_an_optimizer_makes_no_steps_of_its_own() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(df.SplitError, match="a step for each micro-batch"):
        df.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_steps_of_an_optimizer_follow_the_plain_model() -> None:
    """A model that shifts its labels, and makes its loss in float32."""
    model, inputs = labelled("llama")
    other = copy.deepcopy(model)
    step = step_of(other, Each(CUTS, lanes=2), micro_batches=[4, 2])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other)]
    losses: list[tuple[float, float]] = []
    for i in range(50):
        expected, gradients = after(model, lambda: model(**inputs).loss, backward=True)
        loss, found = after(other, lambda: step(**inputs))
        losses.append((expected.item(), loss.item()))
        if i == 0:
            assert_same(found, gradients, 1e-6)
        for optimizer in optimizers:
            optimizer.step()
    plain, stepped = zip(*losses, strict=True)
    assert stepped == pytest.approx(plain, abs=1e-4)
    assert plain[-1] < 0.5 * plain[0], "nothing was learned"


# What can't be split


def test_what_cant_be_split_is_refused() -> None:
    model, x, y = stack_and_batch(4)
    step = step_of(lambda x, y: cross_entropy(model(x), y), micro_batches=5)
    with pytest.raises(df.SplitError, match="leaves a micro-batch empty"):
        step(x, y)
    with pytest.raises(df.SplitError, match=r"no batch in common: {'x': 4, 'y': 3}"):
        step(x, y[:3])
    with pytest.raises(df.SplitError, match="no batch in common"):
        step(1.0, 2.0)
    with pytest.raises(df.SplitError, match="'x' has tensors inside"):
        step([x, x], y)
    with pytest.raises(df.SplitError, match=r"not a scalar but a tensor of shape \[2, 3\]"):
        step_of(model)(x)
    with pytest.raises(df.SplitError, match="in_flight=0"):
        step_of(model, in_flight=0)
    with pytest.raises(df.SplitError, match="reduction='max'"):
        step_of(model, reduction="max")


def test_batch_norm_takes_the_whole_batch() -> None:
    model, x, y = stack_and_batch(4)
    model.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    step = step_of(lambda x, y: cross_entropy(model(x), y))
    with pytest.raises(df.SplitError, match="batch norm"):
        step(x, y)
    model.eval()
    compare(model, lambda: cross_entropy(model(x), y), lambda: step(x, y))
    with pytest.raises(df.SplitError, match="batch norm"):
        step_of(Elsewhere(model.train()).loss)(x, y)
    model.eval().head[0] = nn.BatchNorm1d(8, track_running_stats=False).double().eval()  # type: ignore[operator]
    with pytest.raises(df.SplitError, match="batch norm"):
        step_of(lambda x, y: cross_entropy(model(x), y))(x, y)


class Elsewhere:
    """Has a model that no closure leads to."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model(x), y)


def test_inputs_are_those_that_the_model_takes() -> None:
    model, x, y = stack_and_batch(6)

    def loss(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return cross_entropy(model(x) * scale, y)

    step = step_of(loss)
    compare(model, lambda: loss(x, y, 2.0), lambda: step(x, y, scale=2.0))
    for args, kwargs, message in (
        ((x, y, 1.0, 1.0), {}, "too many positional arguments"),
        ((x, y), {"x": x}, "multiple values for argument 'x'"),
        ((x,), {}, "missing a required argument: 'y'"),
    ):
        with pytest.raises(TypeError, match=message):
            step(*args, **kwargs)
    step = step_of(lambda **inputs: loss(**inputs))
    compare(model, lambda: loss(x, y), lambda: step(x=x, y=y))
    with pytest.raises(df.SplitError, match="'inputs' has tensors inside"):
        step_of(lambda *inputs: loss(*inputs))(x, y)
