"""The partitioned graph as data: operators, and the values between them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import sympy
from torch import fx

from dynaflow.capture.batch_analysis.node_facts import OutVariant
from dynaflow.capture.captured_graph import CapturedGraph, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses operators, or an input of the graph. It owns its memory: views don't cross."""

    index: int
    name: str
    dims: tuple[int | None, ...]
    """For each batch axis (rows; then requests of a ragged batch), the dim that carries it."""
    merged: bool = False
    """On that dim the rows are merged with a dim before them, as in (s * rows,): cutting and joining take copies."""
    shape: Shape | None
    storage: int | None
    """Its storage, as numbered in `Op.accesses`."""
    input: int | None = None
    """Position among the graph's inputs, if it is one."""
    out_variant: OutVariant | None = None
    """How its operator can write it into given memory, if it can."""
    fresh: bool = True
    """It has memory of its own for all sizes. If not, it may share that of an argument for some sizes."""

    @property
    def carries_batch(self) -> bool:
        return any(dim is not None for dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """An operator: the unit of scheduling."""

    index: int
    name: str
    tags: frozenset[str]
    module: fx.GraphModule
    """Takes `symbols`, then `reads`; returns `writes` as a tuple."""
    symbols: tuple[sympy.Expr, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    accesses: tuple[tuple[int, bool], ...]
    """Storages that it reads (False) or writes (True), of those that are written or cross operators."""
    after: tuple[int, ...]
    """Operators that must run before it, for a value or for memory."""
    serial_after: tuple[int, ...]
    """Operators that must have run for all earlier micro-batches before it runs for one. It may be one of them."""
    shared: bool
    """It reads and makes no rows of the batch: it runs once."""
    refusal: str | None
    """Why it can't be split: then it runs once, for all rows."""
    line: str | None
    """The line of the model where it starts, or where it mixes rows."""
    functions: tuple[str, ...] = field(default=(), repr=False)
    """Names of its calls, in order."""
    groups: tuple[str, ...] = ()
    """Process groups of its collectives."""
    has_hidden_state: bool = False
    """It changes state that is no value of the graph (see `by_rows`): a second run continues from there."""

    @property
    def splittable(self) -> bool:
        return self.refusal is None and not self.shared

    # Former names, for schedulers that read them.

    @property
    def touches(self) -> tuple[tuple[int, bool], ...]:
        return self.accesses

    @property
    def follows(self) -> tuple[int, ...]:
        return self.serial_after

    @property
    def keeps(self) -> bool:
        return self.has_hidden_state

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One of the graph's results."""

    dim: int | None = None
    """The dim that carries the rows of the batch."""
    shape: Shape | None = None
    """None for a number."""
    storages: frozenset[int] = frozenset()
    input: int | None = None
    """Position among the graph's inputs, if it is one."""
    number: sympy.Basic | None = None
    """The expression of a number that follows from sizes."""
    passed: bool = False
    """Passed to the other pass of training, or to autograd, and not to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMixing:
    """Something in a graph by which additional rows, such as padding, change the results of other rows."""

    op: str | None
    """None for a view, or a number, among the results."""
    reason: str
    line: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGraph:
    """All operators, in an order that respects their dependencies, and how the results are made."""

    graph: CapturedGraph
    batch_axes: tuple[frozenset[sympy.Symbol], ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    """The values that `epilogue` takes, for the whole batch."""
    epilogue: fx.GraphModule | None
    """Makes views and numbers among the results from `outputs`; None if `outputs` are the results."""
    epilogue_symbols: tuple[sympy.Expr, ...] = ()
    results: tuple[Result, ...] = ()
    row_mixing: RowMixing | None = None
    """The first operator, or result, that does not treat rows independently."""

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def other_symbols(self) -> tuple[sympy.Symbol, ...]:
        """Symbols of sizes that may change from call to call, other than the batch."""
        unused = [self.graph.inputs[n].symbol.free_symbols for n in self.graph.unused_numbers]  # type: ignore[union-attr]
        return tuple(sorted(set(self.graph.hints).difference(*self.batch_axes, *unused), key=str))

    @cached_property
    def written(self) -> frozenset[int]:
        """Storages that an operator writes."""
        return frozenset(s for op in self.ops for s, writes in op.accesses if writes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal partitions of equal graphs, in any process."""
        text = [self.graph.gm.code]
        for op in self.ops:
            text.append(f"{op.name} {op.reads} {op.writes} {op.accesses} {op.after} {op.serial_after} {op.splittable}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    @cached_property
    def identity(self) -> str:
        """Equal if a scheduler sees equal graphs: adds tags, sizes and dtypes to the fingerprint."""
        ops = [f"{sorted(op.tags)} {op.shared} {op.refusal} {op.functions}" for op in self.ops]
        shapes = {shape: str(shape) for shape in {v.shape for v in self.values}}  # few distinct ones, slow to print
        values = [f"{v.name} {v.dims} {shapes[v.shape]}" for v in self.values]
        return hashlib.sha256("\n".join([self.fingerprint, *ops, *values]).encode()).hexdigest()
