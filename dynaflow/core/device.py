"""Device models: what a simulation needs to know of a GPU, its links and the host that feeds it.

Peaks come from the vendor. The fractions of them that kernels reach, and all times, were measured on the H200 (with
Inductor's kernels and cuBLAS); other devices reuse its values where nothing better is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

import torch

from dynaflow.errors import DynaFlowError, nearest, shown

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The interconnect between the GPUs of a node."""

    latency: float
    """Seconds that the smallest collective takes."""
    bandwidth: float
    """Bytes per second that one GPU sends, and receives, in a large collective."""
    sms: int = 16
    """SMs that a collective's kernel occupies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or one of several in a node. Times are in seconds, sizes in bytes."""

    name: str
    sms: int
    peak_flops: Mapping[str, float]
    """Dense, by dtype, as published."""
    peak_bandwidth: float
    memory: float
    matmul: float = 0.78
    """Fraction of the peak that a large matmul reaches in a model, where the card heats up."""
    attention: float = 0.45
    """Fraction of a matmul's speed that fused attention reaches."""
    masked_attention: float = 0.30
    """The same with a mask, which uses another kernel."""
    convolution: float = 0.6
    bandwidth: float = 0.87
    """Fraction of the peak that a large pointwise kernel reaches."""
    to_host: float
    """Bytes per second, as measured; both directions run concurrently."""
    from_host: float
    copy_latency: float = 8 * MICRO
    kernel: float = 3.7 * MICRO
    """The shortest time of a kernel among others on its stream."""
    launch: float = 1.1 * MICRO
    """The gap between two kernels. A CUDA graph saves it."""
    wait: float = 3 * MICRO
    """From the end of a task to the start of a dependent task on another lane."""
    host_call: float = 300 * MICRO
    """Host time per call, per task (below), and per kernel that is launched by itself."""
    host_task: float = 18 * MICRO
    host_kernel: float = 15 * MICRO
    graph_launch: float = 12 * MICRO
    """From the launch of a CUDA graph to its first kernel."""
    share_kept: tuple[tuple[float, float], ...] = (
        (0.0, 0.0), (0.121, 0.24), (0.242, 0.47), (0.364, 0.69), (0.485, 0.89), (0.606, 0.96), (1.0, 1.0),
    )  # fmt: skip
    """(share of the SMs, remaining speed) of memory-bound kernels. Memory saturates early."""
    matmul_share: float = 0.75
    """Remaining efficiency of a matmul on a part of the SMs: its tiling is made for all of them."""
    memory_power: float = 0.88
    """Power of a pointwise kernel at full bandwidth, relative to a matmul at full speed."""
    idle_power: float = 0.28
    """Part of that which SMs draw while they wait for memory. A kernel limited to fewer SMs saves it."""
    sustained: float = 1.0
    """Fraction of that power that the card sustains, averaged over milliseconds. A matmul with pauses runs at full
    speed, one without does not, and two kernels that use different units gain little from running concurrently."""
    crowding: float = 2.0
    """How much more than its own SMs a collective takes from a concurrent matmul: on the H200, 116 of 132 SMs leave
    0.66 of a matmul's speed, a loss three times as large as the SMs explain. Libraries that yield SMs lose less."""
    copy_drag: float = 0.01
    """The same for a copy to or from the host, or a transfer over the link."""
    link: Link | None = None
    ranks: int = 1
    """Number of such GPUs that work together."""
    dtype_defaults: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({"float32": "tf32"}))
    """The peak to use for a dtype without one of its own."""

    def flops(self, dtype: str) -> float:
        """FLOP/s that a large matmul of this dtype reaches."""
        peaks = self.peak_flops
        found = peaks.get(dtype) or peaks.get(self.dtype_defaults.get(dtype, "")) or peaks["float32"]
        return found * self.matmul

    @property
    def bytes_per_second(self) -> float:
        return self.peak_bandwidth * self.bandwidth

    def memory_speed(self, share: float) -> float:
        """Fraction of full bandwidth that a kernel reaches on a share of the SMs."""
        points = self.share_kept
        if share >= 1.0:
            return 1.0
        for (a, low), (b, high) in pairwise(points):
            if share <= b:
                return low + (high - low) * (share - a) / (b - a)
        return 1.0

    def with_ranks(self, ranks: int) -> Device:
        """This GPU as one of `ranks` in a node."""
        name = re.sub(r"x\d+$", "", self.name) + (f"x{ranks}" if ranks > 1 else "")
        return replace(self, name=name, ranks=ranks)


def _peaks(bf16: float, tf32: float, fp32: float, fp8: float | None = None) -> Mapping[str, float]:
    found = {"bfloat16": bf16, "float16": bf16, "tf32": tf32, "float32": fp32}
    if fp8 is not None:
        found |= {"float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType({k: v * TERA for k, v in found.items()})


# NVIDIA A100 80GB SXM datasheet: 312 TFLOP/s bf16, 156 tf32, 19.5 fp32; 2039 GB/s; NVLink 600 GB/s in both
# directions; PCIe Gen4 64 GB/s in both. 108 SMs (A100 architecture whitepaper).
A100 = Device(
    name="a100",
    sms=108,
    peak_flops=_peaks(312, 156, 19.5),
    peak_bandwidth=2.039 * TERA,
    memory=80 * GIGA,
    matmul=0.83,
    attention=0.7,  # torch's kernels were written for this card
    masked_attention=0.5,
    to_host=25 * GIGA,
    from_host=25 * GIGA,
    link=Link(latency=20 * MICRO, bandwidth=235 * GIGA),
)

# NVIDIA H100 SXM datasheet: 1979 TFLOP/s bf16 with sparsity, so 989 dense; 494 tf32, 67 fp32, 1979 fp8 dense;
# 3.35 TB/s; 80 GB; NVLink 900 GB/s in both directions; PCIe Gen5 128 GB/s in both. 132 SMs (H100 whitepaper).
H100 = Device(
    name="h100",
    sms=132,
    peak_flops=_peaks(989, 494, 67, 1979),
    peak_bandwidth=3.35 * TERA,
    memory=80 * GIGA,
    matmul=0.72,  # the H200's chip; its slower memory draws less of the power
    to_host=54 * GIGA,
    from_host=54 * GIGA,
    link=Link(latency=18 * MICRO, bandwidth=380 * GIGA),
)

# NVIDIA H200 SXM datasheet: the H100's chip; 4.8 TB/s; 141 GB; the same links. Measured: matmuls 790 TFLOP/s alone,
# 730-770 in a model, 650 back to back; pointwise kernels 4.2-4.4 TB/s, PCIe 54-55 GB/s each way.
H200 = replace(H100, name="h200", peak_bandwidth=4.8 * TERA, memory=141 * GIGA, matmul=0.75, sustained=0.87)

# NVIDIA DGX B200 datasheet, by GPU: 4.5 PFLOP/s bf16 and 9 fp8 with sparsity, so 2.25 and 4.5 dense; 8 TB/s (64 in
# all); 180 GB (1440 in all); NVLink 1.8 TB/s in both directions (14.4 in all); PCIe Gen5. 148 SMs.
B200 = Device(
    name="b200",
    sms=148,
    peak_flops=_peaks(2250, 1125, 75, 4500),
    peak_bandwidth=8.0 * TERA,
    memory=180 * GIGA,
    matmul=0.72,
    to_host=54 * GIGA,
    from_host=54 * GIGA,
    link=Link(latency=15 * MICRO, bandwidth=760 * GIGA),
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {d.name: d for one in (A100, H100, H200, B200) for d in (one, one.with_ranks(8))}
)


def device_named(name: str, ranks: int | None = None) -> Device:
    """Looks up a device: "h200", or "b200x8" for one of eight in a node."""
    if not isinstance(name, str):
        raise DynaFlowError(f"no device is named {shown(name)}", advice=f"there are {', '.join(DEVICES)}")
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", name.strip().lower())
    base = DEVICES.get(found[1]) if found else None
    if base is None or found is None:
        close = nearest(name[:100], list(DEVICES), 8)
        raise DynaFlowError(f"no device is named {shown(name)}", advice=f"there are {', '.join(close)}")
    return base.with_ranks(ranks or int(found[2] or 1))


_planned_for: ContextVar[Device | None] = ContextVar("planned_for", default=None)


@contextlib.contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """In this context, schedulers plan for this device, wherever the tensors are."""
    token = _planned_for.set(device)
    try:
        yield
    finally:
        _planned_for.reset(token)


def device_for(device: torch.device) -> Device:
    """The model of an actual device: by its name on CUDA, by its thread count on a CPU."""
    if (other := _planned_for.get()) is not None:
        return other
    if device.type != "cuda":
        return _cpu(torch.get_num_threads())
    properties = torch.cuda.get_device_properties(device)
    known = re.search(r"[abh]\d00", properties.name.lower())
    base = DEVICES.get(known[0] if known else "", H100)
    # An unlisted card, or a variant of a listed one: scaled by its number of SMs.
    scale = properties.multi_processor_count / base.sms
    return replace(
        base,
        name=base.name if known else properties.name,
        sms=properties.multi_processor_count,
        peak_flops={k: v * scale for k, v in base.peak_flops.items()},
        memory=properties.total_memory,
    )


def _cpu(threads: int) -> Device:
    """About 50 GFLOP/s (float32) and 10 GB/s per core, up to a socket's bandwidth. "SMs" are threads."""
    flops = 50 * GIGA * threads
    return Device(
        name="cpu",
        sms=threads,
        peak_flops=MappingProxyType({"float32": flops, "bfloat16": flops, "float16": flops / 4}),
        peak_bandwidth=min(10 * GIGA * threads, 200 * GIGA),
        memory=16 * GIGA,
        attention=0.5,
        masked_attention=0.5,
        to_host=10 * GIGA,
        from_host=10 * GIGA,
        kernel=1 * MICRO,
        launch=0.0,
        host_call=100 * MICRO,
        host_task=5 * MICRO,
        host_kernel=0.0,  # the caller's thread does the work itself
        share_kept=((0.0, 0.0), (1.0, 1.0)),
        matmul_share=1.0,
        memory_power=0.0,
        copy_drag=0.0,
        dtype_defaults=MappingProxyType({}),
    )
