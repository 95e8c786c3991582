"""A plan worked out to single steps: which function each task calls, on which variables.

Splitting is by view. Parts of a value that are made apart and used together are slices of one buffer where their
makers can write into it (memory.py), and copied together where they can't. Who owns any other variable, and when
it may be let go, follows from happens-before: it dies on the lane that made it, once all its readers are known to
have ended. What a pass of training gets is such a variable too, as if the caller's lane had made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch

from dynaflow.capture.captured_graph import OpaqueValue, Shape, concrete, per_row
from dynaflow.core.memory_layout import is_dense
from dynaflow.core.plan import MicroBatch, Plan, Task, happens_before
from dynaflow.lower.compile_ops import Operators, Sizes, Source, strides_of
from dynaflow.lower.fuse_tasks import Parts, Unit, make_units
from dynaflow.lower.layouts import arrange, image_layouts
from dynaflow.lower.memory import Buffer, choose_buffers, plan_arena
from dynaflow.lower.out_variants import write_into
from dynaflow.lower.steps import Program, Step
from dynaflow.partition.op_graph import Op, OpGraph, Value
from dynaflow.runtime.arena import View
from dynaflow.runtime.joins import Join, Regroup, unpack
from dynaflow.schedule.context import fusion_values


@dataclass(frozen=True, slots=True)
class _Var:
    """A variable of the generated code, and which micro-batches of its value it holds."""

    name: str
    parts: Parts


def make_program(
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
    """`chains`: calls that run back to back on a lane are compiled as one.

    `pieces`: the program will be captured in pieces, with the operators `outside` between them.
    `elastic`: the program serves micro-batches of all sizes (see `extents`), which it gets as one more argument.
    """
    maker = _Maker(plan, graph, sizes, operators, functions, elastic)
    return maker.make(make_units(plan, graph, chains=chains, apart=outside), pieces=pieces)


class NotElastic(Exception):
    """Something in the program depends on the size of the batch in a way that code can't follow."""


def extents(plan: Plan, graph: OpGraph, sizes: Sizes) -> tuple[int, ...]:
    """What an elastic program gets beside its arguments: how large each micro-batch is, space by space, and the sizes
    that have nothing to do with the batch."""
    parts = [_extent(part, space) for space in range(len(graph.batch_axes)) for part in plan.micro_batches]
    return (*parts, *[sizes[s] for s in graph.other_symbols])


def sizes_of(plan: Plan, graph: OpGraph, sizes: Sizes, parts: Parts) -> Sizes:
    """What every symbol is worth for these micro-batches."""
    found = dict(sizes)
    for space, symbols in enumerate(graph.batch_axes):
        found.update(dict.fromkeys(symbols, sum(_extent(plan.micro_batches[m], space) for m in parts)))
    return found


class _Maker:
    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        sizes: Sizes,
        operators: Operators,
        functions: Mapping[str, Callable[..., Any]],
        elastic: bool,
    ) -> None:
        self.plan, self.graph, self.sizes, self.operators, self.functions = plan, graph, sizes, operators, functions
        self.elastic = elastic
        self.all: Parts = tuple(range(len(plan.micro_batches)))
        self.program = Program(arguments=len(graph.graph.inputs), lanes=[lane.name for lane in plan.lanes], used=[])
        self.program.partitioned = plan.partitioned
        self.program.boxed = graph.graph.phase != "inference"
        self.where: dict[int, dict[int, _Var]] = {}
        self.slices: dict[tuple[str, Parts], str] = {}
        self.maker: dict[str, int | None] = {}  # variable -> step that made it; None: an argument or a buffer
        self.readers: dict[str, set[int]] = {}
        self.lent: dict[str, set[str]] = {}  # variable -> others that may be the same memory
        self.buffers: dict[str, Buffer] = {}
        self.layouts = image_layouts(graph) if operators.writes_into and not graph.graph.grad else {}
        self.cuts: dict[str, list[str]] = {}  # buffer of its own -> the lines that slice it
        self.batch = frozenset().union(*graph.batch_axes) if graph.batch_axes else frozenset()
        self.others = {s: sympy.Symbol(f"k{i}", integer=True) for i, s in enumerate(graph.other_symbols)}
        """What the code of an elastic program calls the sizes that have nothing to do with the batch."""
        if elastic and (self.layouts or graph.graph.grad):
            raise NotElastic("images, and gradients, want layouts that are known beforehand")

    def make(self, units: list[Unit], *, pieces: bool) -> Program:
        for value in self.graph.values:
            if value.input is not None:
                var = _Var(f"a{value.input}", self.all)
                self.where[value.index] = dict.fromkeys(self.all, var)
                self.maker[var.name] = None
                self.program.used.append(value.input)
        self._buffers(units, pieces)
        ends = {unit.tasks[-1]: s for s, unit in enumerate(units)}
        for unit in units:
            first = self.plan.tasks[unit.tasks[0]]
            title = ", then ".join(str(self.plan.tasks[t]) for t in unit.tasks)
            step = Step(tasks=unit.tasks, lane=first.lane, title=title, after=tuple(ends[a] for a in first.after))
            self.program.steps.append(step)
            if unit.fused:
                self._fused(step, first)
            else:
                self._plain(step, unit)
        self._end(pieces)
        self.operators.finish()
        self.before = happens_before(self.program.steps)
        self._free()
        self._place()
        self.program.used.sort()
        if self.elastic:
            names = [f"n{space}_{m}" for space in range(len(self.graph.batch_axes)) for m in self.all]
            names += map(str, self.others.values())
            self.program.start.insert(0, f"{', '.join(names)}, = a{self.program.arguments}")
            self.program.used.append(self.program.arguments)
            self.program.arguments += 1
        return self.program

    # Memory

    def _buffers(self, units: list[Unit], pieces: bool) -> None:
        if not self.operators.writes_into or self.elastic:
            return
        for v, buffers in choose_buffers(units, self.graph, self.all).items():
            layouts = [self._layout(self.graph.values[v], b.parts) for b in buffers]
            given = all(is_dense(size, stride) for size, stride in layouts)
            if not given or (pieces and buffers[0].own):  # a graph writes to the same place every time
                continue
            shape = self._shape(v)
            assert shape is not None
            for buffer, (size, stride) in zip(buffers, layouts, strict=True):
                buffer.size, buffer.stride = size, stride
                buffer.nbytes = torch.Size(size).numel() * shape.dtype.itemsize
                self.buffers[buffer.name] = buffer
                self.maker[buffer.name] = None
                if buffer.own:
                    new = partial(torch.empty_strided, size, stride, dtype=shape.dtype, device=shape.device)
                    self.program.names[f"new_{buffer.name}"] = new

    def _buffer(self, v: int, parts: Parts) -> Buffer | None:
        """The buffer into which these parts of a value are to be written."""
        return next((b for b in self.buffers.values() if b.value == v and set(parts) <= set(b.parts)), None)

    def _place(self) -> None:
        """Cuts the arena, now that it is known who uses what."""
        for buffer in self.buffers.values():
            if buffer.own:
                self._place_new(buffer)
        inner = [b for b in self.buffers.values() if not b.own]
        for buffer in inner:
            buffer.users = buffer.writers | self.readers.get(buffer.name, set())
        self.program.arena_bytes = plan_arena(inner, self.before)
        for buffer in inner:
            shape = self.graph.values[buffer.value].shape
            assert shape is not None
            view = View(offset=buffer.offset, size=buffer.size, stride=buffer.stride, dtype=shape.dtype)
            self.program.views[buffer.name] = view
        for (name, parts), slice_name in self.slices.items():
            if name in self.program.views:
                value, view = self.graph.values[self.buffers[name].value], self.program.views[name]
                for space, dim in enumerate(value.dims):
                    if dim is not None:
                        view = view.narrow(dim, *self._range(value, space, dim, self.buffers[name].parts, parts))
                self.program.views[slice_name] = view

    def _place_new(self, buffer: Buffer) -> None:
        """Memory of its own: made late, where that is safe, so that it does not add to what is needed before."""
        made = [f"{buffer.name} = new_{buffer.name}()", *self.cuts.get(buffer.name, [])]
        writers = [self.program.steps[w] for w in sorted(buffer.writers)]
        if any(w.lane != self.program.lanes[0] for w in writers) or self.program.partitioned:
            # The allocator may give out what the caller's lane has just let go: another lane must not write it yet.
            self.program.start[:0] = made
            return
        writers[0].before[:0] = made
        names = [buffer.name, *(s for (name, _), s in self.slices.items() if name == buffer.name)]
        writers[0].makes.extend(names)
        self.program.variables.extend(names)

    def _layout(self, value: Value, parts: Parts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self._shape(value.index)
        assert shape is not None
        sizes = self._sizes(parts)
        return tuple(concrete(e, sizes) for e in shape.size), strides_of(shape, sizes)

    def _shape(self, v: int) -> Shape | None:
        """The value's layout: the model's own, or that which the uncut graph would give it."""
        return self.layouts.get(v, self.graph.values[v].shape)

    # One task

    def _plain(self, step: Step, unit: Unit) -> None:
        runs = [unit.parts]
        if any(self._writes(op, v) and self.graph.values[v].input is not None for op in unit.ops for v in op.reads):
            # A join is a copy, and what is written to a copy of an argument is lost: only neighbours go together.
            runs = _neighbours(unit.parts)
        if not unit.writes and not any(written for op in unit.ops for _, written in op.accesses):
            step.call = "pass  # nobody uses what it makes"
            return
        for parts in runs[:-1]:
            call, box = self._call(step, unit, parts)
            step.before.append(f"{call}([{', '.join(box)}])")
        step.call, step.box = self._call(step, unit, runs[-1])

    def _call(self, step: Step, unit: Unit, parts: Parts) -> tuple[str, list[str]]:
        sizes = self._sizes(parts)
        numbers = [self._number(e, parts) for e in unit.symbols]
        inputs: list[Shape | sympy.Expr | OpaqueValue | None] = list(unit.symbols)
        strides: list[tuple[int, ...] | None] = [None] * len(unit.symbols)
        args, targets, outs, still, module = [], [], [], [], unit.module
        for v in unit.reads:
            name, held = self._fetch(v, parts, step, unit.ops)
            step.reads.append(name)
            shape = self._shape(v)
            args.append(name)
            if self._is_still(v):
                still.append(len(inputs))
            inputs.append(shape or self._thing(v))
            strides.append(None if shape is None else strides_of(shape, self._sizes(held)))
        for position, v in enumerate(unit.writes):
            buffer = self._buffer(v, parts)
            if buffer is None:
                targets.append(self._made(v, parts, step))
                continue
            var = _Var(buffer.name, buffer.parts)
            self.where.setdefault(v, {}).update(dict.fromkeys(parts, var))
            buffer.writers.add(len(self.program.steps) - 1)
            value = self.graph.values[v]
            outs.append(position)
            args.append(self._slice(value, var, parts, step))
            step.reads.append(args[-1])
            inputs.append(self._shape(v))
            strides.append(buffer.stride)
        if self.layouts:
            module = arrange(module, self._formats(unit, outs))
        if outs:
            module = write_into(module, outs)
        free = self.batch if unit.splittable else frozenset()
        name = ", then ".join(dict.fromkeys(op.name for op in unit.ops))
        made = {self.graph.values[v].storage for op in unit.ops for v in op.writes}
        writes = any(written and s >= 0 and s not in made for op in unit.ops for s, written in op.accesses)
        source = Source(
            module=module,
            inputs=tuple(inputs),
            still=frozenset(still),
            writes=writes,
            name=name,
            free=free,
            aliased=self._shares_memory(unit),
        )
        if self.elastic:
            call, conditions = self.operators.get_for_all(source, sizes)
            self.program.conditions.update((parts, holds) for holds in conditions)
        else:
            call = self.operators.get(source, sizes, tuple(strides))
        name = f"op{unit.ops[0].index}"
        if self.program.names.get(name, call) != call:  # another size of the same operator, compiled apart
            name = f"{name}_{len(self.program.names)}"
        self.program.names[name] = call
        if not all(self.graph.values[v].fresh for op in unit.ops for v in op.writes):
            self._lend(targets)
        assigned = "".join(f"{t}, " for t in targets).rstrip()
        return (f"{assigned} = " if assigned else "") + name, numbers + args

    def _shares_memory(self, unit: Unit) -> bool:
        """Whether two of the graph's inputs that it reads are the same memory, which it writes."""
        written = {s for op in unit.ops for s, writes in op.accesses if writes}
        inputs = [self.graph.values[v].storage for v in unit.reads if self.graph.values[v].input is not None]
        return any(inputs.count(storage) > 1 for storage in written)

    def _thing(self, v: int) -> OpaqueValue | None:
        given = self.graph.values[v].input
        return None if given is None else self.graph.graph.inputs[given].opaque

    def _formats(self, unit: Unit, outs: list[int]) -> dict[int, torch.memory_format]:
        """Of the images among a unit's own results. An operator's result follows its inputs: it must not, here."""
        found = {}
        for position, v in enumerate(unit.writes):
            shape = self.graph.values[v].shape
            if position not in outs and shape is not None and len(shape.size) == 4:
                found[position] = torch.channels_last if v in self.layouts else torch.contiguous_format
        return found

    def _is_still(self, v: int) -> bool:
        value, inputs = self.graph.values[v], self.graph.graph.inputs
        return value.input is not None and inputs[value.input].static_address and not value.carries_batch

    def _fused(self, step: Step, task: Task) -> None:
        items = [(self.graph.by_name[i.op], i.micro_batches) for i in task.items]
        reads, writes = fusion_values(self.graph, items)
        mutators: dict[tuple[int, Parts], Op] = {}
        for op, parts in items:
            mutators.update({(v, parts): op for v in op.reads if self._writes(op, v) or (v, parts) not in mutators})
        args = [self._fetch(v, parts, step, (mutators[v, parts],))[0] for v, parts in reads]
        step.reads.extend(args)
        name = f"f{step.tasks[0]}"
        assert task.replace is not None
        self.program.names[name] = self.functions[task.replace]
        self.program.names["unpack"] = unpack
        targets = [self._made(v, parts, step) for v, parts in writes]
        self._lend(targets)
        result = f"unpack({name}({', '.join(args)}), {len(writes)}, {name})"
        step.call = ("".join(f"{t}, " for t in targets).rstrip() + " = " if targets else "") + result

    def _made(self, v: int, parts: Parts, step: Step) -> str:
        suffix = "" if parts == self.all else "_" + "_".join(map(str, parts))
        var = _Var(f"v{v}{suffix}", parts)
        places = self.where.setdefault(v, {})
        for m in parts:
            places[m] = var
        self._new(var.name)
        return var.name

    def _new(self, name: str) -> None:
        """A variable that the step at hand makes."""
        self.maker[name] = len(self.program.steps) - 1
        self.program.steps[-1].makes.append(name)
        self.program.variables.append(name)

    def _lend(self, targets: list[str]) -> None:
        """What the step at hand makes may be a view of what it reads."""
        here = len(self.program.steps) - 1
        for name, readers in self.readers.items():
            if here in readers:
                self.lent.setdefault(name, set()).update(targets)

    # Values where they are needed

    def _fetch(self, v: int, parts: Parts, step: Step | None, ops: tuple[Op, ...]) -> tuple[str, Parts]:
        """The variable in which a task finds value `v` for micro-batches `parts`, and what its memory holds."""
        value = self.graph.values[v]
        places = self.where[v]
        writes = any(self._writes(op, v) for op in ops)
        if not value.carries_batch:
            var = places[parts[0]]
            if writes and len(parts) == len(self.all):
                self.where[v] = dict.fromkeys(self.all, var)  # every part sees what was written
            return self._use(var.name, step), parts
        pieces: list[tuple[_Var, Parts]] = []
        for m in parts:
            var = places[m]
            if pieces and pieces[-1][0] == var and pieces[-1][1][-1] + 1 == m:
                pieces[-1] = (var, (*pieces[-1][1], m))
            else:
                pieces.append((var, (m,)))
        if value.merged and pieces != [(pieces[0][0], pieces[0][0].parts)]:
            return self._regroup(value, pieces, parts, step), parts
        names = [self._slice(value, var, held, step) for var, held in pieces]
        if len(names) == 1:
            return names[0], pieces[0][0].parts
        (dim, *more) = [d for d in value.dims if d is not None]
        assert not more, "a value that carries both rows and requests can't be joined"
        join = Join.along(dim, self._layout(value, parts)[1])
        return self._join(value, names, join, parts, step, keep=writes), parts

    def _regroup(self, value: Value, pieces: list[tuple[_Var, Parts]], parts: Parts, step: Step | None) -> str:
        """A copy of rows that lie behind another dim."""
        if self.elastic:
            raise NotElastic("rows that lie behind another dim are copied by their number")
        ((space, dim),) = ((space, dim) for space, dim in enumerate(value.dims) if dim is not None)
        whole = next(iter(self.graph.batch_axes[space]))
        assert value.shape is not None
        behind = concrete(value.shape.size[dim], self.sizes) // self.sizes[whole]
        ranges = [(_rows(self.plan, space, [m for m in var.parts if m < held[0]]), _rows(self.plan, space, held))
                  for var, held in pieces]  # fmt: skip
        names = [self._use(var.name, step) for var, _ in pieces]
        regroup = Regroup.along(dim, self._layout(value, parts)[1], behind, tuple(ranges))
        return self._join(value, names, regroup, parts, step, keep=False)

    def _slice(self, value: Value, var: _Var, parts: Parts, step: Step | None) -> str:
        self._use(var.name, step)
        if var.parts == parts:
            return var.name
        key = (var.name, parts)
        if key not in self.slices:
            name = self.slices[key] = f"{var.name}_{'_'.join(map(str, parts))}"
            buffer = self.buffers.get(var.name)
            if buffer is not None and not buffer.own:
                return name  # cut beforehand, once
            line = f"{name} = {var.name}"
            for space, dim in enumerate(value.dims):
                if dim is not None:
                    start, length = self._range(value, space, dim, var.parts, parts)
                    line += f".narrow({dim}, {start}, {length})"
            if buffer is not None:
                self.cuts.setdefault(buffer.name, []).append(line)
                return name
            maker = self.maker[var.name]
            (self.program.start if maker is None else self.program.steps[maker].behind).append(line)
            if maker is not None:
                self.program.variables.append(name)
                self.program.steps[maker].makes.append(name)
        return self.slices[key]

    def _join(
        self,
        value: Value,
        names: list[str],
        join: Callable[..., torch.Tensor],
        parts: Parts,
        step: Step | None,
        keep: bool,
    ) -> str:
        name = f"j{value.index}_{len(self.program.names)}"
        assert value.shape is not None
        size, _ = self._layout(value, parts)
        self.program.names[f"join_{name}"] = join
        line = f"{name} = join_{name}(({', '.join(names)}{',' * (len(names) == 1)}))"
        self.program.joined_bytes += torch.Size(size).numel() * value.shape.dtype.itemsize
        if step is None:
            self.program.end.append(line)
            self.program.final_reads.extend(names)
            return name
        step.before.append(line)
        step.reads.extend(names)
        self._new(name)
        self._use(name, step)
        if keep:  # the operator writes into the joined copy: from here on, that is the value
            var = _Var(name, parts)
            self.where[value.index] = {**self.where[value.index], **dict.fromkeys(parts, var)}
        return name

    def _use(self, name: str, step: Step | None) -> str:
        self.readers.setdefault(name, set()).add(-1 if step is None else len(self.program.steps) - 1)
        return name

    def _writes(self, op: Op, v: int) -> bool:
        storage = self.graph.values[v].storage
        return any(s == storage and written for s, written in op.accesses) and v not in op.writes

    # Sizes

    def _sizes(self, parts: Parts) -> Sizes:
        return sizes_of(self.plan, self.graph, self.sizes, parts)

    def _range(self, value: Value, space: int, dim: int, held: Parts, parts: Parts) -> tuple[Any, Any]:
        """Where the parts begin in what is held, and how long they are: numbers, or code that gives them."""
        assert value.shape is not None
        size = value.shape.size[dim]
        before = tuple(m for m in held if m < parts[0])
        if self.elastic:
            each = per_row(size, self.graph.batch_axes[space])
            if each is None or each.free_symbols & self.batch:
                raise NotElastic(f"{size} is no multiple of the batch")
            code = self._code(each, ())
            return f"({code}) * {_sum(space, before)}", f"({code}) * {_sum(space, parts)}"
        each = concrete(size, self.sizes) // self.sizes[next(iter(self.graph.batch_axes[space]))]
        return _rows(self.plan, space, before) * each, _rows(self.plan, space, parts) * each

    def _number(self, expr: sympy.Expr, parts: Parts) -> str:
        """A size for these micro-batches: a number, or code that gives it."""
        return self._code(expr, parts) if self.elastic else str(concrete(expr, self._sizes(parts)))

    def _code(self, expr: sympy.Expr, parts: Parts) -> str:
        """Of an elastic program: what an expression comes to for these micro-batches."""
        sums = {s: sympy.Symbol(_sum(k, parts)) for k, space in enumerate(self.graph.batch_axes) for s in space}
        names = {**self.others, **sums}
        found = expr.xreplace(names)
        polynomial = found.is_polynomial(*found.free_symbols) and expr.free_symbols <= names.keys()
        if not polynomial or not all(a.is_Integer for a in found.atoms(sympy.Number)):
            raise NotElastic(f"a size of {expr}")
        return str(found)

    # The end

    def _end(self, pieces: bool) -> None:
        whole = {v: self._fetch(v, self.all, None, ())[0] for v in dict.fromkeys(self.graph.outputs)}
        results = [whole[v] for v in self.graph.outputs]  # what is returned twice is one tensor
        program = self.program
        program.final_reads.extend(results)
        caller = None if program.partitioned else program.lanes[0]
        device = self.graph.graph.device.type
        for name, v in {name: v for v, name in whole.items()}.items():
            maker, shape = self.maker.get(name), self.graph.values[v].shape
            if maker is None:
                continue
            if pieces:  # a graph made it, in memory of its own
                program.end.append(f"{name} = {name}.clone()")
            elif program.steps[maker].lane != caller and (shape is None or shape.device.type == device):
                program.made_aside.append(name)
        if self.graph.epilogue is None:
            program.results = "(" + "".join(f"{r}, " for r in results).rstrip() + ")"
            return
        numbers = [self._number(e, self.all) for e in self.graph.epilogue_symbols]
        program.names["ending"] = self.graph.epilogue.forward
        program.results = f"ending({', '.join(numbers + results)})"

    def _free(self) -> None:
        """Lets each variable go on its own lane, at the first step that follows all its readers."""
        by_lane: dict[str, list[int]] = {}
        for s, step in enumerate(self.program.steps):
            by_lane.setdefault(step.lane, []).append(s)
        slices: dict[str, list[str]] = {}
        for (name, _), part in self.slices.items():
            slices.setdefault(name, []).append(part)
        for name, maker in self.maker.items():
            lane = self._lane(name)
            readers = self._all_readers(name, lane)
            if lane is None or -1 in readers:
                continue
            if maker is not None:
                readers.add(maker)
            elif name in self.buffers:
                readers |= self.buffers[name].writers
            needed = 0
            for r in readers:
                needed |= 1 << r
            names = [name, *slices.get(name, [])]  # which keep it alive
            for s in by_lane.get(lane, []):
                known = self.before[s]
                if needed & ~known == 0:
                    self.program.steps[s].frees_first.extend(names)
                    break
                if needed & ~(known | 1 << s) == 0:
                    self.program.steps[s].frees.extend(names)
                    break

    def _lane(self, name: str) -> str | None:
        """The lane to which the memory of a variable goes back, if it is to be let go."""
        maker = self.maker[name]
        if maker is not None:
            return self.program.steps[maker].lane
        made_by_caller = self.buffers[name].own if name in self.buffers else self.program.boxed
        return self.program.lanes[0] if made_by_caller and not self.program.partitioned else None

    def _all_readers(self, name: str, lane: str | None) -> set[int]:
        """With those of what may be the same memory, if some of that is let go on another lane than this variable."""
        same, waiting = {name}, [name]
        while waiting:
            more = self.lent.get(waiting.pop(), set()) - same
            same |= more
            waiting.extend(more)
        apart = any(self._lane(other) != lane for other in same)
        return set().union(*(self.readers.get(n, ()) for n in (same if apart else {name})))


def _neighbours(parts: Parts) -> list[Parts]:
    """Cut wherever a micro-batch is left out."""
    found: list[Parts] = []
    for m in parts:
        if found and found[-1][-1] + 1 == m:
            found[-1] = (*found[-1], m)
        else:
            found.append((m,))
    return found


def _sum(space: int, parts: Parts) -> str:
    return f"({' + '.join(f'n{space}_{m}' for m in parts) or 0})"


def _rows(plan: Plan, space: int, parts: Iterable[int]) -> int:
    return sum(_extent(plan.micro_batches[m], space) for m in parts)


def _extent(part: MicroBatch, space: int) -> int:
    if space == 0 or part.requests is None:
        return part.size
    return part.requests[1] - part.requests[0]
