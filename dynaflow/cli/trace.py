"""`dynaflow trace`: when each task of a run really ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dynaflow.cli import arguments as of
from dynaflow.cli.measured import overlap, watched
from dynaflow.cli.output import nothing_else, out, print_json, write
from dynaflow.view.document import Document
from dynaflow.view.page import page as page_of

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
    calls: Annotated[int, typer.Option(min=1, help="The last one is written.")] = 5,
    out_file: Annotated[
        Path, typer.Option("--out", help="Where to write the trace: for Perfetto, chrome://tracing, `dynaflow view`.")
    ] = Path("trace.json"),
    page: Annotated[Path | None, typer.Option(help="Write the page here as well: in sequence, and as it ran.")] = None,
    as_json: of.Json = False,
) -> None:
    """Runs a model under a strategy and writes when each task ran, lane by lane."""
    scheduler = of.scheduler_named(strategy, option)
    with nothing_else(as_json), torch.no_grad():
        given = of.given(
            model, device=of.device_named(device), dtype=of.dtype_named(dtype), batch=batch, prompt=prompt,
            context=context, layers=layers,
        )  # fmt: skip
        found = [watched(given.model, scheduler, given.inputs, operators=operators, calls=calls, title=strategy)]
        if page is not None:
            sequence = of.scheduler_named("sequential", None)
            before = watched(given.model, sequence, given.inputs, operators=operators, calls=calls, title="in sequence")
            found.insert(0, before)
    ran = found[-1]
    write(out_file, json.dumps(chrome_trace(ran)))
    if page is not None:
        write(page, page_of(found, title=f"{given.title}: {strategy}"))
    if as_json:
        told = {"model": given.name, "inputs": of.sizes(given.inputs), "strategy": strategy, "device": ran.device}
        print_json(
            {**told, "trace": out_file, "page": page, "tasks": len(ran.tasks), "ms": ran.length * 1e3,
             "overlap": overlap(ran)}
        )  # fmt: skip
        return
    out.print(f"{given.title}: {len(ran.tasks)} tasks in {ran.length * 1e3:.3f} ms, {overlap(ran):.2f} lanes busy on "
              "average", highlight=False, soft_wrap=True)  # fmt: skip
    out.print(f"timeline in {out_file}: open it at https://ui.perfetto.dev", style="dim", soft_wrap=True)
    if page is not None:
        out.print(f"page in {page}", style="dim", soft_wrap=True)


def chrome_trace(document: Document) -> dict[str, Any]:
    """For Perfetto or chrome://tracing: a row for each lane. Times are microseconds."""
    threads = {lane.name: i for i, lane in enumerate(document.lanes, 1)}
    events: list[dict[str, Any]] = [_name("process_name", 0, document.device or document.title)]
    events += [_name("thread_name", thread, lane) for lane, thread in threads.items()]
    for i, task in enumerate(document.tasks):
        args = {"task": i, "op": task.op, "micro_batches": task.micro_batches, "after": task.after, "rows": task.rows}
        events.append(
            {"ph": "X", "pid": 1, "tid": threads[task.lane], "name": task.name, "args": args,
             "ts": (task.start - document.begin) * 1e6, "dur": task.seconds * 1e6}
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": document.source}}


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}
