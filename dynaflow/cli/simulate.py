"""`dynaflow simulate`: the speed of a strategy on any device, by the cost model."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from dynaflow.cli import arguments, plan_for_device
from dynaflow.cli.output import Folded, can_write, nothing_else, out, print_json, show, table, verbatim, write
from dynaflow.core.device import Device, Link, device_named
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulate import simulate as run
from dynaflow.cost.simulation import Simulation
from dynaflow.errors import DynaFlowError
from dynaflow.models.build import Workload
from dynaflow.observe.page import page as page_of
from dynaflow.observe.timelines import of_simulation

EXAMPLE = "dynaflow simulate llama-3-70b --tp 8 --device b200 --strategy comm_overlap --prompt 512 --layers 2"
SHOWN = ("compute", "memory", "link", "sms")


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(simulate)


def simulate(
    model: arguments.ModelName = "llama-3-8b",
    device: Annotated[str, typer.Option(help="A device's name, such as h200 or b200x8.")] = "h200",
    strategy: arguments.Strategy = "nanoflow",
    option: arguments.Options = None,
    batch: arguments.Batch = None,
    prompt: arguments.Prompt = None,
    context: arguments.Context = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model's heads and widths.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="GPUs that share its experts.")] = 1,
    layers: arguments.Layers = None,
    attention: Annotated[str, typer.Option(help="flash, as in serving systems; sdpa, as in transformers.")] = "flash",
    link: Annotated[float | None, typer.Option(min=0, help="Another link: GB/s each way.")] = None,
    cudagraph: Annotated[bool, typer.Option(help="The host launches the whole plan at once.")] = True,
    draw: Annotated[bool, typer.Option(help="Draw the timeline.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline here, for Perfetto.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write both timelines here, as a page.")] = None,
    as_json: arguments.Json = False,
    named: Annotated[str | None, typer.Option("--model", hidden=True, help="The same as MODEL.")] = None,
) -> None:
    """Simulates a model in sequence and under a strategy on any device: how long a call takes, and why.

    By default 64 requests decode a token after 1024.
    """
    if attention not in ("flash", "sdpa"):
        raise DynaFlowError(f"attention can't be {attention!r}", advice="use flash or sdpa")
    if tp > 1 and ep > 1:
        raise DynaFlowError("a model is shared by tp or by ep, not both", advice="leave one of them at 1")
    where = _device(device, max(tp, ep), link)
    can_write(trace, page)
    start = time.perf_counter()
    with nothing_else(as_json):
        scheduler = arguments.scheduler_named(strategy, option)
        loaded = arguments.load_model(
            named or model, device=torch.device("meta"), batch=batch, prompt=prompt, context=context, layers=layers,
            usual=Workload(), attention=attention, tp=tp, ep=ep,  # type: ignore[arg-type]
        )  # fmt: skip
        with arguments.blaming_model(loaded):
            graph, plan = plan_for_device.capture(loaded.model, scheduler, loaded.inputs, where)
        captured = time.perf_counter()
        costs = Costs(graph, where)
        before = run(plan_for_device.in_sequence(plan), graph, costs, where, cudagraph=cudagraph)
        after = run(plan, graph, costs, where, cudagraph=cudagraph)
        done = time.perf_counter()

    shared = f", tp {tp}" if tp > 1 else f", ep {ep}" if ep > 1 else ""
    part = f", only its first {layers} layers" if layers else ""
    title = f"{loaded.name}{part}{shared}, {arguments.described(loaded.inputs)}, on {where.name}"
    weights = sum(p.numel() * p.element_size() for p in getattr(loaded.model, "parameters", list)())
    guessed = sorted({op.name for op in graph.ops if costs.work(op, plan.batch_size).guessed})
    if trace is not None:
        write(trace, after.to_json())
    if page is not None:
        shown = [of_simulation(f, graph, costs, title=row) for row, f in (("sequence", before), (strategy, after))]
        write(page, page_of(shown, title=title))
    if as_json:
        print_json(
            {
                "model": loaded.name, "inputs": arguments.sizes(loaded.inputs), "layers": layers, "tp": tp, "ep": ep,
                "device": where.name, "strategy": strategy, "stays_in_sequence": plan.sequential,
                "sequence": _summary(before), "scheduled": _summary(after), "speed_up": before.seconds / after.seconds,
                "weights_bytes": weights, "fits": weights <= where.memory, "guessed": guessed,
                "seconds": {"capture": captured - start, "simulate": done - captured},
                "trace": trace, "page": page,
            }
        )  # fmt: skip
        return
    out.print(Text(title, style="bold"))
    rows = table("", "ms", "speed-up", "limited by", *SHOWN, folds=("",), right=("ms", "speed-up", *SHOWN))
    for row, found in (("sequence", before), (strategy, after)):
        busy = [f"{found.busy[r]:.0%}" for r in SHOWN]
        speed_up = f"{before.seconds / found.seconds:.3f}"
        rows.add_row(Folded(row), f"{found.seconds * 1e3:.3f}", speed_up, found.limit, *busy)
    show(rows)
    if plan.sequential:
        out.print(Text(f"{strategy} stays in sequence here"))
    if weights > where.memory:
        out.print(f"{weights / 1e9:.0f} GB of weights on a GPU that holds {where.memory / 1e9:.0f}", style="red")
    if guessed:
        out.print(f"known by its inputs and results only: {guessed[0]} (and {len(guessed) - 1} more)")
    out.print(f"captured in {captured - start:.1f} s, simulated in {(done - captured) * 1e3:.0f} ms", style="dim")
    if draw:
        verbatim(after.draw(out.drawing))
    if trace is not None:
        out.print(f"timeline in {trace}: open it at https://ui.perfetto.dev", style="dim", soft_wrap=True)
    if page is not None:
        out.print(f"page in {page}", style="dim", soft_wrap=True)


def _summary(found: Simulation) -> dict[str, Any]:
    return {"ms": found.seconds * 1e3, "limited_by": found.limit, "busy": found.busy}


def _device(name: str, ranks: int, bandwidth: float | None) -> Device:
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
