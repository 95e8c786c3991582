"""What making a plan costs, part by part: schedule, check, lower; and the check's share of it.

Operators are left uncompiled, so that the shares are those of planning alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

import dynaflow as df
from benchmarks.llama import TINY
from benchmarks.measure import Figure, Trial, figure
from benchmarks.schedulers import LLAMA_CUTS
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark

LAYERS, ROUNDS = 32, 7


class Batches(df.OpSchedulerBase):
    def __init__(self, parts: int) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return list(LLAMA_CUTS)

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="memory" if "attention" in op.tags else "compute")


def trials(settings: Settings) -> Iterator[Trial]:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = settings.layers or (2 if settings.tiny else LAYERS)
    config = LlamaConfig(**{**TINY, "num_hidden_layers": layers, "use_cache": False})
    fast = df.compile(LlamaForCausalLM(config).eval(), operators="eager")
    tokens = torch.randint(0, TINY["vocab_size"], (8, 8))
    for parts in (2, 4):
        yield Trial(
            what=f"checking a plan, {parts} micro-batches",
            baseline="making the plan",
            situation=f"Llama of {layers} layers",
            run=lambda parts=parts: _cost(fast, tokens, parts, settings.rounds or ROUNDS),
        )


def _cost(fast: df.CompiledModel, tokens: torch.Tensor, parts: int, rounds: int) -> Figure:
    times = []
    for _ in range(rounds):
        fast.set_scheduler(Batches(parts))
        before = _seconds(fast.stats)
        plan = fast.plan(input_ids=tokens)
        times.append([b - a for a, b in zip(before, _seconds(fast.stats), strict=True)])
    names = ("cut_ms", "schedule_ms", "check_ms", "lower_ms")
    medians = {name: statistics.median(t[i] for t in times) * 1e3 for i, name in enumerate(names)}
    return figure([check / (schedule + check + lower) for _, schedule, check, lower in times],
                  tasks=len(plan.tasks), **medians)  # fmt: skip


def _seconds(stats: df.Stats) -> tuple[float, float, float, float]:
    return stats.partition_seconds, stats.schedule_seconds, stats.check_seconds, stats.lower_seconds


BENCHMARK = Benchmark(
    name="plan_cost",
    title="What making a plan costs, operators left uncompiled: the check's share of it, and the parts.",
    suites=("core",),
    trials=trials,
)
