"""Optimizer steps as operators of the backward pass.

After the gradients of a layer, `torch.ops.dynaflow.update` makes the optimizer's own step for the layer's parameters.
It reads the gradients and writes the parameters, so it runs after all readers of these, and a scheduler
(strategies/optimizer_overlap.py) decides when and where. The gradients are not returned.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynaflow import _torch
from dynaflow._torch.ops.optimizer import register_step
from dynaflow.errors import DynaFlowError, user_line

UPDATE = "update"
"""The suffix of a step's operator name, and its tag."""
KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose step treats each parameter independently."""


class OptimizerInBackward:
    """An optimizer whose steps run in the backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        self._made: list[ParameterStep] = []
        mine = weakref.ref(self)

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (updates := mine()) is not None:
                updates._check_step((*args[1:], *kwargs.values()))

        weakref.finalize(self, optimizer.register_step_pre_hook(before_step).remove)
        weakref.finalize(self, _torch.support_grad_scaler(optimizer))

    def parameters(self) -> dict[int, nn.Parameter]:
        """The optimizer's parameters by id."""
        return {id(p): p for group in self.optimizer.param_groups for p in group["params"]}

    def new(self, parameters: Sequence[nn.Parameter]) -> int:
        """Registers the step for some parameters. Returns its number for `torch.ops.dynaflow.update`."""
        self._made.append(ParameterStep(self.optimizer, parameters))
        return register_step(self._made[-1])

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Checks, before a backward pass, that all of the parameters can be updated in it."""
        known = self.parameters()
        for parameter in parameters:
            if id(parameter) not in known:
                raise DynaFlowError(
                    f"optimizer=: a parameter of shape {tuple(parameter.shape)} is no longer one of the optimizer's",
                    advice="compile again when its groups have changed",
                )
            if parameter.grad is not None:
                raise DynaFlowError(
                    f"optimizer=: a parameter of shape {tuple(parameter.shape)} has a gradient already, and every "
                    "backward pass is a step",
                    advice="call zero_grad(set_to_none=True) before it; to accumulate gradients, compile without "
                    "optimizer=",
                )
            if _torch.has_gradient_hooks(parameter):
                raise DynaFlowError(
                    f"optimizer=: a parameter of shape {tuple(parameter.shape)} has hooks on its gradient, which are "
                    "not called",
                    advice="remove the hooks, or compile without optimizer=",
                )
            if not _torch.gets_gradient(parameter):
                raise DynaFlowError(
                    f"optimizer=: no gradient was requested for a parameter of shape {tuple(parameter.shape)}, and "
                    "every backward pass is a step",
                    advice="torch.autograd.grad and backward(inputs=...) need a model compiled without optimizer=",
                )
        _torch.after_backward(lambda: _check_end(parameters))

    def _check_step(self, arguments: Sequence[Any]) -> None:
        """Checks the call of `optimizer.step()`, which updates the remaining parameters."""
        if any(a is not None for a in arguments):
            raise DynaFlowError(
                "optimizer=: step(closure), but the steps ran in the backward pass",
                line=user_line(),
                advice="call step() without a closure",
            )
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise DynaFlowError(
                "optimizer=: the gradients were scaled (GradScaler), and were applied without unscaling",
                line=user_line(),
                advice="train in bfloat16, which needs no scaling, or compile without optimizer=",
            )


class ParameterStep:
    """An optimizer's step for some of its parameters, with the current state and settings of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self.parameters = optimizer, tuple(parameters)
        self._part = copy.copy(optimizer)  # without its hooks
        self._step = type(optimizer).step  # learning rate schedulers wrap the instance's step

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """`weights`: tensors with the parameters' memory. Compiled code may not pass the parameters themselves."""
        states = self._optimizer.state
        weight_of = dict(zip(map(id, self.parameters), weights, strict=True))
        self._part.param_groups = [
            {**group, "params": mine}
            for group in self._optimizer.param_groups
            if (mine := [weight_of[id(p)] for p in group["params"] if id(p) in weight_of])
        ]
        pairs = tuple(zip(self.parameters, weights, strict=True))
        self._part.state = defaultdict(dict, {w: states[p] for p, w in pairs if p in states})
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = _laid_out_as(weight, gradient)
        try:
            self._step(self._part)
            states.update({p: self._part.state[w] for p, w in pairs if w in self._part.state})
        finally:
            for weight in weights:
                weight.grad = None
            self._part.state, self._part.param_groups = defaultdict(dict), []  # drop references to copies


def _laid_out_as(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the weight's strides, as autograd accumulates it and some kernels expect it."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


# Unsupported uses


def _check(optimizer: Any) -> None:
    if type(optimizer) not in KINDS:
        raise DynaFlowError(
            f"optimizer={type(optimizer).__name__}: not known to treat each parameter independently",
            line=user_line(),
            advice=f"use one of {', '.join(kind.__name__ for kind in KINDS)}, or compile without optimizer=",
        )
    for group in optimizer.param_groups:
        if group["differentiable"]:
            raise DynaFlowError(
                "optimizer=: differentiable=True, but steps in the backward pass are not differentiable",
                line=user_line(),
                advice="remove it, or compile without optimizer=",
            )
        if any(_torch.shard_of(p) is not None for p in group["params"]):
            raise DynaFlowError(
                "optimizer=: a parameter is a DTensor, whose gradient may still have to be summed over ranks",
                line=user_line(),
                advice="compile without optimizer=",
            )
        kinds = sorted({p.device.type for p in group["params"]})
        if len(kinds) > 1 and group["foreach"] is None and group["fused"] is None:
            raise DynaFlowError(
                f"optimizer=: parameters of one group are on {' and '.join(kinds)}, which decides how torch steps",
                line=user_line(),
                advice="pass foreach=True or foreach=False to the optimizer",
            )


def _check_end(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            raise DynaFlowError(
                f"optimizer=: a parameter of shape {tuple(parameter.shape)} has been updated, and got another gradient "
                "from outside of the compiled model",
                advice="use it in the compiled model only, or compile without optimizer=",
            )


def check_model(model: Any) -> None:
    """Rejects wrappers that reduce gradients over ranks when these arrive at the parameters."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise DynaFlowError(
                f"optimizer=: {type(module).__name__} would not see the gradients",
                line=user_line(),
                advice="compile without optimizer=",
            )
