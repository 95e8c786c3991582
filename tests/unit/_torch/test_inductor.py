"""Compiling single graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch.fx import Tracer

import dynaflow as df
from tests.helpers import assert_equal, randn


def test_no_thread_captures_while_an_operator_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing replaces nn.Module.__call__ in all threads: a capture would trace the replacement and guard on it."""
    locked: list[bool] = []
    trace = Tracer.trace

    def traced(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        locked.append(compile_lock._is_owned())  # type: ignore[attr-defined]
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(Tracer, "trace", traced)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad():
        fast = df.compile(model, operators="inductor")
        for rows in (2, 3):
            x = randn(rows, 4)
            assert_equal(fast(x), model(x))
    assert locked and all(locked)
