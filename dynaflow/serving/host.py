"""Graphs in a system that serves requests and keeps the state of a batch outside of the graph.

Operators of such a system (attention, state-space layers) look up the batch's metadata elsewhere, mostly in a global.
When such an operator runs for a micro-batch, it has to find that micro-batch's metadata. So the graph calls a row-aware
operator in its place, which takes the numbers of its rows as an additional argument and runs the original one in a
context for these rows. The row numbers are an input of the graph, split like any other input.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.captured_graph import input_name
from dynaflow.capture.op_registry import arguments, by_rows, call_directly, opaque_ops
from dynaflow.capture.serialize import dumps, loads, set_example_args
from dynaflow.core import forks
from dynaflow.core.disk_cache import check_private
from dynaflow.core.fx_graphs import copy_module
from dynaflow.core.plan import Plan
from dynaflow.engine.engine import Engine
from dynaflow.errors import DynaFlowError
from dynaflow.schedule.split import Requests

ROW_AWARE = "dynaflow_row_aware"
"""The namespace of the row-aware operators, which have the names of those that they replace."""
ROWS = "dynaflow_rows"
"""The graph input that holds the row numbers."""
PREPLANNED_REQUESTS = 16
"""Number of fake requests used to pre-plan at start-up."""
RowContext = Callable[[int, int], AbstractContextManager[None]]
"""Makes the context for the rows from `start` to `stop`."""
_NOTHING = contextlib.nullcontext()
_library = torch.library.Library(ROW_AWARE, "FRAGMENT")


class HostedGraph:
    """A graph with row-aware operators, as its system calls it: with the arguments of the original graph."""

    alive: weakref.WeakSet[HostedGraph] = weakref.WeakSet()

    def __init__(self, run: Callable[..., Any], source: BatchInput, engine: Engine) -> None:
        self.engine, self.stats = engine, engine.stats
        self._run, self._source = run, source
        self._row_numbers = torch.arange(0, dtype=torch.int32)
        self._first = True
        self.alive.add(self)

    def __call__(self, *args: Any) -> Any:
        rows = self._source.rows(args)
        if len(self._row_numbers) < rows:
            self._row_numbers = torch.arange(2 * rows, dtype=torch.int32)
        self.begin(rows)
        given = (*args, self._row_numbers[:rows])
        results = self._run(*given)
        if self._first:
            self._first = False
            self._plan_ahead(given, rows)
        return results

    def _plan_ahead(self, args: tuple[Any, ...], rows: int) -> None:
        """Plans for fake requests after the first call.

        A system starts with a batch without requests, to measure memory. What the scheduler would do with requests is
        compiled then as well, so that the first ones need not wait. Not for a scheduler that chooses: it would run
        trials.
        """
        planner = self.engine.planner
        if planner.cache.chooses or self.stats.plain_graphs or not planner.facts().get("whole"):
            return
        lengths = [max(rows // PREPLANNED_REQUESTS, 1)] * min(rows, PREPLANNED_REQUESTS)
        requests = RaggedBatch(rows, lengths, chunk=rows, max_parts=PREPLANNED_REQUESTS)
        planner.planned(lambda: self._run(*args), requests.facts)

    def begin(self, rows: int) -> None:
        """Called before each call, with the number of rows of its batch."""

    @property
    def plans(self) -> list[Plan]:
        """The plans in use."""
        return self.engine.planner.plans()


class SerializableGraph(abc.ABC):
    """A captured graph that torch can write to disk and read in another process.

    It is scheduled at its first call, with that call's arguments: when torch hands out a graph that is to be stored, it
    has no arguments any more. That is too late to make a batch size dynamic that was captured as a constant: the system
    has to mark it.
    """

    def __init__(self, gm: fx.GraphModule, host: Any = None) -> None:
        self.host = host
        """The system's state that belongs to this process."""
        self._gm: fx.GraphModule | None = gm
        self._run: Callable[..., Any] | None = None
        self._serialized: bytes | Exception = b""

    @classmethod
    def captured(cls, gm: fx.GraphModule, host: Any) -> SerializableGraph:
        _torch.register_serializable(cls)
        _torch.cache_traced_sources()
        graph = cls(copy_module(gm), host)  # Dynamo still reads the graph that it handed out
        try:
            graph._serialized = dumps(gm)
        except Exception as e:  # pickling may raise anything; the graph runs, but can't be stored
            graph._serialized = e
        return graph

    @abc.abstractmethod
    def scheduled(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Returns what runs in place of the graph. May change both arguments."""

    def __call__(self, *args: Any) -> Any:
        if self._run is not None:
            return self._run(*args)
        assert self._gm is not None
        set_example_args(self._gm, args)
        with _gc_disabled():
            self._run, self._gm = self.scheduled(self._gm, list(args)), None
            return self._run(*args)

    def finalize_loading(self, host: Any) -> None:
        """vLLM calls it with its configuration after it has read the graph."""
        self.host = host

    @classmethod
    def serialize_compile_artifacts(cls, graph: SerializableGraph) -> bytes:
        if isinstance(graph._serialized, Exception):
            raise graph._serialized
        return graph._serialized

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SerializableGraph:
        if (folder := cls.folder()) is not None:  # unpickling runs code: it must be the user's own
            check_private(folder)
        return cls(loads(data))

    @classmethod
    def folder(cls) -> Path | None:
        """The folder that the system writes graphs to, if it has its own."""
        return None


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables garbage collection: a compiler makes millions of objects, and each collection in a process as large as a
    server's takes half a second."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class RaggedBatch:
    """A batch of requests of different lengths, one after the other: the system's state for it and for parts of it.

    `lengths`: the rows of each request; the remaining rows are padding. Requests may be cut at multiples of `chunk`
    rows. `max_parts`: the most parts that it may be split into. `why_whole`: why it can't be split at all, if it can't.
    """

    def __init__(
        self, rows: int, lengths: Sequence[int], *, chunk: int, max_parts: int, why_whole: str = ""
    ) -> None:
        self.rows, self.max_parts, self.why_whole = rows, max_parts, why_whole
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        uncut = longest < 2 * chunk
        self.requests = Requests(lengths if uncut else (n for length in lengths for n in _chunks(length, chunk)))
        """The rows of each request, or of each chunk of a long one; the last one includes the padding."""
        self.phase = ""
        """"prefill", "decode" or "mixed", if it can be split."""
        if lengths:
            self.requests[-1] += rows - sum(lengths)
            self.phase = "decode" if longest == 1 else "mixed" if shortest == 1 else "prefill"
        self.parts: dict[tuple[int, int], Any] = {}
        """By first and last row: the state of each part that was requested."""
        self.lock = forks.rlock()

    @property
    def facts(self) -> Mapping[str, Any]:
        """For schedulers: see `serving.scheduler`."""
        if self.why_whole:
            return {"whole": True}
        return {"whole": False, "num_tokens": self.requests, "phase": self.phase}

    def part(self, start: int, stop: int) -> Any:
        """Returns the state that the system would have for these rows alone."""
        raise NotImplementedError

    def enter(self, part: Any) -> AbstractContextManager[Any]:
        """Returns a context in which the system's operators find the state of a part."""
        raise NotImplementedError

    def within(self, start: int, stop: int) -> AbstractContextManager[Any]:
        """Returns a context in which the system's operators find the state of these rows."""
        return _NOTHING if (start, stop) == (0, self.rows) else _PartContext(self, start, stop)

    def _cached_part(self, start: int, stop: int) -> Any:
        if (start, stop) not in self.parts:
            ends = self.requests.ends
            if (start and start not in ends) or stop not in ends:
                raise DynaFlowError(
                    f"the batch can't be cut into tokens {start} to {stop}: requests end at {ends}",
                    advice="cut at request boundaries: ctx.split(n) does",
                )
            if len(self.parts) == self.max_parts:
                raise DynaFlowError(f"the batch is cut into more than {self.max_parts} parts", advice="split it less")
            self.parts[start, stop] = self.part(start, stop)
        return self.parts[start, stop]


class _PartContext:
    """The context for a part of a batch, entered by one thread at a time: the system's state is a global."""

    __slots__ = ("_batch", "_context", "_rows")

    def __init__(self, batch: RaggedBatch, start: int, stop: int) -> None:
        self._batch, self._rows = batch, (start, stop)

    def __enter__(self) -> None:
        batch = self._batch
        batch.lock.acquire()
        try:
            self._context = batch.enter(batch._cached_part(*self._rows))
            self._context.__enter__()
        except BaseException:
            batch.lock.release()
            raise

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            return self._context.__exit__(*exc)
        finally:
            self._batch.lock.release()


def _chunks(rows: int, chunk: int) -> list[int]:
    """The rows of each chunk of a request; the last one is the longest."""
    count = max(1, rows // chunk)
    return [chunk] * (count - 1) + [rows - chunk * (count - 1)]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """The graph input that carries the rows of the batch."""

    index: int
    dim: int
    """The input whose size is the number of rows, and the dim of that size."""
    dims: Mapping[str, int]
    """Input name -> the dim of its rows. For the engine, as `batch_dims`."""

    def rows(self, args: Sequence[Any]) -> int:
        return int(args[self.index].shape[self.dim])


ReadsState = Callable[[_torch.OpOverload, Mapping[str, Any]], bool]
"""Whether a call of an operator reads the system's state, given its arguments; inputs of the graph as they are."""


def inject_row_ranges(
    gm: fx.GraphModule, inputs: list[Any], reads_state: ReadsState, within: RowContext, opaque: type | None = None
) -> BatchInput | None:
    """Adds the row numbers of the batch to the graph's inputs and passes them to the operators that read state.

    Contract: changes `gm` and `inputs` in place; the operators have to work by rows, and `within` has to be the same
    function in every call. `opaque` is the class of the opaque objects among their arguments, if there are any. Returns
    the input that carries the rows; None, with nothing changed, if no operator reads state or none of them works on the
    rows of an input.

    1. Find the calls that read state.
    2. Find the input that carries the rows of the batch, and the inputs that have as many.
    3. Add an input with the row numbers.
    4. Replace each call by the row-aware operator.
    """
    places = gm.graph.find_nodes(op="placeholder")
    known = dict(zip(places, inputs, strict=False))
    calls: dict[fx.Node, _torch.OpOverload] = {}  # 1
    for node in gm.graph.nodes:
        if node.op != "call_function" or (overload := _overload(node.target)) is None:
            continue
        values = {a: known.get(v, v) if isinstance(v, fx.Node) else v for a, v in arguments(node).items()}
        if reads_state(overload, values):
            calls[node] = overload
    found = _batch_input(places, [node for call in calls for node in (call, *call.all_input_nodes)])  # 2
    if found is None:
        return None
    index, dim = found
    like, rows = places[index].meta["example_value"], inputs[index].shape[dim]
    names = {node: input_name(_torch.graph_input(node)[0]) for node in places}
    dims = {names[node]: at for node in places if (at := _row_dim(node, known[node], rows)) is not None}
    with gm.graph.inserting_after(places[-1]):  # 3
        numbers = gm.graph.placeholder(ROWS)
    numbers.meta["example_value"] = like.new_empty((like.shape[dim],), dtype=torch.int32, device="cpu")
    numbers.meta[_torch.GRAPH_INPUT] = (ROWS, False, torch.arange(rows, dtype=torch.int32))
    inputs.append(numbers.meta["example_value"])
    by_rows(f"{ROW_AWARE}::*")  # 4
    opaque_ops(f"{ROW_AWARE}::*")
    for node, overload in calls.items():
        node.target = _row_aware(overload, within, opaque)
        node.args = (numbers, *node.args)
    gm.recompile()
    return BatchInput(index, dim, {**dims, ROWS: 0})


def _overload(target: Any) -> _torch.OpOverload | None:
    packet = _torch.packet_of(target)
    return packet.default if isinstance(packet, _torch.OpOverloadPacket) and "default" in packet.overloads() else None


def _batch_input(places: Sequence[fx.Node], seen: Sequence[fx.Node]) -> tuple[int, int] | None:
    """Returns the first input that has as many rows as most tensors of the operators, and the dim of its rows."""
    shapes = [getattr(node.meta.get("example_value"), "shape", ()) for node in seen]
    # As text: comparing symbols would add guards.
    counts = Counter((isinstance(shape[0], torch.SymInt), str(shape[0])) for shape in shapes if shape)
    for _, size in sorted(counts, key=lambda found: (found[0], counts[found]), reverse=True):
        for i, node in enumerate(places):
            if size in (sizes := [str(n) for n in _shape(node)]):
                return i, sizes.index(size)
    return None


def _row_dim(node: fx.Node, given: Any, rows: int) -> int | None:
    """Returns the dim of the rows of an input, if it has them."""
    dims = (d for d, n in enumerate(_shape(node)) if isinstance(n, torch.SymInt) and given.shape[d] == rows)
    return next(dims, None)


def _shape(node: fx.Node) -> Sequence[Any]:
    """The captured shape of an input; () if it is no tensor or belongs to a module."""
    return () if _torch.graph_input(node)[1] else getattr(node.meta.get("example_value"), "shape", ())


@functools.cache
def _row_aware(op: _torch.OpOverload, within: RowContext, opaque: type | None) -> Any:
    """Defines and returns the row-aware form of an operator."""
    name, schema = _torch.op_name(op), str(_torch.schema_of(op)).partition("(")[2]
    if opaque is not None and "PyObject" in schema:
        schema = schema.replace("PyObject", _torch.opaque_type_name(opaque))
    _library.define(f"{name}(Tensor rows, {schema}", tags=tuple(op.tags))

    def run(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first = int(rows[0])
        with within(first, first + len(rows)):
            return op(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    call_directly(row_aware := getattr(getattr(torch.ops, ROW_AWARE), name).default, run)
    torch.library.register_fake(f"{ROW_AWARE}::{name}", lambda rows, *a, **k: op(*a, **k), lib=_library)
    return row_aware
