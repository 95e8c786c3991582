"""`dynaflow plan`: what would run on which lane, and why, without weights and without a device."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from dynaflow.cli import arguments
from dynaflow.cli.output import Folded, can_write, nothing_else, out, print_json, show, table, verbatim, write
from dynaflow.cli.plan_for_device import capture
from dynaflow.core.device import device_named
from dynaflow.core.plan import Plan
from dynaflow.core.plan_text import draw, kind_of
from dynaflow.observe.document import Document
from dynaflow.observe.page import page as page_of
from dynaflow.observe.timelines import of_plan
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext

EXAMPLE = "dynaflow plan llama-3-8b --layers 1 --strategy nanoflow --batch 8 --prompt 512"


def add(app: typer.Typer) -> None:
    app.command(epilog=f"Example: {EXAMPLE}")(plan)


def plan(
    model: arguments.ModelName,
    strategy: arguments.Strategy = "nanoflow",
    option: arguments.Options = None,
    batch: arguments.Batch = None,
    prompt: arguments.Prompt = None,
    context: arguments.Context = None,
    layers: arguments.Layers = None,
    device: Annotated[str, typer.Option(help="The device to plan for, such as h200: its costs and SMs.")] = "h200",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the plan here: for `dynaflow view`, or Plan.from_json.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page here, with shapes and tags.")] = None,
    as_json: arguments.Json = False,
) -> None:
    """Shows the plan that a strategy makes for a model: drawn, and listed with the reasons for each task.

    Nothing runs, and a named model is built without weights. By default 8 prompts of 64 tokens.
    """
    can_write(out_file, page)
    target = device_named(device)
    lines: list[str] = []
    with nothing_else(as_json), _without_cache():
        scheduler = _recording_lines(arguments.scheduler_named(strategy, option), lines)
        loaded = arguments.load_model(
            model, device=torch.device("meta"), batch=batch, prompt=prompt, context=context, layers=layers
        )
        with arguments.blaming_model(loaded):
            graph, made = capture(loaded.model, scheduler, loaded.inputs, target)
    document = of_plan(made, graph, title=f"{loaded.title}: {strategy}")
    rows = _rows(document, graph, lines if len(lines) == len(made.tasks) else [])
    if out_file is not None:
        write(out_file, made.to_json(indent=1))
    if page is not None:
        write(page, page_of([document]))
    if as_json:
        head = {"model": loaded.name, "inputs": arguments.sizes(loaded.inputs), "strategy": strategy}
        ops = [_op(op, graph) for op in graph.ops]
        print_json({**head, "plan": json.loads(made.to_json()), "tasks": rows, "ops": ops})
        return
    _show(document.title, made, rows, graph)
    if made.sequential:
        verbatim(_why(strategy, graph, loaded.model))
    for what, where in (("plan", out_file), ("page", page)):
        if where is not None:
            out.print(f"{what} in {where}", style="dim", soft_wrap=True)


@contextmanager
def _without_cache() -> Iterator[None]:
    """Makes the scheduler run: stored plans don't have its lines."""
    before = os.environ.get("DYNAFLOW_CACHE")
    os.environ["DYNAFLOW_CACHE"] = "0"
    try:
        yield
    finally:
        os.environ.pop("DYNAFLOW_CACHE") if before is None else os.environ.update(DYNAFLOW_CACHE=before)


def _recording_lines(scheduler: OpSchedulerBase, lines: list[str]) -> OpSchedulerBase:
    """Returns the same scheduler, which adds to `lines` the line of code that executed each task."""
    noted: Any = copy.copy(scheduler)

    def schedule(ctx: ScheduleContext) -> Any:
        execute = ctx.execute
        lines.clear()

        def noting(*args: Any, **kwargs: Any) -> None:
            execute(*args, **kwargs)
            caller = sys._getframe(1)
            lines.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")

        ctx.execute = noting  # type: ignore[method-assign]
        return scheduler.schedule(ctx)

    noted.schedule = schedule
    if type(scheduler).choose is not OpSchedulerBase.choose:
        noted.choose = lambda ctx: _recording_lines(scheduler.choose(ctx), lines)
    return noted


def _rows(document: Document, graph: OpGraph, lines: list[str]) -> list[dict[str, Any]]:
    found = []
    for i, task in enumerate(document.tasks):
        ops = [graph.by_name[name] for name in task.op.split(" + ") if name in graph.by_name]
        found.append(
            {
                "task": i, "op": task.op, "lane": task.lane, "micro_batches": task.micro_batches, "tags": task.tags,
                "rows": None if all(op.shared for op in ops) else task.rows,
                "split": "; ".join(dict.fromkeys(map(_splittable, ops))), "after": task.after,
                "line": lines[i] if lines else None, "note": task.note,
            }
        )  # fmt: skip
    return found


NO_ROWS = "no rows of the batch in it"


def _splittable(op: Op) -> str:
    return NO_ROWS if op.shared else op.refusal or "yes"


def _op(op: Op, graph: OpGraph) -> dict[str, Any]:
    return {
        "name": op.name,
        "tags": sorted(op.tags),
        "splittable": op.splittable,
        "why_not": None if op.splittable else _splittable(op),
        "after": [graph.ops[a].name for a in op.after],
        "groups": op.groups,
        "line": op.line,
    }


def _show(title: str, made: Plan, rows: list[dict[str, Any]], graph: OpGraph) -> None:
    out.print(Text(title, style="bold"))
    sizes = ", ".join(str(m.size) for m in made.micro_batches)
    out.print(Text(f"batch of {made.batch_size} as [{sizes}], {len(rows)} tasks"))
    verbatim(draw(made, width=out.drawing))
    if not rows:
        return
    lines = [Path(row["line"] or "").name for row in rows]
    files = {line.rpartition(":")[0] for line in lines}
    columns = ("", "operator", "lane", "part", "rows", "tags", "split", "after", "line")
    found = table(*columns, folds=("operator", "tags", "after", "line"), right=("", "rows"), gap=1)
    for row, line in zip(rows, lines, strict=True):
        parts = "all" if len(row["micro_batches"]) == len(made.micro_batches) else _joined(row["micro_batches"])
        split = {"yes": "yes", NO_ROWS: "-"}.get(row["split"], "no")
        where = Folded(line.rpartition(":")[2] if len(files) == 1 else line)
        found.add_row(
            str(row["task"]), Folded(row["op"]), row["lane"], parts, str(row["rows"] or ""),
            Folded(_joined(row["tags"])), split, _joined(row["after"]), where,
        )  # fmt: skip
    show(found)
    if len(files) == 1 and any(files):
        out.print(Text(f"lines are those of {files.pop()}"))
    if any(row["split"] == NO_ROWS for row in rows):
        out.print(Text(f"split -: {NO_ROWS}"))
    refused: dict[tuple[str, str], list[str]] = {}  # equal layers are listed once
    for op in graph.ops:
        if op.refusal and not op.shared:
            refused.setdefault((kind_of(op.name), op.refusal), []).append(op.name)
    for (_, reason), (name, *more) in refused.items():
        out.print(Text(f"{name}{f' (and {len(more)} like it)' if more else ''} is not split: {reason}"))


def _why(strategy: str, graph: OpGraph, model: Any) -> str:
    """The reasons for a plan without tasks."""
    if strategy == "sequential":
        return "sequential leaves the model as it is"
    if len(graph.ops) > 1:
        return f"{strategy} stays in sequence here: it finds nothing worth running side by side for this batch"
    own = _joined(name for name, _ in getattr(model, "named_children", tuple)())
    return (
        f"{strategy} finds no operators that it knows, by names such as *.mlp or q_proj"
        f"{f'; this model has {own}' if own else ''}.\n"
        "Its options may take your own cuts; or write a scheduler: docs/first-scheduler.md"
    )


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))
