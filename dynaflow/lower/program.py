"""A plan worked out to single steps: which function each task calls, on which variables.

Splitting is by view, made once where the value is made. Joining happens where a task needs the value of
several micro-batches that were made apart. Who owns a variable, and when it may be let go, follows from
happens-before: a variable dies on the lane that made it, once all its readers are known to have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaflow.capture.ops import Op, OpGraph, Value
from dynaflow.capture.probe import concrete
from dynaflow.lower.operators import Operators, Sizes, Source
from dynaflow.run.values import Join, unpack
from dynaflow.schedule.context import fusion_values
from dynaflow.schedule.plan import MicroBatch, Plan, Task

Parts = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Step:
    """One task as lines of code."""

    task: int
    lane: str
    title: str
    waits: tuple[int, ...]
    before: list[str] = field(default_factory=list)
    call: str = ""
    after: list[str] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)
    frees_first: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Program:
    """Straight-line code, by lanes. The first lane is the caller's own."""

    arguments: int
    lanes: list[str]
    used: list[int]
    """Positions of the arguments that some step uses."""
    start: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    results: str = "()"
    made_aside: list[str] = field(default_factory=list)
    """Results that were made on a lane other than the caller's."""
    names: dict[str, Any] = field(default_factory=dict)
    """What the code refers to: operators, joins."""
    variables: list[str] = field(default_factory=list)
    joined_bytes: int = 0


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
) -> Program:
    return _Maker(plan, graph, sizes, operators, functions).make()


class _Maker:
    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        sizes: Sizes,
        operators: Operators,
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.plan, self.graph, self.sizes, self.operators, self.functions = plan, graph, sizes, operators, functions
        self.all: Parts = tuple(range(len(plan.micro_batches)))
        self.program = Program(arguments=len(graph.graph.inputs), lanes=[lane.name for lane in plan.lanes], used=[])
        self.where: dict[int, dict[int, _Var]] = {}
        self.slices: dict[tuple[str, Parts], str] = {}
        self.maker: dict[str, int | None] = {}  # variable -> step that made it; None: an argument
        self.readers: dict[str, set[int]] = {}
        self.family: dict[str, list[str]] = {}  # variable -> its slices, which keep it alive
        self.batch = frozenset().union(*graph.spaces) if graph.spaces else frozenset()

    def make(self) -> Program:
        for value in self.graph.values:
            if value.input is not None:
                var = _Var(f"a{value.input}", self.all)
                self.where[value.index] = dict.fromkeys(self.all, var)
                self.maker[var.name] = None
                self.program.used.append(value.input)
        for index, task in enumerate(self.plan.tasks):
            step = Step(task=index, lane=task.lane, title=str(task), waits=task.after)
            self.program.steps.append(step)
            if task.replace is None:
                self._plain(step, task)
            else:
                self._fused(step, task)
        self._end()
        self._free()
        self.program.used.sort()
        return self.program

    # One task

    def _plain(self, step: Step, task: Task) -> None:
        (item,) = task.items
        op = self.graph.by_name[item.op]
        runs = [item.micro_batches]
        if any(self._writes(op, v) and self.graph.values[v].input is not None for v in op.reads):
            # A join is a copy, and what is written to a copy of an argument is lost: only neighbours go together.
            runs = _neighbours(item.micro_batches)
        for parts in runs[:-1]:
            step.before.append(self._call(step, op, parts))
        step.call = self._call(step, op, runs[-1])

    def _call(self, step: Step, op: Op, parts: Parts) -> str:
        sizes = self._sizes(parts)
        numbers = [str(concrete(e, sizes)) for e in op.symbols]
        reads = [self._fetch(v, parts, step, op) for v in op.reads]
        free = self.batch if op.splittable else frozenset()
        shapes = tuple(self.graph.values[v].shape for v in op.reads)
        source = Source(module=op.module, symbols=op.symbols, shapes=shapes, free=free)
        name = f"op{op.index}"
        call = self.operators.get(source, sizes)
        if self.program.names.get(name, call) != call:  # another size of the same operator, compiled apart
            name = f"op{op.index}_{len(self.program.names)}"
        self.program.names[name] = call
        targets = "".join(f"{self._made(v, parts, step)}, " for v in op.writes)
        return (f"{targets.rstrip()} = " if targets else "") + f"{name}({', '.join(numbers + reads)})"

    def _fused(self, step: Step, task: Task) -> None:
        items = [(self.graph.by_name[i.op], i.micro_batches) for i in task.items]
        reads, writes = fusion_values(self.graph, items)
        mutators: dict[tuple[int, Parts], Op] = {}
        for op, parts in items:
            mutators.update({(v, parts): op for v in op.reads if self._writes(op, v) or (v, parts) not in mutators})
        args = [self._fetch(v, parts, step, mutators[v, parts]) for v, parts in reads]
        name = f"f{step.task}"
        assert task.replace is not None
        self.program.names[name] = self.functions[task.replace]
        self.program.names["unpack"] = unpack
        targets = "".join(f"{self._made(v, parts, step)}, " for v, parts in writes)
        result = f"unpack({name}({', '.join(args)}), {len(writes)}, {name})"
        step.call = (f"{targets.rstrip()} = " if targets else "") + result

    def _made(self, v: int, parts: Parts, step: Step) -> str:
        suffix = "" if parts == self.all else "_" + "_".join(map(str, parts))
        var = _Var(f"v{v}{suffix}", parts)
        places = self.where.setdefault(v, {})
        for m in parts:
            places[m] = var
        self._new(var.name, step)
        return var.name

    def _new(self, name: str, step: Step) -> None:
        self.maker[name] = step.task
        self.program.variables.append(name)

    # Values where they are needed

    def _fetch(self, v: int, parts: Parts, step: Step | None, op: Op | None) -> str:
        """The expression under which a task finds value `v` for micro-batches `parts`."""
        value = self.graph.values[v]
        places = self.where[v]
        writes = op is not None and self._writes(op, v)
        if not value.carries_batch:
            var = places[parts[0]]
            if writes and len(parts) == len(self.all):
                self.where[v] = dict.fromkeys(self.all, var)  # every part sees what was written
            return self._use(var.name, step)
        pieces: list[tuple[_Var, Parts]] = []
        for m in parts:
            var = places[m]
            if pieces and pieces[-1][0] == var and pieces[-1][1][-1] + 1 == m:
                pieces[-1] = (var, (*pieces[-1][1], m))
            else:
                pieces.append((var, (m,)))
        names = [self._slice(value, var, held, step) for var, held in pieces]
        if len(names) == 1:
            return names[0]
        return self._join(value, names, parts, step, keep=writes)

    def _slice(self, value: Value, var: _Var, parts: Parts, step: Step | None) -> str:
        self._use(var.name, step)
        if var.parts == parts:
            return var.name
        key = (var.name, parts)
        if key not in self.slices:
            name = self.slices[key] = f"{var.name}_{'_'.join(map(str, parts))}"
            line = f"{name} = {var.name}"
            for space, dim in enumerate(value.dims):
                if dim is not None:
                    start, length = self._range(value, space, dim, var.parts, parts)
                    line += f".narrow({dim}, {start}, {length})"
            maker = self.maker[var.name]
            (self.program.start if maker is None else self.program.steps[maker].after).append(line)
            self.family.setdefault(var.name, []).append(name)
            if maker is not None:
                self.program.variables.append(name)
        return self.slices[key]

    def _join(self, value: Value, names: list[str], parts: Parts, step: Step | None, keep: bool) -> str:
        name = f"j{value.index}_{len(self.program.names)}"
        assert value.shape is not None
        (dim, *more) = [d for d in value.dims if d is not None]
        assert not more, "a value that carries both rows and requests can't be joined"
        sizes = self._sizes(parts)
        strides = [concrete(e, sizes) for e in value.shape.stride]
        join = Join.along(dim, strides)
        self.program.names[f"join_{name}"] = join
        line = f"{name} = join_{name}(({', '.join(names)}))"
        count = 1
        for e in value.shape.size:
            count *= concrete(e, sizes)
        self.program.joined_bytes += count * value.shape.dtype.itemsize
        if step is None:
            self.program.end.append(line)
            return name
        step.before.append(line)
        self._new(name, step)
        self._use(name, step)
        if keep:  # the operator writes into the joined copy: from here on, that is the value
            var = _Var(name, parts)
            self.where[value.index] = {**self.where[value.index], **dict.fromkeys(parts, var)}
        return name

    def _use(self, name: str, step: Step | None) -> str:
        self.readers.setdefault(name, set()).add(-1 if step is None else step.task)
        return name

    def _writes(self, op: Op, v: int) -> bool:
        storage = self.graph.values[v].storage
        return any(s == storage and written for s, written in op.touches) and v not in op.writes

    # Sizes

    def _sizes(self, parts: Parts) -> Sizes:
        """What every symbol is worth for these micro-batches."""
        sizes = dict(self.sizes)
        for space, symbols in enumerate(self.graph.spaces):
            count = sum(_extent(self.plan.micro_batches[m], space) for m in parts)
            sizes.update(dict.fromkeys(symbols, count))
        return sizes

    def _range(self, value: Value, space: int, dim: int, held: Parts, parts: Parts) -> tuple[int, int]:
        assert value.shape is not None
        whole = next(iter(self.graph.spaces[space]))
        per_row = concrete(value.shape.size[dim], self.sizes) // self.sizes[whole]
        before = [m for m in held if m < parts[0]]
        start = sum(_extent(self.plan.micro_batches[m], space) for m in before)
        length = sum(_extent(self.plan.micro_batches[m], space) for m in parts)
        return start * per_row, length * per_row

    # The end

    def _end(self) -> None:
        whole = {v: self._fetch(v, self.all, None, None) for v in dict.fromkeys(self.graph.outputs)}
        results = [whole[v] for v in self.graph.outputs]  # what is returned twice is one tensor
        program = self.program
        caller = program.lanes[0]
        for name in results:
            maker = self.maker.get(name)
            if maker is not None and program.steps[maker].lane != caller:
                program.made_aside.append(name)
        if self.graph.ending is None:
            program.results = "(" + "".join(f"{r}, " for r in results).rstrip() + ")"
            return
        numbers = [str(concrete(e, self.sizes)) for e in self.graph.ending_symbols]
        program.names["ending"] = self.graph.ending.forward
        program.results = f"ending({', '.join(numbers + results)})"

    def _free(self) -> None:
        """Lets each variable go on its own lane, at the first step that follows all its readers."""
        before = self.plan.happens_before
        by_lane: dict[str, list[Step]] = {}
        for step in self.program.steps:
            by_lane.setdefault(step.lane, []).append(step)
        for name, maker in self.maker.items():
            readers = self.readers.get(name, set())
            if maker is None or -1 in readers:
                continue
            needed = 0
            for r in readers | {maker}:
                needed |= 1 << r
            names = [name, *self.family.get(name, [])]
            for step in by_lane[self.program.steps[maker].lane]:
                known = before[step.task]
                if needed & ~known == 0:
                    step.frees_first.extend(names)
                    break
                if needed & ~(known | 1 << step.task) == 0:
                    step.frees.extend(names)
                    break


def _neighbours(parts: Parts) -> list[Parts]:
    """Cut wherever a micro-batch is left out."""
    found: list[Parts] = []
    for m in parts:
        if found and found[-1][-1] + 1 == m:
            found[-1] = (*found[-1], m)
        else:
            found.append((m,))
    return found


def _extent(part: MicroBatch, space: int) -> int:
    if space == 0 or part.requests is None:
        return part.size
    return part.requests[1] - part.requests[0]
