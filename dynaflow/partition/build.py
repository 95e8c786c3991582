"""Builds an OpGraph: each group of nodes becomes an operator with an fx graph of its own.

*Contract.* Consumes a captured graph, its probe, and the groups in an order that respects their dependencies. Returns
the OpGraph. Does not change the captured graph. Raises nothing: an operator that can't be split says why.

Views, sizes and regions (autocast, grad mode) are recomputed wherever they are used, so each value that crosses
operators is a tensor that owns its memory. Results that are views of inputs, or of memory that other results share, are
made by the epilogue from whole values, which preserves the model's aliasing.

1. copy:      each group's nodes into a subgraph, and what makes the results into the epilogue. What they read of other
              groups has to cross.
2. operators: each returns what others read. Values are numbered; accesses, order and refusals are collected.
3. results:   what each of the graph's results is, and which operator first mixes rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.node_facts import Probe
from dynaflow.capture.batch_analysis.signatures import MergedDim, dim_in
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.collectives import group_of
from dynaflow.capture.node_info import module_stack, source_line, target_names
from dynaflow.partition.claims import has_no_rows
from dynaflow.partition.grouped_graph import Group, GroupedGraph
from dynaflow.partition.op_graph import Op, OpGraph, Result, RowMixing, Value
from dynaflow.partition.split_refusals import SplitRefusals
from dynaflow.partition.subgraph import Regions, Subgraph


def build(
    graph: CapturedGraph,
    probe: Probe,
    groups: list[Group],
    after: dict[fx.Node, set[fx.Node]],
    serial_calls: dict[fx.Node, list[fx.Node]],
) -> OpGraph:
    """`after`: predecessors of each node. `serial_calls`: calls that must run for all earlier rows before a call."""
    return _Build(GroupedGraph(graph, probe, groups, after, serial_calls)).op_graph()


class _Build:
    def __init__(self, cut: GroupedGraph) -> None:
        self.cut, self.graph, self.probe, self.facts = cut, cut.graph, cut.probe, cut.facts
        self.refusals = SplitRefusals(cut)
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, int] = {}
        self.crossing: set[int] = set()
        """Storages of the values that cross operators."""

    def op_graph(self) -> OpGraph:
        cut, regions = self.cut, Regions.of(self.graph)
        # 1. copy
        pieces = [Subgraph(cut, g, regions) for g in range(len(cut.groups))]
        needed: set[fx.Node] = set()
        for piece in pieces:
            needed |= piece.copy_group()
        epilogue = Subgraph(cut, None, regions)
        needed |= epilogue.copy_results()
        self.crossing = {s for n in needed for s in cut.storages(n)}
        # 2. operators
        names = _unique([self._name(group) for group in cut.groups])
        ops = [self._op(g, piece, name, needed) for g, (piece, name) in enumerate(zip(pieces, names, strict=True))]
        # 3. results
        plain = not (epilogue.copied or epilogue.symbols) and all(isinstance(n, fx.Node) for n in cut.results)
        returned = [cut.argument_of(n) for n in cut.results] if plain else epilogue.reads
        outputs = tuple(self._value(n) for n in returned)
        return OpGraph(
            graph=self.graph,
            batch_axes=self.probe.batch_axes,
            ops=tuple(ops),
            values=tuple(self.values),
            outputs=outputs,
            epilogue=None if plain else epilogue.module(epilogue.results),
            epilogue_symbols=tuple(epilogue.symbols),
            results=tuple(self._result(n) for n in cut.results),
            row_mixing=self._row_mixing(ops, pieces, epilogue),
        )

    # 2. operators

    def _op(self, index: int, piece: Subgraph, name: str, needed: set[fx.Node]) -> Op:
        cut, group = self.cut, self.cut.groups[index]
        outs = [n for n in cut.in_order(needed) if cut.maker(n) == index]
        for n in outs:
            piece.get(n)
        reads = [self._value(n) for n in piece.reads]
        writes = [self._value(n) for n in outs]
        shared = not any(self.values[v].carries_batch for v in (*reads, *writes))
        splittable = group.claim.splittable if group.claim else None
        if splittable and self.graph.merged_calls:  # a declaration may cover only some of the merged calls
            splittable = None
        refusal, line = self.refusals.of(piece, splittable, outs)
        serial_calls = [a for n in group.nodes for a in cut.serial_calls.get(n, ())]
        return Op(
            index=index,
            name=name,
            tags=group.claim.tags if group.claim else frozenset(),
            module=piece.module(tuple(piece.env[n] for n in outs)),
            symbols=tuple(piece.symbols),
            reads=tuple(reads),
            writes=tuple(writes),
            accesses=self._accesses(group, outs),
            after=tuple(sorted({cut.home[d] for n in group.nodes for d in cut.after[n]} - {index})),
            serial_after=tuple(sorted({m for a in serial_calls if (m := cut.maker(a)) is not None})),
            shared=shared,
            refusal=None if shared else refusal,
            line=line or next((ln for n in group.nodes if (ln := source_line(n))), None),
            functions=tuple(target_names(n)[0] for n in group.nodes),
            groups=tuple(dict.fromkeys(found for n in group.nodes if (found := group_of(n)) is not None)),
            has_hidden_state=any(n in cut.serial_calls.get(n, ()) for n in group.nodes),
        )

    def _accesses(self, group: Group, outs: list[fx.Node]) -> tuple[tuple[int, bool], ...]:
        """Storages that the operator reads (False) or writes (True), of those that are written or cross operators."""
        visible = self.cut.written | self.crossing
        accesses: dict[int, bool] = {}
        for n in group.nodes:
            accesses = {s: False for s in self.facts[n].reads & visible} | accesses
            accesses |= dict.fromkeys(self.facts[n].writes, True)
        accesses |= {s: True for n in outs for s in self.cut.storages(n)}
        return tuple(sorted(accesses.items()))

    def _value(self, node: fx.Node) -> int:
        if node not in self.value_of:
            given = self.cut.input_of.get(node)
            storages = self.cut.storages(node)
            tensor = isinstance(self.facts[node].value, torch.Tensor)
            one_storage = node in self.cut.home and len(storages) == 1
            self.value_of[node] = len(self.values)
            self.values.append(
                Value(
                    index=len(self.values),
                    name=node.name if given is None else self.graph.inputs[given].name,
                    dims=tuple(map(dim_in, self.probe.dims(node))) if tensor else (None,) * len(self.probe.batch_axes),
                    merged=self.probe.is_merged(node),
                    shape=self.graph.shapes.get(node),
                    storage=next(iter(storages), None),
                    input=given,
                    out_variant=self.facts[node].out_variant if one_storage else None,
                    fresh=given is not None or self._is_fresh(self.cut.base(node)),
                )
            )
        return self.value_of[node]

    def _is_fresh(self, base: fx.Node) -> bool:
        """Whether the memory is new. A call that may copy may also return its argument: that memory is new if the same
        operator makes it, and returns no other view of it."""
        group = self.cut.home.get(base)
        while group is not None and self.facts[base].copied:
            sources = [b for n in base.all_input_nodes for b in self.cut.tensor_bases(n)]
            if len(sources) != 1 or self.cut.home.get(sources[0]) != group:
                return False
            if self.cut.storages(sources[0]) & self.crossing:
                return False
            (base,) = sources
        return group is not None

    def _name(self, group: Group) -> str:
        """The claim's name; for an unclaimed group `path:call`, with the innermost module around all of its nodes."""
        if group.claim is not None:
            return group.claim.name
        stacks = [[path for path, _ in module_stack(n)] for n in group.nodes]
        common = [p for p in (stacks[0] if stacks else []) if all(p in s for s in stacks)]
        return f"{common[-1] if common else ''}:{target_names(group.nodes[0])[0].strip('_')}".lstrip(":")

    # 3. results

    def _result(self, node: Any) -> Result:
        if not isinstance(node, fx.Node):
            return Result()
        if not isinstance(self.facts[node].value, torch.Tensor):
            return Result(number=_torch.number(node.meta.get("example_value")))
        place = next(iter(self.probe.dims(node)), None)
        return Result(
            dim=None if isinstance(place, MergedDim) else place,
            shape=self.graph.shapes.get(node),
            storages=frozenset(self.cut.storages(node)),
            input=self.cut.input_of.get(self.cut.argument_of(node)),
            passed=self.graph.phase == "backward" or node in self.graph.saved,
        )

    def _row_mixing(self, ops: list[Op], pieces: list[Subgraph], epilogue: Subgraph) -> RowMixing | None:
        for op, piece in zip(ops, pieces, strict=True):
            if op.refusal is not None:
                return RowMixing(op=op.name, reason=op.refusal, line=op.line)
            if op.shared and (found := self._mixes_rows(piece, op.name)) is not None:
                return found
        return self._mixes_rows(epilogue, None)

    def _mixes_rows(self, piece: Subgraph, name: str | None) -> RowMixing | None:
        """The first node that can't be split and that rows, or their number, go into or come out of."""
        for n in piece.copied:
            for reason in self.facts[n].refusals.values():
                if self.facts[n].sized or not has_no_rows(n, self.probe):
                    return RowMixing(op=name, reason=reason, line=source_line(n))
        return None


def _unique(names: list[str]) -> list[str]:
    """Numbers repeated names: `attn`, `attn#2`."""
    seen: dict[str, int] = defaultdict(int)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result
