from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaflow._torch.autograd import (
    after_backward,
    gets_gradient,
    has_gradient_hooks,
    in_forward_mode,
    support_grad_scaler,
)


def test_forward_mode_is_seen() -> None:
    assert not in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert in_forward_mode()
    assert not in_forward_mode()


def test_called_at_the_end_of_the_backward_pass() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: after_backward(lambda: order.append("end")))
    x.register_hook(lambda grad: order.append("x"))
    y.sum().backward()
    assert order == ["x", "end"]


def test_what_is_raised_there_backward_raises() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: after_backward(lambda: [][0]))
    with pytest.raises(IndexError):
        y.sum().backward()


def test_hooks_on_gradients_are_seen() -> None:
    plain, hooked, late = (torch.ones(2, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda grad: None)
    late.register_post_accumulate_grad_hook(lambda t: None)
    assert [has_gradient_hooks(t) for t in (plain, hooked, late)] == [False, True, True]


def test_which_parameters_get_gradients() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[tuple[bool, bool]] = []
    y = a * b
    y.register_hook(lambda grad: seen.append((gets_gradient(a), gets_gradient(b))))
    y.sum().backward(inputs=[a])
    assert seen == [(True, False)]


def test_a_gradient_scaler_comes_to_the_optimizers_step() -> None:
    class Counting(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            steps.append(1)

    steps: list[int] = []
    optimizer = Counting([torch.nn.Parameter(torch.ones(2))], {})
    scaler, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1)), other.scale(torch.ones(1))
    undo = support_grad_scaler(optimizer)
    scaler.step(optimizer)
    undo()
    assert steps == [1]
    with pytest.raises(AssertionError, match="No inf checks"):
        other.step(optimizer)
