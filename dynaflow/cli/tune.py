"""`dynaflow tune`: the best strategy on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.text import Text

import dynaflow as df
from dynaflow.cli import arguments
from dynaflow.cli.output import Folded, nothing_else, out, print_json, show, table, verbatim
from dynaflow.tune.decision import Decision
from dynaflow.tune.snippet import code_snippet

EXAMPLE = "dynaflow tune llama-tiny --seconds 1 --operators eager"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(tune)


def tune(
    model: arguments.ModelName,
    seconds: Annotated[float, typer.Option(min=0, help="Seconds for each situation.")] = 60.0,
    most: Annotated[int, typer.Option(min=1, help="Schedules to measure: those with the best predictions.")] = 4,
    batch: arguments.Batch = None,
    prompt: arguments.Prompt = None,
    context: arguments.Context = None,
    layers: arguments.Layers = None,
    device: arguments.Where = None,
    dtype: arguments.Dtype = None,
    cudagraph: arguments.CudaGraph = None,
    operators: arguments.Operators = "inductor",
    as_json: arguments.Json = False,
) -> None:
    """Measures the strategies on a model, and prints a configuration to paste."""
    chosen = []
    results = []
    with nothing_else(as_json), torch.no_grad():
        loaded = arguments.load_model(
            model, device=device, dtype=dtype, batch=batch, prompt=prompt, context=context, layers=layers
        )
        options = {"seconds": seconds, "most": most, "progress": True}
        fast = df.compile(loaded.model, "auto", scheduler_options=options, cudagraph=cudagraph, operators=operators)  # type: ignore[arg-type]
        for inputs in loaded.all_inputs:
            with arguments.blaming_model(loaded, inputs):
                found = fast.explain(**inputs).decision
            out.print(f"[bold]{arguments.described(inputs)}[/bold]")
            _show(found)
            chosen.append((arguments.sizes(inputs), found.chosen))
            results.append({"inputs": arguments.sizes(inputs), **asdict(found)})
        paste = code_snippet(chosen, cudagraph)
        out.print("\n[bold]to paste[/bold]")
        verbatim(paste)
    if as_json:
        print_json({"model": loaded.name, "situations": results, "paste": paste})


def _show(found: Decision) -> None:
    out.print(Text(found.head))
    columns = ("", "schedule", "predicted", "measured", "against sequence", "limited by")
    rows = table(*columns, folds=("schedule", "limited by"), right=("predicted", "measured"))
    for mark, name, *figures, limit in found.rows:
        rows.add_row(mark, Folded(name), *figures, Folded(limit))
    show(rows)
