"""What a plan's code calls, recorded once, as a list that a plain loop can go through again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import WrongResult, agree, synchronize, tensors


@dataclass(slots=True, kw_only=True)
class Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    stream: Any
    """The current one, on CUDA."""
    thread: int
    results: tuple[Tensor, ...] = ()
    expected: tuple[Tensor, ...] = ()
    """Copies of the results: a later call may write over them."""

    @property
    def computes(self) -> bool:
        """A call without tensors makes an empty one: there is nothing to compare."""
        return bool(self.expected) and any(True for _ in tensors(self.args))


@dataclass(slots=True)
class Recording:
    calls: list[Call] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    """Of the plan."""

    def loop(self) -> Callable[[], None]:
        """The hand-written form: call after call, with the same tensors, on the same streams, the same waits.

        Calls of several threads, which must not depend on each other, are made by as many threads of a pool.
        """
        mine = threading.get_ident()
        here = _steps([c for c in self.calls if c.thread == mine])
        others = [_steps([c for c in self.calls if c.thread == t]) for t in {c.thread for c in self.calls} - {mine}]
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

        def go(steps: Steps) -> None:
            for function, args in steps:
                function(*args)

        def aside(steps: Steps) -> None:
            with mode():  # a thread has modes of its own
                go(steps)

        if not others:
            return lambda: go(here)
        pool = ThreadPoolExecutor(len(others))

        def run() -> None:
            waiting = [pool.submit(aside, steps) for steps in others]
            go(here)
            for other in waiting:
                other.result()

        return run

    def check(self, limit: float) -> None:
        """Goes through the calls once; raises unless they give again what they gave, and write what they wrote."""
        synchronize()
        returned = {t.untyped_storage().data_ptr() for call in self.calls if call.computes for t in call.results}
        written = [t for t in self.results if t.untyped_storage().data_ptr() not in returned]
        expected = [t.clone() for t in written]
        for t in written:
            t.zero_()
        for call in self.calls:
            with torch.cuda.stream(call.stream) if call.stream is not None else contextlib.nullcontext():
                found = list(tensors(call.function(*call.args)))
                synchronize()
                if call.computes:
                    agree(call.expected, found, limit)
        agree(expected, written, limit)


Steps = list[tuple[Callable[..., Any], tuple[Any, ...]]]


def _steps(calls: Sequence[Call]) -> Steps:
    """The calls, and the changes of stream between them."""
    steps: Steps = []
    first = current = calls[0].stream if calls else None
    for call in calls:
        if call.stream != current:
            current = call.stream
            steps.append((torch.cuda.set_stream, (current,)))
        steps.append((call.function, call.args))
    if current != first:
        steps.append((torch.cuda.set_stream, (first,)))
    return steps


def record(lowered: Any, args: tuple[Any, ...]) -> Recording:
    """Runs the lowered plan once and keeps every operator that it called, and every wait between streams."""
    recording = Recording()
    names = lowered.code.run.__globals__
    watched = {n: f for n, f in names.items() if n != "run" and not n.startswith("__") and callable(f)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(names, {n: _recorder(f, recording) for n, f in watched.items()}))
        for owner, method in _waits():
            function = getattr(owner, method)
            stack.enter_context(mock.patch.object(owner, method, _recorder(function, recording)))
        recording.results = list(tensors(lowered(list(args))))
    if not any(True for call in recording.calls for _ in tensors(call.args)):
        raise WrongResult("the plan called no operator that could be recorded")
    return recording


def _waits() -> Iterator[tuple[type, str]]:
    if torch.cuda.is_available():
        yield torch.cuda.Event, "record"
        yield torch.cuda.Stream, "wait_event"


def _recorder(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        if len(args) == 1 and isinstance(args[0], list):  # an operator, which empties it
            return _recorder(lambda *given: function(list(given)), recording)(*args[0])
        result = function(*args)
        results = tuple(tensors(result))
        expected = tuple(t.clone() for t in results)
        thread = threading.get_ident()
        made = Call(function=function, args=args, stream=stream, thread=thread, results=results, expected=expected)
        recording.calls.append(made)
        return result

    return call
