"""Shape-polymorphic executables: one function of a plan for micro-batches of all sizes.

The generated code takes the sizes of the micro-batches, and of other dims that vary, as one more argument. Its
operators are compiled for all sizes. A new batch size then needs new cuts, but no new function.

Contract
    `Elastic.at` takes a plan that differs from its own only in the sizes of the micro-batches (see `carries_out`).
    Returns an Executable for it, or None when the operators were not compiled for these sizes: then lower the plan by
    itself. Does not compile anything, nor change its own executable. Does not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dynaflow.core.plan import Plan
from dynaflow.lower.bind import extents, sizes_of
from dynaflow.lower.compile_ops import Sizes
from dynaflow.lower.executable import Executable, resized
from dynaflow.lower.ir import Program
from dynaflow.partition.op_graph import OpGraph

MAX_SIZES = 4096
"""How many sizes to cache the result of `Elastic.at` for."""


class Elastic:
    """`executable` takes the extents of the micro-batches after the graph's arguments. `functions`: the functions
    that the plan calls by name."""

    def __init__(
        self,
        executable: Executable,
        program: Program,
        functions: Mapping[str, Callable[..., Any]],
        remake: Callable[[Plan, Sizes], Executable],
    ) -> None:
        self.executable, self.parts = executable, len(executable.plan.micro_batches)
        self._program, self._functions, self._remake = program, functions, remake
        self._found: dict[tuple[Any, ...], Executable | None] = {}

    @property
    def plan(self) -> Plan:
        return self.executable.plan

    def carries_out(self, plan: Plan, graph: OpGraph, functions: Mapping[str, Callable[..., Any]]) -> bool:
        """Whether a plan equals its own, apart from sizes."""
        if graph is not self.executable.graph or len(plan.micro_batches) != self.parts:
            return False
        return replace(plan, micro_batches=self.plan.micro_batches) == self.plan and functions == self._functions

    def at(self, plan: Plan, sizes: Sizes) -> Executable | None:
        """The executable for a plan with other sizes; None if an operator was not compiled for them."""
        graph = self.executable.graph
        cuts = extents(plan, graph, sizes)
        key = (cuts, plan.micro_batches)
        if key not in self._found:
            if len(self._found) >= MAX_SIZES:
                self._found.clear()
            fits = self._fit(plan, graph, sizes)
            made = resized(self.executable, plan, cuts, lambda: self._remake(plan, sizes)) if fits else None
            self._found[key] = made
        return self._found[key]

    def _fit(self, plan: Plan, graph: OpGraph, sizes: Sizes) -> bool:
        known: dict[tuple[Any, ...], Sizes] = {}
        for parts, holds in self._program.conditions:
            if parts not in known:
                known[parts] = sizes_of(plan, graph, sizes, parts)
            if not holds(known[parts]):
                return False
        return True
