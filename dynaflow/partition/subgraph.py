"""The fx graph of one operator, or of the epilogue.

*Contract.* `copy_group` copies a group's nodes, `copy_results` what makes the graph's results. What they use is copied
too (views, sizes, regions) or becomes an input. `module` returns the graph: symbols first, then values. The captured
graph does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.partition.grouped_graph import RESHAPE_OF, GroupedGraph


class Subgraph:
    """A graph under construction. `group` is None for the epilogue, which makes the graph's results."""

    def __init__(self, cut: GroupedGraph, group: int | None, regions: Regions) -> None:
        self.cut, self.group, self._regions = cut, group, regions
        self._out = fx.Graph()
        self.env: dict[Any, Any] = {}
        """Node of the captured graph -> what stands for it; also ("symbol", s) and ("region", node)."""
        self.symbols: list[Any] = []
        self.reads: list[fx.Node] = []
        self.copied: list[fx.Node] = []
        """Nodes of the captured graph that were copied, in order."""
        self.results: tuple[Any, ...] = ()
        self._region = regions.start

    def copy_group(self) -> set[fx.Node]:
        """Copies the group's nodes. Returns the nodes of other groups that it reads."""
        assert self.group is not None
        for node in self.cut.groups[self.group].nodes:
            self._enter(self._regions.at[node])
            self.env[node] = self._copy(node)
        self._enter(self._regions.start)
        return self._read_from_groups()

    def copy_results(self) -> set[fx.Node]:
        """Copies what makes the graph's results. Returns the nodes of groups that it reads."""
        self.results = tuple(self.get(n) if isinstance(n, fx.Node) else n for n in self.cut.results)
        return self._read_from_groups()

    def _read_from_groups(self) -> set[fx.Node]:
        return {n for n in self.reads if n not in self.cut.input_of}

    def get(self, node: fx.Node) -> Any:
        """What stands for a node here: its copy, or an input."""
        if node not in self.env:
            self.env[node] = self._make(node)
        return self.env[node]

    def _make(self, node: fx.Node) -> Any:
        cut = self.cut
        if node in cut.input_of:
            symbol = cut.graph.inputs[cut.input_of[node]].symbol
            return self._read(node) if symbol is None else self._symbol(symbol)
        if node.op == "get_attr":
            return self._copy(node)
        if (argument := cut.facts[node].returns) is not None:
            return self.get(argument)
        return self._read(node) if node in cut.home or self._is_returned_elsewhere(node) else self._copy(node)

    def _is_returned_elsewhere(self, node: fx.Node) -> bool:
        """Whether another operator returns this view, or item, as it is."""
        if self.group is None and node in self.cut.returned_views:
            return True
        return self.cut.is_item(node) and self.cut.maker(node) != self.group

    def _copy(self, node: fx.Node) -> fx.Node:
        self.copied.append(node)
        for a in node.all_input_nodes:
            self.get(a)
        copy = self._out.node_copy(node, lambda n: self.env[n])
        cut, part = self.cut, self.group is not None
        if cut.is_reshaped(node) or (part and cut.is_view_of_rows(node) and not cut.is_written_later(node)):
            copy.target = RESHAPE_OF[node.target]
        copy.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        return copy

    def _read(self, node: fx.Node) -> fx.Node:
        self.reads.append(node)
        return self._placeholder(f"v_{node.name}")

    def _symbol(self, symbol: Any) -> fx.Node:
        key = ("symbol", symbol)
        if key not in self.env:
            self.symbols.append(symbol)
            self.env[key] = self._placeholder(f"n_{len(self.symbols)}")
        return self.env[key]

    def _placeholder(self, name: str) -> fx.Node:
        first = next(iter(self._out.nodes), None)
        if first is None:
            return self._out.placeholder(name)
        with self._out.inserting_before(first):
            return self._out.placeholder(name)

    def _enter(self, region: Region) -> None:
        """Leaves the regions that the next node is not in, and enters those that it is in."""
        now = self._region
        shared = 0
        while shared < min(len(now.open), len(region.open)) and now.open[shared] is region.open[shared]:
            shared += 1
        for entry in reversed(now.open[shared:]):
            self._out.call_function(_torch.REGIONS[entry.target], (self.env[("region", entry)],))
        for entry in region.open[shared:]:
            enter: Any = entry.target
            self.env[("region", entry)] = self._out.call_function(enter, entry.args, entry.kwargs)
        if now.grad != region.grad:
            self._out.call_function(_torch.SET_GRAD, (region.grad,))
        self._region = region

    def module(self, results: tuple[Any, ...]) -> fx.GraphModule:
        self._out.output(tuple(results))
        self._sort_placeholders()
        return fx.GraphModule(self.cut.graph.gm, self._out, class_name="Operator")

    def _sort_placeholders(self) -> None:
        """Symbols first, then values in the order of `reads`."""
        wanted = [self.env[("symbol", s)] for s in self.symbols] + [self.env[n] for n in self.reads]
        for node in reversed(wanted):
            first = next(iter(self._out.nodes))
            if node is not first:
                first.prepend(node)


@dataclass(frozen=True, slots=True)
class Region:
    """The ambient state in which a node runs: the autocast and inference regions entered, and grad mode."""

    open: tuple[fx.Node, ...]
    grad: bool


@dataclass(frozen=True, slots=True)
class Regions:
    """The region of each node, and the one around the graph."""

    start: Region
    at: dict[fx.Node, Region]

    @staticmethod
    def of(graph: CapturedGraph) -> Regions:
        start = now = Region((), graph.grad)
        at = {}
        for node in graph.gm.graph.nodes:
            if node.target in _torch.REGIONS:
                now = Region((*now.open, node), now.grad)
            elif node.target in _torch.REGIONS.values():
                now = Region(tuple(n for n in now.open if n is not node.args[0]), now.grad)
            elif node.target is _torch.SET_GRAD:
                now = Region(now.open, bool(node.args[0]))
            at[node] = now
        return Regions(start, at)
