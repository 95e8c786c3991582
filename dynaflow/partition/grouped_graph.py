"""A captured graph with its nodes in groups: what the modules that build operators from it ask about nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.node_facts import NodeFacts, Probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.node_info import target_names
from dynaflow.core.fx_graphs import results_of
from dynaflow.core.memory_layout import overlaps_itself
from dynaflow.partition.claims import Claim

MAY_COPY = frozenset({"reshape", "reshape_as", "contiguous", "flatten", "to", "type", "float", "half", "bfloat16",
                      "type_as", "ravel"})  # fmt: skip
"""Calls that return a view or a copy, depending on strides or dtypes."""

RESHAPE_OF: dict[Any, Any] = {
    "view": "reshape",
    "view_as": "reshape_as",
    torch.Tensor.view: torch.Tensor.reshape,
    torch.Tensor.view_as: torch.Tensor.reshape_as,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Calls that fail if the result can't be a view -> the call that copies then."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The nodes of one operator."""

    claim: Claim | None
    nodes: list[fx.Node] = field(default_factory=list)


class GroupedGraph:
    """A graph, its analysis, and the group of each node that computes."""

    def __init__(
        self,
        graph: CapturedGraph,
        probe: Probe,
        groups: list[Group],
        after: dict[fx.Node, set[fx.Node]],
        serial_calls: dict[fx.Node, list[fx.Node]],
    ) -> None:
        """`after`: predecessors of each node. `serial_calls`: calls that must run for all earlier rows before a
        call."""
        self.graph, self.probe, self.facts, self.groups = graph, probe, probe.facts, groups
        self.after, self.serial_calls = after, serial_calls
        self.home = {n: g for g, group in enumerate(groups) for n in group.nodes}
        """Node -> its group."""
        self.position = {n: i for i, n in enumerate(graph.gm.graph.nodes)}
        self.input_of = {given.node: i for i, given in enumerate(graph.inputs)}
        self.written = {s for n in self.home for s in self.facts[n].writes}
        self.last_write: dict[int, int] = {}
        """Storage -> position of the last node that writes it."""
        for n in self.in_order(self.home):
            self.last_write.update(dict.fromkeys(self.facts[n].writes, self.position[n]))
        self.results: list[Any] = list(results_of(graph.gm.graph))
        self.returned_views = {n for n in self.results if self._can_return_view(n)}
        """Views among the results that an operator returns itself. The epilogue makes the other views."""

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.position.__getitem__)

    def storages(self, node: Any) -> set[int]:
        return self.facts[node].storages if isinstance(node, fx.Node) else set()

    def argument_of(self, node: fx.Node) -> fx.Node:
        """The argument that an in-place call returns; another node itself."""
        while (argument := self.facts[node].returns) is not None:
            node = argument
        return node

    def is_item(self, node: Any) -> bool:
        """Whether the node takes one of several results of a node that computes."""
        while isinstance(node, fx.Node) and node.target is operator.getitem:
            node = node.args[0]
            if isinstance(self.facts[node].value, torch.Tensor):  # it indexes a tensor
                return False
            if node in self.home:
                return True
        return False

    def tensor_bases(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a view is made of, without the numbers among its arguments."""
        return [b for b in bases_of(node, self.facts) if isinstance(self.facts[b].value, torch.Tensor)]

    def base(self, node: fx.Node) -> fx.Node:
        """The node that an operator computes to return this node's result: the base of a returned view."""
        return self.tensor_bases(node)[0] if node in self.returned_views else node

    def maker(self, node: fx.Node) -> int | None:
        """The group that returns this node's result."""
        base = self.base(node)
        while base not in self.home and base.target is operator.getitem:
            base = base.args[0]  # type: ignore[assignment]
        return self.home.get(base)

    def is_reshaped(self, node: fx.Node) -> bool:
        """Whether the node merges the rows with another dim, so that for a part of the rows it has to copy."""
        return node.target in RESHAPE_OF and self.probe.is_merged(node)

    def is_view_of_rows(self, node: fx.Node) -> bool:
        """Whether the node must return a view, of a tensor with rows. For a single row that may be impossible:
        `reshape`, which copies several rows, may make a view of one, with other strides."""
        given = (*node.args, *node.kwargs.values())
        if node.target not in RESHAPE_OF or any(isinstance(a, torch.dtype) for a in given):
            return False
        return any(dim is not None for dim in self.probe.dims(node))

    def is_written_later(self, node: fx.Node) -> bool:
        """If not, a view and a copy are equivalent."""
        return any(self.last_write.get(s, -1) > self.position[node] for s in self.storages(node))

    def may_copy(self, node: fx.Node) -> bool:
        return target_names(node)[0] in MAY_COPY

    def _can_return_view(self, node: Any) -> bool:
        """Whether an operator can return this result, a view, for each part of the batch."""
        if not isinstance(node, fx.Node) or not self.facts[node].view or self.is_item(node):
            return False
        bases = self.tensor_bases(node)
        if len(bases) != 1 or bases[0] not in self.home:
            return False
        value = self.facts[node].value
        if overlaps_itself(value.shape, value.stride()):  # joining parts would separate its elements
            return False
        storages = self.storages(node)
        if storages & self.written or any(self.storages(o) & storages for o in self.results if o is not node):
            return False
        return not any(self.facts[n].refusals or self.facts[n].sized for n in _views_between(node, self.facts))


def bases_of(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
    """The nodes that compute what `node` is made of, through views, sizes and in-place results."""
    found, todo, seen = [], [node], set()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op in ("placeholder", "get_attr"):
            found.append(n)
        elif facts[n].returns is not None:
            todo.append(facts[n].returns)  # type: ignore[arg-type]
        elif facts[n].view or facts[n].scalar:
            todo.extend(n.all_input_nodes)
        else:
            found.append(n)
    return found


def _views_between(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
    """The views and sizes from `node` to its bases."""
    found, todo = [], [node]
    while todo:
        n = todo.pop()
        if n.op not in ("placeholder", "get_attr") and (facts[n].view or facts[n].scalar) and n not in found:
            found.append(n)
            todo.extend(n.all_input_nodes)
    return found


def is_dtensor(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """Whether the node's result is a DTensor. The analysis does not follow its rows, so it must not cross operators."""
    return _torch.shard_of(facts[node].value) is not None


def is_region(node: fx.Node) -> bool:
    """Whether the node enters or leaves a region: autocast, inference mode, grad mode."""
    pairs = _torch.REGIONS
    return node.target in pairs or node.target in pairs.values() or node.target is _torch.SET_GRAD
