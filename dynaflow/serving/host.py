"""Graphs in a system that serves requests, and that keeps what it knows of a batch outside of the graph.

Its operators look there: in a global of the system, mostly. Called for a micro-batch, such an operator has to find what
belongs to that micro-batch. So it is told: in its place the graph calls one that takes the numbers of its rows as well,
and that runs it inside of a context for these rows. The numbers are an input of the graph, cut as any other.
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

TOLD = "dynaflow_told"
"""The namespace of the operators that take the others' places, under their names."""
ROWS = "dynaflow_rows"
"""The input that has the numbers of the rows."""
AHEAD = 16
"""So many requests has the batch that is planned before there are any."""
Within = Callable[[int, int], AbstractContextManager[None]]
"""The context for the rows from one to another."""
_NOTHING = contextlib.nullcontext()
_library = torch.library.Library(TOLD, "FRAGMENT")


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """From now on `function` is called in place of a method, which it gets as its first argument."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(lambda *args, **kwargs: function(method, *args, **kwargs)))


class Hosted:
    """A graph whose operators are told their rows, as its system calls it: with the arguments that it had before."""

    alive: weakref.WeakSet[Hosted] = weakref.WeakSet()

    def __init__(self, run: Callable[..., Any], source: Source, engine: Engine) -> None:
        self.engine, self.stats = engine, engine.stats
        self._run, self._source = run, source
        self._numbers = torch.arange(0, dtype=torch.int32)
        self._first = True
        self.alive.add(self)

    def __call__(self, *args: Any) -> Any:
        rows = self._source.rows(args)
        if len(self._numbers) < rows:
            self._numbers = torch.arange(2 * rows, dtype=torch.int32)
        self.begin(rows)
        given = (*args, self._numbers[:rows])
        results = self._run(*given)
        if self._first:
            self._first = False
            self._plan_ahead(given, rows)
        return results

    def _plan_ahead(self, args: tuple[Any, ...], rows: int) -> None:
        """A system starts with a batch of no requests, to see what memory it takes. What the scheduler would do with
        requests is compiled then, too, and not while the first ones wait. But who chooses would have to run trials."""
        planner = self.engine.planner
        if planner.cache.chooses or self.stats.plain_graphs or not planner.facts().get("whole"):
            return
        requests = Batch(rows, [max(rows // AHEAD, 1)] * min(rows, AHEAD), piece=rows, most=AHEAD)
        planner.planned(lambda: self._run(*args), requests.facts)

    def begin(self, rows: int) -> None:
        """Before each call, with the rows of its batch."""

    @property
    def plans(self) -> list[Plan]:
        """Those in use."""
        return self.engine.planner.plans()


class Kept(abc.ABC):
    """A captured graph that torch can write to disk and read in another process. It is scheduled at its first call,
    with that call's arguments: torch has none any more when it hands out a graph that is to be kept. So it is too late
    then to have a batch vary that was captured as a constant: the system has to mark it."""

    def __init__(self, gm: fx.GraphModule, host: Any = None) -> None:
        self.host = host
        """What belongs to this process, of the system."""
        self._gm: fx.GraphModule | None = gm
        self._run: Callable[..., Any] | None = None
        self._written: bytes | Exception = b""

    @classmethod
    def captured(cls, gm: fx.GraphModule, host: Any) -> Kept:
        _torch.register_serializable(cls)
        _torch.cache_traced_sources()
        kept = cls(copy_module(gm), host)  # Dynamo still looks at the graph that it handed out
        try:
            kept._written = dumps(gm)
        except Exception as e:  # pickles raise whatever they like; nothing is wrong but that it can't be kept
            kept._written = e
        return kept

    @abc.abstractmethod
    def scheduled(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """What runs in place of the graph. Both may be changed."""

    def __call__(self, *args: Any) -> Any:
        if self._run is not None:
            return self._run(*args)
        assert self._gm is not None
        set_example_args(self._gm, args)
        with _uncollected():
            self._run, self._gm = self.scheduled(self._gm, list(args)), None
            return self._run(*args)

    def finalize_loading(self, host: Any) -> None:
        """vLLM calls it with its configuration, when the graph is read."""
        self.host = host

    @classmethod
    def serialize_compile_artifacts(cls, kept: Kept) -> bytes:
        if isinstance(kept._written, Exception):
            raise kept._written
        return kept._written

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Kept:
        if (folder := cls.folder()) is not None:  # to unpickle is to run whatever somebody wrote there
            check_private(folder)
        return cls(loads(data))

    @classmethod
    def folder(cls) -> Path | None:
        """Where the system keeps what it writes, if it has a place of its own."""
        return None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nobody looks for garbage meanwhile: a compiler makes objects by the million, and each look at all that a system
    has takes half a second."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Batch:
    """A batch of requests, one behind the other: what a system has for it, and for each part that operators see.

    `lengths`: the rows of each request; what is left is padding. Requests may be cut wherever `piece` of their rows are
    complete. `most`: parts that it may be cut into. `why_whole`: why it can't be cut at all, if it can't.
    """

    def __init__(self, rows: int, lengths: Sequence[int], *, piece: int, most: int, why_whole: str = "") -> None:
        self.rows, self.most, self.why_whole = rows, most, why_whole
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        in_one = longest < 2 * piece
        self.requests = Requests(lengths if in_one else (n for length in lengths for n in _pieces(length, piece)))
        """The rows of each, or of each piece of a long one; the last has the padding, too."""
        self.phase = ""
        """"prefill", "decode" or "mixed", if it can be cut."""
        if lengths:
            self.requests[-1] += rows - sum(lengths)
            self.phase = "decode" if longest == 1 else "mixed" if shortest == 1 else "prefill"
        self.parts: dict[tuple[int, int], Any] = {}
        """By first and last row: what was made for the parts that were asked for."""
        self.lock = forks.rlock()

    @property
    def facts(self) -> Mapping[str, Any]:
        """For schedulers: see strategies.serving."""
        if self.why_whole:
            return {"whole": True}
        return {"whole": False, "num_tokens": self.requests, "phase": self.phase}

    def part(self, start: int, stop: int) -> Any:
        """What the system would have for these rows alone."""
        raise NotImplementedError

    def enter(self, part: Any) -> AbstractContextManager[Any]:
        """In this context the system's operators find a part."""
        raise NotImplementedError

    def entered(self, start: int, stop: int) -> AbstractContextManager[Any]:
        """In this context they find these rows."""
        return _NOTHING if (start, stop) == (0, self.rows) else _Entered(self, start, stop)

    def known_part(self, start: int, stop: int) -> Any:
        if (start, stop) not in self.parts:
            ends = self.requests.ends
            if (start and start not in ends) or stop not in ends:
                raise DynaFlowError(
                    f"the batch can't be cut into tokens {start} to {stop}: requests end at {ends}",
                    advice="cut at request boundaries: ctx.split(n) does",
                )
            if len(self.parts) == self.most:
                raise DynaFlowError(f"the batch is cut into more than {self.most} parts", advice="split it less")
            self.parts[start, stop] = self.part(start, stop)
        return self.parts[start, stop]


class _Entered:
    """The context for a part of a batch. One thread at a time: where operators look is a global of the system's."""

    __slots__ = ("_batch", "_context", "_rows")

    def __init__(self, batch: Batch, start: int, stop: int) -> None:
        self._batch, self._rows = batch, (start, stop)

    def __enter__(self) -> None:
        batch = self._batch
        batch.lock.acquire()
        try:
            self._context = batch.enter(batch.known_part(*self._rows))
            self._context.__enter__()
        except BaseException:
            batch.lock.release()
            raise

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            return self._context.__exit__(*exc)
        finally:
            self._batch.lock.release()


def _pieces(rows: int, longest: int) -> list[int]:
    """A request of so many rows, as pieces between which it may be cut."""
    count = max(1, rows // longest)
    return [longest] * (count - 1) + [rows - longest * (count - 1)]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a graph's inputs have the rows of the batch."""

    place: int
    dim: int
    """The input that tells how many there are, and on which dim."""
    dims: Mapping[str, int]
    """By name: the dim on which an input has them. For the engine, as `batch_dims`."""

    def rows(self, args: Sequence[Any]) -> int:
        return int(args[self.place].shape[self.dim])


Asks = Callable[[_torch.OpOverload, Mapping[str, Any]], bool]
"""Whether a call of an operator asks its system, by its arguments; what is an input of the graph is given as it is."""


def tell_rows(
    gm: fx.GraphModule, inputs: list[Any], asks: Asks, within: Within, opaque: type | None = None
) -> Source | None:
    """Adds the numbers of the batch's rows to the graph's inputs, for the operators that ask.

    Returns where the others have them; None if no operator asks, or none of them for rows of an input. The operators
    work by rows. Each is always called within the same function. `opaque` is the class of the objects among their
    arguments, if there are any.
    """
    places = gm.graph.find_nodes(op="placeholder")
    known = dict(zip(places, inputs, strict=False))
    asking: dict[fx.Node, _torch.OpOverload] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or (overload := _overload(node.target)) is None:
            continue
        values = {a: known.get(v, v) if isinstance(v, fx.Node) else v for a, v in arguments(node).items()}
        if asks(overload, values):
            asking[node] = overload
    found = _place(places, [node for call in asking for node in (call, *call.all_input_nodes)])
    if found is None:
        return None
    place, dim = found
    like, rows = places[place].meta["example_value"], inputs[place].shape[dim]
    names = {node: input_name(_torch.graph_input(node)[0]) for node in places}
    dims = {names[node]: at for node in places if (at := _dim(node, known[node], rows)) is not None}
    with gm.graph.inserting_after(places[-1]):
        told = gm.graph.placeholder(ROWS)
    told.meta["example_value"] = like.new_empty((like.shape[dim],), dtype=torch.int32, device="cpu")
    told.meta[_torch.GRAPH_INPUT] = (ROWS, False, torch.arange(rows, dtype=torch.int32))
    inputs.append(told.meta["example_value"])
    by_rows(f"{TOLD}::*")
    opaque_ops(f"{TOLD}::*")
    for node, overload in asking.items():
        node.target = _told(overload, within, opaque)
        node.args = (told, *node.args)
    gm.recompile()
    return Source(place, dim, {**dims, ROWS: 0})


def _overload(target: Any) -> _torch.OpOverload | None:
    packet = _torch.packet_of(target)
    return packet.default if isinstance(packet, _torch.OpOverloadPacket) and "default" in packet.overloads() else None


def _place(places: Sequence[fx.Node], seen: Sequence[fx.Node]) -> tuple[int, int] | None:
    """The first input that has as many rows as most of the tensors that operators see, and on which dim."""
    shapes = [getattr(node.meta.get("example_value"), "shape", ()) for node in seen]
    # As text: to compare symbols would be to assume something of them.
    counts = Counter((isinstance(shape[0], torch.SymInt), str(shape[0])) for shape in shapes if shape)
    for _, size in sorted(counts, key=lambda found: (found[0], counts[found]), reverse=True):
        for i, node in enumerate(places):
            shape = () if _torch.graph_input(node)[1] else getattr(node.meta.get("example_value"), "shape", ())
            if size in (sizes := [str(n) for n in shape]):
                return i, sizes.index(size)
    return None


def _dim(node: fx.Node, given: Any, rows: int) -> int | None:
    """The dim on which an input that no module owns has the rows."""
    shape = () if _torch.graph_input(node)[1] else getattr(node.meta.get("example_value"), "shape", ())
    return next((d for d, n in enumerate(shape) if isinstance(n, torch.SymInt) and given.shape[d] == rows), None)


@functools.cache
def _told(op: _torch.OpOverload, within: Within, opaque: type | None) -> Any:
    name, schema = _torch.op_name(op), str(_torch.schema_of(op)).partition("(")[2]
    if opaque is not None and "PyObject" in schema:
        schema = schema.replace("PyObject", _torch.opaque_type_name(opaque))
    _library.define(f"{name}(Tensor rows, {schema}", tags=tuple(op.tags))

    def run(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first = int(rows[0])
        with within(first, first + len(rows)):
            return op(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    call_directly(told := getattr(getattr(torch.ops, TOLD), name).default, run)
    torch.library.register_fake(f"{TOLD}::{name}", lambda rows, *a, **k: op(*a, **k), lib=_library)
    return told
