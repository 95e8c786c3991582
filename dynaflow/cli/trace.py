"""`dynaflow trace`: when each task of a run ran, measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dynaflow as df
from dynaflow.cli import arguments
from dynaflow.cli.output import can_write, nothing_else, out, print_json, write
from dynaflow.cli.recorded_run import device_name, device_of, longest, recorded
from dynaflow.observe.page import page as page_of

EXAMPLE = "dynaflow trace llama-tiny --strategy nanoflow --operators eager --out trace.json --page trace.html"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(trace)


def trace(
    model: arguments.ModelName,
    strategy: arguments.Strategy = "nanoflow",
    option: arguments.Options = None,
    batch: arguments.Batch = None,
    prompt: arguments.Prompt = None,
    context: arguments.Context = None,
    layers: arguments.Layers = None,
    device: arguments.Where = None,
    dtype: arguments.Dtype = None,
    operators: arguments.Operators = "inductor",
    calls: Annotated[int, typer.Option(min=1, help="Calls to record.")] = 5,
    out_file: Annotated[
        Path, typer.Option("--out", help="Where to write the trace: for Perfetto, chrome://tracing, `dynaflow view`.")
    ] = Path("trace.json"),
    page: Annotated[Path | None, typer.Option(help="Write the page here as well: in sequence, and as it ran.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Runs a model under a strategy and writes when each task ran, lane by lane."""
    can_write(out_file, page)
    with nothing_else(as_json), torch.no_grad():
        scheduler = arguments.scheduler_named(strategy, option)
        loaded = arguments.load_model(
            model, device=device, dtype=dtype, batch=batch, prompt=prompt, context=context, layers=layers
        )
        options: Any = {"operators": operators}
        with arguments.blaming_model(loaded):
            recording = recorded(df.compile(loaded.model, scheduler, **options), loaded.inputs, calls)
        made = longest(recording)
        if page is not None:
            before = longest(recorded(df.compile(loaded.model, "sequential", **options), loaded.inputs, calls))
    ms, overlap, tasks = made.timeline.length * 1e3, made.overlap, len(made.timeline.tasks)
    write(out_file, json.dumps(recording.trace()))
    if page is not None:
        titles = {"in sequence": before, strategy: made}
        shown = [replace(plan.timeline, title=title) for title, plan in titles.items()]
        write(page, page_of(shown, title=f"{loaded.title}: {strategy}"))
    if as_json:
        result: dict[str, Any] = {"model": loaded.name, "inputs": arguments.sizes(loaded.inputs), "strategy": strategy}
        result |= {"device": device_name(device_of(loaded.model, loaded.inputs)), "trace": out_file, "page": page}
        print_json({**result, "tasks": tasks, "ms": ms, "overlap": overlap})
        return
    out.print(f"{loaded.title}: {tasks} tasks in {ms:.3f} ms, {overlap:.2f} lanes busy on average", highlight=False,
              soft_wrap=True)  # fmt: skip
    out.print(f"timeline in {out_file}: for `dynaflow view {out_file}`, or https://ui.perfetto.dev", style="dim",
              soft_wrap=True)  # fmt: skip
    if page is not None:
        out.print(f"page in {page}", style="dim", soft_wrap=True)

