"""CUDA graphs: a function of tensors is run once, then captured, then replayed with one launch.

A graph reads and writes fixed addresses. Inputs with static addresses (parameters, caches, `static_inputs`, and all
that is written) are used in place. Their addresses are compared at every replay; if one has moved, the function is
captured again, and the graphs for a few sets of addresses are cached. Other inputs are copied into the graph's buffers.
Results lie in the graph's memory and are returned without a copy, unless another graph may write there. A caller often
still references the last results when it calls again, so a second graph alternates with the first. If the results of
both are referenced, these graphs are dropped, and from then on results are copied.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dynaflow import _torch
from dynaflow.core import forks
from dynaflow.core.memory_layout import span
from dynaflow.core.stats import Stats
from dynaflow.runtime.cuda_lanes import CaptureStreams, RunOrder, device_index

MAX_GRAPHS = 256
"""Of each compiled model. Beyond that, the least recently used one is dropped."""

MAX_CAPTURES = 12
"""Captures in a row with few replays after which a function is no longer captured: its inputs keep moving."""

MIN_REPLAYS = 16
"""Replays after which a capture pays off: it takes about as long as this number of runs without a graph."""

MAX_PLACES = 4
"""Graphs of one function, for different addresses of its inputs, such as the caches of several threads."""


ALIGNED = 16
"""Bytes of the largest element."""


class CaptureError(Exception):
    """The function can't be captured; nothing of it has run."""


class GraphPool:
    """The captured graphs of one compiled model, in one pool of memory. They run one after the other."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.streams = CaptureStreams()
        self.lock = forks.rlock()
        self.order = RunOrder()
        self._recent: WeakKeyDictionary[GraphedFunction, None] = WeakKeyDictionary()
        self._handles: dict[int, tuple[Any, torch.cuda.CUDAGraph]] = {}

    def handle(self, device: torch.device) -> Any:
        """The handle of the memory pool. It lives as long as a graph is in it, so an empty graph always is."""
        index = device_index(device)
        if index not in self._handles:
            handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            record_graph(anchor, lambda args: (), [], self.streams.main(device), handle)
            self._handles[index] = (handle, anchor)
        return self._handles[index][0]

    def segments(self, device: torch.device) -> list[range]:
        """The addresses of the pool's memory."""
        found = torch.cuda.memory_snapshot(self.handle(device), include_traces=False)
        return [range(s["address"], s["address"] + s["total_size"]) for s in found]

    def failed(self, where: str, error: CaptureError) -> None:
        """Warns that a capture failed."""
        # The frames of the traceback reference tensors of the capture: free them now, and not during the next one.
        traceback.clear_frames(error.__cause__.__traceback__ if error.__cause__ else None)
        error.__cause__ = error.__traceback__ = None
        gc.collect()
        self._handles.clear()  # the next graphs use a new pool, without the failed capture
        self.streams.renew()
        self.stats.capture_failures.append(f"{where}: {error}")
        warnings.warn(
            f"dynaflow: {where} can't be captured in a CUDA graph ({error}); it stays outside. To avoid this "
            f"warning, tag the operator 'no_capture'.",
            stacklevel=2,
        )

    @property
    def graphs(self) -> int:
        """How many functions have a graph now."""
        return len(self._recent)

    def used(self, graphed: GraphedFunction) -> None:
        """Marks it as the most recently used, and drops the least recently used one if there are too many."""
        self._recent.pop(graphed, None)
        self._recent[graphed] = None
        while len(self._recent) > MAX_GRAPHS:
            first = next(iter(self._recent.keys()))
            del self._recent[first]
            first.forget()


class GraphedFunction:
    """A function of a list of arguments, as a CUDA graph."""

    def __init__(
        self,
        function: _torch.Boxed,
        device: torch.device,
        pool: GraphPool,
        *,
        copied: Sequence[int],
        static: Sequence[int],
        inner: bool = False,
        stream: torch.cuda.Stream | None = None,
        where: Callable[[BaseException], str | None] = lambda error: None,
        warm: bool = False,
    ) -> None:
        """`copied`, `static`: positions of the tensors to be copied in, and of those to be used in place.

        `inner`: a piece of a plan, whose results go only to other pieces. If it can't be captured, it runs without a
        graph, since pieces before it have run already. `where` names the operator that raised an error. `warm`: the
        kernels have run before, so the first call may be captured.
        """
        self._function, self._device, self._pool, self._stream = function, device, pool, stream
        self._copied, self._static, self._inner, self._where = list(copied), list(static), inner, where
        self._graphs: list[GraphCapture] = []
        self.warm, self._off, self._copy_results = warm, False, False
        self._captures = self._replays = 0
        """Captures in a row with fewer than MIN_REPLAYS replays, and replays since the last capture."""

    def __call__(self, args: list[Any]) -> Any:
        with self._pool.lock:
            graph = self._find(args)
            if graph is None:
                if not self.warm or self._off:
                    self.warm = True  # libraries are initialised and kernels are tuned now
                    return self._function(args)
                try:
                    graph = self._capture(args)
                except CaptureError as e:
                    self._off = True
                    if not self._inner:
                        raise
                    self._pool.failed(self._where(e.__cause__ or e) or "a piece", e)
                    return self._function(args)
            self._pool.used(self)
            self._pool.stats.graph_replays += 1
            self._replays += 1
            graph.used = self._pool.stats.graph_replays
            if self._inner:
                graph.replay(args)
                return graph.results(args, copy=False)
            self._pool.order.enter(self._device)
            graph.replay(args)
            results = graph.results(args, copy=self._copy_results)
            self._pool.order.leave(self._device)
            return results

    def call(self, *args: Any) -> Any:
        return self(list(args))

    @property
    def last(self) -> Any:
        """The graph that was launched last."""
        return max(self._graphs, key=lambda graph: graph.used)

    def forget(self) -> None:
        self._graphs.clear()
        self._captures = 0

    def _find(self, args: Sequence[Any]) -> GraphCapture | None:
        for graph in self._graphs:
            if graph.fits(args) and (self._inner or not graph.results_are_held()):
                return graph
        return None

    def _capture(self, args: Sequence[Any]) -> GraphCapture:
        fitting = [graph for graph in self._graphs if graph.fits(args)]
        if len(fitting) > 1:  # the results of both are still referenced
            self._copy_results = True
            self._graphs = [graph for graph in self._graphs if graph not in fitting]
            fitting = []
        # Pieces have graphs for one set of addresses only: their memory is ordered by the order of capture.
        others = fitting if self._inner else self._graphs
        self._graphs = sorted(others, key=lambda graph: graph.used)[1 - MAX_PLACES :]
        self._captures = 1 if self._replays >= MIN_REPLAYS else self._captures + 1
        self._replays = 0
        if self._captures > MAX_CAPTURES:
            raise CaptureError("inputs that are used in place were elsewhere in memory too often")
        stream = self._stream or self._pool.streams.main(self._device)
        # Other graphs may use memory that is in the pool already as scratch. Pieces run in one order, in which memory
        # that is still needed is not scratch.
        scratch = [] if self._inner else self._pool.segments(self._device)
        self._pool.streams.settle(self._device)
        handle = self._pool.handle(self._device)
        graph = GraphCapture(self._function, args, self._copied, self._static, stream, handle, scratch)
        self._pool.stats.captures += 1
        self._graphs.append(graph)
        return graph


class GraphCapture:
    """One CUDA graph, for arguments at these addresses."""

    def __init__(
        self,
        function: _torch.Boxed,
        args: Sequence[Any],
        copied: list[int],
        static: list[int],
        stream: torch.cuda.Stream,
        pool: Any,
        scratch: list[range],
    ) -> None:
        self.used = 0
        """The model's count of replays at its last replay."""
        fixed = list(args)
        with torch.inference_mode(False), torch.no_grad():
            for i in copied:
                buffer = torch.empty_strided(
                    args[i].size(), args[i].stride(), dtype=args[i].dtype, device=args[i].device
                )
                fixed[i] = _torch.view_at(args[i], buffer.untyped_storage(), 0)
        self._copied, self._static = copied, static
        self._buffers = {i: fixed[i] for i in copied}
        self._copies = [without_repeats(fixed[i]) for i in copied]
        self._addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args]
        self._graph = torch.cuda.CUDAGraph()
        outputs = record_graph(self._graph, function, list(fixed), stream, pool)
        self._kind, leaves = type(outputs), list(outputs)
        inputs = {_torch.storage_id(fixed[i]): i for i in (*copied, *static)}
        self._outputs: list[tuple[Any, int | None]] = [
            (leaf, inputs.get(_torch.storage_id(leaf)) if isinstance(leaf, torch.Tensor) else None) for leaf in leaves
        ]
        # One object for each storage, so that counting references adds none.
        own = {_torch.storage_id(t): t.untyped_storage() for t, i in self._outputs if _is_own(t, i)}
        self._storages = list(own.values())
        self._users = [_torch.storage_use_count(s) for s in self._storages]
        self._unsafe = {key for key, storage in own.items() if any(storage.data_ptr() in s for s in scratch)}
        self._spans = {
            key: _span([t for t, i in self._outputs if _is_own(t, i) and _torch.storage_id(t) == key]) for key in own
        }

    def fits(self, args: Sequence[Any]) -> bool:
        return _torch.same_addresses(list(args), self._addresses, self._static)

    def results_are_held(self) -> bool:
        return any(_torch.storage_use_count(s) > n for s, n in zip(self._storages, self._users, strict=True))

    def replay(self, args: Sequence[Any]) -> None:
        if self._copied:
            _torch.foreach_copy(self._copies, [without_repeats(args[i]) for i in self._copied])
        self._graph.replay()

    def results(self, args: Sequence[Any], copy: bool) -> Any:
        found: dict[int, Any] = {}  # by the output's id: a tensor that is returned twice stays one tensor
        copies: dict[int, torch.UntypedStorage] = {}
        for out, given in self._outputs:
            if id(out) in found:
                continue
            if not isinstance(out, torch.Tensor):
                found[id(out)] = out
            elif given is not None:
                found[id(out)] = _same_view(out, self._buffers.get(given, args[given]), args[given])
            elif copy or _torch.storage_id(out) in self._unsafe:
                key = _torch.storage_id(out)
                first, last = self._spans[key]
                if key not in copies:  # outputs that share memory still do
                    copies[key] = _bytes(out)[first:last].clone().untyped_storage()
                found[id(out)] = _torch.view_at(out, copies[key], int(out.storage_offset()) - first // out.itemsize)
            else:
                found[id(out)] = out.detach()
        return self._kind(found[id(out)] for out, _ in self._outputs)


def record_graph(
    graph: torch.cuda.CUDAGraph, function: _torch.Boxed, args: list[Any], stream: torch.cuda.Stream, pool: Any
) -> Any:
    torch.cuda.synchronize(stream.device)
    failed: BaseException | None = None
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = function(args)
        except BaseException as e:
            failed = e
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # an operator may launch nothing
                graph.capture_end()
        except RuntimeError as e:  # the error has invalidated the capture
            failed = failed or e
            _torch.end_failed_capture(stream.device, pool)
    if failed is None:
        return outputs
    torch.cuda.synchronize(stream.device)
    try:
        if not isinstance(failed, Exception):  # such as KeyboardInterrupt
            raise failed
        raise CaptureError(str(failed).strip().split("\n")[0]) from failed
    finally:
        del failed  # it references this frame


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """A view with each element once: copies into expanded tensors (stride 0) are not allowed."""
    if 0 in tensor.stride():
        for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_own(leaf: Any, given: int | None) -> bool:
    return isinstance(leaf, torch.Tensor) and given is None


def _same_view(out: torch.Tensor, given: torch.Tensor, arg: torch.Tensor) -> torch.Tensor:
    """The view of the caller's argument that corresponds to an output, which is a view of the graph's input."""
    shift = out.storage_offset() * out.itemsize - given.storage_offset() * given.itemsize
    offset = (arg.storage_offset() * arg.itemsize + shift) // out.itemsize
    if out.dtype == arg.dtype and out.is_conj() == arg.is_conj() and out.is_neg() == arg.is_neg():
        return arg.as_strided(out.size(), out.stride(), offset)
    return _torch.view_at(out, arg.untyped_storage(), offset)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _span(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The range of bytes in their storage that tensors use, aligned for all dtypes."""
    first = min(int(t.storage_offset()) * t.itemsize for t in tensors) // ALIGNED * ALIGNED
    return first, max((int(t.storage_offset()) + span(t.size(), t.stride())) * t.itemsize for t in tensors)
