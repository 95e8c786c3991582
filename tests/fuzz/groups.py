"""A random graph and an engine that has captured it, for a few cases: each a schedule of its own, and calls.

Capturing is most of a case's time. The cases of a group are drawn one by one from their numbers, so each can be run
by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from dynaflow.core.fx_graphs import copy_module
from dynaflow.core.plan import Task
from dynaflow.engine.engine import Engine
from dynaflow.lower.executable import Executable
from dynaflow.schedule.base import Sequential
from tests.fuzz.dice import Dice
from tests.fuzz.graphs import RandomGraph, random_graph
from tests.fuzz.sizes import POINTS, Sizes
from tests.helpers import set_chains

SHARE = 4
"""Cases in a group."""

Throws = Callable[[str], Dice]
"""The dice for "graph", the same for all cases of a group, and for "case"."""


def dice_of(way: str, number: int) -> Throws:
    seeds = {"graph": f"{way} {number // SHARE}", "case": f"{way} {number // SHARE} {number % SHARE}"}
    return lambda what: Dice(Random(seeds[what]))


@dataclass(slots=True, kw_only=True)
class Group:
    graph: RandomGraph
    engine: Engine
    gentle: bool
    """Nothing in it mixes rows."""
    runner: Any = None
    serves: Callable[[Sizes], bool] = lambda sizes: True
    """Whether the capture holds for a size."""

    def lowered(self, sizes: Sizes, seed: int) -> Executable | None:
        args = list(self.graph.args(sizes, seed))
        planner = self.engine.planner
        request = planner.request(self.runner_of(args).graph, args)
        return planner.find(planner.decider(request), request)

    def runner_of(self, args: list[Any]) -> Any:
        """Arguments that share memory may have plans of their own, or none."""
        return self.runner.for_memory_of(args, self.engine.planner)

    def close(self) -> None:
        self.engine.planner.lowerer.threads.close()


def draw_group(dice: Dice, device: str = "cpu", steps: int = 14, **options: Any) -> Group:
    """For inference. `options`: those of the engine."""
    gentle = dice.one_in(5)
    graph = random_graph(dice, steps, gentle=gentle, device=device)
    if "on_task" not in options and dice.one_in(5):
        options["on_task"] = _sleeper(dice.below(1000))
    engine = Engine(
        Sequential(), batch_dims=graph.batch_dims, **{"operators": "eager", "verify": dice.one_in(10), **options}
    )
    engine.operators.writes_into |= dice.one_in(2)  # as compiled operators do
    set_chains(engine, dice.one_in(2))
    with torch.no_grad():  # as it will be called
        # A backend may change the graph that it is given; eager runs it as it was drawn.
        runner = engine.backend(copy_module(graph.gm), list(graph.args(POINTS[0], 0)))
    return Group(graph=graph, engine=engine, gentle=gentle, runner=runner)


def _sleeper(seed: int) -> Callable[[Task, str], None]:
    """Shakes the lanes: whatever is not ordered by the plan comes in many orders."""
    delays = [(seed * 7919 + i * 104729) % 200 * 1e-6 for i in range(97)]
    calls = [0]

    def on_task(task: Task, moment: str) -> None:
        calls[0] += 1
        time.sleep(delays[calls[0] % 97])

    return on_task
