"""CUDA streams, events and memory pools."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def timing_event() -> Any:
    """A CUDA event without the Python wrapper that torch.cuda.Event puts around each method. Seen on 2.11."""
    return torch._C._CudaEventBase(enable_timing=True)


def set_stream(stream: Any) -> None:
    """torch.cuda.set_stream without its checks. Seen on 2.11."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def sleep(cycles: int) -> None:
    """Occupies the current stream for this number of clock cycles. Seen on 2.11."""
    torch.cuda._sleep(cycles)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Leaves the memory pool after a failed capture: CUDAGraph.capture_end raises before it does so. Seen on 2.11."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
