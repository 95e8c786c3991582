"""The command line: what a strategy would give on a device that is not at hand, and what is best on the one that is."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as e:
    raise SystemExit(f"the command line needs {e.name}: pip install 'dynaflow[tune]'") from e

from dynaflow.errors import DynaFlowError, ScheduleError

app = typer.Typer(
    help="Programmable intra-device parallelism for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False
)
_out = Console()
_shown = ("compute", "memory", "link", "sms")


@app.callback()
def _commands() -> None:
    """Each command has its own --help."""


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help="A model's name; see `dynaflow list`.")] = "llama-3-8b",
    device: Annotated[str, typer.Option(help="A device's name, such as h200 or b200x8.")] = "h200",
    strategy: Annotated[str, typer.Option(help="A strategy's name, or module:Class.")] = "nanoflow",
    option: Annotated[list[str] | None, typer.Option(help="Of the strategy: name=value.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of each prompt; 0: one token is decoded.")] = 0,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the one that is decoded.")] = 1024,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model's heads and widths.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="GPUs that share its experts.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first ones: faster, and not scaled up.")] = None,
    attention: Annotated[str, typer.Option(help="flash, as serving systems do it; sdpa, as transformers.")] = "flash",
    link: Annotated[float | None, typer.Option(min=0, help="Another link: GB/s each way.")] = None,
    cudagraph: Annotated[bool, typer.Option(help="The host launches all at once.")] = True,
    draw: Annotated[bool, typer.Option(help="Draw the timeline.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline here, for Perfetto.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write both timelines here, as a page.")] = None,
) -> None:
    """The model in sequence and under a strategy: milliseconds of a call, and what limits it."""
    from dynaflow.models.build import Situation, build, inputs
    from dynaflow.tune import shapes
    from dynaflow.tune.cost import Costs
    from dynaflow.tune.simulate import simulate as run

    if attention not in ("flash", "sdpa"):
        raise DynaFlowError(f"attention is no {attention!r}", advice="say flash or sdpa")
    if tp > 1 and ep > 1:
        raise DynaFlowError("a model is shared by tp or by ep, not both", advice="leave one of them at 1")
    where = _device(device, max(tp, ep), link)
    scheduler = _scheduler(strategy, option or [])
    start = time.perf_counter()
    built = build(model, tp=tp, ep=ep, layers=layers, attention=attention)  # type: ignore[arg-type]
    situation = Situation(batch=batch, prompt=prompt, context=context)
    graph, plan = shapes.capture(built, scheduler, inputs(built, situation))
    captured = time.perf_counter()
    costs = Costs(graph, where)
    before = run(shapes.in_sequence(plan), graph, costs, where, cudagraph=cudagraph)
    after = run(plan, graph, costs, where, cudagraph=cudagraph)
    done = time.perf_counter()

    what = f"{batch} prompts of {prompt}" if prompt else f"{batch} decoding after {context}"
    shared = f", tp {tp}" if tp > 1 else f", ep {ep}" if ep > 1 else ""
    part = f", only its first {layers} layers" if layers else ""
    table = Table(title=f"{model}{part}{shared}: {what} tokens, on {where.name}", title_justify="left")
    name = f"{strategy} (stays in sequence)" if plan.sequential else strategy
    table.add_column("", min_width=min(len(name), 32))
    for column in ("ms", "speed-up", "limited by", *_shown):
        table.add_column(column, justify="left" if column == "limited by" else "right")
    for row, found in (("sequence", before), (name, after)):
        busy = [f"{found.busy[r]:.0%}" for r in _shown]
        table.add_row(row, f"{found.seconds * 1e3:.3f}", f"{before.seconds / found.seconds:.3f}", found.limit, *busy)
    _out.print(table)
    weights = sum(p.numel() * p.element_size() for p in built.parameters())
    if weights > where.memory:
        _out.print(f"{weights / 1e9:.0f} GB of weights on a GPU that holds {where.memory / 1e9:.0f}", style="red")
    guessed = sorted({op.name for op in graph.ops if costs.work(op, batch).guessed})
    if guessed:
        _out.print(f"known by its inputs and results only: {guessed[0]} (and {len(guessed) - 1} more)")
    _out.print(f"captured in {captured - start:.1f} s, simulated in {(done - captured) * 1e3:.0f} ms", style="dim")
    if draw:
        _out.print(str(after), markup=False, highlight=False, soft_wrap=True)
    if trace is not None:
        trace.write_text(after.to_json())
        _out.print(f"timeline in {trace}: open it at https://ui.perfetto.dev", style="dim")
    if page is not None:
        from dynaflow.view.makers import of_simulation
        from dynaflow.view.page import page as written

        shown = [of_simulation(f, graph, costs, title=row) for row, f in (("sequence", before), (name, after))]
        _write(page, written(shown, title=f"{model}, {what} tokens"))
        _out.print(f"page in {page}", style="dim")


@app.command()
def tune(
    target: Annotated[str, typer.Argument(help="module:function, which returns the model and its inputs.")],
    seconds: Annotated[float, typer.Option(min=0, help="For each situation.")] = 60.0,
    most: Annotated[int, typer.Option(min=1, help="Schedules that are measured, of those that look best.")] = 4,
    cudagraph: Annotated[str | None, typer.Option(help="plan or pieces, as in df.compile.")] = None,
    operators: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
) -> None:
    """Measures the strategies on a model of yours, and prints a configuration to paste.

    The function returns (model, inputs): keyword arguments, or a list of them, one for each situation.
    """
    import torch

    import dynaflow as df
    from dynaflow.tune.paste import configuration

    model, inputs = _found(target)()
    options = {"seconds": seconds, "most": most, "progress": True}
    fast = df.compile(model, "auto", scheduler_options=options, cudagraph=cudagraph, operators=operators)  # type: ignore[arg-type]
    chosen = []
    with torch.no_grad():
        for given in inputs if isinstance(inputs, list) else [inputs]:
            found = fast.explain(**given)
            sizes = {name: tuple(t.shape) for name, t in given.items() if isinstance(t, torch.Tensor)}
            _out.print(f"[bold]{sizes}[/bold]")
            _out.print(str(found.decision), markup=False, highlight=False, soft_wrap=True)
            chosen.append((sizes, found.decision.chosen))
    _out.print("\n[bold]to paste[/bold]")
    _out.print(configuration(chosen, cudagraph), markup=False, highlight=False, soft_wrap=True)


@app.command()
def view(
    files: Annotated[list[Path], typer.Argument(help="Plans, timelines, and traces in Chrome's format.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the page; else beside the first file.")] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Timelines one above the other, as one page: planned, simulated, measured, or two to be compared."""
    from dynaflow.view.files import read
    from dynaflow.view.page import page

    documents = [read(file) for file in files]
    where = out or files[0].with_name(files[0].name.removesuffix(".gz").removesuffix(".json") + ".html")
    _write(where, page(documents, title=title))
    if as_json:
        told = [{"title": d.title, "source": d.source, "tasks": len(d.tasks), "unit": d.unit, "length": d.length}
                for d in documents]  # fmt: skip
        print(json.dumps({"page": str(where), "timelines": told}))
    else:
        _out.print(f"page in {where}", soft_wrap=True)
    if show:
        webbrowser.open(where.resolve().as_uri())


@app.command("list")
def list_names() -> None:
    """The models, devices and strategies that have a name."""
    from dynaflow.models.table import MODELS
    from dynaflow.strategies import CLASSES
    from dynaflow.tune.device import DEVICES

    for what, names in (("models", MODELS), ("devices", DEVICES), ("strategies", CLASSES)):
        _out.print(f"[bold]{what}[/bold]: {', '.join(names)}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise DynaFlowError(f"{path} can't be written: {e.strerror}", advice="name another place") from e


def _device(name: str, ranks: int, bandwidth: float | None) -> Any:
    from dataclasses import replace

    from dynaflow.tune.device import Link, device_named

    found = device_named(name)
    if ranks > 1 and found.ranks not in (1, ranks):
        raise DynaFlowError(
            f"{name} is {found.ranks} GPUs, the model is shared by {ranks}", advice=f"say {name.split('x')[0]}"
        )
    found = found.with_ranks(max(ranks, found.ranks))
    if bandwidth is None:
        return found
    usual = found.link or Link(latency=20e-6, bandwidth=0.0)
    return replace(found, link=replace(usual, bandwidth=bandwidth * 1e9), name=f"{found.name}, {bandwidth:g} GB/s")


def _scheduler(strategy: str, options: list[str]) -> Any:
    """A strategy by its name, or a class of the user's by where it is."""
    from dynaflow.schedule.base import OpSchedulerBase
    from dynaflow.strategies import make

    given = dict(_option(text) for text in options)
    if ":" not in strategy:
        return make(strategy, **given)
    kind = _found(strategy)
    try:
        made = kind(**given)
    except TypeError as e:
        raise ScheduleError(f"{strategy} can't be made: {e}", advice="pass what it takes by --option name=value") from e
    if not isinstance(made, OpSchedulerBase):
        raise ScheduleError(f"{strategy} is no scheduler", advice="name a subclass of dynaflow.OpSchedulerBase")
    return made


def _found(path: str) -> Any:
    """What stands at module:name."""
    module, colon, name = path.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own file is most likely here
    try:
        if not colon:
            raise ImportError("no name in the module is given")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ScheduleError(f"nothing at {path!r}: {e}", advice="say module:name, as in an import") from e
    finally:
        sys.path.remove(os.getcwd())


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ScheduleError(f"--option {text!r}", advice="say name=value, such as parts=3")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word
        return name, value


def main() -> None:
    """The `dynaflow` command."""
    try:
        app()
    except DynaFlowError as e:
        Console(stderr=True).print(f"{type(e).__name__}: {e}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
