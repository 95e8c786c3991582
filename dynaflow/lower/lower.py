"""A checked plan made runnable."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dynaflow.capture.graph import CapturedGraph
from dynaflow.capture.ops import OpGraph
from dynaflow.lower.codegen import Code, event_count, forget, generate
from dynaflow.lower.operators import Operators, Sizes, Source
from dynaflow.lower.program import Program, make_program
from dynaflow.run.lanes import Call, LanePool
from dynaflow.run.streams import StreamPool, StreamRun
from dynaflow.schedule.context import fusion_values
from dynaflow.schedule.plan import Plan, Task

OnTask = Callable[[Task, str], None]


class Lowered:
    """A plan's function. Call it with the graph's arguments."""

    def __init__(
        self,
        plan: Plan,
        graph: OpGraph,
        run: Callable[[tuple[Any, ...]], Any],
        code: Code | None = None,
        joined_bytes: int = 0,
        all_values: Callable[[tuple[Any, ...]], dict[int, Any]] | None = None,
    ) -> None:
        self.plan = replace(plan, code=code.source if code else "")
        self.graph = graph
        self.run = run
        self.all_values = all_values
        """Runs the plan for the sake of its inner values: value -> tensor of the whole batch."""
        self.joined_bytes = joined_bytes
        self.code = code
        self.verified = False
        if code:
            weakref.finalize(self, forget, code.filename)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        try:
            return self.run(args)
        except Exception as e:
            self._name_task(e)
            raise

    def _name_task(self, error: BaseException) -> None:
        index = self.code.task_of(error) if self.code else None
        if index is not None:
            task = self.plan.tasks[index]
            error.add_note(f"dynaflow: in task {index}, {task}, on lane {task.lane}")


class Lowerer:
    """Lowers the plans of one compiled model; owns its operators, threads and streams."""

    def __init__(self, operators: Operators, on_task: OnTask | None) -> None:
        self.operators = operators
        self.on_task = on_task
        self.threads = LanePool()
        self.streams = StreamPool()

    def lower(
        self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Mapping[str, Callable[..., Any]]
    ) -> Lowered:
        if plan.sequential:
            return Lowered(plan, graph, self.whole(graph.graph, sizes))
        program = make_program(plan, graph, sizes, self.operators, functions)
        cuda = graph.graph.device.type == "cuda"
        code = generate(program, cuda=cuda, hook=self.on_task is not None)
        return Lowered(
            plan,
            graph,
            self._runnable(plan, program, code, graph.graph.device),
            code,
            program.joined_bytes,
            lambda args: self._all_values(plan, graph, sizes, functions, args),
        )

    def _runnable(
        self, plan: Plan, program: Program, code: Code, device: torch.device
    ) -> Callable[[tuple[Any, ...]], Any]:
        run, hook = code.run, self._hook(plan)
        if len(program.lanes) < 2:
            return lambda args: run(args, hook)
        if device.type == "cuda":
            stream_run = StreamRun(run, device, program.lanes, event_count(program), self.streams)
            return lambda args: stream_run(args, hook)
        pool = self.threads
        return lambda args: run(args, hook, Call(pool))

    def _all_values(
        self, plan: Plan, graph: OpGraph, sizes: Sizes, functions: Mapping[str, Callable[..., Any]], args: Any
    ) -> dict[int, Any]:
        hidden: set[int] = set()  # values that stay inside a fusion
        for task in plan.tasks:
            if task.replace:
                items = [(graph.by_name[i.op], i.micro_batches) for i in task.items]
                shown = set(fusion_values(graph, items)[1])
                hidden |= {v for op, parts in items for v in op.writes if (v, parts) not in shown}
        inner = tuple(v for op in graph.ops for v in op.writes if v not in hidden)
        every = replace(graph, outputs=inner, ending=None)
        program = make_program(plan, every, sizes, self.operators, functions)
        code = generate(program, cuda=graph.graph.device.type == "cuda", hook=self.on_task is not None)
        results = self._runnable(plan, program, code, graph.graph.device)(args)
        forget(code.filename)
        return dict(zip(inner, results, strict=True))

    def whole(self, graph: CapturedGraph, sizes: Sizes) -> Callable[[tuple[Any, ...]], Any]:
        """The uncut graph."""
        symbols = tuple(i.symbol for i in graph.inputs if i.shape is None)
        if self.operators.mode == "eager" or any(s is None for s in symbols):
            forward = graph.gm.forward
            return lambda args: forward(*args)
        numbers = [n for n, i in enumerate(graph.inputs) if i.shape is None]
        order = numbers + [n for n, i in enumerate(graph.inputs) if i.shape is not None]
        shapes = tuple(i.shape for i in graph.inputs if i.shape is not None)
        source = Source(module=_numbers_first(graph), symbols=symbols, shapes=shapes, free=frozenset())
        call = self.operators.get(source, sizes)
        return lambda args: call(*[args[n] for n in order])

    def _hook(self, plan: Plan) -> Callable[[int, str], None] | None:
        if self.on_task is None:
            return None
        on_task, tasks = self.on_task, plan.tasks
        return lambda index, moment: on_task(tasks[index], moment)


def _numbers_first(graph: CapturedGraph) -> torch.fx.GraphModule:
    """The same graph with the inputs in the order that `Operators` wants: numbers, then tensors."""
    copy = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for wanted in (False, True):
        for given in graph.inputs:
            if (given.shape is not None) == wanted:
                env[given.node] = copy.placeholder(given.node.name)
    for node in graph.gm.graph.nodes:
        if node.op == "output":
            copy.output(torch.fx.map_arg(node.args[0], lambda n: env[n]))
        elif node.op != "placeholder":
            env[node] = copy.node_copy(node, lambda n: env[n])
    return torch.fx.GraphModule(graph.gm, copy)
