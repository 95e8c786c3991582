"""A captured graph with what is known about it independently of the scheduler: batch analysis and partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from dynaflow.capture.batch_analysis.probe import ProbeFailed, Unschedulable, probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.core.bounded import BoundedDict
from dynaflow.schedule.split import request_count

MAX_PARTITIONS = 32
BatchAxes = tuple[frozenset[sympy.Symbol], ...]
"""The symbols that stand for the rows of the batch, and those for the requests of a ragged one."""


class AnalyzedGraph:
    """A captured graph with its batch analysis and its partitions, both computed on demand."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self.plain: str | None = None
        """Why the graph can't be scheduled, if so."""
        idle = graph.unused_numbers
        self.size_positions = tuple(n for n, i in enumerate(graph.inputs) if i.shape is None and n not in idle)
        """Positions of the inputs that are numbers. A plan is made for their values."""
        self._probes: dict[BatchAxes, Any] = {}
        self.partitions = BoundedDict(MAX_PARTITIONS)
        """By the batch's symbols and a scheduler's rules: the OpGraph, shared by schedulers with equal rules."""

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(args.__getitem__, self.size_positions))

    def batch_axes(self, args: Sequence[Any], facts: Mapping[str, Any]) -> tuple[BatchAxes, dict[sympy.Symbol, int]]:
        """The symbols that stand for the batch of a call, and the values of all symbols in it."""
        values = self.graph.symbol_values(args)
        return self.graph.batch_axes(values, request_count(facts.get("num_tokens"))), values

    def probe(self, batch_axes: BatchAxes) -> Any:
        """The batch analysis of the graph; without a batch if none can be followed; None if the analysis fails."""
        if batch_axes not in self._probes:
            try:
                self._probes[batch_axes] = probe(self.graph, batch_axes)
            except Unschedulable as e:
                self.plain = str(e)
                self._probes[batch_axes] = None
            except ProbeFailed as e:
                self.plain = None if batch_axes else str(e)
                self._probes[batch_axes] = self.probe(()) if batch_axes else None
        return self._probes[batch_axes]

    @property
    def known_probe(self) -> Any:
        """An analysis that was made before, for any batch; None if there is none."""
        return next((found for found in self._probes.values() if found is not None), None)
