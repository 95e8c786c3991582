"""What making a plan costs, part by part: schedule, check, lower; and the check's share of it.

Operators are left uncompiled, so that the shares are those of planning alone.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import report
from transformers import LlamaConfig, LlamaForCausalLM

import dynaflow as df


class Batches(df.OpSchedulerBase):
    def __init__(self, parts: int) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitModule]:
        return [df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="memory" if "attention" in op.tags else "compute")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 64, (8, 8))
    fast = df.compile(model, operators="eager")
    rows = []
    with torch.no_grad():
        for parts in (2, 4):
            times = []
            for _ in range(args.rounds):
                fast.set_scheduler(Batches(parts))
                before = _seconds(fast.stats)
                plan = fast.plan(input_ids=tokens)
                times.append([b - a for a, b in zip(before, _seconds(fast.stats), strict=True)])
            cut, schedule, check, lower = (statistics.median(t[i] for t in times) * 1e3 for i in range(4))
            rows.append({
                "tasks": len(plan.tasks),
                "micro-batches": parts,
                "cut, ms": cut,
                "schedule, ms": schedule,
                "check, ms": check,
                "lower, ms": lower,
                "check / making the plan": check / (schedule + check + lower),
            })  # fmt: skip
    report("plan_cost", rows, args.out)


def _seconds(stats: df.Stats) -> tuple[float, float, float, float]:
    return stats.partition_seconds, stats.schedule_seconds, stats.check_seconds, stats.lower_seconds


if __name__ == "__main__":
    main()
