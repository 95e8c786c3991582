"""CPU lanes: worker threads, one for each lane after the first, and the run of a plan's lanes on them.

A lane's share is a number of threads. Priorities have no effect.
"""

from __future__ import annotations

import os
import threading
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from dynaflow.core import forks

Lane = Callable[[], None]
Job = tuple["ThreadRun", Lane, LockType]
"""A lane of a run, and the lock that is released at its end."""


class LanePool:
    """The worker threads of one compiled model. They end with it; a forked process starts its own."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Job | None]] = []
        self._lock = forks.lock()
        self._finalizer = weakref.finalize(self, _stop, self._queues)
        forks.register(self)

    def give_out(self, call: ThreadRun, lanes: Sequence[Lane]) -> list[LockType]:
        """Lane i runs on worker i. Returns the locks that are released when the lanes end."""
        done = []
        with self._lock:  # all at once, so that every queue has the jobs of two callers in the same order
            if len(self._queues) < len(lanes):
                self._start(len(lanes))
            for queue, lane in zip(self._queues, lanes, strict=False):
                lock = allocate_lock()
                lock.acquire()
                done.append(lock)
                queue.put((call, lane, lock))
        return done

    def _start(self, count: int) -> None:
        _settle_libraries(os.getpid())
        while len(self._queues) < count:
            queue: SimpleQueue[Job | None] = SimpleQueue()
            self._queues.append(queue)
            name = f"dynaflow-lane-{len(self._queues)}"
            threading.Thread(target=_work, args=(queue,), name=name, daemon=True).start()

    def after_fork(self) -> None:
        self._queues.clear()  # their workers are threads of the parent

    def close(self) -> None:
        self._finalizer()


@cache
def _settle_libraries(process: int) -> None:
    """Initialises libraries that lanes would otherwise initialise concurrently, once in a process.

    When two lanes made the process's first calls of `sin` at once, one of them was now and then off by 1e-4 (torch
    2.13, MKL), and exact from then on, as if the library were still choosing its variant. After one call beforehand
    this was not seen again. In a forked child, torch makes a new thread pool on first use, and another thread that uses
    it at the same time fails ("Invalid thread pool", torch 2.13).
    """
    torch.set_num_threads(torch.get_num_threads())
    names = ("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10",
             "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh")  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        x = torch.full((64,), 0.5, dtype=dtype)
        for name in names:
            getattr(torch, name)(x)


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        _run(*job)
        del job  # or an idle worker would keep the last call's tensors alive


def _run(call: ThreadRun, lane: Lane, done: LockType) -> None:
    try:
        with call.state:
            lane()
    except BaseException as e:
        call.fail(e)
    finally:
        done.release()


def _stop(queues: list[SimpleQueue[Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


class ThreadRun:
    """One run of a plan over several lanes. A failure in one lane stops the others, and is raised at the end."""

    __slots__ = ("_pool", "_shares", "failed", "locks", "state")

    def __init__(self, pool: LanePool, shares: tuple[int | None, ...], locks: int) -> None:
        """`locks`: how many acquired locks to make. The waiting task acquires, the awaited one releases."""
        self._pool, self._shares = pool, shares
        self.failed: list[BaseException] = []
        self.locks: list[LockType] = []
        for _ in range(locks):
            lock = allocate_lock()
            lock.acquire()
            self.locks.append(lock)

    def run(self, *lanes: Lane) -> None:
        if self._shares:
            usual = torch.get_num_threads()
            lanes = tuple(_with_threads(lane, n or usual, usual) for lane, n in zip(lanes, self._shares, strict=True))
        self.state = ThreadState()
        done = self._pool.give_out(self, lanes[1:])
        try:
            lanes[0]()
        except BaseException as e:
            self.fail(e)
        for lock in done:
            lock.acquire()
        if self.failed:
            raise self.failed[0]

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        for lock in self.locks:  # tasks that wait, now or later, wake up, see the failure and stop
            if lock.locked():
                try:
                    lock.release()
                except RuntimeError:
                    pass  # its own task released it in the meantime


def _with_threads(lane: Lane, threads: int, usual: int) -> Lane:
    """The lane, with its number of threads for as long as it runs; `usual` is the caller's number.

    torch.set_num_threads sets two numbers: that of the calling thread (OpenMP and MKL keep one for each), and the
    process's, which a thread adopts at its first parallel region or query, whatever it was set to before. So a lane
    queries first, then sets. Lanes without a share do it too, or a new worker would start, and stay, with the number of
    another lane. Each lane ends with the caller's number, so the process has it again, whichever ends last.
    """

    def run() -> None:
        torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            lane()
        finally:
            torch.set_num_threads(usual)

    return run


class ThreadState:
    """State that torch has per thread and a lane must share with its caller: grad, inference and autocast modes."""

    __slots__ = ("autocast", "grad", "inference")

    def __init__(self) -> None:
        """Reads the modes of the calling thread."""
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast = {}
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self.autocast[device] = torch.get_autocast_dtype(device)

    def __enter__(self) -> None:
        # All lanes of a run share one ThreadState, so the contexts that a lane opens are stored per thread.
        contexts: list[Any] = [torch.inference_mode(self.inference)] if self.inference else []
        contexts.append(torch.set_grad_enabled(self.grad))
        contexts += [torch.autocast(device, dtype=dtype) for device, dtype in self.autocast.items()]
        for context in contexts:
            context.__enter__()
        _open.contexts = contexts

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(_open.contexts):
            context.__exit__(*exc)
        _open.contexts = []


class _Open(threading.local):
    contexts: list[Any] = []


_open = _Open()
