"""`dynaflow run`: a model under a strategy on this machine: are the results equal, and how fast is it?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

import dynaflow as df
from dynaflow import _torch
from dynaflow.cli import arguments
from dynaflow.cli.output import Folded, complain, listed, nothing_else, out, print_json, show, table
from dynaflow.cli.recorded_run import device_name, device_of, longest, recorded, restorer
from dynaflow.engine.verify import difference
from dynaflow.tune.measure import side_by_side, timings

EXAMPLE = "dynaflow run llama-tiny --strategy nanoflow --operators eager --seconds 1"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(run)


def run(
    model: arguments.ModelName,
    strategy: arguments.Strategy = "nanoflow",
    option: arguments.Options = None,
    batch: arguments.Batch = None,
    prompt: arguments.Prompt = None,
    context: arguments.Context = None,
    layers: arguments.Layers = None,
    device: arguments.Where = None,
    dtype: arguments.Dtype = None,
    cudagraph: arguments.CudaGraph = None,
    operators: arguments.Operators = "inductor",
    seconds: Annotated[float, typer.Option(min=0, help="Seconds of measurement, in rounds of all three.")] = 3.0,
    as_json: arguments.Json = False,
) -> None:
    """Runs a model as it is, in sequence and under a strategy: are the results equal, how fast is each?

    Weights are random. By default 8 prompts of 64 tokens. Exit code 1 if the results differ.
    """
    with nothing_else(as_json), torch.no_grad():
        scheduler = arguments.scheduler_named(strategy, option)
        loaded = arguments.load_model(
            model, device=device, dtype=dtype, batch=batch, prompt=prompt, context=context, layers=layers
        )
        plain, inputs = loaded.model, loaded.inputs
        restore, where = restorer(inputs), device_of(plain, inputs)
        graphs: Any = {"cudagraph": cudagraph, "operators": operators}
        sequence, fast = df.compile(plain, "sequential", **graphs), df.compile(plain, scheduler, **graphs)
        with arguments.blaming_model(loaded):
            problem = _difference(plain, fast, inputs, restore)
        made = fast.plan(**inputs)
        if problem is None:
            runs = [lambda m=m: m(**inputs) for m in (sequence, plain, fast)]
            found = side_by_side(runs, restore, seconds=seconds, cuda=where.type == "cuda", rounds=None)
            host = _host(runs[2], restore) if where.type == "cuda" else None
            overlap = longest(recorded(fast, inputs, 5)).overlap
    result: dict[str, Any] = {
        "model": loaded.name, "inputs": arguments.sizes(inputs), "device": device_name(where), "strategy": strategy,
        "agrees": problem is None, "difference": problem, "stays_in_sequence": made.sequential,
        "micro_batches": [m.size for m in made.micro_batches], "tasks": len(made.tasks),
        "lanes": [str(lane) for lane in made.lanes],
    }  # fmt: skip
    if problem is None:
        first, other, ours = timings(found)
        result |= {
            "ms": {"sequence": first.seconds * 1e3, "plain": other.seconds * 1e3, "strategy": ours.seconds * 1e3},
            "speed_up": 1 / ours.ratio, "speed_up_range": [1 / ours.high, 1 / ours.low],
            "speed_up_over_plain": other.seconds / ours.seconds, "rounds": ours.rounds,
            "overlap": overlap, "host_ms": host,
            "bytes_copied": fast.stats.joined_bytes, "plans": fast.stats.plans, "stats": asdict(fast.stats),
        }  # fmt: skip
    if as_json:
        print_json(result)
    elif problem is None:
        _show(loaded.title, result)
    if problem is not None:
        advice = f"df.compile(model, {strategy!r}, verify=True) names the first operator that differs"
        if any(t.dtype in (torch.bfloat16, torch.float16) for t in getattr(plain, "parameters", list)()):
            advice += "; --dtype float32 excludes rounding errors"
        modules = plain.modules() if isinstance(plain, torch.nn.Module) else ()
        if any(m.training and "Dropout" in type(m).__name__ for m in modules):
            advice = "the model is in training mode, with random dropout in each call: return model.eval()"
        complain(f"{strategy} gives other results than the plain model: {problem}\n  what to do: {advice}")
        raise typer.Exit(1)


def _difference(plain: Any, fast: Any, inputs: dict[str, Any], restore: Callable[[], None]) -> str | None:
    """Describes how the results differ; None if they are equal."""
    expected = [t.clone() if isinstance(t, torch.Tensor) else t for t in _torch.tree_leaves(plain(**inputs))]
    restore()
    found = _torch.tree_leaves(fast(**inputs))
    restore()
    if len(expected) != len(found):
        return f"{len(found)} results instead of {len(expected)}"
    pairs = enumerate(zip(expected, found, strict=True))
    return next((f"result {i} is {gap}" for i, (e, f) in pairs if (gap := difference(e, f)) is not None), None)


def _host(call: Callable[[], Any], restore: Callable[[], None], rounds: int = 20) -> float:
    """Returns the milliseconds until a call returns, while the device may still be working."""
    found = []
    for _ in range(rounds):
        restore()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


def _show(title: str, result: dict[str, Any]) -> None:
    out.print(Text(f"{title}, on {result['device']}", style="bold"))
    rows = table("", "ms", "against sequence", folds=("",), right=("ms", "against sequence"))
    ms = result["ms"]
    low, high = result["speed_up_range"]
    rows.add_row("plain model", f"{ms['plain']:.3f}", f"{ms['sequence'] / ms['plain']:.2f}x")
    rows.add_row("in sequence", f"{ms['sequence']:.3f}", "1.00x")
    gain = "the same" if result["stays_in_sequence"] else f"{result['speed_up']:.2f}x ({low:.2f}-{high:.2f})"
    rows.add_row(Folded(result["strategy"]), f"{ms['strategy']:.3f}", gain)
    show(rows)
    sizes = ", ".join(map(str, result["micro_batches"]))
    where = ", ".join(result["lanes"])
    how = "in sequence" if result["stays_in_sequence"] else f"as [{sizes}], {result['tasks']} tasks on lanes {where}"
    host = "the host is the device" if result["host_ms"] is None else f"{result['host_ms']:.3f} ms"
    listed(
        [
            ("results", "agree with the plain model's"),
            ("plan", f"batch of {sum(result['micro_batches'])} {how}; plans made: {result['plans']}"),
            ("overlap", f"{result['overlap']:.2f} lanes busy on average"),
            ("copied", f"{result['bytes_copied']} bytes to join micro-batches"),
            ("host time", host),
        ]
    )
