"""`dynaflow tune`: what is best on the device at hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.text import Text

import dynaflow as df
from dynaflow.cli import arguments as of
from dynaflow.cli.output import Folded, nothing_else, out, print_json, show, table, verbatim
from dynaflow.tune.decision import Decision
from dynaflow.tune.paste import configuration

EXAMPLE = "dynaflow tune llama-tiny --seconds 1 --operators eager"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(tune)


def tune(
    model: of.ModelName,
    seconds: Annotated[float, typer.Option(min=0, help="For each situation.")] = 60.0,
    most: Annotated[int, typer.Option(min=1, help="Schedules that are measured, of those that look best.")] = 4,
    batch: of.Batch = None,
    prompt: of.Prompt = None,
    context: of.Context = None,
    layers: of.Layers = None,
    device: of.Where = None,
    dtype: of.Dtype = None,
    cudagraph: of.CudaGraph = None,
    operators: of.Operators = "inductor",
    as_json: of.Json = False,
) -> None:
    """Measures the strategies on a model, and prints a configuration to paste."""
    chosen = []
    told = []
    with nothing_else(as_json), torch.no_grad():
        given = of.given(
            model, device=device, dtype=dtype, batch=batch, prompt=prompt, context=context, layers=layers
        )
        options = {"seconds": seconds, "most": most, "progress": True}
        fast = df.compile(given.model, "auto", scheduler_options=options, cudagraph=cudagraph, operators=operators)  # type: ignore[arg-type]
        for inputs in given.situations:
            with of.at_fault(given, inputs):
                found = fast.explain(**inputs).decision
            out.print(f"[bold]{of.described(inputs)}[/bold]")
            _show(found)
            chosen.append((of.sizes(inputs), found.chosen))
            told.append({"inputs": of.sizes(inputs), **asdict(found)})
        paste = configuration(chosen, cudagraph)
        out.print("\n[bold]to paste[/bold]")
        verbatim(paste)
    if as_json:
        print_json({"model": given.name, "situations": told, "paste": paste})


def _show(found: Decision) -> None:
    out.print(Text(found.head))
    columns = ("", "schedule", "predicted", "measured", "against sequence", "limited by")
    rows = table(*columns, folds=("schedule", "limited by"), right=("predicted", "measured"))
    for mark, name, *figures, limit in found.rows:
        rows.add_row(mark, Folded(name), *figures, Folded(limit))
    show(rows)
