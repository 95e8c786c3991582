"""Lowers a checked plan: from a plan to an Executable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from dynaflow._torch import Boxed
from dynaflow.capture.captured_graph import CapturedGraph, Input, is_named
from dynaflow.core.plan import Plan, Task, operator_by_operator
from dynaflow.core.stats import Stats
from dynaflow.lower.bind import NotElastic
from dynaflow.lower.compile_ops import CompilerFailed, Condition, Operators, Sizes, Source
from dynaflow.lower.emit import Code, emit, event_count
from dynaflow.lower.executable import Entry, Executable, Recordable, tasks_of, with_code
from dynaflow.lower.ir import Program
from dynaflow.lower.passes import make_program
from dynaflow.lower.segments import make_segments
from dynaflow.lower.shape_polymorphic import Elastic
from dynaflow.lower.timing import Marks, make_marks, marked_around, whole_marks
from dynaflow.lower.whole_graph import as_one_graph
from dynaflow.partition.op_graph import OpGraph
from dynaflow.runtime.arena import Arena, BlockPool
from dynaflow.runtime.cpu_lanes import LanePool, ThreadRun
from dynaflow.runtime.cuda_graphs import GraphedFunction, GraphPool
from dynaflow.runtime.cuda_lanes import StreamPool, StreamRun
from dynaflow.schedule.fusion import fusion_values

Made = TypeVar("Made")
OnTask = Callable[[Task, str], None]
Functions = Mapping[str, Callable[..., Any]]
CudaGraph = Literal["plan", "pieces"] | None

NO_CAPTURE = "no_capture"
"""The tag of operators that stay out of CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A plan to be lowered, and how."""

    plan: Plan
    graph: OpGraph
    sizes: Sizes
    functions: Functions
    chains: bool
    marked: bool = False
    """For a recording."""
    row: bool = False
    """All calls run one after the other on one lane."""
    warm: bool = False
    """Its kernels have run before, so the first call may be captured."""

    @property
    def device(self) -> torch.device:
        return self.graph.graph.device


def _capturable(given: Input) -> bool:
    """Whether a CUDA graph can read an input: it is on the GPU, or pinned at a static address."""
    assert given.shape is not None
    return given.shape.device.type == "cuda" or (given.pinned and given.static_address)


class Lowerer:
    """Lowers the plans of one compiled model; owns its operators, threads, streams and graphs."""

    def __init__(
        self,
        operators: Operators,
        on_task: OnTask | None,
        stats: Stats,
        cudagraph: CudaGraph = None,
        static_inputs: Sequence[str] = (),
    ) -> None:
        self.operators, self.on_task, self.stats = operators, on_task, stats
        self.cudagraph, self.static_inputs = cudagraph, static_inputs
        self.chains = on_task is None
        """Fuse tasks that run back to back on a lane; not with `on_task`, which is called for each task."""
        self.threads = LanePool()
        self.streams = StreamPool()
        self.blocks = BlockPool()
        self.graphs = GraphPool(stats)

    def lower(self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Functions) -> Executable:
        return self._lower(_Job(plan=plan, graph=graph, sizes=sizes, functions=functions, chains=self.chains))

    def _lower(self, job: _Job) -> Executable:
        outside = frozenset(op.name for op in job.graph.ops if NO_CAPTURE in op.tags)
        if self.captures(job) and (self.cudagraph == "pieces" or outside):
            return self._in_pieces(job, outside)
        executable = self._uncut(job) if job.plan.sequential else self._cut(job)[0]
        return self._as_graph(job, executable) if self.captures(job) else executable

    def _cut(self, job: _Job, elastic: bool = False) -> tuple[Executable, Program]:
        program, plan = self._program(job, elastic=elastic)
        marks = make_marks(plan, job.graph, job.sizes, program) if job.marked else None
        code = self._emit(program, job.device, marks)
        run = self._runnable(plan, program, code, job.device, self._blocks_for(job))
        remade = lambda row: self._cut(replace(job, marked=True, row=row), elastic)[0]  # noqa: E731
        return self._executable(job, program, code, run, marks, remade), program

    def _program(self, job: _Job, **more: Any) -> tuple[Program, Plan]:
        """And the plan by whose lanes it runs."""
        plan, graph, functions = job.plan, job.graph, job.functions
        make = partial(make_program, plan, graph, job.sizes, self.operators, functions, chains=job.chains, **more)
        program = _until_compiled(make)
        return (program.on_one_lane(), plan.on_one_lane(program.lanes[0])) if job.row else (program, plan)

    def elastic(self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Functions) -> Elastic | None:
        """The plan for micro-batches of all sizes; None if that is not possible."""
        job = _Job(plan=plan, graph=graph, sizes=sizes, functions=functions, chains=self.chains)
        if self.cudagraph is not None or not graph.batch_axes:  # without a batch there is nothing to resize
            return None
        if plan.sequential:
            return self._elastic_sequence(job)
        try:
            executable, program = self._cut(job, elastic=True)
        except NotElastic:
            return None
        return Elastic(executable, program, functions, lambda plan, sizes: self.lower(plan, graph, sizes, functions))

    def _elastic_sequence(self, job: _Job) -> Elastic:
        conditions: frozenset[Condition] = frozenset()
        if (source := self._whole(job.graph.graph, _writes_inputs(job.graph))) is None:
            run = self.operators.as_it_is(job.graph.graph.gm)
        else:

            def compiled() -> tuple[Boxed, frozenset[Condition]]:
                found = self.operators.get_for_all(source, job.sizes, uncut=True)
                self.operators.finish()
                return found

            run, conditions = _until_compiled(compiled)

        def run_whole(args: list[Any]) -> Any:
            args.pop()  # the cuts
            return run(args)

        executable = self._whole_executable(job, run_whole)
        program = Program(
            arguments=0, inputs=(), lanes=(), conditions=frozenset(((0,), holds) for holds in conditions)
        )  # fmt: skip
        return Elastic(executable, program, job.functions, lambda plan, sizes: executable)

    def _uncut(self, job: _Job) -> Executable:
        return self._whole_executable(job, self.whole(job.graph.graph, job.sizes, _writes_inputs(job.graph)))

    def _whole_executable(self, job: _Job, run: Boxed) -> Executable:
        """The executable of the uncut graph."""
        plan, graph = job.plan, job.graph
        marks = whole_marks(plan, graph, job.sizes)
        timed = Executable(plan=plan, graph=graph, entry=Entry(marked_around(run, job.device)), marks=marks)
        if job.marked:
            return timed
        return Executable(plan=plan, graph=graph, entry=Entry(run), recordable=Recordable(lambda row: timed))

    def _executable(
        self,
        job: _Job,
        program: Program,
        code: Code,
        run: Boxed,
        marks: Marks | None,
        remade: Callable[[bool], Executable],
    ) -> Executable:
        """`remade`: makes the variant that takes marks."""
        self.stats.arena_bytes = program.arena_bytes
        return Executable(
            plan=with_code(job.plan, code), graph=job.graph, entry=Entry(run), code=code,
            joined_bytes=program.joined_bytes, all_values=lambda args: self._all_values(job, args), marks=marks,
            recordable=Recordable(remade) if marks is None else None,
        )  # fmt: skip

    def _emit(self, program: Program, device: torch.device, marks: Marks | None = None) -> Code:
        return emit(program, cuda=device.type == "cuda", hook=self.on_task is not None, marks=marks)

    def _blocks_for(self, job: _Job) -> BlockPool | None:
        """None in training: memory that a pass does not use must be free for saved activations."""
        return self.blocks if job.graph.graph.phase == "inference" else None

    def _runnable(
        self, plan: Plan, program: Program, code: Code, device: torch.device, blocks: BlockPool | None
    ) -> Boxed:
        """The code with its buffers, and with lanes to run on."""
        run = code.run
        code.names["on_task"] = self._hook(plan)
        if len(plan.lanes) > 1 or plan.partitioned:
            if device.type == "cuda":
                run = StreamRun(run, device, plan.lanes, event_count(program), self.streams, self.graphs.streams)
            else:
                shares = tuple(lane.sms for lane in plan.lanes) if plan.partitioned else ()
                code.names["new_call"] = partial(ThreadRun, self.threads, shares)
        if not program.views:
            return run
        arena = Arena([view for _, view in program.views], program.arena_bytes, device, blocks)

        def with_memory(args: list[Any]) -> Any:
            block, memory = arena.take()
            try:
                return run(args, memory)
            finally:
                arena.give(block)

        return with_memory

    def _all_values(self, job: _Job, args: list[Any]) -> dict[int, Any]:
        plan, graph = job.plan, job.graph
        hidden: set[int] = set()  # values that stay inside a fusion
        for task in plan.tasks:
            if task.replace:
                items = [(graph.by_name[i.op], i.micro_batches) for i in task.items]
                shown = set(fusion_values(graph, items)[1])
                hidden |= {v for op, parts in items for v in op.writes if (v, parts) not in shown}
        inner = tuple(v for op in graph.ops for v in op.writes if v not in hidden)
        every = replace(graph, outputs=inner, epilogue=None)
        make = partial(make_program, plan, every, job.sizes, self.operators, job.functions, chains=False)
        program = _until_compiled(make)
        code = self._emit(program, job.device)
        results = self._runnable(plan, program, code, job.device, self._blocks_for(job))(args)
        return dict(zip(inner, results, strict=True))

    def whole(self, graph: CapturedGraph, sizes: Sizes, writes: bool = True) -> Boxed:
        """A function of the uncut graph. `writes`: it may write to its inputs."""
        if (source := self._whole(graph, writes)) is None:
            return self.operators.as_it_is(graph.gm)

        def compiled() -> Boxed:
            call = self.operators.get(source, sizes)
            self.operators.finish()
            return call

        return _until_compiled(compiled)

    def _whole(self, graph: CapturedGraph, writes: bool) -> Source | None:
        """The uncut graph for the compiler; None if it is not compiled."""
        if self.operators.mode == "eager" or any(i.kind is None or i.alias_set is not None for i in graph.inputs):
            return None
        inputs = tuple(i.kind for i in graph.inputs)
        static = frozenset(n for n, i in enumerate(graph.inputs) if i.static_address)
        return Source(
            module=graph.gm, inputs=inputs, static=static, tensors=False, writes=writes, name="the uncut graph",
            free=frozenset(),
        )  # fmt: skip

    # CUDA graphs

    def captures(self, job: _Job) -> bool:
        if self.cudagraph is None or job.device.type != "cuda" or self.on_task is not None:
            return False
        elsewhere = [i.name for i in self._used(job) if i.shape is not None and not _capturable(i)]
        if job.graph.graph.grad or job.graph.graph.phase != "inference":
            return self._refuse("the graph is captured with gradients on: use torch.no_grad() or inference_mode()")
        if elsewhere:
            return self._refuse(f"input {elsewhere[0]!r} is not on the GPU")
        return True

    def _refuse(self, reason: str) -> bool:
        if reason not in self.stats.capture_failures:
            self.stats.capture_failures.append(reason)
            warnings.warn(f"dynaflow: running without CUDA graphs: {reason}", stacklevel=2)
        return False

    def _used(self, job: _Job) -> list[Input]:
        return [job.graph.graph.inputs[v.input] for v in job.graph.values if v.input is not None]

    def _places(self, job: _Job) -> tuple[list[int], list[int]]:
        """Positions of the inputs that a graph copies in, and of those that it uses in place."""
        copied: list[int] = []
        static: list[int] = []
        for value in job.graph.values:
            if value.input is None or value.shape is None:
                continue
            given = job.graph.graph.inputs[value.input]
            promised = any(is_named(given.name, name) for name in self.static_inputs)
            stays = given.static_address or promised or value.storage in job.graph.written
            (static if stays else copied).append(value.input)
        return copied, static

    def _as_graph(self, job: _Job, executable: Executable) -> Executable:
        copied, static = self._places(job)
        return as_one_graph(
            executable, self.graphs, self.blocks, copied=copied, static=static, warm=job.warm,
            pieces=lambda outside: self._in_pieces(job, outside),
            remade=lambda row, warm: self._lower(replace(job, marked=True, row=row, warm=warm)),
        )  # fmt: skip

    def _in_pieces(self, job: _Job, outside: frozenset[str]) -> Executable:
        """The plan with all steps captured in segments, apart from the operators `outside`."""
        if job.plan.sequential:
            if not outside:
                return self._as_graph(job, self._uncut(job))
            job = replace(job, plan=operator_by_operator(job.plan, job.graph.by_name))
        program, plan = self._program(job, pieces=True, outside=outside)
        held_out = frozenset(
            s for s, step in enumerate(program.steps)
            if any(item.op in outside for t in step.tasks for item in plan.tasks[t].items)
        )  # fmt: skip
        segments = make_segments(program, held_out)
        marks = make_marks(plan, job.graph, job.sizes, program, segments) if job.marked else None
        code = emit(program, cuda=True, hook=False, segments=segments, marks=marks)
        moving, where = frozenset(self._places(job)[0]), partial(tasks_of, job.plan, code)
        sides = self.graphs.streams.get(job.device, plan.lanes)
        streams = dict(zip([lane.name for lane in plan.lanes][-len(sides) :] if sides else [], sides, strict=True))
        for n, segment in enumerate(segments):
            inputs = enumerate(segment.inputs)
            copied = [i for i, v in inputs if i in segment.made_outside or v.root.argument in moving]
            static = [i for i in range(len(segment.inputs)) if i not in copied]
            lane = program.steps[segment.steps[0]].lane
            graphed = GraphedFunction(
                _spread(code.names[f"segment_{n}"]), job.device, self.graphs, copied=copied, static=static, inner=True,
                stream=streams.get(lane), where=where,
            )  # fmt: skip
            code.names[f"graph_{n}"] = graphed.call
        # Graphs know their buffers by address, so the arena is the plan's own.
        run = self._runnable(plan, program, code, job.device, BlockPool())
        pool, device = self.graphs, job.device

        def one_at_a_time(args: list[Any]) -> Any:
            with pool.lock:
                pool.order.enter(device)
                try:
                    return run(args)
                finally:
                    pool.order.leave(device)

        remade = lambda row: self._in_pieces(replace(job, marked=True, row=row), outside)  # noqa: E731
        return self._executable(job, program, code, one_at_a_time, marks, remade)

    def _hook(self, plan: Plan) -> Callable[[int, str], None] | None:
        if self.on_task is None:
            return None
        on_task, tasks = self.on_task, plan.tasks
        return lambda index, moment: on_task(tasks[index], moment)


def _writes_inputs(graph: OpGraph) -> bool:
    return any(v.input is not None and v.storage in graph.written for v in graph.values)


def _until_compiled(make: Callable[[], Made]) -> Made:
    """Retries after CompilerFailed. It terminates, since what failed runs uncompiled from then on."""
    while True:
        try:
            return make()
        except CompilerFailed:
            continue


def _spread(function: Callable[..., Any]) -> Boxed:
    return lambda args: function(*args)
