"""`dynaflow demo`: a small Llama as it is and under three schedulers: equal outputs, plans drawn, times compared."""

from __future__ import annotations

from typing import Any

import torch
import typer

import dynaflow as df
from dynaflow import _torch
from dynaflow.cli import arguments
from dynaflow.cli.output import nothing_else, out, print_json
from dynaflow.cli.recorded_run import device_name, longest, recorded
from dynaflow.engine.verify import difference
from dynaflow.tune.measure import side_by_side, timings

EXAMPLE = "dynaflow demo"
CUTS = [df.SplitModule("*.self_attn", tag="attention"), df.SplitModule("*.mlp", tag="mlp")]


class TwoBatches(df.OpSchedulerBase):
    """Attention of one half of the batch beside the matmuls of the other."""

    def partition(self) -> list[Any]:
        return CUTS

    def schedule(self, ctx: df.ScheduleContext) -> None:
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
    """Three micro-batches of different sizes, each on its own lane; the MLPs run merged."""

    def partition(self) -> list[Any]:
        return CUTS

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split([ctx.batch_size // 2, ctx.batch_size - ctx.batch_size // 2 - 1, 1])
        while ops := ctx.get_ready_ops():
            merge = [op for op in ops if "mlp" in op.tags]
            if len(merge) == len(ops) == 3:
                ctx.execute(merge, lane="lane0")
                continue
            for op in ops:
                if op not in merge:
                    ctx.execute(op, lane=f"lane{op.micro_batch}")


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(demo)


def demo(operators: arguments.Operators = "inductor", as_json: arguments.Json = False) -> None:
    """Runs a small Llama as it is and under three schedulers: equal outputs, plans drawn, times compared.

    Exit code 1 if the results differ.
    """
    with nothing_else(as_json), torch.no_grad():
        rows = _run(operators)
    if as_json:
        print_json({"rows": rows})
    if not all(row["agrees"] for row in rows):
        raise typer.Exit(1)


def _run(operators: str) -> list[dict[str, Any]]:
    device = arguments.device_named(None)
    big = device.type == "cuda"
    loaded = arguments.load_model("llama-medium" if big else "llama-small", device=device, batch=16 if big else 8,
                     prompt=512 if big else 64)  # fmt: skip
    model, inputs = loaded.model, loaded.inputs
    print(f"{loaded.title}, on {device_name(device)}")
    print(f"torch {torch.__version__}, dynaflow {df.__version__}")
    expected = _torch.tree_leaves(model(**inputs))[0]
    print("compiling the operators (once for each distinct one) ...", flush=True)
    fast = df.compile(model, operators=operators)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    for scheduler in (df.Sequential(), TwoBatches(), ThreeWays()):
        title = type(scheduler).__name__
        fast.set_scheduler(scheduler)
        gap = difference(expected, _torch.tree_leaves(fast(**inputs))[0])
        print(f"\n{title}: outputs {'agree with' if gap is None else f'are {gap}: not'} the plain model's")
        plan = fast.plan(**inputs)
        if not plan.sequential:
            print(df.draw(plan, width=out.drawing))
            print("as it ran:")
            print(longest(recorded(fast, inputs, 5)).draw(out.drawing))
        runs = (lambda: model(**inputs), lambda: fast(**inputs))
        plain, ours = timings(side_by_side(runs, lambda: None, seconds=0.5, cuda=big, rounds=None))
        ms = {"ms": ours.seconds * 1e3, "plain_ms": plain.seconds * 1e3}
        rows.append({"name": title, "agrees": gap is None, **ms, "against_plain": 1 / ours.ratio})
    print(f"\n{'':16}{'ms':>8}{'plain model, in turns':>24}{'faster':>10}")
    for row in rows:
        print(f"{row['name']:16}{row['ms']:8.2f}{row['plain_ms']:24.2f}{row['against_plain']:9.2f}x")
    print(
        "\nA small model has little to overlap: the point here is that one model ran"
        "\nthree ways, equal up to rounding, and that every step can be seen."
        "\n`print(fast.plan(**inputs))` lists a plan; its `.code` is the function that runs"
        "\nit. The demo's schedulers are in dynaflow/cli/demo.py; `dynaflow --help` lists"
        "\nwhat else there is."
    )
    return rows
