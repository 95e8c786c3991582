"""`dynaflow view`: timelines as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dynaflow.cli import arguments
from dynaflow.cli.output import can_write, print_json, write
from dynaflow.cli.output import out as console
from dynaflow.observe.page import page
from dynaflow.observe.readers import read

EXAMPLE = "dynaflow view plan.json --no-open"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(view)


def view(
    files: Annotated[list[Path], typer.Argument(help="Plans, timelines, and traces in Chrome's format.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page; else next to the first file.")] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    as_json: arguments.Json = False,
) -> None:
    """Writes timelines as one page: planned, simulated or measured, to compare them."""
    can_write(out)
    documents = [read(file) for file in files]
    where = out or files[0].with_name(files[0].name.removesuffix(".gz").removesuffix(".json") + ".html")
    write(where, page(documents, title=title))
    if as_json:
        result = [{"title": d.title, "source": d.source, "tasks": len(d.tasks), "unit": d.unit, "length": d.length}
                for d in documents]  # fmt: skip
        print_json({"page": where, "timelines": result})
    else:
        console.print(f"page in {where}", soft_wrap=True)
    if show:
        webbrowser.open(where.resolve().as_uri())
