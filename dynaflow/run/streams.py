"""CUDA lanes: streams, one for each lane name, and the call that issues a plan's lanes on them."""

from __future__ import annotations

import threading
from typing import Any

import torch

from dynaflow import _torch


class StreamPool:
    """The side streams of one compiled model, by device and lane."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def get(self, device: torch.device, lane: str) -> torch.cuda.Stream:
        index = device.index if device.index is not None else torch.cuda.current_device()
        with self._lock:
            if (index, lane) not in self._streams:
                self._streams[index, lane] = torch.cuda.Stream(device=index)
            return self._streams[index, lane]


class StreamRun:
    """Runs a lowered plan on the caller's stream and its side streams.

    Values that cross lanes live until their readers are known to have ended, and all lanes join the caller's
    stream before the call returns; so the allocator hands no memory out again that a lane may still use.
    """

    def __init__(self, run: Any, device: torch.device, lanes: list[str], events: int, pool: StreamPool) -> None:
        self._run, self._device = run, device
        self._sides = [pool.get(device, lane) for lane in lanes[1:]]
        self._events = [torch.cuda.Event() for _ in range(events)]
        self._fork = torch.cuda.Event()
        self._lock = threading.Lock()  # the events are one set: two threads issue one after the other

    def __call__(self, args: tuple[Any, ...], on_task: Any) -> Any:
        with self._lock:
            main = torch.cuda.current_stream(self._device)
            self._fork.record(main)
            for side in self._sides:
                side.wait_event(self._fork)
            try:
                return self._run(args, on_task, (main, *self._sides), self._events, _torch.set_stream)
            except BaseException:
                for side in self._sides:  # nothing is freed before the lanes that use it are done
                    main.wait_stream(side)
                raise
            finally:
                _torch.set_stream(main)
