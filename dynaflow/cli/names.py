"""`dynaflow list`: the models, devices and strategies that have a name."""

from __future__ import annotations

import typer

from dynaflow.cli import arguments
from dynaflow.cli.output import out, print_json, show, table
from dynaflow.core.device import DEVICES
from dynaflow.models.table import MODELS
from dynaflow.strategies import CLASSES

EXAMPLE = "dynaflow list"


def add(app: typer.Typer) -> None:
    app.command("list", epilog=f"Example: {EXAMPLE}")(names)


def names(as_json: arguments.Json = False) -> None:
    """Lists the models, devices and strategies that have a name."""
    if as_json:
        models = [{"name": m.name, "about": m.about, "class": m.kind, "own": m.own} for m in MODELS.values()]
        print_json({"models": models, "devices": list(DEVICES), "strategies": list(CLASSES)})
        return
    rows = table("model", "", "class", folds=("class",))
    for m in MODELS.values():
        rows.add_row(m.name, m.about, m.kind.split(":")[1] if m.own else f"{m.kind} of transformers")
    show(rows)
    devices, strategies = ", ".join(DEVICES), ", ".join(CLASSES)
    out.print(f"\n[bold]devices[/bold] (each also as several, such as h100x4): {devices}", highlight=False)
    out.print(f"[bold]strategies[/bold]: {strategies}", highlight=False)
