"""First pass of lowering: from a plan to instructions on variables.

Contract
    Takes a checked plan, its graph, and the units that `make_units` made of its tasks.
    Returns a Program that computes the plan: steps in the plan's order, on its lanes, with its waits. Buffers have no
    memory yet and nothing is freed: see `liveness` and `memory`.
    Compiles the operators for the given sizes.
    Raises NotElastic if the program has to serve all sizes and something in it can't, and what the compiler raises.

Steps
    1. Arguments become variables.
    2. Values that their makers can write into given memory get buffers (`choose_buffers`).
    3. Each unit becomes a step. What it reads is found for its micro-batches: a variable, a slice of one, or a copy
       that joins several.
    4. The results are joined for the whole batch.

Splitting is by view. Micro-batches of a value that are made separately and used together are slices of one buffer if
their operators can write into it, and are concatenated if not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch

from dynaflow.capture.captured_graph import OpaqueValue, Shape, concrete, per_row
from dynaflow.core.memory_layout import is_dense
from dynaflow.core.plan import MicroBatch, Plan
from dynaflow.lower.compile_ops import Condition, Operators, Sizes, Source, strides_of
from dynaflow.lower.fuse_tasks import Parts, Unit, make_units
from dynaflow.lower.ir import (
    Buffer,
    Call,
    Epilogue,
    Instruction,
    Join,
    Narrow,
    Program,
    Replace,
    Size,
    Step,
    Var,
    Vars,
)
from dynaflow.lower.layouts import arrange, image_layouts
from dynaflow.lower.memory import choose_buffers
from dynaflow.lower.out_variants import write_into
from dynaflow.partition.op_graph import Op, OpGraph, Value
from dynaflow.runtime import joins
from dynaflow.runtime.arena import View
from dynaflow.schedule.fusion import fusion_values


class NotElastic(Exception):
    """Something in the program depends on the batch size in a way that generated code can't express."""


def bind(
    plan: Plan,
    graph: OpGraph,
    sizes: Sizes,
    operators: Operators,
    functions: Mapping[str, Callable[..., Any]],
    *,
    chains: bool = True,
    pieces: bool = False,
    outside: frozenset[str] = frozenset(),
    elastic: bool = False,
) -> Program:
    """`chains`: tasks that run back to back on a lane become one call.

    `pieces`: the program will be captured in pieces, with the operators `outside` between them.
    `elastic`: the program serves micro-batches of all sizes (see `extents`), which it gets as one more argument.
    """
    binder = _Binder(plan, graph, sizes, operators, functions, pieces, elastic)
    return binder.bind(make_units(plan, graph, chains=chains, apart=outside))


def extents(plan: Plan, graph: OpGraph, sizes: Sizes) -> tuple[int, ...]:
    """The additional argument of an elastic program: the size of each micro-batch, axis by axis, and the sizes that do
    not depend on the batch."""
    parts = [_extent(part, axis) for axis in range(len(graph.batch_axes)) for part in plan.micro_batches]
    return (*parts, *[sizes[s] for s in graph.other_symbols])


def sizes_of(plan: Plan, graph: OpGraph, sizes: Sizes, parts: Parts) -> Sizes:
    """The values of all symbols for these micro-batches."""
    found = dict(sizes)
    for axis, symbols in enumerate(graph.batch_axes):
        found.update(dict.fromkeys(symbols, sum(_extent(plan.micro_batches[m], axis) for m in parts)))
    return found


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step that is being built. `number`: its index; -1 for the end of the program."""

    number: int
    before: list[Instruction] = field(default_factory=list)
    call: Call | Replace | None = None
    then: list[Narrow] = field(default_factory=list)


class _Binder:
    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        sizes: Sizes,
        operators: Operators,
        functions: Mapping[str, Callable[..., Any]],
        pieces: bool,
        elastic: bool,
    ) -> None:
        self.plan, self.graph, self.sizes, self.operators, self.functions = plan, graph, sizes, operators, functions
        self.pieces, self.elastic = pieces, elastic
        self.all: Parts = tuple(range(len(plan.micro_batches)))
        self.count = 0
        self.where: dict[int, dict[int, Var]] = {}
        """By value and micro-batch: the variable that holds it."""
        self.slices: dict[tuple[Var, Parts], Var] = {}
        self.steps: list[_Step] = []
        self.step_of: dict[Var, _Step] = {}
        """By variable, the step that makes it; none for arguments and buffers."""
        self.start: list[Instruction] = []
        self.buffers: list[Buffer] = []
        self.buffer_slices: list[Narrow] = []
        self.modules: dict[Any, torch.fx.GraphModule] = {}
        """By module and results: the module that writes those into given memory, the same for all micro-batches."""
        self.conditions: set[tuple[Parts, Condition]] = set()
        self.layouts = image_layouts(graph) if operators.writes_into and not graph.graph.grad else {}
        self.batch = frozenset().union(*graph.batch_axes) if graph.batch_axes else frozenset()
        self.others = {s: sympy.Symbol(f"k{i}", integer=True) for i, s in enumerate(graph.other_symbols)}
        """Names for the sizes of an elastic program that do not depend on the batch."""
        if elastic and (self.layouts or graph.graph.grad):
            raise NotElastic("images and gradients need static layouts")

    def bind(self, units: list[Unit]) -> Program:
        plan, graph = self.plan, self.graph
        # 1. arguments
        inputs = []
        for value in graph.values:
            if value.input is not None:
                inputs.append(self._var("argument", value.index, self.all, argument=value.input))
                self.where[value.index] = dict.fromkeys(self.all, inputs[-1])
        # 2. buffers
        if self.operators.writes_into and not self.elastic:
            self._choose_buffers(units)
        # 3. steps
        for unit in units:
            self.steps.append(_Step(number=len(self.steps)))
            if unit.fused:
                self._replaced(self.steps[-1], unit)
            else:
                self._calls(self.steps[-1], unit)
        # 4. results
        end = _Step(number=-1)
        whole = {v: self._fetch(v, self.all, end, ())[0] for v in dict.fromkeys(graph.outputs)}
        results = tuple(whole[v] for v in graph.outputs)  # one that is returned twice is one tensor
        self.operators.finish()
        clones, aside = self._handed_out(results, units)
        names = [f"n{axis}_{m}" for axis in range(len(graph.batch_axes)) for m in self.all]
        names += map(str, self.others.values())
        return Program(
            arguments=len(graph.graph.inputs),
            inputs=tuple(inputs),
            lanes=tuple(lane.name for lane in plan.lanes),
            partitioned=plan.partitioned,
            boxed=graph.graph.phase != "inference",
            extents=tuple(names) if self.elastic else (),
            start=tuple(self.start),
            steps=tuple(self._finished(units)),
            end=tuple(i for i in end.before if isinstance(i, Join)),
            results=results,
            clones=clones,
            epilogue=None if graph.epilogue is None else Epilogue(
                function=graph.epilogue.forward, sizes=tuple(self._size(e, self.all) for e in graph.epilogue_symbols)
            ),
            made_aside=aside,
            buffers=tuple(self.buffers),
            buffer_slices=tuple(self.buffer_slices),
            conditions=frozenset(self.conditions),
        )  # fmt: skip

    def _finished(self, units: list[Unit]) -> Iterable[Step]:
        last = {unit.tasks[-1]: s for s, unit in enumerate(units)}
        for step, unit in zip(self.steps, units, strict=True):
            first = self.plan.tasks[unit.tasks[0]]
            yield Step(
                tasks=unit.tasks,
                lane=first.lane,
                title=", then ".join(str(self.plan.tasks[t]) for t in unit.tasks),
                after=tuple(last[a] for a in first.after),
                before=tuple(step.before),
                call=step.call,
                then=tuple(step.then),
            )

    def _handed_out(self, results: Vars, units: list[Unit]) -> tuple[Vars, Vars]:
        """Of the results: those to copy out of a graph's memory, and those made on another lane than the caller's."""
        made = [v for v in dict.fromkeys(results) if v in self.step_of and self.step_of[v].number >= 0]
        if self.pieces:
            return tuple(made), ()
        caller = None if self.plan.partitioned else self.plan.lanes[0].name
        here = self.graph.graph.device.type
        shapes = {v: self.graph.values[v.value].shape for v in made}
        lanes = {v: self.plan.tasks[units[self.step_of[v].number].tasks[0]].lane for v in made}
        aside = (v for v in made if lanes[v] != caller and ((shape := shapes[v]) is None or shape.device.type == here))
        return (), tuple(aside)

    def _var(self, kind: Any, value: int, parts: Parts, step: _Step | None = None, **more: Any) -> Var:
        var = Var(id=self.count, kind=kind, value=value, parts=parts, whole=parts == self.all, **more)
        self.count += 1
        if step is not None:
            self.step_of[var] = step
        return var

    # Buffers

    def _choose_buffers(self, units: list[Unit]) -> None:
        for v, chosen in choose_buffers(units, self.graph, self.all).items():
            shape = self._shape(v)
            assert shape is not None
            layouts = [self._layout(self.graph.values[v], parts) for parts in chosen.parts]
            given = all(is_dense(size, stride) for size, stride in layouts)
            if not given or (self.pieces and chosen.own):  # a graph writes to the same address in each replay
                continue
            for parts, (size, stride) in zip(chosen.parts, layouts, strict=True):
                view = View(offset=0, size=size, stride=stride, dtype=shape.dtype)
                new = partial(torch.empty_strided, size, stride, dtype=shape.dtype, device=shape.device)
                nbytes = torch.Size(size).numel() * shape.dtype.itemsize
                var = self._var("buffer", v, parts)
                self.buffers.append(Buffer(var=var, own=chosen.own, view=view, nbytes=nbytes, new=new))

    def _buffer(self, v: int, parts: Parts) -> Buffer | None:
        """The buffer into which these micro-batches of a value are to be written."""
        return next((b for b in self.buffers if b.var.value == v and set(parts) <= set(b.var.parts)), None)

    def _layout(self, value: Value, parts: Parts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._shape(value.index)
        assert shape is not None
        sizes = self._sizes(parts)
        return tuple(concrete(e, sizes) for e in shape.size), strides_of(shape, sizes)

    def _shape(self, v: int) -> Shape | None:
        """The value's layout: the model's own, or the one that the uncut graph would have."""
        return self.layouts.get(v, self.graph.values[v].shape)

    # Steps

    def _calls(self, step: _Step, unit: Unit) -> None:
        runs = [unit.parts]
        if any(self._writes(op, v) and self.graph.values[v].input is not None for op in unit.ops for v in op.reads):
            # A join is a copy, and writes to a copy of an argument would be lost: join only consecutive micro-batches.
            runs = _neighbours(unit.parts)
        if not unit.writes and not any(written for op in unit.ops for _, written in op.accesses):
            return
        for parts in runs[:-1]:
            call = self._call(step, unit, parts)
            step.before.append(call)
        step.call = self._call(step, unit, runs[-1])

    def _call(self, step: _Step, unit: Unit, parts: Parts) -> Call:
        sizes = self._sizes(parts)
        inputs: list[Shape | sympy.Expr | OpaqueValue | None] = list(unit.symbols)
        strides: list[tuple[int, ...] | None] = [None] * len(unit.symbols)
        args: list[Var] = []
        into: list[Var] = []
        makes: list[Var] = []
        outs: list[int] = []
        static: list[int] = []
        for v in unit.reads:
            var, held = self._fetch(v, parts, step, unit.ops)
            shape = self._shape(v)
            args.append(var)
            if self._has_static_address(v):
                static.append(len(inputs))
            inputs.append(shape or self._opaque(v))
            strides.append(None if shape is None else strides_of(shape, self._sizes(held)))
        for position, v in enumerate(unit.writes):
            buffer = self._buffer(v, parts)
            if buffer is None:
                makes.append(self._made(v, parts, step))
                continue
            self.where.setdefault(v, {}).update(dict.fromkeys(parts, buffer.var))
            outs.append(position)
            into.append(self._slice(self.graph.values[v], buffer.var, parts))
            inputs.append(self._shape(v))
            strides.append(buffer.view.stride)
        source = Source(
            module=self._module(unit, outs),
            inputs=tuple(inputs),
            static=frozenset(static),
            writes=self._writes_others(unit),
            name=", then ".join(dict.fromkeys(op.name for op in unit.ops)),
            free=self.batch if unit.splittable else frozenset(),
            aliased=self._shares_memory(unit),
        )
        if self.elastic:
            call, conditions = self.operators.get_for_all(source, sizes)
            self.conditions.update((parts, holds) for holds in conditions)
        else:
            call = self.operators.get(source, sizes, tuple(strides))
        return Call(
            makes=tuple(makes),
            call=call,
            op=unit.ops[0].index,
            sizes=tuple(self._size(e, parts) for e in unit.symbols),
            args=tuple(args),
            into=tuple(into),
            lends=not all(self.graph.values[v].fresh for op in unit.ops for v in op.writes),
        )

    def _module(self, unit: Unit, outs: list[int]) -> torch.fx.GraphModule:
        """The unit's graph, with the results at positions `outs` written into given memory."""
        key = (unit.module, tuple(outs))
        if key not in self.modules:
            module = arrange(unit.module, self._formats(unit, outs)) if self.layouts else unit.module
            self.modules[key] = write_into(module, outs) if outs else module
        return self.modules[key]

    def _formats(self, unit: Unit, outs: list[int]) -> dict[int, torch.memory_format]:
        """Memory formats of the images among a unit's results, which would otherwise follow its inputs."""
        found = {}
        for position, v in enumerate(unit.writes):
            shape = self.graph.values[v].shape
            if position not in outs and shape is not None and len(shape.size) == 4:
                found[position] = torch.channels_last if v in self.layouts else torch.contiguous_format
        return found

    def _writes_others(self, unit: Unit) -> bool:
        """Whether it writes to memory other than its results."""
        made = {self.graph.values[v].storage for op in unit.ops for v in op.writes}
        return any(written and s >= 0 and s not in made for op in unit.ops for s, written in op.accesses)

    def _shares_memory(self, unit: Unit) -> bool:
        """Whether it writes memory that two of the graph's inputs share."""
        written = {s for op in unit.ops for s, writes in op.accesses if writes}
        inputs = [self.graph.values[v].storage for v in unit.reads if self.graph.values[v].input is not None]
        return any(inputs.count(storage) > 1 for storage in written)

    def _opaque(self, v: int) -> OpaqueValue | None:
        given = self.graph.values[v].input
        return None if given is None else self.graph.graph.inputs[given].opaque

    def _has_static_address(self, v: int) -> bool:
        value, inputs = self.graph.values[v], self.graph.graph.inputs
        return value.input is not None and inputs[value.input].static_address and not value.carries_batch

    def _replaced(self, step: _Step, unit: Unit) -> None:
        """A step of a user's function."""
        task = self.plan.tasks[unit.tasks[0]]
        items = [(self.graph.by_name[i.op], i.micro_batches) for i in task.items]
        reads, writes = fusion_values(self.graph, items)
        mutators: dict[tuple[int, Parts], Op] = {}
        for op, parts in items:
            mutators.update({(v, parts): op for v in op.reads if self._writes(op, v) or (v, parts) not in mutators})
        args = [self._fetch(v, parts, step, (mutators[v, parts],))[0] for v, parts in reads]
        assert task.replace is not None
        step.call = Replace(
            makes=tuple(self._made(v, parts, step) for v, parts in writes),
            function=self.functions[task.replace],
            task=unit.tasks[0],
            reads=tuple(args),
        )

    def _made(self, v: int, parts: Parts, step: _Step) -> Var:
        var = self._var("made", v, parts, step)
        self.where.setdefault(v, {}).update(dict.fromkeys(parts, var))
        return var

    # Values where they are needed

    def _fetch(self, v: int, parts: Parts, step: _Step, ops: tuple[Op, ...]) -> tuple[Var, Parts]:
        """The variable that holds value `v` for micro-batches `parts`, and the micro-batches in its memory."""
        value = self.graph.values[v]
        places = self.where[v]
        writes = any(self._writes(op, v) for op in ops)
        if not value.carries_batch:
            var = places[parts[0]]
            if writes and len(parts) == len(self.all):
                self.where[v] = dict.fromkeys(self.all, var)  # every micro-batch sees what was written
            return var, parts
        pieces: list[tuple[Var, Parts]] = []
        for m in parts:
            var = places[m]
            if pieces and pieces[-1][0] is var and pieces[-1][1][-1] + 1 == m:
                pieces[-1] = (var, (*pieces[-1][1], m))
            else:
                pieces.append((var, (m,)))
        if value.merged and pieces != [(pieces[0][0], pieces[0][0].parts)]:
            return self._regroup(value, pieces, parts, step), parts
        found = [self._slice(value, var, held) for var, held in pieces]
        if len(found) == 1:
            return found[0], pieces[0][0].parts
        (dim, *more) = [d for d in value.dims if d is not None]
        assert not more, "a value that carries both rows and requests can't be joined"
        join = joins.Join.along(dim, self._layout(value, parts)[1])
        return self._join(value, found, join, parts, step, replaces=writes), parts

    def _regroup(self, value: Value, pieces: Sequence[tuple[Var, Parts]], parts: Parts, step: _Step) -> Var:
        """A copy of rows that are merged with an outer dim."""
        if self.elastic:
            raise NotElastic("rows that are merged with an outer dim need a copy of static size")
        ((axis, dim),) = ((axis, dim) for axis, dim in enumerate(value.dims) if dim is not None)
        whole = next(iter(self.graph.batch_axes[axis]))
        assert value.shape is not None
        outer = concrete(value.shape.size[dim], self.sizes) // self.sizes[whole]
        ranges = [(_rows(self.plan, axis, [m for m in var.parts if m < held[0]]), _rows(self.plan, axis, held))
                  for var, held in pieces]  # fmt: skip
        regroup = joins.Regroup.along(dim, self._layout(value, parts)[1], outer, tuple(ranges))
        return self._join(value, [var for var, _ in pieces], regroup, parts, step, replaces=False)

    def _slice(self, value: Value, var: Var, parts: Parts) -> Var:
        if var.parts == parts:
            return var
        key = (var, parts)
        if key not in self.slices:
            found = self.slices[key] = self._var("slice", value.index, parts, base=var)
            cuts = [(dim, *self._range(value, axis, dim, var.parts, parts))
                    for axis, dim in enumerate(value.dims) if dim is not None]  # fmt: skip
            narrow = Narrow(out=found, base=var, cuts=tuple(cuts))
            if var.kind == "buffer":
                self.buffer_slices.append(narrow)
            elif var in self.step_of:
                self.step_of[var].then.append(narrow)
            else:
                self.start.append(narrow)
        return self.slices[key]

    def _join(
        self, value: Value, found: Sequence[Var], join: Callable[..., Any], parts: Parts, step: _Step, *, replaces: bool
    ) -> Var:
        """`replaces`: the step writes into the joined copy, so from here on that is the value."""
        out = self._var("joined", value.index, parts, step)
        assert value.shape is not None
        nbytes = torch.Size(self._layout(value, parts)[0]).numel() * value.shape.dtype.itemsize
        step.before.append(Join(out=out, reads=tuple(found), join=join, nbytes=nbytes))
        if replaces:
            self.where[value.index] = {**self.where[value.index], **dict.fromkeys(parts, out)}
        return out

    def _writes(self, op: Op, v: int) -> bool:
        storage = self.graph.values[v].storage
        return any(s == storage and written for s, written in op.accesses) and v not in op.writes

    # Sizes

    def _sizes(self, parts: Parts) -> Sizes:
        return sizes_of(self.plan, self.graph, self.sizes, parts)

    def _range(self, value: Value, axis: int, dim: int, held: Parts, parts: Parts) -> tuple[Size, Size]:
        """The offset of the micro-batches in a variable that holds `held`, and their length."""
        assert value.shape is not None
        size = value.shape.size[dim]
        before = tuple(m for m in held if m < parts[0])
        if self.elastic:
            each = per_row(size, self.graph.batch_axes[axis])
            if each is None or each.free_symbols & self.batch:
                raise NotElastic(f"{size} is not a multiple of the batch size")
            code = self._expression(each, ())
            return f"({code}) * {_sum(axis, before)}", f"({code}) * {_sum(axis, parts)}"
        each = concrete(size, self.sizes) // self.sizes[next(iter(self.graph.batch_axes[axis]))]
        return _rows(self.plan, axis, before) * each, _rows(self.plan, axis, parts) * each

    def _size(self, expr: sympy.Expr, parts: Parts) -> Size:
        return self._expression(expr, parts) if self.elastic else concrete(expr, self._sizes(parts))

    def _expression(self, expr: sympy.Expr, parts: Parts) -> str:
        """Code of an elastic program for an expression, for these micro-batches."""
        sums = {s: sympy.Symbol(_sum(k, parts)) for k, axis in enumerate(self.graph.batch_axes) for s in axis}
        names = {**self.others, **sums}
        found = expr.xreplace(names)
        polynomial = found.is_polynomial(*found.free_symbols) and expr.free_symbols <= names.keys()
        if not polynomial or not all(a.is_Integer for a in found.atoms(sympy.Number)):
            raise NotElastic(f"a size of {expr}")
        return str(found)


def _neighbours(parts: Parts) -> list[Parts]:
    """Split into runs of consecutive micro-batches."""
    found: list[Parts] = []
    for m in parts:
        if found and found[-1][-1] + 1 == m:
            found[-1] = (*found[-1], m)
        else:
            found.append((m,))
    return found


def _sum(axis: int, parts: Parts) -> str:
    return f"({' + '.join(f'n{axis}_{m}' for m in parts) or 0})"


def _rows(plan: Plan, axis: int, parts: Iterable[int]) -> int:
    return sum(_extent(plan.micro_batches[m], axis) for m in parts)


def _extent(part: MicroBatch, axis: int) -> int:
    if axis == 0 or part.requests is None:
        return part.size
    return part.requests[1] - part.requests[0]
