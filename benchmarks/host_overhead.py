"""Host time of replaying a plan, per task, against a hand-written loop over the same compiled operators.

The model is many tiny layers, so that the time is the host's own. Both run the same operators on the same
micro-batches, in one lane; the loop is what a user would write by hand: slice, call, call, ..., join.
"""

from __future__ import annotations

import argparse
import statistics

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
    def __init__(self, parts: int) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitModule]:
        return [df.SplitModule(Layer)]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)


def by_hand(fast: df.CompiledModel, x: torch.Tensor, parts: int):
    """The loop over the compiled operators, taken from the plan's own function."""
    runner, lowered = next((key[0], low) for key, low in fast._engine._schedules.plans.items())
    names = lowered.code.run.__globals__
    graph = lowered.graph
    calls = [names[f"op{op.index}"] for op in graph.ops]
    # Each operator reads the running value and its own weights: the weights are bound beforehand, as a user would.
    captured: dict = {}
    original = lowered.code.run

    def spy(args, hook):
        captured["args"] = args
        return original(args, hook)

    lowered.run = lambda args: spy(args, None)
    fast(x)
    lowered.run = lambda args: original(args, None)
    args = captured["args"]
    weights = []
    for op in graph.ops:
        values = [graph.values[v] for v in op.reads]
        weights.append([None if v.carries_batch else args[v.input] for v in values])
    places = [w.index(None) for w in weights]
    sizes = [m.size for m in lowered.plan.micro_batches]

    def loop() -> torch.Tensor:
        outs = []
        states = list(x.split(sizes))
        for call, held, place in zip(calls, weights, places, strict=True):
            for m in range(len(states)):
                inputs = list(held)
                inputs[place] = states[m]
                states[m] = call(*inputs)[0]
        outs = states
        return torch.cat(outs)

    return loop, (lambda: lowered(args)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--operators", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for parts in (1, 2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer(16) for _ in range(args.layers)]).eval().to(device)
        x = torch.randn(8, 16, device=device)
        with torch.inference_mode():
            fast = df.compile(model, Layers(parts), operators=args.operators)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            loop, replay = by_hand(fast, x, parts)
            torch.testing.assert_close(loop(), replay(), rtol=0, atol=0)
            tasks = len(fast.plan(x).tasks)
            hand, ours, whole = side_by_side([loop, replay, lambda: fast(x)], args.rounds, 5)
        hand_us, ours_us = statistics.median(hand) / tasks * 1e6, statistics.median(ours) / tasks * 1e6
        rows.append({
            "tasks": tasks,
            "micro_batches": parts,
            "hand_us_per_task": hand_us,
            "replay_us_per_task": ours_us,
            "replay/hand": ours_us / hand_us,
            "with_guards/hand": statistics.median(whole) / statistics.median(hand),
        })  # fmt: skip
    report("host_overhead", rows, args.out)


if __name__ == "__main__":
    main()
