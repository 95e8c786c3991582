"""A checked plan made runnable."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from dynaflow._torch import Boxed
from dynaflow.capture.captured_graph import CapturedGraph, Input, is_named
from dynaflow.core.plan import Plan, Task, one_by_one
from dynaflow.core.stats import Stats
from dynaflow.lower.codegen import Code, event_count, forget, generate
from dynaflow.lower.compile_ops import CompilerFailed, Condition, Operators, Sizes, Source
from dynaflow.lower.executable import Lowered
from dynaflow.lower.program import NotElastic, make_program
from dynaflow.lower.segments import make_segments
from dynaflow.lower.shape_polymorphic import Elastic
from dynaflow.lower.steps import Program
from dynaflow.lower.timing import Branches, MarkAside, Marks, in_a_row, make_marks, whole_marks
from dynaflow.partition.op_graph import OpGraph
from dynaflow.runtime.arena import Arena, BlockPool
from dynaflow.runtime.cpu_lanes import Call, LanePool
from dynaflow.runtime.cuda_graphs import CaptureError, Graphed, GraphPool
from dynaflow.runtime.cuda_lanes import CaptureStreams, StreamPool, StreamRun
from dynaflow.schedule.context import fusion_values

Made = TypeVar("Made")
OnTask = Callable[[Task, str], None]
CudaGraph = Literal["plan", "pieces"] | None

NO_CAPTURE = "no_capture"
"""The tag of operators that stay out of CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is to be lowered."""

    plan: Plan
    graph: OpGraph
    sizes: Sizes
    functions: Mapping[str, Callable[..., Any]]
    chains: bool
    marked: bool = False
    """For a recording."""
    row: bool = False
    """All calls one after the other on one lane."""
    warm: bool = False
    """Its kernels have run before."""

    @property
    def device(self) -> torch.device:
        return self.graph.graph.device


def _capturable(given: Input) -> bool:
    """On the GPU; or where the copy engine finds it again."""
    assert given.shape is not None
    return given.shape.device.type == "cuda" or (given.pinned and given.still)


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
        """Tasks that run back to back on a lane are one call; but who watches wants to see each."""
        self.threads = LanePool()
        self.streams = StreamPool()
        self.blocks = BlockPool()
        self.graphs = GraphPool(stats)

    def lower(self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Mapping[str, Callable[..., Any]]) -> Lowered:
        return self._lower(_Job(plan=plan, graph=graph, sizes=sizes, functions=functions, chains=self.chains))

    def _lower(self, job: _Job) -> Lowered:
        outside = frozenset(op.name for op in job.graph.ops if NO_CAPTURE in op.tags)
        if self.captures(job) and (self.cudagraph == "pieces" or outside):
            return self._in_pieces(job, outside)
        if job.plan.sequential:
            lowered = self._uncut(job)
        else:
            lowered, _ = self._cut(job)
        lowered.remark = lambda row: self._lower(replace(job, marked=True, row=row))
        if self.captures(job):
            self._as_graph(job, lowered)
        return lowered

    def _cut(self, job: _Job, elastic: bool = False) -> tuple[Lowered, Program]:
        program, plan = self._program(job, elastic=elastic)
        marks = make_marks(plan, job.graph, job.sizes, program) if job.marked else None
        code = self._generate(program, job.device, marks)
        run = self._runnable(plan, program, code, job.device, self._blocks_for(job))
        return self._lowered(job, program, code, run, marks), program

    def _program(self, job: _Job, **more: Any) -> tuple[Program, Plan]:
        """And the plan by whose lanes it runs."""
        plan, graph, functions = job.plan, job.graph, job.functions
        make = partial(make_program, plan, graph, job.sizes, self.operators, functions, chains=job.chains, **more)
        program = _until_compiled(make)
        return (in_a_row(program), plan.on_one_lane(program.lanes[0])) if job.row else (program, plan)

    def elastic(
        self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Mapping[str, Callable[..., Any]]
    ) -> Elastic | None:
        """The plan for micro-batches of all sizes, if there can be such a thing."""
        job = _Job(plan=plan, graph=graph, sizes=sizes, functions=functions, chains=self.chains)
        if self.cudagraph is not None or not graph.spaces:  # without a batch there is nothing to stretch
            return None
        if plan.sequential:
            return self._elastic_sequence(job)
        try:
            lowered, program = self._cut(job, elastic=True)
        except NotElastic:
            return None
        lowered.remark = lambda row: self._cut(replace(job, marked=True, row=row), elastic=True)[0]
        return Elastic(lowered, program, functions, lambda plan, sizes: self.lower(plan, graph, sizes, functions))

    def _elastic_sequence(self, job: _Job) -> Elastic:
        program = Program(arguments=0, lanes=[], used=[])
        if (source := self._whole(job.graph.graph, _writes_inputs(job.graph))) is None:
            run = self.operators.as_it_is(job.graph.graph.gm)
        else:

            def compiled() -> tuple[Boxed, frozenset[Condition]]:
                found = self.operators.get_for_all(source, job.sizes, uncut=True)
                self.operators.finish()
                return found

            run, conditions = _until_compiled(compiled)
            program.conditions.update(((0,), holds) for holds in conditions)

        def run_whole(args: list[Any]) -> Any:
            args.pop()  # the cuts
            return run(args)

        lowered = Lowered(job.plan, job.graph, run_whole)
        lowered.remark = lambda row: _timed(job, Lowered(job.plan, job.graph, run_whole))
        return Elastic(lowered, program, job.functions, lambda plan, sizes: lowered)

    def _uncut(self, job: _Job) -> Lowered:
        lowered = Lowered(job.plan, job.graph, self.whole(job.graph.graph, job.sizes, _writes_inputs(job.graph)))
        return _timed(job, lowered) if job.marked else lowered

    def _lowered(self, job: _Job, program: Program, code: Code, run: Boxed, marks: Marks | None) -> Lowered:
        self.stats.arena_bytes = program.arena_bytes
        values = lambda args: self._all_values(job, args)  # noqa: E731
        lowered = Lowered(job.plan, job.graph, run, code, program.joined_bytes, values)
        lowered.marks = marks
        return lowered

    def _generate(self, program: Program, device: torch.device, marks: Marks | None = None) -> Code:
        return generate(program, cuda=device.type == "cuda", hook=self.on_task is not None, marks=marks)

    def _blocks_for(self, job: _Job) -> BlockPool | None:
        """None in training: what a pass does not use is there for what the passes save."""
        return self.blocks if job.graph.graph.phase == "inference" else None

    def _runnable(
        self, plan: Plan, program: Program, code: Code, device: torch.device, blocks: BlockPool | None
    ) -> Boxed:
        """The code with all that it needs beside the arguments: buffers, and lanes to run on."""
        run = code.run
        code.names["on_task"] = self._hook(plan)
        if len(plan.lanes) > 1 or plan.partitioned:
            if device.type == "cuda":
                run = StreamRun(run, device, plan.lanes, event_count(program), self.streams, self.graphs.streams)
            else:
                shares = tuple(lane.sms for lane in plan.lanes) if plan.partitioned else ()
                code.names["new_call"] = partial(Call, self.threads, shares)
        if not program.views:
            return run
        arena = Arena(tuple(program.views.values()), program.arena_bytes, device, blocks)

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
        every = replace(graph, outputs=inner, ending=None)
        make = partial(make_program, plan, every, job.sizes, self.operators, job.functions, chains=False)
        program = _until_compiled(make)
        code = self._generate(program, job.device)
        results = self._runnable(plan, program, code, job.device, self._blocks_for(job))(args)
        forget(code.filename)
        return dict(zip(inner, results, strict=True))

    def whole(self, graph: CapturedGraph, sizes: Sizes, writes: bool = True) -> Boxed:
        """The uncut graph. `writes`: it may write to its inputs."""
        if (source := self._whole(graph, writes)) is None:
            return self.operators.as_it_is(graph.gm)

        def compiled() -> Boxed:
            call = self.operators.get(source, sizes)
            self.operators.finish()
            return call

        return _until_compiled(compiled)

    def _whole(self, graph: CapturedGraph, writes: bool) -> Source | None:
        """The uncut graph for the compiler; None if it runs as it is."""
        if self.operators.mode == "eager" or any(i.kind is None or i.memory is not None for i in graph.inputs):
            return None
        inputs = tuple(i.kind for i in graph.inputs)
        still = frozenset(n for n, i in enumerate(graph.inputs) if i.still)
        return Source(
            module=graph.gm, inputs=inputs, still=still, tensors=False, writes=writes, name="the uncut graph",
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
        moving: list[int] = []
        still: list[int] = []
        for value in job.graph.values:
            if value.input is None or value.shape is None:
                continue
            given = job.graph.graph.inputs[value.input]
            promised = any(is_named(given.name, name) for name in self.static_inputs)
            stays = given.still or promised or value.storage in job.graph.written
            (still if stays else moving).append(value.input)
        return moving, still

    def _as_graph(self, job: _Job, lowered: Lowered) -> None:
        """Has its function run as one CUDA graph."""
        plain = lowered.run if lowered.marks is None else _with_own_marks(lowered, self.graphs.streams)
        moving, still = self._places(job)
        graphed = Graphed(plain, job.device, self.graphs, moving=moving, still=still, warm=job.warm)

        def run(args: list[Any]) -> Any:
            try:
                captures = self.stats.captures
                results = graphed(args)
                if self.stats.captures > captures:  # it has memory of its own: what the first call had is spare
                    self.blocks.clear(job.device)
                return results
            except CaptureError as e:
                cause = e.__cause__ or e
                indices = lowered.code.tasks_of(cause) if lowered.code else None
                self.graphs.failed(lowered.tasks_of(cause) or ("the plan" if lowered.code else "the uncut graph"), e)
                if indices and not job.marked:  # whose places are known to the recording
                    culprits = frozenset(item.op for i in indices for item in job.plan.tasks[i].items)
                    pieces = self._in_pieces(job, culprits)
                    lowered.run, lowered.code, lowered.remark = pieces.run, pieces.code, pieces.remark
                else:
                    lowered.run = plain
                return lowered.run(args)

        if lowered.marks is None:
            lowered.run = run
            lowered.remark = lambda row: self._lower(replace(job, marked=True, row=row, warm=graphed.warm))
        else:
            lowered.marks = replace(lowered.marks, own=True)
            lowered.run = self._with_graphs_marks(graphed, run)

    def _with_graphs_marks(self, graphed: Graphed, run: Boxed) -> Boxed:
        """A graph records the events that it was captured with: they are put into the list that it is given."""
        kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

        def run_marked(args: list[Any]) -> Any:
            marks = args[-1]
            with self.graphs.lock:
                captures = self.stats.captures
                results = run(args)
                if self.stats.captures > captures:
                    kept[graphed.last] = list(marks)
                elif not marks:
                    marks += kept[graphed.last]
                return results

        return run_marked

    def _in_pieces(self, job: _Job, outside: frozenset[str]) -> Lowered:
        """The plan with what lies between the operators `outside` captured, lane by lane."""
        if job.plan.sequential:
            if not outside:
                lowered = self._uncut(job)
                self._as_graph(job, lowered)
                return lowered
            job = replace(job, plan=one_by_one(job.plan, job.graph.by_name))
        program, plan = self._program(job, pieces=True, outside=outside)
        held_out = frozenset(
            s for s, step in enumerate(program.steps)
            if any(item.op in outside for t in step.tasks for item in plan.tasks[t].items)
        )  # fmt: skip
        segments = make_segments(program, held_out)
        marks = make_marks(plan, job.graph, job.sizes, program, segments) if job.marked else None
        code = generate(program, cuda=True, hook=False, segments=segments, marks=marks)
        copied = {f"a{i}" for i in self._places(job)[0]}
        sides = self.graphs.streams.get(job.device, plan.lanes)
        streams = dict(zip([lane.name for lane in plan.lanes][-len(sides) :] if sides else [], sides, strict=True))
        for n, segment in enumerate(segments):
            moving = [i for i, name in enumerate(segment.inputs) if i in segment.moving or name.split("_")[0] in copied]
            still = [i for i in range(len(segment.inputs)) if i not in moving]
            lane = program.steps[segment.steps[0]].lane
            code.names[f"graph_{n}"] = Graphed(
                _spread(code.names[f"segment_{n}"]), job.device, self.graphs, moving=moving, still=still, inner=True,
                stream=streams.get(lane), where=lambda error: lowered.tasks_of(error),
            ).call  # fmt: skip
        # Graphs know their buffers by address, so the arena is the plan's own.
        run = self._runnable(plan, program, code, job.device, BlockPool())
        pool, device = self.graphs, job.device

        def one_at_a_time(args: list[Any]) -> Any:
            with pool.lock:
                pool.turns.enter(device)
                try:
                    return run(args)
                finally:
                    pool.turns.leave(device)

        lowered = self._lowered(job, program, code, one_at_a_time, marks)
        lowered.remark = lambda row: self._in_pieces(replace(job, marked=True, row=row), outside)
        return lowered  # which `where` knows as well

    def _hook(self, plan: Plan) -> Callable[[int, str], None] | None:
        if self.on_task is None:
            return None
        on_task, tasks = self.on_task, plan.tasks
        return lambda index, moment: on_task(tasks[index], moment)


def _writes_inputs(graph: OpGraph) -> bool:
    return any(v.input is not None and v.storage in graph.written for v in graph.values)


def _until_compiled(make: Callable[[], Made]) -> Made:
    """What the compiler fails on late is uncompiled the next time that it is asked for; so there is an end."""
    while True:
        try:
            return make()
        except CompilerFailed:
            continue


def _spread(function: Callable[..., Any]) -> Boxed:
    return lambda args: function(*args)


def _timed(job: _Job, lowered: Lowered) -> Lowered:
    """The uncut graph with marks around it."""
    run, device = lowered.run, job.device
    cuda = device.type == "cuda"

    def run_timed(args: list[Any]) -> Any:
        marks = args.pop()
        if cuda:
            stream = torch.cuda.current_stream(device)
            marks[0].record(stream)
            results = run(args)
            marks[1].record(stream)
        else:
            marks[0] = time.perf_counter()
            results = run(args)
            marks[1] = time.perf_counter()
        return results

    lowered.run, lowered.marks = run_timed, whole_marks(job.plan, job.graph, job.sizes)
    return lowered


def _with_own_marks(lowered: Lowered, streams: CaptureStreams) -> Boxed:
    """Puts marks into the list that it is given: what is captured needs some that no other graph has."""
    marks, run = lowered.marks, lowered.run
    assert marks is not None

    def run_marked(args: list[Any]) -> Any:
        given = args.pop()
        if not marks.cuda:  # where graphs are a pretence
            given[:] = [0.0] * marks.count
            return run([*args, given])
        branches = Branches(streams)
        aside = [MarkAside(branches) for _ in range(marks.count)]
        results = run([*args, aside])
        branches.join(torch.cuda.current_stream(marks.device))
        given[:] = [mark.event for mark in aside]
        return results

    return run_marked
