"""CUDA lanes: streams, one for each lane name, and the call that issues a plan's lanes on them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.run.partitions import Partition, for_lanes
from dynaflow.schedule.plan import Lane


class Turns:
    """Runs that share memory or streams take turns on the GPU, also when callers use several streams."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Event, int]] = {}

    def enter(self, device: torch.device) -> None:
        """What the current stream does from here on comes after the last run."""
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
        self.turns = Turns()
        self.issuing = threading.Lock()
        """Plans share the lanes, and the events of one are one set: they are issued one after the other."""
        self._streams: dict[tuple[int, Lane, Partition | None], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def get(self, device: torch.device, lanes: tuple[Lane, ...]) -> list[torch.cuda.Stream]:
        """The streams of `lanes` beside the caller's, which is the first lane's own if no lane has a share."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        with self._lock:
            if all(lane.sms is None for lane in lanes):
                return [self._get(index, lane, None) for lane in lanes[1:]]
            return [self._get(index, lane, part) for lane, part in zip(lanes, for_lanes(index, lanes), strict=True)]

    def _get(self, index: int, lane: Lane, part: Partition | None) -> torch.cuda.Stream:
        key = (index, lane, part)
        if key not in self._streams:
            self._streams[key] = part.stream(lane) if part else torch.cuda.Stream(index, lane.priority)
        return self._streams[key]


class StreamRun:
    """Runs a lowered plan on the caller's stream and its side streams.

    Values that cross lanes live until their readers are known to have ended, and all lanes join the caller's
    stream before the call returns; so the allocator hands no memory out again that a lane may still use.
    """

    def __init__(self, run: Any, device: torch.device, lanes: tuple[Lane, ...], events: int, pool: StreamPool) -> None:
        self._run, self._device, self._turns, self._issuing = run, device, pool.turns, pool.issuing
        self._sides = pool.get(device, lanes)
        self._events = [torch.cuda.Event() for _ in range(events)]
        self._fork = torch.cuda.Event()

    def __call__(self, args: Sequence[Any], on_task: Any, memory: tuple[torch.Tensor, ...]) -> Any:
        with self._issuing:
            captured = capturing()
            if not captured:
                self._turns.enter(self._device)
            main = torch.cuda.current_stream(self._device)
            self._fork.record(main)
            for side in self._sides:
                side.wait_event(self._fork)
            try:
                return self._run(args, on_task, memory, (main, *self._sides), self._events, _torch.set_stream)
            except BaseException:
                if captured:  # nothing has run, and the capture is spoilt
                    raise
                for side in self._sides:  # nothing is freed before the lanes that use it are done
                    main.wait_stream(side)
                raise
            finally:
                _torch.set_stream(main)
                if not captured:
                    self._turns.leave(self._device)


def capturing() -> bool:
    """What is captured runs later: its turn is the graph's."""
    return torch.cuda.is_current_stream_capturing()
