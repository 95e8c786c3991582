"""The `dynaflow` command: one file for each of its commands."""

from __future__ import annotations

try:
    import typer

    from dynaflow.cli.output import complain
except ModuleNotFoundError as e:
    raise SystemExit(f"the command line needs {e.name}: pip install 'dynaflow[cli]'") from e

from dynaflow.cli import bench, demo, doctor, names, plan, run, simulate, trace, tune, view
from dynaflow.errors import DynaFlowError

HELP = """Programmable intra-device parallelism for PyTorch. Each command has its own --help.

Exit codes: 0, all is well; 1, results differ, or something is missing or has failed; 2, wrong use: stderr says why.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)
for module in (demo, doctor, names, plan, run, tune, simulate, trace, bench, view):
    module.add(app)


def main() -> None:
    """The `dynaflow` command."""
    try:
        app()
    except DynaFlowError as e:
        complain(f"{type(e).__name__}: {e}")
        raise SystemExit(2) from None
