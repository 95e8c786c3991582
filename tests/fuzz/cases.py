"""One case: a random graph under a random schedule, beside eager; and mutants of its plan, beside the oracle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import dynaflow as df
from dynaflow.capture.graph import copied
from dynaflow.capture.ops import OpGraph
from dynaflow.capture.rules import target_names
from dynaflow.engine import Engine
from dynaflow.errors import DynaFlowError
from dynaflow.lower.lower import Lowered
from dynaflow.schedule.check import check
from dynaflow.schedule.plan import Plan, Task
from tests.fuzz.graphs import Dice, RandomGraph, random_graph
from tests.fuzz.schedules import RandomElasticScheduler, RandomScheduler, mutants, why_illegal

TOLERANCE = 1e-9
_COMPUTING = {"tanh", "sin", "neg", "sigmoid", "linear", "softmax", "cumsum", "topk", "relu", "layer_norm", "mean"}
"""Calls that compute whatever their arguments: a rule that names one of them always finds it."""


class Mismatch(AssertionError):
    """The scheduled run did something else than eager, or the check judged a plan wrongly."""


class Undefined(Exception):
    """Eager itself refuses the program."""


@dataclass(slots=True)
class Tally:
    cases: int = 0
    undefined: int = 0
    plain: int = 0
    sequential: int = 0
    unsplit: int = 0
    arenas: int = 0
    fusions: int = 0
    elastic: int = 0
    mutants: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    mutants_run: int = 0

    def add(self, other: Tally) -> None:
        for name in self.__slots__:
            mine = getattr(self, name)
            setattr(self, name, mine + getattr(other, name))

    def __str__(self) -> str:
        total, killed, legal = self.mutants.total(), self.killed.total(), self.redundant.total()
        illegal = total - legal
        rate = 100 * killed / illegal if illegal else 100.0
        lines = [
            f"{self.cases} cases: {self.sequential} sequential, {self.unsplit} in one part, {self.plain} plain, "
            f"{self.arenas} with an arena, {self.elastic} elastic, {self.fusions} fusions; {self.undefined} programs "
            f"that eager refuses were left out",
            f"{total} mutants: {killed} killed, {legal} redundant (legal by the oracle; {self.mutants_run} of them "
            f"run); kill rate {rate:.2f}% of {illegal} illegal ones",
        ]
        for kind, count in sorted(self.mutants.items()):
            killed, legal = self.killed[kind], self.redundant[kind]
            lines.append(f"  {kind:<32} {count:>7} made {killed:>7} killed {legal:>7} redundant")
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class Case:
    """A graph, a scheduler and arguments: all that is drawn before anything runs."""

    graph: RandomGraph
    scheduler: RandomScheduler
    engine: Engine
    batch: int
    seed: int
    runner: Any = None

    def lowered(self) -> Lowered | None:
        args = self.graph.args(self.batch, self.seed)
        return self.engine.find(self.runner, self.engine.situation(self.runner, args), args)

    def close(self) -> None:
        self.engine.lowerer.threads.close()

    def __str__(self) -> str:
        found = self.lowered()
        plan = str(found.plan) if found else f"no plan: {self.runner.plain}"
        ops = "\n".join(_show(op) for op in found.graph.ops) if found else ""
        return f"{self.graph}\nbatch {self.batch}, seed {self.seed}, rules {self.scheduler.rules}\n{ops}\n{plan}"


def _show(op: Any) -> str:
    kind = "shared" if op.shared else f"whole: {op.refusal}" if op.refusal else "rows"
    return f"  {op.name}: {' '.join(op.functions)}  ({kind})  touches {op.touches} after {op.after}"


def draw_case(dice: Dice) -> Case:
    graph = random_graph(dice)
    functions = sorted({target_names(n)[0] for n in graph.gm.graph.nodes if n.op.startswith("call")} & _COMPUTING)
    scheduler = (RandomElasticScheduler if dice.one_in(4) else RandomScheduler)(dice, functions)
    hook = _sleeper(dice.below(1000)) if dice.one_in(5) else None
    engine = Engine(scheduler, operators="eager", batch_dims=graph.batch_dims, on_task=hook)
    engine.operators.writes_into = dice.one_in(2)  # as compiled operators do
    engine.lowerer.chains = dice.one_in(2)
    batch, seed = 2 + dice.below(7), dice.below(100)
    with torch.no_grad():  # as it will be called
        # A backend may change the graph that it is given; eager runs it as it was drawn.
        runner = engine.backend(copied(graph.gm), list(graph.args(batch, seed)))
    if hasattr(runner, "error"):
        raise runner.error
    return Case(graph=graph, scheduler=scheduler, engine=engine, batch=batch, seed=seed, runner=runner)


def _sleeper(seed: int) -> Any:
    """Shakes the lanes: whatever is not ordered by the plan comes in many orders."""
    delays = [(seed * 7919 + i * 104729) % 200 * 1e-6 for i in range(97)]
    calls = [0]

    def on_task(task: Task, moment: str) -> None:
        calls[0] += 1
        time.sleep(delays[calls[0] % 97])

    return on_task


def run_case(case: Case, dice: Dice, tally: Tally) -> bool:
    """Runs the case, a few times, and compares; False when eager refuses it."""
    tally.cases += 1
    try:
        compare_again = compare_with_eager(case.graph, case.runner, case.batch, case.seed)
        if dice.one_in(4):  # a plan in use
            compare_with_eager(case.graph, case.runner, case.batch, case.seed + 1)
        for turn in range(3 if case.scheduler.elastic else dice.one_in(6)):  # the same operators, another plan or size
            compare_with_eager(case.graph, case.runner, 2 + dice.below(7), case.seed + 2 + turn)
        compare_again()  # what was handed out belongs to the caller
    except Undefined:
        tally.undefined += 1
        return False
    found = case.lowered()
    tally.plain += found is None
    if found is not None:
        tally.sequential += found.plan.sequential
        tally.unsplit += len(found.plan.micro_batches) == 1 and not found.plan.sequential
        tally.arenas += case.engine.stats.arena_bytes > 0
        tally.elastic += bool(case.engine._schedules.elastic)
        tally.fusions += sum(t.replace is not None for t in found.plan.tasks)
    return True


def compare_with_eager(
    graph: RandomGraph, function: Any, batch: int, seed: int, eager: Any = None
) -> Callable[[], None]:
    """Returns the comparison, to be made again later."""
    numbers = () if eager is not None else tuple(batch for _ in graph.numbers)
    plain, scheduled = graph.tensors(batch, seed), graph.tensors(batch, seed)
    with torch.no_grad():
        try:
            expected = (eager or graph.gm)(*numbers, *plain)
        except (RuntimeError, IndexError, ValueError) as e:
            raise Undefined(str(e)) from e
        found = function(*numbers, *scheduled)
    names = [i.name for i in graph.inputs] + [f"result {i}" for i in range(len(expected))]
    again = partial(compare, names, [*plain, *expected], [*scheduled, *found], len(plain))
    again()
    return again


def compare(names: list[str], expected: list[Any], found: list[Any], inputs: int) -> None:
    """Values, memory shared among inputs and results, and where in an input's memory a result lies."""
    if len(expected) != len(found):
        raise Mismatch(f"{len(found)} results instead of {len(expected)}")
    for name, e, f in zip(names, expected, found, strict=True):
        if not isinstance(e, torch.Tensor):
            if e != f:
                raise Mismatch(f"{name} is {f!r} instead of {e!r}")
            continue
        if not isinstance(f, torch.Tensor) or e.shape != f.shape or e.dtype != f.dtype:
            raise Mismatch(f"{name} is {f!r} instead of {e!r}")
        if e.numel() and not torch.allclose(e, f, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            rows = [tuple(i) for i in (e != f).nonzero().tolist()]
            raise Mismatch(f"{name} differs at {rows[:6]}{'...' if len(rows) > 6 else ''}:\n{f}\ninstead of\n{e}")
    for j in range(inputs, len(expected)):
        for i in range(j):
            together, so = _share(expected[i], expected[j]), _share(found[i], found[j])
            if together != so:
                word = "does not share" if together else "shares"
                raise Mismatch(f"{names[j]} {word} its memory with {names[i]}")
            if together and i < inputs and _place(expected[j]) != _place(found[j]):
                now, was = _place(found[j]), _place(expected[j])
                raise Mismatch(f"{names[j]} is another view of {names[i]}: {now}, not {was}")


def _share(one: Any, two: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)) or not one.numel() or not two.numel():
        return False
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tuple(st for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s > 1)
    return tensor.storage_offset(), tuple(tensor.shape), strides


# Mutants


def judge_mutants(case: Case, dice: Dice, tally: Tally, each: int = 1) -> None:
    """The check must refuse what the oracle refuses, and nothing else."""
    found = case.lowered()
    if found is None or found.plan.sequential:
        return
    plan, graph = found.plan, found.graph
    if why_illegal(plan, graph, case.batch) is not None:
        raise Mismatch(f"the oracle refuses the legal plan: {why_illegal(plan, graph, case.batch)}")
    for kind, mutant in mutants(plan, graph, dice, each):
        tally.mutants[kind] += 1
        illegal = why_illegal(mutant, graph, case.batch)
        refused = _refused(mutant, graph, case.batch)
        if illegal and not refused:
            raise Mismatch(f"survivor ({kind}): the check passes it, but {illegal}\n{mutant}")
        if refused and not illegal:
            raise Mismatch(f"false alarm ({kind}): the check says {refused}\n{mutant}")
        tally.killed[kind] += illegal is not None
        tally.redundant[kind] += illegal is None
        # Lowered mutants of a fusion would call a function made for other micro-batches.
        if not illegal and not any(t.replace for t in mutant.tasks) and dice.one_in(3):
            run_mutant(case, mutant, graph)
            tally.mutants_run += 1


def _refused(plan: Plan, graph: OpGraph, rows: int) -> str | None:
    try:
        check(plan, graph, rows)
    except DynaFlowError as e:
        return str(e)
    return None


def run_mutant(case: Case, plan: Plan, graph: OpGraph) -> None:
    runner = case.runner
    args = case.graph.args(case.batch, case.seed)
    sizes = {**runner.graph.hints, **runner.graph.symbol_values(args)}
    lowered = case.engine.lowerer.lower(plan, graph, sizes, {})
    numbers = runner.graph.numbers

    def run(*given: Any) -> Any:
        results = lowered(list(given))
        return numbers.put_back(numbers.made(given), results) if numbers.positions else results

    compare_with_eager(case.graph, run, case.batch, case.seed)


# Through the front door


def run_door(graph: RandomGraph, dice: Dice, tally: Tally) -> None:
    """The program as Python source under `dynaflow.compile`, so that Dynamo itself makes the graph."""
    torch._dynamo.reset()
    text, names = graph.source()
    exec(compile(text, "<fuzz>", "exec"), names)
    model = names["model"]
    batch, seed = 2 + dice.below(7), dice.below(100)
    try:
        compare_with_eager(graph, model, batch, seed, eager=model)
    except Undefined:
        tally.undefined += 1
        return
    scheduler = RandomScheduler(dice, [])
    dims = None if graph.batch_dims is None else dict(graph.batch_dims)
    while True:
        compiled = df.compile(model, scheduler, batch_dims=dims, operators="eager", fullgraph=True)
        try:
            compare_with_eager(graph, compiled, batch, seed, eager=model)
            break
        except df.SplitError as e:  # Dynamo left out an input that only dead code uses
            unused = next((n for n in dims or () if f"batch_dims names {n!r}, but" in str(e)), None)
            if unused is None:
                raise
            del dims[unused]
            torch._dynamo.reset()
    tally.cases += 1


def run_training(graph: RandomGraph, dice: Dice, tally: Tally) -> None:
    """The same with gradients: of all inputs, for a loss in which each element of each result counts differently."""
    torch._dynamo.reset()
    text, names = graph.source()
    exec(compile(text, "<fuzz>", "exec"), names)

    def model(*given: torch.Tensor) -> Any:
        return names["model"](*(t.clone() for t in given))  # what wants a gradient must not be written

    batch, seed = 2 + dice.below(7), dice.below(100)
    try:
        expected = _gradients(model, graph.tensors(batch, seed))
    except (RuntimeError, IndexError, ValueError) as e:
        if isinstance(e, df.DynaFlowError):
            raise
        tally.undefined += 1
        return
    if not any(g is not None for g in expected):
        tally.plain += 1
        return
    fast = df.compile(model, RandomScheduler(dice, []), operators="eager", fullgraph=True)
    found = _gradients(fast, graph.tensors(batch, seed))
    for given, e, f in zip(graph.inputs, expected, found, strict=True):
        if (e is None) != (f is None):
            raise Mismatch(f"the gradient of {given.name} is {f} instead of {e}")
        if e is not None and f is not None and not torch.allclose(e, f, rtol=1e-7, atol=1e-7, equal_nan=True):
            raise Mismatch(f"the gradient of {given.name} is\n{f}\ninstead of\n{e}")
    tally.cases += 1


def _gradients(function: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    given = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    results = [r for r in function(*given) if isinstance(r, torch.Tensor) and r.requires_grad]
    random = torch.Generator().manual_seed(3)
    loss = sum((r * torch.rand(r.shape, generator=random, dtype=r.dtype)).sum() for r in results)
    if not results:
        return [None for _ in given]
    wanted = [t for t in given if t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if t.requires_grad else None for t in given]
