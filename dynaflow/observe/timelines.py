"""Timelines made from plans, simulations and measured runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dynaflow.capture.captured_graph import concrete
from dynaflow.core.plan import Item, Lane, Plan, Task, operator_by_operator
from dynaflow.core.plan_form import check_form
from dynaflow.core.plan_text import Span, steps_of
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulation import Simulation
from dynaflow.cost.work import concrete_sizes
from dynaflow.errors import TimelineError
from dynaflow.observe.document import Counter, Document, Source, TimedTask
from dynaflow.partition.op_graph import Op, OpGraph

MOST_VALUES = 16
"""A longer list of an operator's values is truncated."""


def of_plan(plan: Plan, graph: OpGraph | None = None, *, title: str = "") -> Document:
    """The timeline of a plan, in which every task takes one step: the order without any times.

    A sequential plan has the operators of its graph; without the graph, nothing.
    """
    check_form(plan)
    whole = _spelled_out(plan, graph)
    return _document(plan, whole, steps_of(whole), "planned", title, graph)


def of_simulation(
    simulation: Simulation, graph: OpGraph | None = None, costs: Costs | None = None, *, title: str = ""
) -> Document:
    """The timeline of a simulation. With `costs`, it includes each task's use of the device."""
    whole = _spelled_out(simulation.plan, graph)
    if simulation.plan.sequential and graph is None:
        whole = operator_by_operator(simulation.plan, [s.name for s in simulation.spans])
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in (name for name, share in simulation.busy.items() if share > 0):
        curves[name] = [(load.start, round(load.uses.get(name, 0.0), 4)) for load in simulation.loads]
        curves[name] += [(simulation.loads[-1].end, 0.0)]
    return _document(
        simulation.plan,
        whole,
        [(s.start, s.end) for s in simulation.spans],
        "simulated",
        title,
        graph,
        costs=costs,
        device=simulation.device,
        counters=tuple(Counter(name=n, points=tuple(_changes(p)), unit="fraction") for n, p in curves.items()),
        whole_time=(0.0, simulation.seconds),
    )


def of_spans(
    plan: Plan,
    spans: Sequence[Span],
    graph: OpGraph | None = None,
    *,
    title: str = "",
    device: str = "",
    costs: Costs | None = None,
) -> Document:
    """The timeline of a measured run, given when each task of the plan started and ended, in seconds.

    The spans of a sequential plan are those of the graph's operators; without the graph, one for the whole.
    With `costs`, it includes each task's use of the device.
    """
    whole = _spelled_out(plan, graph)
    if plan.sequential and graph is None:
        whole = operator_by_operator(plan, ["model"])
    return _document(plan, whole, spans, "measured", title, graph, costs=costs, device=device)


def _spelled_out(plan: Plan, graph: OpGraph | None) -> Plan:
    return operator_by_operator(plan, [op.name for op in graph.ops]) if plan.sequential and graph is not None else plan


def _document(
    plan: Plan,
    whole: Plan,
    spans: Sequence[Span],
    source: Source,
    title: str,
    graph: OpGraph | None,
    *,
    costs: Costs | None = None,
    device: str = "",
    counters: tuple[Counter, ...] = (),
    whole_time: Span | None = None,
) -> Document:
    """`whole`: the plan with all its tasks, even if it is sequential."""
    if len(spans) != len(whole.tasks):
        raise TimelineError(
            f"{len(spans)} spans for a plan of {len(whole.tasks)} tasks",
            advice="pass a start and an end for each task, in the plan's order",
        )
    facts = _Facts(whole, graph, costs)
    tasks = tuple(facts.task(task, span, plan.sequential) for task, span in zip(whole.tasks, spans, strict=True))
    sizes = ", ".join(str(m.size) for m in plan.micro_batches)
    how = "in sequence" if plan.sequential else f"as [{sizes}]"
    return Document(
        title=title or f"batch of {plan.batch_size} {how}",
        source=source,
        device=device,
        lanes=whole.lanes or (Lane(name="main"),),
        tasks=tasks,
        counters=counters,
        whole=whole_time,
    )


class _Facts:
    """What is known of a plan's tasks in addition to their times. Values are described once."""

    def __init__(self, plan: Plan, graph: OpGraph | None, costs: Costs | None) -> None:
        self.plan, self.graph, self.costs = plan, graph, costs
        self._values: dict[tuple[int, int], str] = {}
        self._sms = plan.shares(costs.device.sms) if costs is not None else {}

    def task(self, task: Task, span: Span, sequential: bool) -> TimedTask:
        ops = [self.graph.by_name[i.op] for i in task.items if i.op in self.graph.by_name] if self.graph else []
        rows = [self._rows(item) for item in task.items]
        own = {v for op in ops for v in op.writes}
        notes = [f"calls {task.replace} in place of the operators"] if task.replace else []
        notes += [f"{op.name} runs for all rows at once: {op.refusal}" for op in ops if op.refusal]
        uses, moved = self._used(ops, rows, task.lane)
        return TimedTask(
            name=task.items[0].op if sequential else str(task),
            op=" + ".join(item.op for item in task.items),
            lane=task.lane,
            start=span[0],
            end=span[1],
            micro_batches=() if sequential else tuple(sorted({m for i in task.items for m in i.micro_batches})),
            after=task.after,
            tags=tuple(sorted({tag for op in ops for tag in op.tags})),
            rows=max(rows),
            reads=self._named((v for op in ops for v in op.reads if v not in own), max(rows)),
            writes=self._named((v for op in ops for v in op.writes), max(rows)),
            uses=uses,
            bytes=moved,
            note="; ".join(notes),
        )

    def _rows(self, item: Item) -> int:
        op = self.graph.by_name.get(item.op) if self.graph else None
        if op is not None and not op.splittable:
            return self.plan.batch_size
        return sum(self.plan.micro_batches[m].size for m in item.micro_batches)

    def _named(self, values: Iterable[int], rows: int) -> tuple[str, ...]:
        found = list(dict.fromkeys(values))
        names = [self._value(v, rows) for v in found[:MOST_VALUES]]
        return (*names, *([f"and {len(found) - MOST_VALUES} more"] if len(found) > MOST_VALUES else []))

    def _value(self, index: int, rows: int) -> str:
        assert self.graph is not None
        if (index, rows) not in self._values:
            value = self.graph.values[index]
            if value.shape is None:
                text = "a number"
            else:
                sizes = concrete_sizes(self.graph, rows)
                free = {s for e in value.shape.size for s in e.free_symbols}
                shape = [concrete(e, sizes) if free <= sizes.keys() else e for e in value.shape.size]
                text = f"{str(value.shape.dtype).removeprefix('torch.')} {shape}"
            self._values[index, rows] = f"{value.name}: {text}"
        return self._values[index, rows]

    def _used(self, ops: Sequence[Op], rows: Sequence[int], lane: str) -> tuple[dict[str, float], int | None]:
        """Returns the mean use of each resource over the task's time, and the bytes that it moves."""
        if self.costs is None or not ops:
            return {}, None
        sms = self._sms.get(lane)
        times = [self.costs.seconds(op, n, sms) for op, n in zip(ops, rows)]
        each = [self.costs.uses(op, n, sms) for op, n in zip(ops, rows)]
        total = math.fsum(times)
        mean = {r: math.fsum(t * u[r] for t, u in zip(times, each)) / total for r in each[0]} if total else {}
        moved = sum(self.costs.work(op, n).bytes for op, n in zip(ops, rows))
        return {r: round(u, 4) for r, u in mean.items() if u >= 0.005}, moved


def _changes(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Yields the points at which the value changes."""
    last = None
    for moment, value in points:
        if value != last:
            yield moment, value
        last = value
