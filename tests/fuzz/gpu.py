"""`python -m tests.fuzz.gpu --cases 1000`: random graphs on a GPU, with sleeps at random places in the lanes.

Inputs are made on the CPU, from a seed, and moved. Calls are issued back to back, and memory is let go and used again
while lanes may still be at work: whatever is not ordered shows. With `--device cpu` all is the same but the sleeps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch

from dynaflow.core.plan import Task
from tests.fuzz.compare import Mismatch, Run, Undefined, compare
from tests.fuzz.dice import Dice
from tests.fuzz.engine_way import count_plans, functions_of
from tests.fuzz.groups import Group, draw_group
from tests.fuzz.processes import chunks_of, quiet, run_all
from tests.fuzz.schedules import RandomScheduler, draw_scheduler
from tests.fuzz.seeds import first_case
from tests.fuzz.sizes import Sizes
from tests.fuzz.tally import Tally
from tests.fuzz.verdicts import EAGER
from tests.fuzz.ways import InGroups, Show, show
from tests.helpers import elastic_of, plans_of

LONGEST = 400_000
"""Cycles of a sleep: about 0.2 ms."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the operators run."""

    share: float
    """Of all cases."""
    steps: int
    options: dict[str, Any]
    inside: bool
    """Sleeps are a part of the operators, and not of what watches them, which no CUDA graph can hold."""


KINDS = {
    "eager": Kind(0.7, 14, {"operators": "eager"}, inside=False),
    "plan": Kind(0.26, 10, {"operators": "eager", "cudagraph": "plan"}, inside=True),
    "inductor": Kind(0.04, 4, {"operators": "inductor"}, inside=False),
}


def draw(kind: Kind, device: str, dice: Dice) -> Group:
    sleep = _sleeper(Random(dice.below(1000)), device)
    watch = {} if kind.inside else {"on_task": lambda task, moment: _before(task, moment, sleep)}
    group = draw_group(dice, device, kind.steps, **{"on_task": None, "verify": False, **watch, **kind.options})
    if kind.inside:
        as_it_is = group.engine.operators.as_it_is
        group.engine.operators.as_it_is = lambda module: _asleep(as_it_is(module), sleep)  # type: ignore[method-assign]
    return group


def _sleeper(random: Random, device: str) -> Callable[[], None]:
    def sleep() -> None:
        cycles = random.randrange(1000, LONGEST) if random.random() < 0.3 else 0
        if cycles and device != "cpu":
            torch.cuda._sleep(cycles)

    return sleep


def _before(task: Task, moment: str, sleep: Callable[[], None]) -> None:
    if moment == "start":
        sleep()


def _asleep(call: Callable[[list[Any]], Any], sleep: Callable[[], None]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        sleep()
        return call(args)

    return run


class Calls:
    """Those of one case, on one side: what the model owns is the same in all of them."""

    def __init__(self, group: Group, function: Any) -> None:
        self.graph, self.function = group.graph, function
        self.owned: dict[str, torch.Tensor] = {}

    def make(self, sizes: Sizes, seed: int) -> Run:
        memory = self.graph.memory(sizes, seed)
        for given in self.graph.given:
            if given.owned:
                memory[given.name] = self.owned.setdefault(given.name, memory[given.name])
        results = self.function(*self.graph.sizes_as_args(sizes), *self.graph.tensors(memory))
        state = {name: tensor.clone() for name, tensor in self.owned.items()}
        return Run({**memory, **state}, results)


def run_gpu(group: Group, dice: Dice, tally: Tally, show: Show | None) -> None:
    if hasattr(group.runner, "error"):
        raise group.runner.error
    graph = group.graph
    scheduler: RandomScheduler = draw_scheduler(dice, functions_of(graph), graph.rules, buckets=12)
    group.engine.planner.set_scheduler(scheduler)
    tally.wanted += scheduler.may_split
    sizes = [graph.draw_sizes(dice)] * 3 + [graph.draw_sizes(dice) for _ in range(1 + dice.below(2))]
    keeps = not dice.one_in(2)
    if show is not None:
        show(f"{graph}\n{sizes}, {scheduler}, inputs are {'kept' if keeps else 'let go'}")
    with torch.no_grad():
        plain, ours = Calls(group, graph.gm), Calls(group, group.runner)
        try:
            expected = [plain.make(s, seed) for seed, s in enumerate(sizes)]
        except EAGER as e:
            raise Undefined(str(e)) from e
        found = []
        for seed, s in enumerate(sizes):
            run = ours.make(s, seed)
            found.append(run if keeps else Run({}, run.results))
            if not keeps:
                _scribble(run, graph.device)
        for seed, (e, f) in enumerate(zip(expected, found, strict=True)):
            try:
                compare(e if keeps else Run({}, e.results), f)
            except Mismatch as difference:
                if graph.is_captured_anew(sizes[seed], seed):
                    raise Undefined("Dynamo would capture it anew for these sizes") from difference
                raise
    tally.cases += 1
    stats = group.engine.stats
    tally.events["captures of CUDA graphs"] += stats.captures
    tally.events["replays of CUDA graphs"] += stats.graph_replays
    stats.captures = stats.graph_replays = 0
    tally.elastic += bool(elastic_of(group.engine))
    tally.bucketed += bool(scheduler.rounds)
    count_plans(plans_of(group.engine), scheduler, tally)


def _scribble(run: Run, device: str) -> None:
    """Lets the inputs go, and has others write to memory of their sizes."""
    sizes = [t.untyped_storage().nbytes() for t in run.memory.values()]
    run.memory.clear()
    for size in sizes:
        torch.full((size,), 255, dtype=torch.uint8, device=device)


def make_gpu_way(device: str, name: str) -> InGroups:
    if device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return InGroups(name, partial(draw, KINDS[name], device), run_gpu)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.gpu", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="stop after that")
    parser.add_argument("--start", type=int, help="number of the first case; by default a fresh one")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one for each core")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--case", type=int, help="show and run this case of --way alone")
    parser.add_argument("--small", action="store_true", help="with --case: look for a smaller one that fails alike")
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    make = partial(make_gpu_way, options.device)
    if options.case is not None:
        quiet()
        return show(make, options.way, options.case, options.small)
    start = first_case() if options.start is None else options.start
    kinds = {options.way: 1.0} if options.way != "all" else {name: kind.share for name, kind in KINDS.items()}
    counts = {name: max(1, round(options.cases * share)) for name, share in kinds.items()}
    jobs = options.jobs or os.cpu_count() or 1
    print(f"from case {start} on", flush=True)
    again = f"python -m tests.fuzz.gpu --device {options.device}"
    outcome = run_all(
        chunks_of(counts, start, jobs), make, jobs=jobs, seconds=options.seconds, again=again, method="spawn"
    )
    print(outcome.summary())
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main())
