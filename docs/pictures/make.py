"""Draws the strategies' pages: sequence and strategy one above the other, from a plan's simulation or from the plan.

`python docs/pictures/make.py [name ...]` writes docs/pictures/NAME.svg. They are committed: making them takes a while.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dynaflow as df
from dynaflow.cli.plan_for_device import capture, in_sequence
from dynaflow.core.device import device_named
from dynaflow.core.plan_text import kind_of
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulate import simulate
from dynaflow.models.build import Workload, build, inputs
from dynaflow.observe.document import Document, TimedTask
from dynaflow.observe.timelines import of_plan, of_simulation
from dynaflow.strategies import make

HERE = Path(__file__).parent
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
"""Those of Okabe and Ito, as on our pages; the rest is grey."""
GREY, TEXT = "#999999", "#7a7a7a"
"""Readable on light and on dark."""
WIDTH, LEFT, ROW, GAP = 760, 96, 22, 30


def simulated(model: str, strategy: str, *, device: str, situation: Workload, layers: int | None = 2, tp: int = 1,
              ep: int = 1, **options: Any) -> list[Document]:  # fmt: skip
    where = device_named(device).with_ranks(max(tp, ep))
    made = build(model, tp=tp, ep=ep, layers=layers)
    given = inputs(made, situation)
    return _both(made, strategy, given, where, **options)


def prefetched() -> list[Document]:
    model = build("llama-medium", layers=1, device="cpu", attention="sdpa")
    df.offload(model, "cpu", match="*.layers.*", at_least=1 << 20)
    given = inputs(model, Workload(batch=8, prompt=512))
    graph, plan = capture(model, make("prefetch"), given, device_named("h200"))  # no device here: nothing is copied
    return [of_plan(plan, graph, title="prefetch: every task as one step")]


def stepped() -> list[Document]:
    """A backward pass, recorded: its plan, every task as one step."""
    model = build("llama-tiny", device="cpu", dtype=torch.float32, attention="sdpa").requires_grad_(True)
    given = {**inputs(model, Workload(batch=4, prompt=8))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = _Layers()
    fast = df.compile(model, make("optimizer_overlap", inner=inner), optimizer=optimizer, operators="eager")
    batch = {"input_ids": given["input_ids"], "labels": given["input_ids"]}
    with df.record() as recording:
        fast(**batch).loss.backward()
    backward = next(call for call in recording.calls if call.phase == "backward")
    return [of_plan(backward.plan, title="optimizer_overlap, backward pass: every task as one step")]


class _Layers(df.OpSchedulerBase):
    """Whole layers, in order."""

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [df.SplitModule("*.self_attn"), df.SplitModule("*.mlp")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0])


def _both(model: Any, strategy: str, given: dict[str, Any], where: Any, **options: Any) -> list[Document]:
    graph, plan = capture(model, make(strategy, **options), given, where)
    costs = Costs(graph, where)
    found = []
    for title, each in (("sequence", in_sequence(plan)), (strategy, plan)):
        run = simulate(each, graph, costs, where, cudagraph=True)
        found.append(of_simulation(run, graph, costs, title=f"{title}: {run.seconds * 1e3:.3f} ms on {where.name}"))
    return found[:1] if plan.sequential else found


def svg(documents: Sequence[Document]) -> str:
    times: dict[str, float] = {}
    for document in documents:
        for task in document.tasks:
            times[_kind(task)] = times.get(_kind(task), 0.0) + task.seconds
    kinds = sorted(times, key=lambda kind: -times[kind])
    colours = {kind: COLOURS[i] if i < len(COLOURS) else GREY for i, kind in enumerate(kinds)}
    scale = (WIDTH - LEFT - 4) / max(document.length for document in documents)
    lines, y = [], 0.0
    for document in documents:
        lines.append(_text(0, y + 14, document.title))
        y += 22
        split = any(1 in task.micro_batches for task in document.tasks)
        for lane in document.lanes:
            lines.append(_text(LEFT - 8, y + 15, lane.name, "end"))
            for task in (task for task in document.tasks if task.lane == lane.name):
                x = LEFT + (task.start - document.begin) * scale
                lines.append(_box(task, x, y, scale, colours[_kind(task)], split))
            y += ROW
        y += GAP - 16
    x = 0.0
    for kind in [*kinds[: len(COLOURS)], *(["others"] if len(kinds) > len(COLOURS) else [])]:
        wide = 24 + 6.6 * len(kind)
        if x + wide > WIDTH and x:
            x, y = 0.0, y + 18
        lines.append(f'<rect x="{x:.0f}" y="{y + 3:.0f}" width="11" height="11" fill="{colours.get(kind, GREY)}"/>')
        lines.append(_text(x + 16, y + 13, kind))
        x += wide + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 22:.0f}" role="img" font-size="12"'
    title = html.escape("; ".join(document.title for document in documents))
    return "\n".join([f'{head} font-family="system-ui, sans-serif">', f"<title>{title}</title>", *lines, "</svg>\n"])


def _kind(task: TimedTask) -> str:
    """Without the path that all have in common."""
    ops = (task.op or task.name).split(" + ")
    parts = [kind_of(op).replace("model.layers.", "").replace("layers.", "") for op in ops]
    return parts[0] if len(parts) == 1 else f"{parts[0]} + {len(parts) - 1} more"


def _box(task: TimedTask, x: float, y: float, scale: float, colour: str, split: bool) -> str:
    wide = max(task.seconds * scale - 0.6, 0.4)
    box = f'<rect x="{x:.1f}" y="{y + 1:.0f}" width="{wide:.1f}" height="{ROW - 3}" fill="{colour}"/>'
    if split and wide > 12 and len(task.micro_batches) == 1:
        part = task.micro_batches[0]
        box += f'<text x="{x + wide / 2:.1f}" y="{y + 15:.0f}" text-anchor="middle" fill="#fff">{part}</text>'
    return box


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{TEXT}">{html.escape(text)}</text>'


PROMPTS = Workload(batch=8, prompt=1024)
PICTURES: dict[str, Callable[[], list[Document]]] = {
    "sequential": lambda: simulated("llama-3-8b", "nanoflow", device="h200", situation=PROMPTS)[:1],
    "nanoflow": lambda: simulated("llama-3-70b", "nanoflow", device="b200", tp=8, situation=PROMPTS),
    "comm_overlap": lambda: simulated("llama-3-8b", "comm_overlap", device="h100", tp=4, situation=PROMPTS),
    "token_weave": lambda: simulated("llama-3-8b", "token_weave", device="h100", tp=4, situation=PROMPTS),
    "dual_batch": lambda: simulated("deepseek-v2-lite", "dual_batch", device="h100", ep=4, situation=PROMPTS, layers=3),
    "comet": lambda: simulated("mixtral-8x7b", "comet", device="h100", ep=4, situation=PROMPTS),
    "branches": lambda: simulated("inception-tiny", "branches", device="h200", situation=PROMPTS, layers=None),
    "prefetch": prefetched,
    "optimizer_overlap": stepped,
    "solver": lambda: simulated("llama-3-70b", "solver", device="b200", tp=8, situation=PROMPTS),
}


def main(names: Sequence[str]) -> None:
    for name in names or PICTURES:
        (HERE / f"{name}.svg").write_text(svg(PICTURES[name]()), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
