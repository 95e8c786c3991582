"""Forward and backward of a random graph, given to the engine as Dynamo would, beside eager: results and gradients.

Dynamo itself would take most of the time, and is left to the door's cases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dynaflow.core.fx_graphs import copy_module
from dynaflow.engine.engine import Engine
from dynaflow.errors import DynaFlowError
from tests.fuzz.compare import TOLERANCE, Mismatch, Run, Undefined, compare, compare_gradients, used_of
from tests.fuzz.dice import Dice
from tests.fuzz.engine_way import count_plans, functions_of
from tests.fuzz.graphs import RandomGraph, random_graph
from tests.fuzz.groups import Group
from tests.fuzz.schedules import RandomScheduler, draw_scheduler
from tests.fuzz.sizes import POINTS, Sizes
from tests.fuzz.tally import Tally
from tests.fuzz.verdicts import EAGER
from tests.helpers import elastic_of, plans_of, set_chains

STEPS = 7
LOOSELY = 100.0
"""Gradients are sums over many terms."""
ROUGHLY = 3e-2
"""The most that values may be off, in whatever precision the graph computes."""


class NotTorchs(Exception):
    """torch.compile would have to start again, or can't trace the program."""


def draw_training(dice: Dice) -> Group:
    graph = random_graph(dice, STEPS, train=True)
    names = tuple(i.name for i in graph.given)
    # Declarations count if they are there when the graph is captured.
    scheduler = RandomScheduler(dice, rules=graph.rules)
    engine = Engine(scheduler, operators="eager", batch_dims=graph.batch_dims, parameters=names)
    set_chains(engine, dice.one_in(2))
    engine.rewrite = dice.one_in(2)  # as for compiled operators
    if not any(i.grad for i in graph.given):
        raise Undefined("no input wants a gradient")
    _gradients(graph, graph.gm, POINTS[0], 0)  # eager refuses it?
    runner, serves = _captured(graph, engine.backend)
    return Group(graph=graph, engine=engine, gentle=False, runner=runner, serves=serves)


def _captured(graph: RandomGraph, backend: Callable[..., Any]) -> tuple[Any, Callable[[Sizes], bool]]:
    """What runs the graph: what a backend returns when it is called as Dynamo would call it. And whether that serves a
    size: for others Dynamo would capture the graph anew."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = copy_module(graph.gm)
    memory = graph.memory(POINTS[0], 0)
    fakes: dict[str, Any] = {}
    for given in graph.given:
        real = memory[given.name].detach().requires_grad_(given.grad)
        dims = [DimDynamic.DUCK if s.batch or s.length else DimDynamic.STATIC for s in given.sizes]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        fakes[given.name] = mode.from_tensor(real, source=ConstantSource(given.name), symbolic_context=context)
    for names, length in ((graph.numbers, False), (graph.lengths, True)):
        for name in names:
            where, dim = graph.place_of(length)
            fakes[name] = fakes[where].shape[dim]
    places = gm.graph.find_nodes(op="placeholder")
    for node in places:
        node.meta["example_value"] = fakes[node.name]
    try:
        with mode, enable_python_dispatcher():  # as Dynamo does
            _Shown(gm).run(*[fakes[node.name] for node in places])
    except EAGER as e:
        raise NotTorchs(str(e)) from e
    with tracing(TracingContext(mode)), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can't be traced")  # the examples of the nodes are not of this mode
        try:
            return backend(gm, [fakes[node.name] for node in places]), partial(_holds, graph, fakes)
        except (RestartAnalysis, UserWarning) as e:  # only Dynamo can start again
            raise NotTorchs(str(e)) from e


def _holds(graph: RandomGraph, fakes: dict[str, Any], sizes: Sizes) -> bool:
    """Whether what was assumed of the sizes when they were traced is true of these."""
    values: dict[Any, int] = {}
    guards: list[Any] = []
    for name, tensor in graph.memory(sizes, 0).items():
        if name not in fakes:
            continue
        for traced, size in zip(fakes[name].shape, tensor.shape, strict=True):
            if isinstance(traced, int):
                if traced != size:
                    return False
            else:
                guards = traced.node.shape_env.guards
                if values.setdefault(traced.node.expr, size) != size:
                    return False
    return all(guard.expr.xreplace(values) is sympy.true for guard in guards)


class _Shown(fx.Interpreter):
    """A run that leaves with each node an example of its result, with the symbols of the inputs."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op.startswith("call"):
            n.meta["example_value"] = result
        return result


@dataclass(slots=True, kw_only=True)
class TrainCase:
    group: Group
    scheduler: RandomScheduler
    sizes: Sizes
    seed: int

    def __str__(self) -> str:
        return f"{self.group.graph}\n{self.sizes}, seed {self.seed}, {self.scheduler}"


def draw_train_case(group: Group, dice: Dice) -> TrainCase:
    if hasattr(group.runner, "error"):
        raise group.runner.error
    graph = group.graph
    scheduler = draw_scheduler(dice, functions_of(graph), graph.rules, buckets=20)
    group.engine.planner.set_scheduler(scheduler)
    return TrainCase(group=group, scheduler=scheduler, sizes=graph.draw_sizes(dice), seed=dice.below(100))


def run_train_case(case: TrainCase, dice: Dice, tally: Tally) -> None:
    group, scheduler = case.group, case.scheduler
    plain_before = group.engine.stats.plain_graphs
    tally.wanted += scheduler.may_split
    sizes = case.sizes
    for turn in range(2 if scheduler.elastic or scheduler.rounds or dice.one_in(4) else 1):
        _compare_gradients(case, sizes, case.seed + turn)
        sizes = group.graph.draw_sizes(dice)
    tally.cases += 1
    tally.plain += group.engine.stats.plain_graphs > plain_before
    tally.elastic += bool(elastic_of(group.engine))
    tally.bucketed += bool(scheduler.rounds)
    plans = plans_of(group.engine)
    tally.sequential += all(p.sequential for p in plans)
    count_plans(plans, scheduler, tally)


def _compare_gradients(case: TrainCase, sizes: Sizes, seed: int) -> None:
    graph = case.group.graph
    expected = _gradients(graph, graph.gm, sizes, seed)
    try:
        _compare(expected, _gradients(graph, case.group.runner, sizes, seed, ours=True), _loosely(graph))
    except DynaFlowError:
        raise
    except Exception as e:
        if not isinstance(e, Mismatch):
            try:
                _gradients(graph, _captured(graph, aot_eager)[0], sizes, seed, ours=True)
            except Exception:
                raise NotTorchs(str(e)) from e
        if not case.group.serves(sizes) or (isinstance(e, Mismatch) and graph.is_captured_anew(sizes, seed)):
            raise Undefined("Dynamo would capture it anew for these sizes") from e
        raise


def _loosely(graph: RandomGraph) -> float:
    """Sums of values that were rounded on the way may be rounded otherwise, and Inductor drops casts."""
    dtypes = {getattr(n.meta.get("example_value"), "dtype", None) for n in graph.gm.graph.nodes}
    coarsest = max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)
    return max(LOOSELY, min(coarsest, ROUGHLY) / TOLERANCE[torch.float64])


def _compare(expected: tuple[Run, dict[str, Any]], found: tuple[Run, dict[str, Any]], loosely: float) -> None:
    compare(expected[0], found[0], loosely)
    compare_gradients(expected[1], found[1], loosely)


def _gradients(
    graph: RandomGraph, function: Any, sizes: Sizes, seed: int, ours: bool = False
) -> tuple[Run, dict[str, Any]]:
    """Of a loss in which each element of each result that it uses counts differently."""
    memory = graph.memory(sizes, seed)
    for given in graph.given:
        if given.grad:
            memory[given.name] = memory[given.name].detach().requires_grad_()
    wanted = {i.name: memory[i.name] for i in graph.given if i.grad}
    try:
        results = function(*graph.sizes_as_args(sizes), *graph.tensors(memory))
        lossy = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        random = torch.Generator().manual_seed(3)
        loss: Any = sum(
            (r * torch.rand(r.shape, generator=random, dtype=torch.float64)).sum()
            for r in map(_real, used_of(lossy, seed))
        )
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True) if lossy else [None] * len(wanted)
    except EAGER as e:
        if ours:
            raise
        raise Undefined(str(e)) from e
    return Run(memory, results), dict(zip(wanted, grads, strict=True))


def _real(result: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
