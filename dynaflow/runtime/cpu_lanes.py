"""CPU lanes: worker threads, one for each lane name, and the call that runs a plan's lanes on them.

A lane's share is a number of threads; priorities have no effect here.
"""

from __future__ import annotations

import threading
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from dynaflow.core import forks

Job = Callable[[], None]


class LanePool:
    """The worker threads of one compiled model. They end when it is gone; a child process gets its own."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Job | None]] = []
        self._lock = forks.lock()
        self._finalizer = weakref.finalize(self, _stop, self._queues)
        forks.tell(self)

    def submit(self, jobs: list[Job]) -> None:
        """Job i goes to worker i. All at once, so that two callers' jobs stand in one order in every queue."""
        with self._lock:
            if len(self._queues) < len(jobs):
                _settle_math_library()
            while len(self._queues) < len(jobs):
                queue: SimpleQueue[Job | None] = SimpleQueue()
                self._queues.append(queue)
                name = f"dynaflow-lane-{len(self._queues)}"
                threading.Thread(target=_work, args=(queue,), name=name, daemon=True).start()
            for queue, job in zip(self._queues, jobs, strict=False):
                queue.put(job)

    def after_fork(self) -> None:
        self._queues.clear()  # of workers that are the parent's

    def close(self) -> None:
        self._finalizer()


@cache
def _settle_math_library() -> None:
    """Calls each vector function once, on one thread.

    When two lanes made the process's first calls of `sin` at once, one of them was now and then off by 1e-4 (torch
    2.13, MKL), and exact from then on: as if the library were still choosing its variant. After a call beforehand this
    was not seen again.
    """
    names = ("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log", "log10",
             "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh")  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        x = torch.full((64,), 0.5, dtype=dtype)
        for name in names:
            getattr(torch, name)(x)


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # or an idle worker would keep the last call's tensors alive


def _stop(queues: list[SimpleQueue[Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


class Call:
    """One run of a plan over several lanes. A failure in one lane lets the others go, and is raised at the end."""

    __slots__ = ("_locks", "_pool", "_shares", "failed")

    def __init__(self, pool: LanePool, shares: tuple[int | None, ...] = ()) -> None:
        self._pool, self._shares = pool, shares
        self._locks: list[LockType] = []
        self.failed: list[BaseException] = []

    def locks(self, count: int) -> list[LockType]:
        """Closed gates: the waiting task acquires, the awaited one releases."""
        self._locks = [allocate_lock() for _ in range(count)]
        for lock in self._locks:
            lock.acquire()
        return self._locks

    def run(self, lanes: tuple[Callable[[], None], ...]) -> None:
        if self._shares:
            usual = torch.get_num_threads()
            lanes = tuple(_with_threads(lane, n or usual, usual) for lane, n in zip(lanes, self._shares, strict=True))
        first, *others = lanes
        state = ThreadState.now()
        done = [allocate_lock() for _ in others]
        for lock in done:
            lock.acquire()
        self._pool.submit([self._job(lane, lock, state) for lane, lock in zip(others, done, strict=True)])
        try:
            first()
        except BaseException as e:
            self._fail(e)
        for lock in done:
            lock.acquire()
        if self.failed:
            raise self.failed[0]

    def _job(self, lane: Callable[[], None], done: LockType, state: ThreadState) -> Job:
        def job() -> None:
            try:
                with state:
                    lane()
            except BaseException as e:
                self._fail(e)
            finally:
                done.release()

        return job

    def _fail(self, error: BaseException) -> None:
        self.failed.append(error)
        for lock in self._locks:  # whoever waits, now or later, goes on, sees the failure and stops
            if lock.locked():
                try:
                    lock.release()
                except RuntimeError:
                    pass  # its own task released it in between


def _with_threads(lane: Callable[[], None], threads: int, usual: int) -> Callable[[], None]:
    """The lane, with its number of threads for as long as it runs; `usual` is the caller's number.

    torch.set_num_threads sets two numbers: that of the calling thread (OpenMP and MKL keep one for each), and the
    process's, which a thread takes over at its first parallel region or question, whatever it was set to before. So
    a lane asks first, then sets. Lanes without a share do it too, or a new worker would start, and stay, with its
    neighbour's number. Each ends with the caller's: whichever ends last, the process has its own number again.
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
    """What torch keeps per thread and a lane must share with its caller: grad, inference and autocast modes."""

    __slots__ = ("_contexts", "autocast", "grad", "inference")

    def __init__(self, grad: bool, inference: bool, autocast: list[tuple[str, torch.dtype]]) -> None:
        self.grad, self.inference, self.autocast = grad, inference, autocast

    @staticmethod
    def now() -> ThreadState:
        on = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        return ThreadState(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), [(d, torch.get_autocast_dtype(d)) for d in on]
        )

    def __enter__(self) -> None:
        # One state serves all lanes of a call, so what a lane opens is kept by its own thread.
        contexts: list[Any] = [torch.inference_mode(self.inference)] if self.inference else []
        contexts.append(torch.set_grad_enabled(self.grad))
        contexts += [torch.autocast(device, dtype=dtype) for device, dtype in self.autocast]
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
