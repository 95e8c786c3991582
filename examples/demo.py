"""A small Llama, plainly and under two schedulers: equal outputs, both plans drawn, times side by side."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaflow as df

CUTS = [df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp")]


class TwoBatches(df.OpSchedulerBase):
    """Attention of one half of the batch beside the matrix products of the other."""

    def partition(self):
        return CUTS

    def schedule(self, ctx):
        if ctx.batch_size < 4:
            return ctx.sequential()
        ctx.split(2)
        turn = 0
        while ops := ctx.get_ready_ops():
            op = next((op for op in ops if op.micro_batch == turn), ops[0])
            ctx.execute(op, lane="memory" if "attention" in op.tags else "compute")
            if "attention" in op.tags:  # while it runs, the other half goes on
                turn = 1 - turn


class ThreeWays(df.OpSchedulerBase):
    """Three uneven micro-batches, each on a lane of its own; the MLPs run merged."""

    def partition(self):
        return CUTS

    def schedule(self, ctx):
        ctx.split([ctx.batch_size // 2, ctx.batch_size - ctx.batch_size // 2 - 1, 1])
        while ops := ctx.get_ready_ops():
            merge = [op for op in ops if "mlp" in op.tags]
            if len(merge) == len(ops) == 3:
                ctx.execute(merge, lane="lane0")
                continue
            for op in ops:
                if op not in merge:
                    ctx.execute(op, lane=f"lane{op.micro_batch}")


def median_ms(run: Callable[[], object], device: torch.device, times: int = 15) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    big = device.type == "cuda"
    hidden, layers, length, batch = (2048, 8, 512, 16) if big else (256, 4, 64, 8)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device, torch.bfloat16 if big else torch.float32)
    inputs = {"input_ids": torch.randint(0, 1024, (batch, length), device=device)}
    name = torch.cuda.get_device_name() if big else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    print(f"Llama of {layers} layers, hidden {hidden}, batch {batch} x {length} tokens, on {name}")
    print(f"torch {torch.__version__}, dynaflow {df.__version__}")

    with torch.inference_mode():
        expected = model(**inputs).logits
        print("compiling the operators (once for each distinct one) ...", flush=True)
        fast = df.compile(model, scheduler=df.Sequential())
        rows = [("plain model", median_ms(lambda: model(**inputs), device))]
        for scheduler in (df.Sequential(), TwoBatches(), ThreeWays()):
            title = type(scheduler).__name__
            fast.set_scheduler(scheduler)
            found = fast(**inputs).logits
            gap = ((found - expected).float().norm() / expected.float().norm()).item()
            limit = 3e-2 if big else 1e-5  # bf16 on a GPU, fp32 on a CPU
            assert gap < limit, f"{title} differs from the plain model by {gap:.2e}"
            rows.append((title, median_ms(lambda: fast(**inputs), device)))
            plan = fast.plan(**inputs)
            print(f"\n{title}: outputs agree with the plain model's (relative difference {gap:.1e})")
            if not plan.sequential:
                print(df.draw(plan))
                with df.record() as recording:
                    for _ in range(5):
                        fast(**inputs)
                print("as it ran:")
                print(recording.plans[0].draw())

    print(f"\n{'':24}{'ms':>8}{'against plain':>16}")
    for title, ms in rows:
        print(f"{title:24}{ms:8.2f}{rows[0][1] / ms:15.2f}x")
    print(
        "\nA small model has little to overlap: the point here is that one model ran three ways, equal up to rounding,"
        "\nand that every step can be seen. `print(fast.plan(**inputs))` lists a plan; its `.code` is the function that"
        "\nruns it."
    )


if __name__ == "__main__":
    main()
