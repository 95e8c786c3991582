"""How long an operator takes, and what it uses meanwhile: as measured where it was measured, else by roofline.

An operator is a list of phases, in each of which it uses the same resources: an attention block is a product, then
a sweep over memory, then a product. Each kernel takes as long as the resource it needs most, and never less than a
kernel takes at all. A measured time stretches the phases: the same bytes and products over a longer time are less of
the memory's and the arithmetic's; but the SMs, a link or a copy engine are held for all of it.
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
"""What tasks share: power over a whole run, the others at each moment. The SMs may be divided among lanes."""

POWER, SMS = RESOURCES.index("power"), RESOURCES.index("sms")
_BY_WORK = frozenset({"compute", "memory", "power", "sms"})
"""What is used by the amount of work, however long that takes; the SMs if nothing better is known."""

Uses = tuple[float, ...]
"""Of each resource: the fraction that is in use, in the order of RESOURCES."""

Profile = Mapping[tuple[str, int, int | None], float]
"""(operator_key or name of a function, rows, SMs or None for all) -> seconds."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 256, 0.85), (64, 128, 0.72), (64, 64, 0.5))
"""What libraries cut a product into: rows, columns, speed of such a tile against the best."""
SPLITS = (1, 2, 4, 8)
"""And in how many pieces they do the sums, where that fills the device."""

SHORT = 0.1
"""Of an operator's time: a phase shorter than this is counted to the one before."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Some time in which an operator, alone on the device, uses the same of everything."""

    seconds: float
    uses: Uses
    filled: float = 0.0
    """The share of the SMs that its kernels hold while they run; 0 if nothing is known of them."""
    idle: float = 0.0
    """Of the seconds, those between kernels, in which nothing is used."""

    def stretched(self, scale: float) -> Phase:
        """The same work in another time; in none, what was too short to be measured."""
        if not scale:
            return Phase(0.0, (0.0,) * len(self.uses))
        seconds, idle = self.seconds * scale, self.idle * min(1.0, scale)
        uses = [min(1.0, u / scale) if RESOURCES[r] in _BY_WORK else u for r, u in enumerate(self.uses)]
        if self.filled:
            uses[SMS] = self.filled * (seconds - idle) / max(seconds, 1e-12)
        return Phase(seconds, tuple(uses), self.filled, idle)


class Costs:
    """The operators of one graph on one device. `profile` holds what was measured."""

    def __init__(
        self,
        graph: OpGraph,
        device: Device,
        profile: Profile | None = None,
        *,
        sizes: Mapping[sympy.Symbol, int] | None = None,
    ) -> None:
        """`sizes`: values of symbols other than the batch, where they are not those of the capture."""
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
        """How many the host has to launch."""
        return self.work(op, rows).kernels

    def seconds(self, op: Op, rows: int, sms: int | None = None) -> float:
        """How long the operator takes alone, for `rows` rows of the batch, on `sms` SMs (all, if None)."""
        return math.fsum(p.seconds for p in self.phases(op, rows, sms))

    def uses(self, op: Op, rows: int, sms: int | None = None) -> dict[str, float]:
        """Of each resource, the fraction that the operator uses while it runs alone."""
        phases = self.phases(op, rows, sms)
        total = math.fsum(p.seconds for p in phases)
        parts = (math.fsum(p.seconds * p.uses[r] for p in phases) for r in range(len(RESOURCES)))
        return {name: part / total if total else 0.0 for name, part in zip(RESOURCES, parts, strict=True)}

    def phases(self, op: Op, rows: int, sms: int | None = None) -> tuple[Phase, ...]:
        """The operator's time, cut where it changes over to another resource."""
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
        """What stands for an operator without kernels, where it was measured all the same."""
        return Phase(self.device.kernel, (0.0,) * len(RESOURCES))

    def function(self, name: str, rows: int, sms: int | None = None) -> float | None:
        """Of a function that stands for operators: what was measured, between measured rows a straight line."""
        points = self._measured.get((name, sms)) or self._measured.get((name, None))
        return _between(points, rows) if points else None

    def _correction(self, op: Op, rows: int, sms: int | None) -> float | None:
        """Measured over estimated time; between measured numbers of rows a straight line, outside the nearest."""
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
    wide = kernel.kind == "matmul" or kernel.blocks >= there  # products split their sums to fill the device
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
    """Seconds of arithmetic, and how much of the SMs' time that is."""
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
"""How often a rank sends what it was given, if not once; an all-gather sends it to every other rank."""


def _collective(kernel: Kernel, device: Device, sms: int | None) -> Phase:
    ranks, link = device.ranks, device.link
    if ranks < 2 or link is None:
        return Phase(device.kernel, (0.0,) * len(RESOURCES))
    times = SENT.get(kernel.name, 1.0)
    sent = kernel.bytes * (ranks - 1 if times is None else times * (ranks - 1) / ranks)
    busy = sent / link.bandwidth
    seconds = busy + link.latency
    memory = 2 * sent / device.bytes_per_second / seconds  # each byte that is sent is read, and written by its receiver
    part = busy / seconds
    # On SMs of its own it is in nobody's way.
    held = min(1.0, link.sms * (1.0 if sms else device.crowding) / (sms or device.sms))
    return Phase(seconds, (0.0, min(memory, 1.0), 0.0, 0.0, part, device.copy_drag * part, held), held)


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    """Neighbours that use the same resource most become one; short ones go with what came before."""
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
