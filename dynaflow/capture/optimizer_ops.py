"""Steps of an optimizer as operators of the backward pass.

Behind the gradients of a layer stands a call of `torch.ops.dynaflow.update`, which makes the optimizer's own step for
the layer's parameters alone. It reads the gradients and writes the parameters: so it comes after all that reads them,
and a scheduler (strategies/optimizer_beside.py) says when and where it runs. These gradients go no further.
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
"""The step for some parameters as an operator: how its name ends, and its tag."""
KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Whose step treats every parameter by itself, as we have seen."""


class Updates:
    """An optimizer that makes its steps during the backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        self._made: list[Update] = []
        mine = weakref.ref(self)

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (updates := mine()) is not None:
                updates._check_step((*args[1:], *kwargs.values()))

        weakref.finalize(self, optimizer.register_step_pre_hook(before_step).remove)
        weakref.finalize(self, _torch.have_scalers_step(optimizer))

    def parameters(self) -> dict[int, nn.Parameter]:
        """All of the optimizer's, by identity."""
        return {id(p): p for group in self.optimizer.param_groups for p in group["params"]}

    def new(self, parameters: Sequence[nn.Parameter]) -> int:
        """The step for some of the parameters, as a number that `torch.ops.dynaflow.update` takes."""
        self._made.append(Update(self.optimizer, parameters))
        return register_step(self._made[-1])

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a backward pass: every one of them can be updated in it, or none is."""
        known = self.parameters()
        for parameter in parameters:
            if id(parameter) not in known:
                raise DynaFlowError(
                    f"optimizer=: a parameter of shape {tuple(parameter.shape)} was the optimizer's, and is no more",
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
                    f"optimizer=: nobody asked for the gradient of a parameter of shape {tuple(parameter.shape)}, and "
                    "every backward pass is a step",
                    advice="torch.autograd.grad and backward(inputs=...) need a model compiled without optimizer=",
                )
        _torch.after_backward(lambda: _check_end(parameters))

    def _check_step(self, arguments: Sequence[Any]) -> None:
        """Before `optimizer.step()`, which does what remains."""
        if any(a is not None for a in arguments):
            raise DynaFlowError(
                "optimizer=: step(closure), but the steps were made in the backward pass",
                line=user_line(),
                advice="call step() without a closure",
            )
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise DynaFlowError(
                "optimizer=: the gradients were scaled (GradScaler), and were applied as they are",
                line=user_line(),
                advice="train in bfloat16, which needs no scaling, or compile without optimizer=",
            )


class Update:
    """The step for some parameters of an optimizer, with its state and its settings of the moment."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self.parameters = optimizer, tuple(parameters)
        self._part = copy.copy(optimizer)  # without its hooks
        self._step = type(optimizer).step  # a scheduler of learning rates wraps that of the optimizer itself

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """`weights`: the memory of the parameters. A compiler need not hand over the parameters themselves."""
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
            self._part.state, self._part.param_groups = defaultdict(dict), []  # they may be copies


def _laid_out_as(weight: Tensor, gradient: Tensor) -> Tensor:
    """As autograd leaves it in `.grad`; some kernels take for granted that it is."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


# What can't be


def _check(optimizer: Any) -> None:
    if type(optimizer) not in KINDS:
        raise DynaFlowError(
            f"optimizer={type(optimizer).__name__}: not known to treat every parameter by itself",
            line=user_line(),
            advice=f"use one of {', '.join(kind.__name__ for kind in KINDS)}, or compile without optimizer=",
        )
    for group in optimizer.param_groups:
        if group["differentiable"]:
            raise DynaFlowError(
                "optimizer=: differentiable=True, but nothing goes back through a step of the backward pass",
                line=user_line(),
                advice="leave it out, or compile without optimizer=",
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
                f"optimizer=: parameters of one group are on {' and '.join(kinds)}, by which torch chooses how to step",
                line=user_line(),
                advice="choose yourself: pass foreach=True or False to the optimizer",
            )


def _check_end(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            raise DynaFlowError(
                f"optimizer=: a parameter of shape {tuple(parameter.shape)} has been updated, and got another gradient "
                "from outside of the compiled model",
                advice="use it inside of the model alone, or compile without optimizer=",
            )


def check_model(model: Any) -> None:
    """Who sums gradients over ranks does so when they arrive at the parameters."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise DynaFlowError(
                f"optimizer=: {type(module).__name__} would not see the gradients",
                line=user_line(),
                advice="compile without optimizer=",
            )
