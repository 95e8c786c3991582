"""Fuses tasks that run back to back into one call, so that cuts which a schedule does not use cost nothing.

Contract
    Takes a checked plan and its graph. Returns the calls of the plan (`Unit`), in the plan's order; together they cover
    each task once. Changes neither, compiles nothing, and raises nothing.
    Two tasks become one call when they follow each other on a lane for the same micro-batches, the second waits for no
    other lane, and no other lane waits for the first. Tasks with a `replace_func`, and operators in `apart`, stay
    separate.

Steps
    1. Group the tasks of each lane into chains.
    2. For each chain, compose one graph that returns the values that are used outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from dynaflow.core.fx_graphs import inline
from dynaflow.core.plan import Plan, Task
from dynaflow.partition.op_graph import Op, OpGraph

Parts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The tasks of one call, in order, and the graph that computes them."""

    tasks: tuple[int, ...]
    ops: tuple[Op, ...]
    parts: Parts
    module: fx.GraphModule
    """Takes `symbols`, then `reads`; returns `writes` as a tuple."""
    symbols: tuple[sympy.Expr, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fused: bool = False
    """A function of the user's replaces the operators. Then only `tasks`, `ops` and `parts` are meaningful."""

    @property
    def splittable(self) -> bool:
        return any(op.splittable for op in self.ops)


def make_units(plan: Plan, graph: OpGraph, *, chains: bool, apart: frozenset[str] = frozenset()) -> list[Unit]:
    """The calls of a plan, in the order of issue. `chains`: tasks are fused. `apart`: operators that stay separate."""
    users: dict[int, set[int]] = {}
    for op in graph.ops:
        for v in op.reads:
            users.setdefault(v, set()).add(op.index)
    units = []
    composed: dict[tuple[Op, ...], dict[str, Any]] = {}
    # 1. and 2.
    for tasks in _chains(plan, apart) if chains else [(i,) for i in range(len(plan.tasks))]:
        items = [item for t in tasks for item in plan.tasks[t].items]
        ops = tuple(graph.by_name[item.op] for item in items)
        first = ops[0]
        whole: dict[str, Any] = {"tasks": tasks, "ops": ops, "parts": items[0].micro_batches}
        if len(tasks) == 1:
            whole |= {"module": first.module, "symbols": first.symbols, "reads": first.reads, "writes": first.writes}
            units.append(Unit(**whole, fused=plan.tasks[tasks[0]].replace is not None))
            continue
        inside = {op.index for op in ops}
        returned = [v for op in ops for v in op.writes if v in graph.outputs or users.get(v, set()) - inside]
        if ops not in composed:  # the same for all micro-batches
            composed[ops] = _compose(graph, ops, returned)
        units.append(Unit(**whole, **composed[ops]))
    return units


def _chains(plan: Plan, apart: frozenset[str]) -> list[tuple[int, ...]]:
    awaited = {a for task in plan.tasks for a in task.after}
    latest: dict[str, list[int]] = {}
    found: list[list[int]] = []
    for i, task in enumerate(plan.tasks):
        chain = latest.get(task.lane)
        if chain and not task.after and chain[-1] not in awaited and _fusable(plan.tasks[chain[-1]], task, apart):
            chain.append(i)
        else:
            chain = latest[task.lane] = [i]
            found.append(chain)
    return [tuple(chain) for chain in found]


def are_neighbours(parts: Parts) -> bool:
    """Whether micro-batches are consecutive: together they are one slice of the batch."""
    return parts[-1] - parts[0] + 1 == len(parts)


def _fusable(one: Task, other: Task, apart: frozenset[str]) -> bool:
    (first, *_), (second, *_) = one.items, other.items
    parts = second.micro_batches
    return (
        one.replace is None
        and other.replace is None
        and first.micro_batches == parts
        and are_neighbours(parts)  # else values would have to be gathered in between
        and first.op not in apart
        and second.op not in apart
    )


def _compose(graph: OpGraph, ops: tuple[Op, ...], returned: list[int]) -> dict[str, Any]:
    """One graph that computes several operators in sequence and returns the values `returned`."""
    made = {v for op in ops for v in op.writes}
    symbols = list(dict.fromkeys(s for op in ops for s in op.symbols))
    reads = list(dict.fromkeys(v for op in ops for v in op.reads if v not in made))
    out = fx.Graph()
    number = {s: out.placeholder(f"n_{i}") for i, s in enumerate(symbols)}
    value = {v: out.placeholder(f"v_{v}") for v in reads}
    for op in ops:
        given = [number[s] for s in op.symbols] + [value[v] for v in op.reads]
        value |= zip(op.writes, inline(op.module.graph, out, given), strict=True)
    out.output(tuple(value[v] for v in returned))
    module = fx.GraphModule(graph.graph.gm, out, class_name="Operators")
    return {"module": module, "symbols": tuple(symbols), "reads": tuple(reads), "writes": tuple(returned)}
