"""A random graph given to the engine, under a random schedule, beside eager; and mutants of its plan, beside the
oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow.capture.node_info import target_names
from dynaflow.core.plan import Plan
from dynaflow.errors import DynaFlowError, VerifyError
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.check import check
from tests.fuzz.compare import Mismatch, Run, Undefined, compare, write_to_results
from tests.fuzz.dice import Dice
from tests.fuzz.graphs import RandomGraph
from tests.fuzz.groups import Group
from tests.fuzz.mutants import mutants
from tests.fuzz.oracle import why_illegal
from tests.fuzz.schedules import RandomScheduler, draw_scheduler
from tests.fuzz.sizes import Sizes
from tests.fuzz.tally import Tally
from tests.fuzz.verdicts import EAGER
from tests.helpers import elastic_of, plans_of

_COMPUTING = {"tanh", "sin", "neg", "sigmoid", "linear", "softmax", "cumsum", "topk", "relu", "layer_norm", "mean"}
"""Calls that compute whatever their arguments: a rule that names one of them always finds it."""


@dataclass(slots=True, kw_only=True)
class Case:
    """A group's graph under a schedule of its own: all that is drawn before anything runs."""

    group: Group
    scheduler: RandomScheduler
    sizes: Sizes
    seed: int
    mode: Callable[[], Any]

    def __str__(self) -> str:
        how = f"{self.group.graph}\n{self.sizes}, seed {self.seed}, {self.mode.__name__}, {self.scheduler}"
        try:
            found = self.group.lowered(self.sizes, self.seed)
        except Exception as e:
            return f"{how}\nno plan: {type(e).__name__}"
        if found is None:
            return f"{how}\nno plan: {self.group.engine.stats.plain_reasons}"
        ops = "\n".join(_show(op) for op in found.graph.ops)
        return f"{how}\n{ops}\n{found.plan}\n{found.plan.code}"


def _show(op: Any) -> str:
    kind = "shared" if op.shared else f"whole: {op.refusal}" if op.refusal else "rows"
    return f"  {op.name}: {' '.join(op.functions)}  ({kind})  accesses {op.accesses} after {op.after}"


def functions_of(graph: RandomGraph) -> list[str]:
    """Names that a rule may use."""
    return sorted({target_names(n)[0] for n in graph.gm.graph.nodes if n.op.startswith("call")} & _COMPUTING)


def draw_case(group: Group, dice: Dice) -> Case:
    if hasattr(group.runner, "error"):
        raise group.runner.error
    graph = group.graph
    scheduler = draw_scheduler(dice, functions_of(graph), graph.rules, buckets=2 if group.gentle else 8)
    group.engine.planner.set_scheduler(scheduler)
    mode = torch.inference_mode if dice.one_in(6) else torch.no_grad
    return Case(group=group, scheduler=scheduler, sizes=graph.draw_sizes(dice), seed=dice.below(100), mode=mode)


def run_case(case: Case, dice: Dice, tally: Tally) -> bool:
    """Runs the case, a few times, and compares; False when the plan is of no more interest."""
    graph, group, scheduler = case.group.graph, case.group, case.scheduler
    plain_before = group.engine.stats.plain_graphs
    tally.wanted += scheduler.may_split
    again = compare_with_eager(case, case.sizes, case.seed)
    if dice.one_in(4):  # a plan in use
        compare_with_eager(case, case.sizes, case.seed + 1)
    for turn in range(3 if scheduler.elastic or scheduler.rounds else dice.one_in(4)):  # another plan or size
        compare_with_eager(case, graph.draw_sizes(dice), case.seed + 2 + turn)
    again()  # what was handed out belongs to the caller
    tally.cases += 1
    tally.plain += group.engine.stats.plain_graphs > plain_before
    tally.elastic += bool(elastic_of(group.engine))
    count_plans(plans_of(group.engine), scheduler, tally)
    if scheduler.rounds:
        tally.bucketed += 1
        return False
    found = group.lowered(case.sizes, case.seed)
    tally.sequential += found is not None and found.plan.sequential
    tally.arenas += group.engine.stats.arena_bytes > 0
    return found is not None


def count_plans(plans: list[Plan], scheduler: RandomScheduler, tally: Tally) -> None:
    split = any(len(p.micro_batches) > 1 and p.tasks for p in plans)
    tally.split += split
    tally.whole += scheduler.may_split and not split
    tally.fusions += sum(t.replace is not None for p in plans for t in p.tasks)


def compare_with_eager(case: Case, sizes: Sizes, seed: int, run: Any = None) -> Callable[[], None]:
    """Returns the comparison, to be made again later, when both sides have been written to."""
    graph = case.group.graph
    plain, scheduled = graph.memory(sizes, seed), graph.memory(sizes, seed)
    numbers = graph.sizes_as_args(sizes)
    with case.mode():
        if case.mode is torch.inference_mode:
            plain, scheduled = graph.memory(sizes, seed), graph.memory(sizes, seed)
        try:
            expected = Run(plain, graph.gm(*numbers, *graph.tensors(plain)))
        except EAGER as e:
            raise Undefined(str(e)) from e
        try:
            found = Run(scheduled, (run or case.group.runner)(*numbers, *graph.tensors(scheduled)))
            compare(expected, found)
        except Exception as e:
            if isinstance(e, DynaFlowError) and not isinstance(e, VerifyError):
                raise
            if graph.is_captured_anew(sizes, seed):
                raise Undefined("Dynamo would capture it anew for these sizes") from e
            raise

    def again() -> None:
        compare(expected, found)
        with case.mode():
            write_to_results(expected)
            write_to_results(found)
        compare(expected, found)

    return again


# Mutants


def judge_mutants(case: Case, dice: Dice, tally: Tally, each: int = 1) -> None:
    """The check must refuse what the oracle refuses, and nothing else."""
    found = case.group.lowered(case.sizes, case.seed)
    if found is None or found.plan.sequential:
        return
    plan, graph, rows = found.plan, found.graph, found.plan.batch_size
    if (reason := why_illegal(plan, graph, rows)) is not None:
        raise Mismatch(f"the oracle refuses the legal plan: {reason}")
    for kind, mutant in mutants(plan, graph, dice, each):
        tally.mutants[kind] += 1
        illegal = why_illegal(mutant, graph, rows)
        refused = _refused(mutant, graph, rows)
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
    args = list(case.group.graph.args(case.sizes, case.seed))
    captured = case.group.runner_of(args).graph.graph
    sizes = {**captured.hints, **captured.symbol_values(args)}
    lowered = case.group.engine.planner.lowerer.lower(plan, graph, sizes, {})
    numbers = captured.host_scalars

    def run(*given: Any) -> Any:
        results = lowered(list(given))
        return numbers.put_back(numbers.made(given), results) if numbers.positions else results

    compare_with_eager(case, case.sizes, case.seed, run)
