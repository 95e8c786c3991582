"""Fake tensors."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch


@contextlib.contextmanager
def concrete_fake_mode() -> Iterator[Any]:
    """A mode for fake tensors with concrete sizes, which give the shapes, strides and aliasing of a run. Seen on 2.11
    and 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with silence_fake_errors(), mode:  # errors at these sizes don't concern the user
        yield mode


@contextlib.contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Silences the errors that torch logs when a call fails on fake tensors, in this thread only."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()
    quiet = lambda record: record.thread != thread  # noqa: E731
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor. Seen on 2.11 and 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) is FakeTensor


def is_plain_fake(value: Any) -> bool:
    """Whether shape, dtype and device describe the fake tensor fully: no symbols, no known content, no conj or neg
    bit."""
    return (
        is_fake(value)
        and value.constant is None
        and value.layout is torch.strided
        and not (value._has_symbolic_sizes_strides or value.requires_grad or value.is_conj() or value.is_neg())
    )


def make_fake(
    mode: Any,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    over: torch.Tensor | None,
) -> torch.Tensor:
    """Makes a fake tensor with this layout, over the storage of another or its own. Takes a tenth of the time of an
    operator call. Seen on 2.11 and 2.13."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        if over is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(over.untyped_storage(), offset, size, stride)
        return cast("torch.Tensor", FakeTensor(mode, meta, device))
