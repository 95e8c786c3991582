"""CUDA lanes: streams, one for each lane name, and the run that issues a plan's lanes on them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.core import forks
from dynaflow.core.plan import Lane
from dynaflow.runtime.sm_partitions import Partition, for_lanes, own_stream


class RunOrder:
    """Orders runs that share memory or streams on the GPU, also when callers use several streams."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Event, int]] = {}

    def enter(self, device: torch.device) -> None:
        """Makes the current stream wait for the last run."""
        last = self._last.get(device)
        if last is not None and last[1] != torch.cuda.current_stream(device).cuda_stream:
            last[0].wait(torch.cuda.current_stream(device))

    def leave(self, device: torch.device) -> None:
        last = self._last.get(device)
        event = last[0] if last is not None else torch.cuda.Event()
        stream = torch.cuda.current_stream(device)
        event.record(stream)
        self._last[device] = (event, stream.cuda_stream)


class StreamPool:
    """The streams of one compiled model, by device, lane and partition."""

    def __init__(self) -> None:
        self.order = RunOrder()
        self.issuing = forks.lock()
        """Runs are issued one after the other: plans share lanes, and each plan has one set of events."""
        self._streams: dict[tuple[int, Lane, Partition | None], torch.cuda.Stream] = {}
        self._lock = forks.lock()

    def get(self, device: torch.device, lanes: tuple[Lane, ...]) -> list[torch.cuda.Stream]:
        """The side streams of `lanes`. Without SM partitions, the first lane is the caller's stream and has none."""
        index = device_index(device)
        with self._lock:
            if all(lane.sms is None for lane in lanes):
                return [self._get(index, lane, None) for lane in lanes[1:]]
            return [self._get(index, lane, part) for lane, part in zip(lanes, for_lanes(index, lanes), strict=True)]

    def _get(self, index: int, lane: Lane, part: Partition | None) -> torch.cuda.Stream:
        key = (index, lane, part)
        if key not in self._streams:
            self._streams[key] = self._make(index, lane, part)
        return self._streams[key]

    def _make(self, index: int, lane: Lane, part: Partition | None) -> torch.cuda.Stream:
        return part.stream(lane) if part else torch.cuda.Stream(index, lane.priority)


class CaptureStreams(StreamPool):
    """The streams on which one model's graphs are captured. Nothing else uses them.

    A captured matmul uses the workspace of cuBLAS at each replay. torch has one workspace for each stream, allocated at
    the first matmul on it, and frees all of them on request, as torch.compile does for its own graphs. So the
    workspaces of these streams are allocated from a pool of ours. When a model is gone, its streams and their
    workspaces are reused by the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._beside: dict[tuple[int, Lane, Partition | None], torch.cuda.Stream] = {}
        for streams in (self._streams, self._beside):
            weakref.finalize(self, _take_back, streams)

    def main(self, device: torch.device) -> torch.cuda.Stream:
        """A stream for the caller's lane, since the default stream can't be captured."""
        with self._lock:
            return self._get(device_index(device), _CALLER, None)

    def beside(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """A side stream for captured work that computes nothing, such as events."""
        with self._lock:
            key = (stream.device.index, Lane(name=str(stream.cuda_stream)), None)
            if key not in self._beside:
                self._beside[key] = self._make(*key)
            return self._beside[key]

    def settle(self, device: torch.device) -> None:
        """Allocates the workspaces of the calling thread, before a capture."""
        index = device_index(device)
        with self._lock, torch.cuda.use_mem_pool(_workspaces(index), index):
            for stream in [s for (i, *_), s in self._streams.items() if i == index]:
                with torch.cuda.stream(stream):
                    one = torch.ones(16, 16, device=stream.device)
                    torch.addmm(one[0], one, one)  # with cuBLASLt, which may have one of its own
                    torch.mm(one, one)

    def renew(self) -> None:
        """After a failed capture: the next ones begin on another stream."""
        with self._lock:
            for key in [key for key in self._streams if key[1] is _CALLER]:
                del self._streams[key]

    def _make(self, index: int, lane: Lane, part: Partition | None) -> torch.cuda.Stream:
        spare = _spare.get((index, lane.priority, part))
        return spare.pop() if spare else part.stream(lane) if part else own_stream(index, lane)


_CALLER = Lane(name="")
_spare: dict[tuple[int, int, Partition | None], list[torch.cuda.Stream]] = {}
_pools: dict[int, torch.cuda.MemPool] = {}


def _workspaces(index: int) -> torch.cuda.MemPool:
    """The memory of workspaces. Never freed: a graph may still use one that torch has dropped."""
    return _pools.get(index) or _pools.setdefault(index, torch.cuda.MemPool())


def _take_back(streams: dict[tuple[int, Lane, Partition | None], torch.cuda.Stream]) -> None:
    for (index, lane, part), stream in streams.items():
        _spare.setdefault((index, lane.priority, part), []).append(stream)


class StreamRun:
    """Runs a lowered plan on the caller's stream and its side streams.

    Values that cross lanes live until their readers are known to have ended, and all lanes join the caller's stream
    before the call returns. So the allocator does not reuse memory that a lane may still access.
    """

    def __init__(
        self,
        run: Any,
        device: torch.device,
        lanes: tuple[Lane, ...],
        events: int,
        pool: StreamPool,
        captured: CaptureStreams,
    ) -> None:
        """`captured`: the streams to use during a capture, by us or by the caller."""
        self._run, self._device, self._order, self._issuing = run, device, pool.order, pool.issuing
        self._sides, self._captured = pool.get(device, lanes), captured.get(device, lanes)
        self._events = [torch.cuda.Event() for _ in range(events)]
        self._fork = torch.cuda.Event()

    def __call__(self, *args: Any) -> Any:
        with self._issuing:
            captured = capturing()
            if not captured:
                self._order.enter(self._device)
            main = torch.cuda.current_stream(self._device)
            sides = self._captured if captured else self._sides
            self._fork.record(main)
            for side in sides:
                side.wait_event(self._fork)
            try:
                return self._run(*args, (main, *sides), self._events, _torch.set_stream)
            except BaseException:
                if captured:  # nothing has run, and the capture is invalid
                    raise
                for side in sides:  # free nothing before the lanes that use it are done
                    main.wait_stream(side)
                raise
            finally:
                _torch.set_stream(main)
                if not captured:
                    self._order.leave(self._device)


def capturing() -> bool:
    """Whether the current stream is being captured: the work runs later, ordered by the graph's launch."""
    return torch.cuda.is_current_stream_capturing()


def device_index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
