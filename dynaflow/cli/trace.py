"""`dynaflow trace`: when each task of a run really ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dynaflow as df
from dynaflow.cli import arguments as of
from dynaflow.cli.measured import device_name, device_of, longest, recorded
from dynaflow.cli.output import can_write, nothing_else, out, print_json, write
from dynaflow.observe.page import page as page_of

EXAMPLE = "dynaflow trace llama-tiny --strategy nanoflow --operators eager --out trace.json --page trace.html"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(trace)


def trace(
    model: of.ModelName,
    strategy: of.Strategy = "nanoflow",
    option: of.Options = None,
    batch: of.Batch = None,
    prompt: of.Prompt = None,
    context: of.Context = None,
    layers: of.Layers = None,
    device: of.Where = None,
    dtype: of.Dtype = None,
    operators: of.Operators = "inductor",
    calls: Annotated[int, typer.Option(min=1, help="That are recorded.")] = 5,
    out_file: Annotated[
        Path, typer.Option("--out", help="Where to write the trace: for Perfetto, chrome://tracing, `dynaflow view`.")
    ] = Path("trace.json"),
    page: Annotated[Path | None, typer.Option(help="Write the page here as well: in sequence, and as it ran.")] = None,
    as_json: of.Json = False,
) -> None:
    """Runs a model under a strategy and writes when each task ran, lane by lane."""
    can_write(out_file, page)
    with nothing_else(as_json), torch.no_grad():
        scheduler = of.scheduler_named(strategy, option)
        given = of.given(
            model, device=device, dtype=dtype, batch=batch, prompt=prompt, context=context, layers=layers
        )
        options: Any = {"operators": operators}
        with of.at_fault(given):
            recording = recorded(df.compile(given.model, scheduler, **options), given.inputs, calls)
        made = longest(recording)
        if page is not None:
            before = longest(recorded(df.compile(given.model, "sequential", **options), given.inputs, calls))
    ms, overlap, tasks = made.timeline.length * 1e3, made.overlap, len(made.timeline.tasks)
    write(out_file, json.dumps(recording.trace()))
    if page is not None:
        titles = {"in sequence": before, strategy: made}
        shown = [replace(plan.timeline, title=title) for title, plan in titles.items()]
        write(page, page_of(shown, title=f"{given.title}: {strategy}"))
    if as_json:
        told: dict[str, Any] = {"model": given.name, "inputs": of.sizes(given.inputs), "strategy": strategy}
        told |= {"device": device_name(device_of(given.model, given.inputs)), "trace": out_file, "page": page}
        print_json({**told, "tasks": tasks, "ms": ms, "overlap": overlap})
        return
    out.print(f"{given.title}: {tasks} tasks in {ms:.3f} ms, {overlap:.2f} lanes busy on average", highlight=False,
              soft_wrap=True)  # fmt: skip
    out.print(f"timeline in {out_file}: for `dynaflow view {out_file}`, or https://ui.perfetto.dev", style="dim",
              soft_wrap=True)  # fmt: skip
    if page is not None:
        out.print(f"page in {page}", style="dim", soft_wrap=True)

