"""The step of an optimizer for some of its parameters: graphs hold numbers, not objects."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dynaflow._torch.ops import library


class Step(Protocol):
    """Makes the step for some parameters."""

    def step(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None: ...


_numbers = itertools.count()
_steps: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()


def register_step(step: Step) -> int:
    """The number by which `torch.ops.dynaflow.update` calls the step, for as long as that lives."""
    number = next(_numbers)
    _steps[number] = step
    return number


def _update(weights: list[Tensor], gradients: list[Tensor], number: int) -> None:
    _steps[number].step(weights, gradients)


library.define("update(Tensor(a!)[] weights, Tensor[] gradients, int number) -> ()")
library.impl("update", _update, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::update", lambda weights, gradients, number: None, lib=library)
