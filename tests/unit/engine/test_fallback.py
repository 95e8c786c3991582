"""Where dynaflow itself fails, the call still succeeds: unscheduled, with one warning and a reason in the stats."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.capture.joint_graph import JointGraph
from dynaflow.engine import engine, plan_maker, planner
from dynaflow.errors import FallbackWarning
from dynaflow.lower.lower import Lowerer
from tests.helpers import Each, Stack, compiled, randn


class Counting(nn.Module):
    """Writes to itself: what runs twice shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh() + self.calls


class Rounding(Each):
    """Pads to eight rows."""

    def bucket(self, rows: int) -> int:
        return 8


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("mul_93")


def backward_fails(usual: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, gm, backward: fail() if backward else usual(self, gm, backward)


WHERE: dict[str, tuple[Any, str]] = {
    "capture": (engine, "CapturedGraph"),
    "cut": (plan_maker, "partition"),
    "check": (plan_maker, "check"),
    "lower": (Lowerer, "lower"),
    "padding": (planner, "Padding"),
    "request": (planner.Planner, "request"),
    "decider": (planner.Planner, "decider"),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_call_runs_unscheduled(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    monkeypatch.setattr(*WHERE[where], fail)
    fast = compiled(model, Rounding() if where == "padding" else Each(split=2))
    with torch.no_grad(), pytest.warns(FallbackWarning, match="KeyError: 'mul_93'") as seen:
        for rows in (6, 6, 5):
            torch.testing.assert_close(fast(randn(rows, 4)), plain(randn(rows, 4)))
    assert len(seen) == 1
    torch.testing.assert_close(model.calls, plain.calls)
    assert fast.stats.plain_graphs == 1
    assert "dynaflow failed on it: KeyError: 'mul_93'" in fast.stats.plain_reasons


@pytest.mark.parametrize("backward", [False, True])
def test_a_training_step_runs_unscheduled(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    monkeypatch.setattr(JointGraph, "read", backward_fails(JointGraph.read) if backward else fail)
    fast = compiled(model, Each(split=2))
    for _ in range(2):
        x, same = randn(6, 4).requires_grad_(), randn(6, 4).requires_grad_()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", FallbackWarning)
            fast(x).square().sum().backward()
        plain(same).square().sum().backward()
        torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    torch.testing.assert_close(model.calls, plain.calls)
    assert not seen, "one warning is enough"
    assert fast.stats.plain_reasons == ["dynaflow failed on it: KeyError: 'mul_93'"]


def test_the_plan_of_a_graph_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lowerer, "lower", fail)
    with pytest.warns(FallbackWarning), pytest.raises(df.PlanError, match=r"runs plainly.*mul_93"):
        compiled(torch.tanh).plan(randn(6, 4))


def test_as_an_error_the_warning_is_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in all tests, and in fuzzing."""
    monkeypatch.setattr(Lowerer, "lower", fail)
    with pytest.raises(KeyError, match="mul_93"):
        compiled(torch.tanh)(randn(6, 4))


def test_what_torchs_tracer_fails_on_runs_as_python_does() -> None:
    """Dynamo can't go on with `view` after the break, though eager torch can."""
    before = []

    def model(x: Tensor, w: Tensor) -> Tensor:
        before.append(len(x))
        y = x * w
        with torch.no_grad():
            view = y.view(-1)
        y.mul_(2)
        torch._dynamo.graph_break()
        return y.tanh() * view.shape[0]

    fast, w = compiled(model, Each(split=2)), randn(4).requires_grad_()
    with pytest.warns(FallbackWarning, match="tracer failed on it") as seen:
        for rows in (6, 6, 5):
            x = randn(rows, 4)
            torch.testing.assert_close(fast(x, w), model(x, w))
    assert len(seen) == 1
    assert before[::2] == before[1::2] == [6, 6, 5]
    assert any(__file__ in reason and "tracer failed on it" in reason for reason in fast.stats.plain_reasons)


@pytest.mark.parametrize("error", [IndexError, AssertionError, KeyError])
def test_whatever_torchs_tracer_fails_with(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("list index out of range")

    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    fast = compiled(model, Each(split=2))
    with torch.no_grad(), pytest.warns(FallbackWarning, match=f"{error.__name__}.*out of range"):
        monkeypatch.setattr("torch._dynamo.guards.CheckFunctionManager.__init__", fail)
        for rows in (6, 6, 5):
            torch.testing.assert_close(fast(randn(rows, 4)), plain(randn(rows, 4)))
    torch.testing.assert_close(model.calls, plain.calls)


def test_what_facts_raise_is_the_users() -> None:
    fast = df.compile(torch.tanh, facts=lambda: {}["phase"], operators="eager")
    with pytest.raises(df.ScheduleError, match=r"facts\(\) raised KeyError: 'phase'") as raised:
        fast(randn(6, 4))
    assert raised.value.line is not None
    assert __file__ in raised.value.line


def test_memory_that_is_not_there_is_no_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = compiled(torch.tanh)
    with monkeypatch.context() as patch:
        patch.setattr(Lowerer, "lower", full)
        with pytest.raises(torch.OutOfMemoryError):
            model(randn(6, 4))
    torch.testing.assert_close(model(randn(6, 4)), randn(6, 4).tanh())
    assert not model.stats.plain_graphs


def test_a_graph_whose_compiled_model_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's code of a model may outlive it."""
    runners: list[Any] = []
    backend = engine.Engine.backend
    monkeypatch.setattr(engine.Engine, "backend", lambda *given: runners.append(backend(*given)) or runners[0])
    fast, x = compiled(Stack()), randn(4, 8)
    with torch.no_grad():
        fast(x)
        (runner,) = runners
        del fast
        gc.collect()
        with pytest.raises(df.DynaFlowError, match="no longer exists") as caught:
            runner(x)
    assert caught.value.advice
