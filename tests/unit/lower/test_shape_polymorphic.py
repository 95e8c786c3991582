"""Elastic plans: one function for batches of all sizes, equal to the model at each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import assert_equal, count_elastic
from tests.zoo import ZOO


class Stretching(df.OpSchedulerBase):
    """`parts` micro-batches, attention on a lane of its own; one plan for all sizes that can be split so."""

    elastic = True

    def __init__(self, parts: int, cuts: tuple[df.SplitModule, ...] = ()) -> None:
        self.parts, self.cuts, self.asked = parts, cuts, 0

    def partition(self) -> list[Any]:
        return list(self.cuts)

    def key(self, ctx: df.ScheduleContext) -> Any:
        return min(self.parts, ctx.max_parts)

    def schedule(self, ctx: df.ScheduleContext) -> None:
        self.asked += 1
        ctx.split(min(self.parts, ctx.max_parts))
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="other" if "attention" in op.tags else "main")


CUTS = (df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp"))


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_one_function_for_all_sizes(operators: str) -> None:
    entry = ZOO["llama"]
    model = entry.build()
    scheduler = Stretching(3, CUTS)
    fast = df.compile(model, scheduler, operators=operators)
    with torch.no_grad():
        for batch in (6, 7, 3, 12, 4, 6, 20):
            inputs = entry.inputs(batch)
            torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
            plan = fast.plan(**inputs)
            assert [m.size for m in plan.micro_batches] == [batch // 3 + (i < batch % 3) for i in range(3)]
            assert "n0_0" in plan.code
    assert scheduler.asked == 1 and fast.stats.plans == 1


def test_each_size_is_verified_once() -> None:
    entry = ZOO["llama"]
    fast = df.compile(entry.build(), Stretching(2, CUTS), operators="eager", verify=True)
    with torch.no_grad():
        for batch in (4, 4, 6, 4, 6):
            fast(**entry.inputs(batch))
        with df.record() as recording:
            fast(**entry.inputs(4))
    assert fast.stats.verified == 2 and fast.stats.plans == 1
    assert len(recording.calls) == 1


def test_fewer_rows_than_parts_are_another_key() -> None:
    entry = ZOO["llama"]
    model, scheduler = entry.build(), Stretching(3, CUTS)
    fast = df.compile(model, scheduler, operators="eager")
    with torch.no_grad():
        for batch in (6, 2, 9, 2):
            inputs = entry.inputs(batch)
            torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert scheduler.asked == 2, "three micro-batches, and two"


class Daily(Stretching):
    """A key for each day. On sundays all is on another lane; holidays have functions of their own."""

    def __init__(self, holidays: dict[str, Callable[..., Any]] | None = None) -> None:
        super().__init__(2, (df.SplitModule("up"), df.SplitModule("down")))
        self.holidays = holidays or {}

    def key(self, ctx: df.ScheduleContext) -> Any:
        return ctx.facts["day"]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        self.asked += 1
        ctx.split(2)
        day, lane = ctx.facts["day"], "other" if ctx.facts["day"] == "sunday" else "main"
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=lane, replace_func=self.holidays.get(day) if op.name.startswith("up") else None)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_keys_with_the_same_decisions_share_a_function(operators: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_elastic(monkeypatch)
    model, scheduler = Packed(), Daily()
    fast = df.compile(model, scheduler, operators=operators)
    with torch.no_grad():
        for batch, day, functions in (6, "monday", 1), (7, "tuesday", 1), (9, "sunday", 2), (3, "monday", 2):
            inputs, facts = packed(batch), {"day": day}
            torch.testing.assert_close(fast(**inputs, facts=facts), model(**inputs))
            plan = fast.plan(**inputs, facts=facts)
            assert plan.batch_size == batch and {task.lane for task in plan.tasks} == {
                "other" if day == "sunday" else "main"
            }
            assert len(made) == functions
    assert scheduler.asked == 3


def test_decisions_that_call_other_functions_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even under one name."""

    def times(factor: float) -> Callable[..., Tensor]:
        def scaled(x: Tensor, *_: Tensor) -> Tensor:
            return x.new_full((len(x), 16), factor)

        return scaled

    made = count_elastic(monkeypatch)
    model = Packed()
    fast = df.compile(model, Daily({"easter": times(2.0), "christmas": times(3.0)}), operators="eager")
    with torch.no_grad():
        for day, factor in ("easter", 2.0), ("christmas", 3.0), ("easter", 2.0):
            inputs = packed(6)
            expected = model.down(torch.full((6, 16), factor)) * inputs["scale"][:, None]
            torch.testing.assert_close(fast(**inputs, facts={"day": day}), expected)
    assert len(made) == 2


class Packed(nn.Module):
    """Tokens of several requests."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) * scale[:, None].to(x.dtype)


def packed(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "scale": torch.arange(rows) % 5}


def test_packed_requests_are_cut_at_their_boundaries() -> None:
    model, scheduler = Packed(), Stretching(2, (df.SplitModule("up"), df.SplitModule("down")))
    fast = df.compile(model, scheduler, operators="eager")
    dice = random.Random(0)
    seen = set()
    with torch.no_grad():
        for _ in range(30):
            lengths = [dice.randint(1, 9) for _ in range(dice.randint(2, 7))]
            rows = sum(lengths)
            if rows == len(lengths):
                continue
            inputs = packed(rows)
            facts = {"num_tokens": lengths}
            torch.testing.assert_close(fast(**inputs, facts=facts), model(**inputs))
            plan = fast.plan(**inputs, facts=facts)
            ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
            assert len(plan.micro_batches) == 2 and plan.micro_batches[0].stop in ends
            seen.add(tuple(m.size for m in plan.micro_batches))
    assert len(seen) > 10 and scheduler.asked == 1 and fast.stats.plans == 1


def test_sizes_that_are_odd_numbers_to_the_model() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + x.new_ones(x.size(0) // 2 * 2 + x.size(0) % 2, 4)

    model, scheduler = Halved(), Stretching(2)
    fast = df.compile(model, scheduler, operators="eager")
    with torch.no_grad():
        for batch in (4, 6, 9):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(fast(x), model(x))


def test_one_function_of_each_pass_serves_all_sizes_in_training() -> None:
    model, scheduler = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Stretching(2, (df.SplitModule("0"),))
    fast = df.compile(model, scheduler, operators="eager")
    for batch in (4, 6, 9):
        x = torch.randn(batch, 4, requires_grad=True)
        expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        for found, wanted in zip(torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()]), expected):
            torch.testing.assert_close(found, wanted)
        assert "n0_0" in fast.plan(x).code
    assert scheduler.asked == 2 and fast.stats.plans == 2


@pytest.mark.parametrize("name", ["mixtral", "bert", "t5", "whisper", "gpt2"])
def test_models(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    fast = df.compile(model, Stretching(2), operators="eager", verify=True)
    with torch.no_grad():
        for batch in (4, 7, 5):
            inputs = entry.inputs(batch)
            expected, found = model(**inputs), fast(**inputs)
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert fast.stats.verified == 3


class Lengths(nn.Module):
    """What takes the length of the sequence as a number, as a size, and as a factor of a dim that carries the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        flat = self.up(x).view(x.shape[0] * x.shape[1], -1)
        places = x + torch.arange(x.shape[1])[None, :, None]
        return flat * 2, places, x.sum(1) * x.shape[1], x * (x.shape[1] // 2), torch.tensor(x.shape[1]), x.shape[1]


SIZES = ((4, 6), (4, 8), (5, 6), (6, 7), (3, 9), (4, 6))


@pytest.mark.parametrize(("operators", "train"), [("eager", False), ("eager", True), ("inductor", False)])
def test_another_dim_may_vary_as_well(operators: str, train: bool) -> None:
    model, scheduler = Lengths(), Stretching(2, (df.SplitModule("up"),))
    fast = df.compile(model, scheduler, operators=operators, dynamic_dims={"x": [1]})
    for batch, length in SIZES:
        x = torch.randn(batch, length, 4, requires_grad=train)
        with torch.set_grad_enabled(train):
            found, expected = fast(x), model(x)
            assert_equal(found, expected)
            if train:
                grads = [torch.autograd.grad(sum(y.square().sum() for y in r[:4]), x)[0] for r in (found, expected)]
                torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert scheduler.asked == (2 if train else 1), "no size is a reason to ask again"
    assert fast.stats.plans == (2 if train else 1), "one function of each pass serves all lengths"


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dynamic", [None, {"x": [1]}])
def test_a_graph_without_a_batch_has_nothing_to_stretch(parts: int, dynamic: Any) -> None:
    class Pieces(Stretching):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            assert not ctx.has_batch
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op)

    def model(x: Tensor) -> Tensor:
        return torch.relu(x.reshape(6, -1)) @ torch.ones(x.numel() // 6, 3)

    fast = df.compile(model, Pieces(parts), operators="eager", batch_dims={}, dynamic_dims=dynamic)
    with torch.no_grad():
        for length in (4, 5, 4, 8):
            x = torch.randn(6, length)
            torch.testing.assert_close(fast(x), model(x))
