"""The partitioned graph as data: operators, the values between them, and what may be done to each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import sympy
from torch import fx

from dynaflow.capture.batch_analysis.probe import OutVariant
from dynaflow.capture.captured_graph import CapturedGraph, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses operators, or an input of the graph. It owns its memory: views don't cross."""

    index: int
    name: str
    dims: tuple[int | None, ...]
    """On which dim it carries the rows of the batch (and, second, the requests of a ragged one)."""
    merged: bool = False
    """On that dim the rows lie behind another dim that was merged into theirs: parts are cut and joined by copies."""
    shape: Shape | None
    storage: int | None
    """The memory behind it, as `Op.accesses` numbers it."""
    input: int | None = None
    """Position among the graph's inputs, if it is one."""
    out_variant: OutVariant | None = None
    """How it is made, where its maker can write it straight into memory given from outside."""
    fresh: bool = True
    """Its maker always gives it memory of its own; never, for some size, that of what it was made from."""

    @property
    def carries_batch(self) -> bool:
        return any(dim is not None for dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """A schedulable piece of the model."""

    index: int
    name: str
    tags: frozenset[str]
    module: fx.GraphModule
    """Takes `symbols`, then `reads`; returns `writes` as a tuple."""
    symbols: tuple[sympy.Expr, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    accesses: tuple[tuple[int, bool], ...]
    """Storages that it reads (False) or writes (True), of those that anyone writes."""
    after: tuple[int, ...]
    """Operators that come before it for the sake of a value or of memory."""
    serial_after: tuple[int, ...]
    """Operators that have run for all earlier micro-batches when it runs for one. It may be among them itself."""
    shared: bool
    """No row of the batch takes part: it runs once."""
    refusal: str | None
    """Why it can't be split, if it can't: then it runs once, for all rows."""
    line: str | None
    """The line of the model where it starts, or where the rows are mixed."""
    functions: tuple[str, ...] = field(default=(), repr=False)
    """The calls that it holds, by name and in order."""
    groups: tuple[str, ...] = ()
    """The process groups in which it makes ranks meet."""
    has_hidden_state: bool = False
    """It changes a state that no value shows (see `by_rows`): run again, it would go on from there."""

    @property
    def splittable(self) -> bool:
        return self.refusal is None and not self.shared

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One of the graph's results."""

    dim: int | None = None
    """On which dim it carries the rows of the batch."""
    shape: Shape | None = None
    """Of a tensor."""
    storages: frozenset[int] = frozenset()
    input: int | None = None
    """Position among the graph's inputs, if it is one."""
    number: sympy.Basic | None = None
    """What a number stands for, if it follows from sizes."""
    passed: bool = False
    """From one pass of training to the other, or to autograd, and not to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMixing:
    """Something in a graph that more rows would change for the rows that are there."""

    op: str | None
    """None if it is a view, or a number, among the results."""
    reason: str
    line: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGraph:
    """All operators in an order that respects their dependencies, and how the results are put together."""

    graph: CapturedGraph
    batch_axes: tuple[frozenset[sympy.Symbol], ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]
    """The values that `epilogue` takes, for the whole batch."""
    epilogue: fx.GraphModule | None
    """Views and numbers among the results, made from `outputs`; None when `outputs` are the results."""
    epilogue_symbols: tuple[sympy.Expr, ...] = ()
    results: tuple[Result, ...] = ()
    row_mixing: RowMixing | None = None
    """The first operator, or result, that does not treat each row by itself."""

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def other_symbols(self) -> tuple[sympy.Symbol, ...]:
        """The sizes that may change from call to call and do not stand for the batch."""
        unused = [self.graph.inputs[n].symbol.free_symbols for n in self.graph.unused_numbers]  # type: ignore[union-attr]
        return tuple(sorted(set(self.graph.hints).difference(*self.batch_axes, *unused), key=str))

    @cached_property
    def written(self) -> frozenset[int]:
        """Storages that some operator writes."""
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
        """Equal when a scheduler sees equal graphs: the fingerprint alone covers no tags, sizes or types."""
        ops = [f"{sorted(op.tags)} {op.shared} {op.refusal} {op.functions}" for op in self.ops]
        shapes = {shape: str(shape) for shape in {v.shape for v in self.values}}  # few distinct ones, slow to print
        values = [f"{v.name} {v.dims} {shapes[v.shape]}" for v in self.values]
        return hashlib.sha256("\n".join([self.fingerprint, *ops, *values]).encode()).hexdigest()
