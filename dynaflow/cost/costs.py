"""How long an operator takes, and which resources it uses: measured if possible, else by a roofline model.

An operator is a list of phases, in each of which its use of resources is constant: attention is a matmul, a
memory-bound kernel, and a matmul. A kernel takes as long as its scarcest resource, and at least the minimum time of a
kernel. A measured time stretches the phases: the same bytes and FLOPs over a longer time use less bandwidth and
compute, but SMs, links and copy engines are occupied throughout.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from dynaflow.core.device import Device
from dynaflow.cost.kernels import Kernel
from dynaflow.cost.work import Work, operator_key, work_of
from dynaflow.partition.op_graph import Op, OpGraph

__all__ = ["RESOURCES", "Costs", "Phase", "Profile", "operator_key"]

RESOURCES = ("compute", "memory", "to_host", "from_host", "link", "power", "sms")
"""Resources that tasks share: power over a whole run, the others at each moment. SMs may be divided among lanes."""

POWER, SMS = RESOURCES.index("power"), RESOURCES.index("sms")
_BY_WORK = frozenset({"compute", "memory", "power", "sms"})
"""Resources whose total use does not depend on the time taken; the SMs unless `Phase.filled` is known."""

Uses = tuple[float, ...]
"""Utilization of each resource, in the order of RESOURCES."""

Profile = Mapping[tuple[str, int, int | None], float]
"""(operator_key or name of a function, rows, SMs or None for all) -> seconds."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 256, 0.85), (64, 128, 0.72), (64, 64, 0.5))
"""Matmul tiles of libraries: rows, columns, speed relative to the best tile."""
SPLITS = (1, 2, 4, 8)
"""Split-K factors, where that fills the device."""

SHORT = 0.1
"""A phase shorter than this fraction of an operator's time is merged into the previous one."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A span in which an operator, alone on the device, uses each resource at a constant rate."""

    seconds: float
    uses: Uses
    filled: float = 0.0
    """The fraction of the SMs that its kernels occupy; 0 if unknown."""
    idle: float = 0.0
    """Seconds between kernels, in which nothing is used."""

    def stretched(self, scale: float) -> Phase:
        """The same work in `scale` times the time. A scale of 0 means that it was too short to be measured."""
        if not scale:
            return Phase(0.0, (0.0,) * len(self.uses))
        seconds, idle = self.seconds * scale, self.idle * min(1.0, scale)
        uses = [min(1.0, u / scale) if RESOURCES[r] in _BY_WORK else u for r, u in enumerate(self.uses)]
        if self.filled:
            uses[SMS] = self.filled * (seconds - idle) / max(seconds, 1e-12)
        return Phase(seconds, tuple(uses), self.filled, idle)


class Costs:
    """Costs of one graph's operators on one device. `profile` holds measurements."""

    def __init__(
        self,
        graph: OpGraph,
        device: Device,
        profile: Profile | None = None,
        *,
        sizes: Mapping[sympy.Symbol, int] | None = None,
    ) -> None:
        """`sizes`: values of symbols other than the batch, where they differ from the capture."""
        self.graph, self.device, self.sizes = graph, device, sizes
        self._measured: dict[tuple[str, int | None], list[tuple[int, float]]] = {}
        for (key, rows, sms), seconds in sorted((profile or {}).items(), key=lambda item: item[0][:2]):
            self._measured.setdefault((key, sms), []).append((rows, seconds))
        self._phases: dict[tuple[str, int, int | None], tuple[Phase, ...]] = {}
        self._works: dict[tuple[str, int], Work] = {}

    def work(self, op: Op, rows: int) -> Work:
        key = (operator_key(self.graph, op), rows)
        if key not in self._works:
            self._works[key] = work_of(self.graph, op, rows, self.sizes)
        return self._works[key]

    def kernels(self, op: Op, rows: int) -> int:
        """Number of kernels that the host launches."""
        return self.work(op, rows).kernels

    def seconds(self, op: Op, rows: int, sms: int | None = None) -> float:
        """Time of the operator alone, for `rows` rows of the batch, on `sms` SMs (None: all)."""
        return math.fsum(p.seconds for p in self.phases(op, rows, sms))

    def uses(self, op: Op, rows: int, sms: int | None = None) -> dict[str, float]:
        """Utilization of each resource while the operator runs alone."""
        phases = self.phases(op, rows, sms)
        total = math.fsum(p.seconds for p in phases)
        parts = (math.fsum(p.seconds * p.uses[r] for p in phases) for r in range(len(RESOURCES)))
        return {name: part / total if total else 0.0 for name, part in zip(RESOURCES, parts, strict=True)}

    def phases(self, op: Op, rows: int, sms: int | None = None) -> tuple[Phase, ...]:
        """The operator's time, divided where its main resource changes."""
        sms = None if sms is None or sms >= self.device.sms else sms
        key = (operator_key(self.graph, op), rows, sms)
        if key not in self._phases:
            found = _merged([_phase(k, self.device, sms) for k in self.work(op, rows).parts])
            scale = self._correction(op, rows, sms)
            if scale is not None:
                found = [p.stretched(scale) for p in found or [self._nothing]]
            self._phases[key] = tuple(found)
        return self._phases[key]

    @property
    def _nothing(self) -> Phase:
        """A phase for an operator without kernels that was measured nevertheless."""
        return Phase(self.device.kernel, (0.0,) * len(RESOURCES))

    def function(self, name: str, rows: int, sms: int | None = None) -> float | None:
        """The measured time of a replacement function, interpolated between measured numbers of rows."""
        points = self._measured.get((name, sms)) or self._measured.get((name, None))
        return _between(points, rows) if points else None

    def _correction(self, op: Op, rows: int, sms: int | None) -> float | None:
        """Measured over estimated time, interpolated between measured numbers of rows; outside of them, the nearest."""
        key = operator_key(self.graph, op)
        own = sms if (key, sms) in self._measured else None
        points = self._measured.get((key, own))
        return _between([(n, s / self._estimate(op, n, own)) for n, s in points], rows) if points else None

    def _estimate(self, op: Op, rows: int, sms: int | None) -> float:
        phases = [_phase(k, self.device, sms) for k in self.work(op, rows).parts] or [self._nothing]
        return math.fsum(p.seconds for p in phases)


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    at = bisect_left(points, (rows, -math.inf))
    if at == len(points) or at == 0:
        return points[min(at, len(points) - 1)][1]
    (a, low), (b, high) = points[at - 1], points[at]
    return low + (high - low) * (rows - a) / (b - a)


def _phase(kernel: Kernel, device: Device, sms: int | None) -> Phase:
    """One kernel, alone."""
    if kernel.kind in ("copy_in", "copy_out"):
        return _copy(kernel, device)
    if kernel.kind == "collective":
        return _collective(kernel, device, sms)
    there = sms or device.sms
    filled = min(1.0, kernel.blocks / there)
    compute = 0.0
    if kernel.flops:
        compute, filled = _compute(kernel, device, sms)
    wide = kernel.kind == "matmul" or kernel.blocks >= there  # matmuls split K to fill the device
    reach = device.memory_speed((there if wide else kernel.blocks) / device.sms)
    memory = kernel.bytes / (device.bytes_per_second * reach)
    busy = max(compute, memory)
    if memory >= compute:
        filled = 1.0 if wide else min(1.0, kernel.blocks / there)
    seconds = busy + device.kernel
    flops = device.flops(kernel.dtype) if kernel.flops else 1.0
    by_compute, by_memory = kernel.flops / flops / seconds, kernel.bytes / device.bytes_per_second / seconds
    saved = device.idle_power * (1.0 - there / device.sms)
    power = max(filled * compute / seconds * there / device.sms, by_memory * device.memory_power * (1.0 - saved))
    held = filled * (seconds - device.launch) / seconds
    return Phase(seconds, (by_compute, by_memory, 0.0, 0.0, 0.0, power, held),
                 0.0 if kernel.kind == "other" else filled, device.launch)  # fmt: skip


def _compute(kernel: Kernel, device: Device, sms: int | None) -> tuple[float, float]:
    """Seconds of arithmetic, and the fraction of the SMs that it occupies."""
    flops = device.flops(kernel.dtype)
    there = sms or device.sms
    share = there / device.sms * (device.matmul_share if sms else 1.0)
    if kernel.kind != "matmul" or kernel.shape is None:
        rate = getattr(device, kernel.kind, 1.0)
        filled = min(1.0, kernel.blocks / there)
        return kernel.flops / (flops * rate * share * filled), filled
    many, m, n, k = kernel.shape
    best = (math.inf, 1.0)
    for rows, columns, rate in TILES:
        tiles = many * -(-m // rows) * -(-n // columns)
        for split in SPLITS if k >= 1024 else (1,):
            waves = -(-tiles * split // device.sms)
            work = waves * device.sms * 2 * rows * columns * k / split
            speed = rate * (1.0 if split == 1 else 0.95)
            best = min(best, (work / (flops * share * speed), tiles * split / (waves * device.sms)))
    return best


def _copy(kernel: Kernel, device: Device) -> Phase:
    speed = device.from_host if kernel.kind == "copy_in" else device.to_host
    busy = kernel.bytes / speed
    seconds = busy + device.copy_latency
    part, memory = busy / seconds, kernel.bytes / device.bytes_per_second / seconds
    out, back = (0.0, part) if kernel.kind == "copy_in" else (part, 0.0)
    return Phase(seconds, (0.0, memory, out, back, 0.0, device.copy_drag * part, 0.0))


SENT = {"all_reduce": 2.0, "all_gather_into_tensor": None, "all_gather": None}
"""How often a rank sends its input, by default once; None for all-gather, which sends it to every other rank."""


def _collective(kernel: Kernel, device: Device, sms: int | None) -> Phase:
    ranks, link = device.ranks, device.link
    if ranks < 2 or link is None:
        return Phase(device.kernel, (0.0,) * len(RESOURCES))
    times = SENT.get(kernel.name, 1.0)
    sent = kernel.bytes * (ranks - 1 if times is None else times * (ranks - 1) / ranks)
    busy = sent / link.bandwidth
    seconds = busy + link.latency
    memory = 2 * sent / device.bytes_per_second / seconds  # each byte sent is read once and written once
    part = busy / seconds
    # On an SM partition of its own it does not disturb other kernels.
    held = min(1.0, link.sms * (1.0 if sms else device.crowding) / (sms or device.sms))
    return Phase(seconds, (0.0, min(memory, 1.0), 0.0, 0.0, part, device.copy_drag * part, held), held)


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    """Merges neighbours with the same main resource, and short phases into the previous one."""
    total = math.fsum(p.seconds for p in phases)
    groups: list[list[Phase]] = []
    before = -1
    for phase in phases:
        most = max(range(len(RESOURCES) - 2), key=phase.uses.__getitem__)
        if groups and (most == before or phase.seconds < SHORT * total):
            groups[-1].append(phase)
        else:
            groups.append([phase])
            before = most
    return [_sum(group) for group in groups]


def _sum(phases: Sequence[Phase]) -> Phase:
    if len(phases) == 1:
        return phases[0]
    seconds = math.fsum(p.seconds for p in phases)
    uses = tuple(math.fsum(p.uses[r] * p.seconds for p in phases) / seconds for r in range(len(RESOURCES)))
    idle = math.fsum(p.idle for p in phases)
    held = math.fsum(p.filled * (p.seconds - p.idle) for p in phases)
    return Phase(seconds, uses, held / max(seconds - idle, 1e-12), idle)
