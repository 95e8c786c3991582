"""A plan's function for micro-batches of any size.

The generated code gets the sizes as one more argument, those of other dims that vary as well, and its operators are
compiled for all sizes. So a batch that is different every time needs no new function: only its cuts.
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

KEPT = 4096
"""Sizes for which it is remembered whether the operators fit."""


class Elastic:
    """`executable` takes the extents of the micro-batches after the graph's arguments. `functions`: those that the
    plan calls by name."""

    def __init__(
        self,
        executable: Executable,
        program: Program,
        functions: Mapping[str, Callable[..., Any]],
        remake: Callable[[Plan, Sizes], Executable],
    ) -> None:
        self.executable, self.parts = executable, len(executable.plan.micro_batches)
        self._program, self._functions, self._remake = program, functions, remake
        self._fits: dict[tuple[int, ...], bool] = {}

    @property
    def plan(self) -> Plan:
        return self.executable.plan

    def carries_out(self, plan: Plan, graph: OpGraph, functions: Mapping[str, Callable[..., Any]]) -> bool:
        """Its own plan says the same, but for the sizes."""
        if graph is not self.executable.graph or len(plan.micro_batches) != self.parts:
            return False
        return replace(plan, micro_batches=self.plan.micro_batches) == self.plan and functions == self._functions

    def at(self, plan: Plan, sizes: Sizes) -> Executable | None:
        """For a plan that differs in the sizes of its micro-batches; None if an operator does not fit them."""
        graph = self.executable.graph
        cuts = extents(plan, graph, sizes)
        if cuts not in self._fits:
            if len(self._fits) >= KEPT:
                self._fits.clear()
            self._fits[cuts] = self._fit(plan, graph, sizes)
        return resized(self.executable, plan, cuts, lambda: self._remake(plan, sizes)) if self._fits[cuts] else None

    def _fit(self, plan: Plan, graph: OpGraph, sizes: Sizes) -> bool:
        known: dict[tuple[Any, ...], Sizes] = {}
        for parts, holds in self._program.conditions:
            if parts not in known:
                known[parts] = sizes_of(plan, graph, sizes, parts)
            if not holds(known[parts]):
                return False
        return True
