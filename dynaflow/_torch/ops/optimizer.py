"""An optimizer's step for some of its parameters, which graphs refer to by number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dynaflow._torch.ops import library


class Step(Protocol):
    """The step for some parameters."""

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None: ...


_numbers = itertools.count()
_steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()


def register_step(step: Step) -> int:
    """The number by which `torch.ops.dynaflow.update` calls the step, as long as the step lives."""
    number = next(_numbers)
    _steps[number] = step
    return number


def _update(weights: list[Tensor], gradients: list[Tensor], number: int) -> None:
    _steps[number].step(weights, gradients)


library.define("update(Tensor(a!)[] weights, Tensor[] gradients, int number) -> ()")
library.impl("update", _update, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::update", lambda weights, gradients, number: None, lib=library)
