"""SM partitions on CUDA: disjoint green contexts that together make the whole device.

Each lane that declares a share gets that many SMs, split off one after the other from the remainder; all other lanes of
the plan get the last remainder. A lane that asks for all SMs has no partition: it shares them with the others. torch
can split off one partition only. Disjoint partitions need the driver API: `cuda.bindings.driver` where it is installed,
the same few functions over ctypes where it is not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from dynaflow.core import forks
from dynaflow.core.plan import Lane
from dynaflow.errors import DynaFlowError, PlanError

_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, without which no green context is made
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, as torch's own streams are


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Some SMs of a device. Never destroyed: the allocator may have blocks of its streams after the model is gone."""

    device: int
    sms: int
    """How many were granted. The driver grants whole groups (8 on Hopper), so it may be more than requested."""
    context: Any
    """The green context."""
    api: Any

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """A new stream whose kernels run on these SMs and nowhere else."""
        (stream,) = _call(self.api, lane.name, "cuGreenCtxStreamCreate", self.context, _NON_BLOCKING, lane.priority)
        return torch.cuda.ExternalStream(int(stream), device=self.device)


def own_stream(device: int, lane: Lane) -> torch.cuda.Stream:
    """A new stream on all SMs. torch's own streams come from a pool of 32, and repeat."""
    with torch.cuda.device(device):
        (stream,) = _call(_load(), lane.name, "cuStreamCreateWithPriority", _NON_BLOCKING, lane.priority)
    return torch.cuda.ExternalStream(int(stream), device=device)


_made: dict[tuple[int, tuple[int | None, ...]], list[Partition | None]] = {}  # making green contexts is slow
_lock = forks.lock()


def for_lanes(device: int, lanes: tuple[Lane, ...]) -> list[Partition | None]:
    """The partition of each lane; None for the whole device. Plans with equal shares use the same ones."""
    key = (device, tuple(lane.sms for lane in lanes))
    with _lock:
        if key not in _made:
            _made[key] = carve(_load(), device, lanes)
        return _made[key]


def carve(api: Any, device: int, lanes: tuple[Lane, ...]) -> list[Partition | None]:
    """Makes the partition of each lane; lanes without a share have one in common. `api` is cuda.bindings.driver."""
    first = lanes[0].name
    _call(api, first, "cuInit", 0)
    (handle,) = _call(api, first, "cuDeviceGet", device)
    kind = api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    (left,) = _call(api, first, "cuDeviceGetDevResource", handle, kind)
    everything = left.sm.smCount
    divided = tuple(lane for lane in lanes if lane.sms != everything)
    _check_sum(divided, everything)
    if all(lane.sms is None for lane in divided):
        return [None] * len(lanes)

    def green(lane: str, resource: Any) -> Partition:
        (desc,) = _call(api, lane, "cuDevResourceGenerateDesc", [resource], 1)
        (context,) = _call(api, lane, "cuGreenCtxCreate", desc, handle, _DEFAULT_STREAM)
        return Partition(device=device, sms=resource.sm.smCount, context=context, api=api)

    parts: dict[str, Partition] = {}
    rest: Partition | None = None
    for lane in divided:
        if lane.sms is None:
            continue
        have = left.sm.smCount if left is not None else 0
        if lane.sms > have:
            raise _spent(lane, f"{lane.sms} SMs", have, parts)
        if lane.sms == have:  # no split: the remainder may not be a whole number of groups
            parts[lane.name], rest, left = rest or green(lane.name, left), None, None
            continue
        groups, count, left = _call(api, lane.name, "cuDevSmResourceSplitByCount", 1, left, 0, lane.sms)
        if count != 1:
            raise _spent(lane, f"{lane.sms} SMs", have, parts)
        parts[lane.name] = green(lane.name, groups[0])
        if parts[lane.name].sms == have:
            rest = left = None
            continue
        # The driver splits resources of a device or a context, not of a split: so the remainder gets a context.
        rest = green(lane.name, left)
        (left,) = _call(api, lane.name, "cuGreenCtxGetDevResource", rest.context, kind)
    found: list[Partition | None] = []
    for lane in lanes:
        part = parts.get(lane.name, rest)
        if lane not in divided:
            part = None
        elif part is None:
            raise _spent(lane, "what the others leave", 0, parts)
        found.append(part)
    return found


def _check_sum(lanes: tuple[Lane, ...], total: int) -> None:
    asked = sum(lane.sms or 0 for lane in lanes)
    if asked > total:
        raise PlanError(
            f"lanes {', '.join(map(str, lanes))} request {asked} SMs together, but the device has {total}",
            advice="request fewer; ctx.sms is the number of SMs",
        )


def _spent(lane: Lane, wanted: str, left: int, parts: dict[str, Partition]) -> PlanError:
    granted = ", ".join(f"{name} {part.sms}" for name, part in parts.items()) or "none"
    return PlanError(
        f"lane {lane.name!r} requests {wanted}, but {left} SMs are left (granted so far: {granted})",
        advice="request fewer; SMs are granted in whole groups, 8 on Hopper, so use multiples of that",
    )


def _call(api: Any, lane: str, function: str, *args: Any) -> list[Any]:
    try:
        error, *values = getattr(api, function)(*args)
    except (AttributeError, RuntimeError) as e:  # cuda.bindings raises RuntimeError if the driver lacks the function
        raise DynaFlowError(
            f"lane {lane!r} has no partition: the CUDA driver has no {function} ({e})",
            advice="update the driver (and cuda-bindings) to one newer than CUDA 12.4, or leave out sms=",
        ) from e
    if int(error):
        raise DynaFlowError(
            f"lane {lane!r} has no partition: {function} failed ({getattr(error, 'name', error)})",
            advice="request another number of SMs (multiples of 8 fit best), or leave out sms=",
        )
    return values


def _load() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return CtypesDriver()
    return driver


# The functions of cuda.bindings.driver that are used here, over ctypes, with the same arguments and results.


class _Sm(ctypes.Structure):
    _fields_ = [("smCount", ctypes.c_uint)]


class Resource(ctypes.Structure):
    """CUdevResource: 144 bytes in the headers of CUDA 12.4, 12.8, 13.0 and 13.4."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("_internal_padding", ctypes.c_ubyte * 92),
        ("sm", _Sm),
        ("_oversize", ctypes.c_ubyte * 44),
    ]


class CtypesDriver:
    """None of these functions is versioned in any header, so the unversioned symbols are correct."""

    class CUdevResourceType(IntEnum):
        CU_DEV_RESOURCE_TYPE_SM = 1

    def __init__(self, library: Any = None) -> None:
        self._cuda = library or ctypes.CDLL("libcuda.so.1")

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (self._cuda.cuInit(flags),)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        device = ctypes.c_int()
        return self._cuda.cuDeviceGet(ctypes.byref(device), ordinal), device

    def cuDeviceGetDevResource(self, device: Any, kind: int) -> tuple[Any, ...]:
        resource = Resource()
        return self._cuda.cuDeviceGetDevResource(device, ctypes.byref(resource), int(kind)), resource

    def cuGreenCtxGetDevResource(self, context: Any, kind: int) -> tuple[Any, ...]:
        resource = Resource()
        return self._cuda.cuGreenCtxGetDevResource(context, ctypes.byref(resource), int(kind)), resource

    def cuDevSmResourceSplitByCount(self, count: int, resource: Any, flags: int, sms: int) -> tuple[Any, ...]:
        groups, made, rest = (Resource * count)(), ctypes.c_uint(count), Resource()
        error = self._cuda.cuDevSmResourceSplitByCount(
            groups, ctypes.byref(made), ctypes.byref(resource), ctypes.byref(rest), flags, sms
        )
        return error, list(groups), made.value, rest

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[Any, ...]:
        desc = ctypes.c_void_p()
        array = (Resource * count)(*resources)
        return self._cuda.cuDevResourceGenerateDesc(ctypes.byref(desc), array, count), desc

    def cuGreenCtxCreate(self, desc: Any, device: Any, flags: int) -> tuple[Any, ...]:
        context = ctypes.c_void_p()
        return self._cuda.cuGreenCtxCreate(ctypes.byref(context), desc, device, flags), context

    def cuGreenCtxStreamCreate(self, context: Any, flags: int, priority: int) -> tuple[Any, ...]:
        stream = ctypes.c_void_p()
        return self._cuda.cuGreenCtxStreamCreate(ctypes.byref(stream), context, flags, priority), stream.value

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        stream = ctypes.c_void_p()
        return self._cuda.cuStreamCreateWithPriority(ctypes.byref(stream), flags, priority), stream.value
