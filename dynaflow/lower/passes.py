"""The passes from a plan to a program, in order: bind, liveness, memory. `emit` generates its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynaflow.core.plan import Plan
from dynaflow.lower.bind import bind
from dynaflow.lower.compile_ops import Operators, Sizes
from dynaflow.lower.ir import Program
from dynaflow.lower.liveness import add_frees
from dynaflow.lower.memory import place_buffers
from dynaflow.partition.op_graph import OpGraph


def make_program(
    plan: Plan,
    graph: OpGraph,
    sizes: Sizes,
    operators: Operators,
    functions: Mapping[str, Callable[..., Any]],
    **options: bool | frozenset[str],
) -> Program:
    """The options are those of `bind`."""
    return place_buffers(add_frees(bind(plan, graph, sizes, operators, functions, **options)))  # type: ignore[arg-type]
