"""The state of autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_forward_mode() -> bool:
    """Whether forward-mode AD is active, so that tensors may have tangents. Seen on 2.11 and 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


def after_backward(function: Callable[[], None]) -> None:
    """Calls the function at the end of the current backward pass. backward() raises what it raises. Seen on 2.11 and
    2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the tensor has hooks on its gradient. Seen on 2.11 and 2.13."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the current backward pass accumulates a gradient for the parameter. Seen on 2.11 and 2.13."""
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)


def support_grad_scaler(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Makes GradScaler.step call the optimizer's step, and its hooks, even without gradients: otherwise it fails with
    an unhelpful assertion. Returns a function that undoes this. Seen on 2.11 and 2.13."""
    had = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", had)
