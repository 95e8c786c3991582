"""`dynaflow bench`: the benchmarks of the repository."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

import dynaflow
from dynaflow.cli import arguments
from dynaflow.cli.output import nothing_else, print_json
from dynaflow.errors import DynaFlowError

EXAMPLE = "dynaflow bench --only copies --tiny --rounds 1 --operators eager"


def add(app: typer.Typer) -> None:
    # Other arguments are passed on to the benchmarks, which have their own parser and help.
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(epilog=f"Example: {EXAMPLE}", context_settings=passed_on)(bench)


def bench(ctx: typer.Context, as_json: arguments.Json = False) -> None:
    """Runs benchmarks and prints their tables.

    Takes the arguments of `python -m benchmarks`: `dynaflow bench -- --help` lists them. Exit code 1 if one fails.
    """
    folder = _repository()
    sys.path.insert(0, str(folder))
    try:
        main = importlib.import_module("benchmarks.__main__").main
        with nothing_else(as_json):
            reports = main(ctx.args)
    finally:
        sys.path.remove(str(folder))
    if as_json:
        print_json({"reports": [{**report.result, "rows": report.rows} for report in reports]})
    if any("error" in row for report in reports for row in report.rows):
        raise typer.Exit(1)


def _repository() -> Path:
    """Finds the benchmarks, which are not installed: next to the package's sources, or in the current folder."""
    for folder in (Path(dynaflow.__file__).parents[1], Path.cwd()):
        if (folder / "benchmarks" / "__main__.py").is_file():
            return folder
    raise DynaFlowError(
        "the benchmarks are not part of the installed package",
        advice="clone the repository and run `dynaflow bench` there; `dynaflow run` measures a model without them",
    )
