"""Host time of replaying a plan, per task, against a hand-written loop over the same compiled operators.

The model is many tiny layers, so that the time is the host's own. Both run the same operators on the same
micro-batches; the loop is what a user would write by hand: slice, call, call, ..., join. With several lanes it
does as the plan does: on CPU a thread of a pool for each further lane, on CUDA a stream.
`with guards` is a whole call of the compiled model, Dynamo's guards included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from common import report, side_by_side
from torch import nn

import dynaflow as df


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(df.OpSchedulerBase):
    """Every layer an operator; micro-batches in turn on the lanes."""

    def __init__(self, parts: int, lanes: int) -> None:
        self.parts, self.lanes = parts, lanes

    def partition(self) -> list[df.SplitModule]:
        return [df.SplitModule(Layer)]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch % self.lanes}")


def lowered_plan(fast: df.CompiledModel, x: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The plan's own function and the arguments that Dynamo calls it with."""
    lowered = next(iter(fast._engine._schedules.plans.values()))
    run, seen = lowered.run, []
    lowered.run = lambda args: seen.append(args) or run(args)
    fast(x)
    lowered.run = run
    return lowered, seen[0]


def by_hand(lowered: Any, args: tuple[Any, ...], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A loop over the same compiled operators, with the weights bound beforehand."""
    graph, names = lowered.graph, lowered.code.run.__globals__
    lanes = len(lowered.plan.lanes)
    pool = ThreadPoolExecutor(max(1, lanes - 1))
    streams = [torch.cuda.Stream() for _ in range(lanes - 1)] if x.is_cuda else []
    sizes = [m.size for m in lowered.plan.micro_batches]
    layers = []
    for op in graph.ops:
        values = [graph.values[v] for v in op.reads]
        place = next(i for i, v in enumerate(values) if v.carries_batch)
        weights = [None if v.carries_batch else args[v.input] for v in values]
        layers.append((names[f"op{op.index}"], weights[:place], weights[place + 1 :]))

    def run_lane(states: list[torch.Tensor], mine: range) -> None:
        with torch.inference_mode():
            for call, before, behind in layers:
                for m in mine:
                    (states[m],) = call(*before, states[m], *behind)

    def loop() -> torch.Tensor:
        states = list(x.split(sizes))
        if lanes == 1:
            run_lane(states, range(len(sizes)))
        elif x.is_cuda:
            main = torch.cuda.current_stream()
            for lane, stream in enumerate([main, *streams]):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    run_lane(states, range(lane, len(sizes), lanes))
                main.wait_stream(stream)
        else:
            others = [pool.submit(run_lane, states, range(n, len(sizes), lanes)) for n in range(1, lanes)]
            run_lane(states, range(0, len(sizes), lanes))
            for other in others:
                other.result()
        return torch.cat(states) if len(states) > 1 else states[0]

    return loop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--operators", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(16) for _ in range(args.layers)]).eval().to(device)
    x = torch.randn(8, 16, device=device)
    rows = []
    for parts, lanes in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)):
        with torch.inference_mode():
            fast = df.compile(model, Layers(parts, lanes), operators=args.operators)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            lowered, arguments = lowered_plan(fast, x)
            loop = by_hand(lowered, arguments, x)
            torch.testing.assert_close(loop(), lowered(arguments)[0], rtol=0, atol=0)
            runs = [loop, lambda: lowered(arguments), lambda: fast(x)]  # noqa: B023
            hand, ours, whole = (statistics.median(times) for times in side_by_side(runs, args.rounds, 5))
        tasks = len(lowered.plan.tasks)
        rows.append({
            "tasks": tasks,
            "micro-batches": parts,
            "lanes": lanes,
            "by hand, us per task": hand / tasks * 1e6,
            "replay, us per task": ours / tasks * 1e6,
            "replay / by hand": ours / hand,
            "with guards / by hand": whole / hand,
        })  # fmt: skip
    report("host_overhead", rows, args.out)


if __name__ == "__main__":
    main()
