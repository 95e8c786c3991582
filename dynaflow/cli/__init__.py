"""The `dynaflow` command: one module for each of its commands.

- The module of a command has its name (`names` is `dynaflow list`): what it prints, and its help, is there.
- `arguments`: options that several commands have, and the model, strategy or device that they name.
- `recorded_run`: a model run under a schedule and recorded. `plan_for_device`: a plan without running the model.
- `output`: tables, text and JSON on the terminal, and where errors go.

It needs typer and rich (`pip install 'dynaflow[cli]'`); importing `dynaflow` does not import it.
"""

from __future__ import annotations

try:
    import typer

    from dynaflow.cli.output import complain
except ModuleNotFoundError as e:
    raise SystemExit(f"the command line needs {e.name}: pip install 'dynaflow[cli]'") from e

from dynaflow.cli import bench, demo, doctor, names, plan, run, simulate, trace, tune, view
from dynaflow.errors import DynaFlowError

HELP = """Programmable intra-device parallelism for PyTorch. Each command has its own --help.

Exit codes: 0: success; 1: results differ, or something is missing or failed; 2: wrong usage, see stderr.
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
