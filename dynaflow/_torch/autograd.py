"""What autograd is doing."""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_forward_mode() -> bool:
    """Whether tensors may have tangents, of forward-mode AD. Seen on 2.11 and 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


def after_backward(function: Callable[[], None]) -> None:
    """Calls it at the end of the backward pass that is under way. What it raises, backward() raises. Seen on 2.11 and
    2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to be called with its gradient. Seen on 2.11 and 2.13."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that is under way will leave a gradient at it. Seen on 2.11 and 2.13."""
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)


def have_scalers_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """GradScaler.step comes to the optimizer's own step, and its hooks, even if there are no gradients: else it fails
    without a word of why. Returns the function that takes that back. Seen on 2.11 and 2.13."""
    had = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", had)
