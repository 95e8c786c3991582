"""The version of torch, and shared types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Hooks = RemovableHandle
"""`Hooks.next_id` grows with each hook registered anywhere. Seen on 2.11 and 2.13."""

Boxed = Callable[[list[Any]], Any]
"""A function that takes its arguments in a list and empties it, so that each argument is freed after its last use."""

F = TypeVar("F", bound=Callable[..., Any])
