"""Why an operator can't be split along the batch.

*Contract.* Takes an operator's nodes with the probe's facts, and its rule's `splittable`. Returns a reason, written for
the user, and the line of the model; or (None, None) if the operator may be split. Changes nothing. A refusal is always
safe: the operator runs once, for all rows. A split must be legal for every partition of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dynaflow.capture.batch_analysis.aten_calls import RNG
from dynaflow.capture.batch_analysis.signatures import MergedDim, dim_in
from dynaflow.capture.node_info import addresses_memory, source_line, target_names
from dynaflow.core.memory_layout import is_dense
from dynaflow.partition.claims import has_no_rows, is_inside
from dynaflow.partition.grouped_graph import RESHAPE_OF, Group, GroupedGraph, is_dtensor
from dynaflow.partition.subgraph import Subgraph

Reason = tuple[str | None, str | None]
"""Why, and the line of the model."""

_DECLARED = "its rule says splittable=True, but"


class SplitRefusals:
    """Decides for the operators of one graph."""

    def __init__(self, cut: GroupedGraph) -> None:
        self.cut, self.probe, self.facts = cut, cut.probe, cut.facts

    def of(self, piece: Subgraph, splittable: bool | None, outs: list[fx.Node]) -> Reason:
        """`splittable`: as its rule declares. `outs`: the nodes whose results the operator returns.

        1. declared: `splittable=False`, or a `splittable=True` that can't hold; else the rules' refusals of its nodes.
        2. memory:   views that would be copies for a part of the rows, or fail.
        3. borders:  values that can't be cut, or joined.
        """
        # 1. declared
        reason, line = self._by_rules(piece, splittable, outs)
        # 2. memory
        if reason is None:
            reason, line = self._by_memory(piece)
        # 3. borders
        crossing = (*piece.reads, *outs)
        if any(n not in self.cut.input_of and is_dtensor(n, self.facts) for n in crossing):
            return "a DTensor goes in or out, whose rows can't be followed", line
        stuck = next((n for n in crossing if self._cant_be_cut(n)), None) if reason is None else None
        if stuck is not None:
            reason = f"{stuck.name} goes in or out with the rows merged into another dim, and can't be copied"
        return reason, line

    # 1. declared

    def _by_rules(self, piece: Subgraph, splittable: bool | None, outs: list[fx.Node]) -> Reason:
        if splittable is False:
            return "its rule says splittable=False", None
        refused = [(reason, source_line(n)) for n in piece.copied for reason in self.facts[n].refusals.values()]
        if splittable is None:
            return refused[0] if refused else self._shared_state(piece)
        return self._broken_promise(piece, outs) if refused else (None, None)

    def _shared_state(self, piece: Subgraph) -> Reason:
        nodes = self._group(piece).nodes
        made = {s for n in nodes for s in self.facts[n].made}
        for n in nodes:
            if self.facts[n].writes - made - {RNG} and has_no_rows(n, self.probe):
                return f"{target_names(n)[0]} writes state that is shared by all rows", source_line(n)
        return None, None

    def _group(self, piece: Subgraph) -> Group:
        assert piece.group is not None
        return self.cut.groups[piece.group]

    def _region(self, piece: Subgraph) -> tuple[str, ...]:
        """The key of the claim that made the operator."""
        claim = self._group(piece).claim
        assert claim is not None
        return claim.key

    def _broken_promise(self, piece: Subgraph, outs: list[fx.Node]) -> Reason:
        """Why a region that is declared splittable can't be split, where the rules refuse some of its nodes.

        The declaration says that the region treats each row independently. Values are cut and joined by position, so
        each value that goes in or out must have rows at known positions. For results that the rules can't follow, the
        declaration is the only evidence; it covers what the region returns, not what is saved for a backward pass.
        """
        facts, region = self.facts, self._region(piece)
        lost = self._lost_in(piece)
        group = self._group(piece)
        for n in piece.copied:
            if addresses_memory(n):
                return f"{_DECLARED} {target_names(n)[0]} addresses memory directly, wherever rows lie", source_line(n)
            if facts[n].refusals and n not in group.nodes and not is_inside(n, region):
                reason, line = next(iter(facts[n].refusals.values())), source_line(n)
                return f"{_DECLARED} it gets a view, made outside of its region, that mixes rows: {reason}", line
        for n in piece.reads:
            if facts[n].merged:
                return f"{_DECLARED} {n.name} goes in with the batch merged with another dim", source_line(n)
            if n in lost:  # another rule cut the region in pieces
                return f"{_DECLARED} the rows of {n.name}, which is in its region, can't be followed", source_line(n)
        layouts = {self._row_sizes(n) for n in piece.reads}
        for n in outs:
            if facts[n].reduced:
                return f"{_DECLARED} {n.name} comes out without rows", source_line(n)
            if n in lost and not (self._keeps_rows(n, lost) and self._is_returned_by_rows(n, piece, layouts)):
                return f"{_DECLARED} the rows of {n.name}, which comes out, can't be followed", source_line(n)
        return None, None

    def _keeps_rows(self, node: fx.Node, lost: set[fx.Node]) -> bool:
        """Whether later writes to a result have their rows where the result has them."""
        clean = {node}
        for n in self.cut.graph.gm.graph.nodes:
            if self.cut.position[n] <= self.cut.position[node] or n not in lost:
                continue
            if not self.facts[n].refusals and all(a in clean for a in n.all_input_nodes if a in lost):
                clean.add(n)
            elif self.facts[n].writes & self.cut.storages(node):
                return False
        return True

    def _lost_in(self, piece: Subgraph) -> set[fx.Node]:
        """The nodes of an operator's region that depend on a node that the rules refuse."""
        lost: set[fx.Node] = set()
        own, key = {*self._group(piece).nodes, *piece.copied}, self._region(piece)
        for n in self.cut.graph.gm.graph.nodes:
            if n not in own and not is_inside(n, key):
                continue
            if self.facts[n].refusals or any(a in lost for a in n.all_input_nodes):
                lost.add(n)
        return lost

    def _row_sizes(self, node: fx.Node) -> tuple[int | None, ...]:
        """For each batch axis, the size of the dim that carries it."""
        value = self.facts[node].value
        if not isinstance(value, torch.Tensor):
            return ()
        return tuple(None if (dim := dim_in(place)) is None else value.shape[dim] for place in self.probe.dims(node))

    def _is_returned_by_rows(self, node: fx.Node, piece: Subgraph, layouts: set[tuple[int | None, ...]]) -> bool:
        """Whether the rest of the model uses a region's result, and always in a layout in which a row is a position:
        with the batch on a dim of its own, or as one of the region's arguments has it."""
        key = self._region(piece)
        uses = 0

        def is_clear(n: fx.Node) -> bool:
            return not self.facts[n].merged or self._row_sizes(n) in layouts

        def is_known(view: fx.Node, known: bool | None) -> bool | None:
            """None after a view that mixes rows. Outside of the region, views are made of joined values."""
            if known and not is_inside(view, key):
                return True
            if known is None or self.facts[view].refusals:
                return None
            return known or is_clear(view)

        todo: list[tuple[fx.Node, bool | None]] = [(node, is_clear(node))]
        while todo:
            given, known = todo.pop()
            for user in given.users:
                if self.facts[user].returns is given:  # written in place: the same tensor
                    todo.append((user, known))
                if user.op == "output":
                    seen = given not in self.cut.graph.saved
                elif user in self.cut.home:
                    claim = self.cut.groups[self.cut.home[user]].claim
                    seen = (claim is None or claim.key != key) and not is_inside(user, key)
                else:  # a view, which each of its users recomputes
                    todo.append((user, is_known(user, known)))
                    continue
                if seen and not known:
                    return False
                uses += seen
        return uses > 0

    # 2. memory

    def _by_memory(self, piece: Subgraph) -> Reason:
        cut = self.cut
        for n in piece.copied:
            name, line = target_names(n)[0], source_line(n)
            if self._fails_on_a_part(n):
                return f"{name} merges the rows into another dim; use reshape", line
            if self._copies_or_not(n):
                return f"{name} may return a view or a copy, depending on the rows, of memory that is written", line
            if cut.is_view_of_rows(n) and cut.is_written_later(n) and self._comes_of_a_copy(n):
                return f"{name} may fail on a single row, because of its strides", line
        return None, None

    def _copies_or_not(self, node: fx.Node) -> bool:
        """Whether a reshape, or a call like it, copies or not depending on the rows, and a later write shows which."""
        cut = self.cut
        if not cut.may_copy(node) and not cut.is_reshaped(node):
            return False
        dims = self.probe.dims(node)
        # Earlier writes are the same in a copy and in a view. Only later writes show the difference.
        written = {s for s, at in cut.last_write.items() if at > cut.position[node]}
        if self.facts[node].view:  # a part of the rows is a view as well if they are outermost
            return bool(cut.storages(node) & written) and any(dims)
        if any(_is_converted(self.facts[a].value, self.facts[node].value) for a in node.all_input_nodes):
            return False
        # It copies. A single row may be a view, and then a write to one side is seen on the other.
        memory = cut.storages(node).union(*(cut.storages(a) for a in node.all_input_nodes))
        return bool(memory & written) and any(dim is not None for dim in dims)

    def _comes_of_a_copy(self, node: fx.Node) -> bool:
        """Whether a call that may copy did copy an argument of the node, directly or not."""
        todo, seen = [node], {node}
        while todo:
            for n in todo.pop().all_input_nodes:
                if n not in seen and n in self.facts:
                    if self.cut.may_copy(n) and not self.facts[n].view:
                        return True
                    seen.add(n)
                    todo.append(n)
        return False

    def _fails_on_a_part(self, node: fx.Node) -> bool:
        """Whether the node merges the rows into another dim by a view, which can't become a reshape."""
        copies = node.target in RESHAPE_OF or self.cut.may_copy(node)
        if copies or not self.facts[node].view or not self.probe.is_merged(node) or self.cut.is_item(node):
            return False
        return not any(self.probe.is_merged(a) for a in node.all_input_nodes)

    # 3. borders

    def _cant_be_cut(self, node: fx.Node) -> bool:
        """Whether a value has its rows merged into another dim, so that a part is a copy, and can't be copied: it is
        written, its memory has holes, or the dim has more than rows and the dims merged into it."""
        if not self.probe.is_merged(node):
            return False
        value, dims = self.facts[node].value, self.probe.dims(node)
        if node not in self.cut.graph.shapes or len(dims) - dims.count(None) > 1:
            return True
        alone = all(
            place is None or (isinstance(place, MergedDim) and value.shape[place.dim] == place.outer * rows)
            for place, rows in zip(dims, self.probe.rows, strict=True)
        )
        written = bool(self.cut.storages(node) & self.cut.written)
        return not alone or written or not is_dense(value.shape, value.stride())


def _is_converted(given: Any, made: Any) -> bool:
    """Whether a tensor was copied to another dtype or device."""
    both = isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor)
    return both and (given.dtype, given.device) != (made.dtype, made.device)
