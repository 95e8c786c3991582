"""Each group of nodes made a small graph of its own: an operator.

Views, sizes and regions (autocast, grad mode) are computed again wherever they are used, so what crosses
operators is always a tensor that owns its memory. Results that are views of inputs, or of memory that others
see too, are made at the end, from whole values, so that aliasing is as the model has it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.aten_calls import RNG
from dynaflow.capture.batch_analysis.probe import NodeFacts, Probe
from dynaflow.capture.batch_analysis.signatures import Merged, dim_in
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.collectives import group_of
from dynaflow.capture.node_info import addresses_memory, module_stack, source_line, target_names
from dynaflow.core.memory_layout import is_dense, overlaps_itself
from dynaflow.partition.claims import Claim, has_no_rows, is_inside
from dynaflow.partition.op_graph import Op, OpGraph, Result, RowMixing, Value


@dataclass(slots=True, kw_only=True)
class Group:
    claim: Claim | None
    nodes: list[fx.Node] = field(default_factory=list)


class Build:
    """Makes the operators' own graphs, and the values between them."""

    def __init__(
        self,
        graph: CapturedGraph,
        probe: Probe,
        groups: list[Group],
        after: dict[fx.Node, set[fx.Node]],
        followed: dict[fx.Node, list[fx.Node]],
    ) -> None:
        self.graph, self.probe, self.facts, self.groups, self.after = graph, probe, probe.facts, groups, after
        self.followed = followed
        self.home = {n: g for g, group in enumerate(groups) for n in group.nodes}
        self.position = {n: i for i, n in enumerate(graph.gm.graph.nodes)}
        self.input_of = {given.node: i for i, given in enumerate(graph.inputs)}
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, int] = {}
        self.regions = _regions(graph)
        self.early: set[fx.Node] = set()
        """Views among the results that their operators hand out themselves."""
        self.crossing: set[int] = set()
        self.written = {s for n in self.home for s in self.facts[n].writes}
        self.last_write: dict[int, int] = {}
        for n in sorted(self.home, key=self.position.__getitem__):
            self.last_write.update(dict.fromkeys(self.facts[n].writes, self.position[n]))

    def result(self) -> OpGraph:
        returned = self._returned()
        self.early = {n for n in returned if self._can_return_early(n, returned)}
        pieces = [_Piece(self, g) for g in range(len(self.groups))]
        needed: set[fx.Node] = set()
        for piece in pieces:
            needed |= piece.copy_work()
        epilogue = _Piece(self, None)
        needed |= epilogue.copy_results(returned)
        self.crossing = {s for n in needed for s in self._storages(n)}
        names = _unique([self._name(g) for g in range(len(self.groups))])
        ops = [self._op(piece, name, needed) for piece, name in zip(pieces, names, strict=True)]
        plain = not epilogue.made and not epilogue.symbols and all(isinstance(n, fx.Node) for n in returned)
        outputs = tuple(self._value(n) for n in ([self._held(n) for n in returned] if plain else epilogue.reads))
        return OpGraph(
            graph=self.graph,
            batch_axes=self.probe.batch_axes,
            ops=tuple(ops),
            values=tuple(self.values),
            outputs=outputs,
            epilogue=None if plain else epilogue.module(epilogue.results),
            epilogue_symbols=tuple(epilogue.symbols),
            results=tuple(self._result(n) for n in returned),
            row_mixing=self._row_mixing(ops, pieces, epilogue),
        )

    def _result(self, node: Any) -> Result:
        if not isinstance(node, fx.Node):
            return Result()
        if not isinstance(self.facts[node].value, torch.Tensor):
            return Result(number=_torch.number(node.meta.get("example_value")))
        place = next(iter(self.probe.dims(node)), None)
        return Result(
            dim=None if isinstance(place, Merged) else place,
            shape=self.graph.shapes.get(node),
            storages=frozenset(self._storages(node)),
            input=self.input_of.get(self._held(node)),
            passed=self.graph.phase == "backward" or node in self.graph.saved,
        )

    def _row_mixing(self, ops: list[Op], pieces: list[_Piece], epilogue: _Piece) -> RowMixing | None:
        for op, piece in zip(ops, pieces, strict=True):
            if op.refusal is not None:
                return RowMixing(op=op.name, reason=op.refusal, line=op.line)
            if op.shared and (found := self._sees_rows(piece, op.name)) is not None:
                return found
        return self._sees_rows(epilogue, None)

    def _sees_rows(self, piece: _Piece, name: str | None) -> RowMixing | None:
        """A node that can't be split, and that rows go into, or come out of, or their number."""
        for n in piece.made:
            for reason in self.facts[n].refusals.values():
                if self.facts[n].sized or not has_no_rows(n, self.probe):
                    return RowMixing(op=name, reason=reason, line=source_line(n))
        return None

    def _held(self, node: fx.Node) -> fx.Node:
        """An in-place node's result is its argument."""
        while (written := self.facts[node].returns) is not None:
            node = written
        return node

    def _returned(self) -> list[Any]:
        output = next(iter(self.graph.gm.graph.find_nodes(op="output")))
        (results,) = output.args
        return list(results)

    def is_item(self, node: Any) -> bool:
        """One of several results of a computing node."""
        while isinstance(node, fx.Node) and node.target is operator.getitem:
            node = node.args[0]
            if isinstance(self.facts[node].value, torch.Tensor):  # it takes a part of a tensor
                return False
            if node in self.home:
                return True
        return False

    def _can_return_early(self, node: Any, returned: list[Any]) -> bool:
        """A view among the results that its operator can hand out itself, a part at a time."""
        if not isinstance(node, fx.Node) or not self.facts[node].view or self.is_item(node):
            return False
        bases = self._tensors_behind(node)
        if len(bases) != 1 or bases[0] not in self.home:
            return False
        value = self.facts[node].value
        if overlaps_itself(value.shape, value.stride()):  # joined, its elements would be apart
            return False
        storages = self._storages(node)
        if storages & self.written or any(self._storages(o) & storages for o in returned if o is not node):
            return False
        return not any(self.facts[n].refusals or self.facts[n].sized for n in _chain(node, self.facts))

    def _storages(self, node: Any) -> set[int]:
        return self.facts[node].storages if isinstance(node, fx.Node) else set()

    def _value(self, node: fx.Node) -> int:
        if node not in self.value_of:
            given = self.input_of.get(node)
            tensor = isinstance(self.facts[node].value, torch.Tensor)
            one_memory = node in self.home and len(self._storages(node)) == 1
            self.value_of[node] = len(self.values)
            self.values.append(
                Value(
                    index=len(self.values),
                    name=node.name if given is None else self.graph.inputs[given].name,
                    dims=tuple(map(dim_in, self.probe.dims(node))) if tensor else (None,) * len(self.probe.batch_axes),
                    merged=self.probe.is_merged(node),
                    shape=self.graph.shapes.get(node),
                    storage=next(iter(self._storages(node)), None),
                    input=given,
                    out_variant=self.facts[node].out_variant if one_memory else None,
                    fresh=given is not None or self._is_fresh(self._base(node)),
                )
            )
        return self.value_of[node]

    def _op(self, piece: _Piece, name: str, needed: set[fx.Node]) -> Op:
        assert piece.group is not None
        group = self.groups[piece.group]
        outs = [n for n in sorted(needed, key=self.position.__getitem__) if self.maker(n) == piece.group]
        for n in outs:
            piece.get(n)
        reads = [self._value(n) for n in piece.reads]
        writes = [self._value(n) for n in outs]
        shared = not any(self.values[v].carries_batch for v in (*reads, *writes))
        declared = group.claim.splittable if group.claim else None
        declared = None if declared and self.graph.merged_calls else declared
        refusal, line = self._refusal(piece, declared, outs)
        if any(n not in self.input_of and is_spread(n, self.facts) for n in (*piece.reads, *outs)):
            refusal = "a DTensor goes in or out, whose rows can't be followed"
        if (stuck := next((n for n in (*piece.reads, *outs) if self._cant_be_cut(n)), None)) is not None:
            refusal = refusal or f"{stuck.name} goes in or out, whose rows lie behind another dim and can't be copied"
        accesses: dict[int, bool] = {}
        for n in group.nodes:
            fact = self.facts[n]
            accesses.update({s: accesses.get(s, False) for s in fact.reads if s in self.written or s in self.crossing})
            accesses.update({s: True for s in fact.writes})
        accesses.update({s: True for n in outs for s in self._storages(n)})
        return Op(
            index=piece.group,
            name=name,
            tags=group.claim.tags if group.claim else frozenset(),
            module=piece.module(tuple(piece.env[n] for n in outs)),
            symbols=tuple(piece.symbols),
            reads=tuple(reads),
            writes=tuple(writes),
            accesses=tuple(sorted(accesses.items())),
            after=tuple(sorted({self.home[d] for n in group.nodes for d in self.after[n]} - {piece.group})),
            serial_after=tuple(
                sorted({m for n in group.nodes for a in self.followed.get(n, ()) if (m := self.maker(a)) is not None})
            ),
            shared=shared,
            refusal=None if shared else refusal,
            line=line or next((ln for n in group.nodes if (ln := source_line(n))), None),
            functions=tuple(target_names(n)[0] for n in group.nodes),
            groups=tuple(dict.fromkeys(found for n in group.nodes if (found := group_of(n)) is not None)),
            has_hidden_state=any(n in self.followed.get(n, ()) for n in group.nodes),
        )

    def _cant_be_cut(self, node: fx.Node) -> bool:
        """Its rows lie behind another dim: a part is a copy. So nobody may write to it, and nothing else may lie behind
        the rows on their dim, nor the memory have holes."""
        if not self.probe.is_merged(node):
            return False
        value, dims = self.facts[node].value, self.probe.dims(node)
        if node not in self.graph.shapes or len(dims) - dims.count(None) > 1:
            return True
        alone = all(
            place is None or (isinstance(place, Merged) and value.shape[place.dim] == place.behind * rows)
            for place, rows in zip(dims, self.probe.rows, strict=True)
        )
        written = bool(self._storages(node) & self.written)
        return not alone or written or not is_dense(value.shape, value.stride())

    def _tensors_behind(self, node: fx.Node) -> list[fx.Node]:
        """What a view looks at; the numbers among its arguments have makers, too."""
        return [b for b in bases_of(node, self.facts) if isinstance(self.facts[b].value, torch.Tensor)]

    def _base(self, node: fx.Node) -> fx.Node:
        """What its operator makes to hand out this node's result: more than that, if that is a view."""
        return self._tensors_behind(node)[0] if node in self.early else node

    def _is_fresh(self, base: fx.Node) -> bool:
        """Whether its memory is new. What should be a copy may be left out, and is then what it copies: that is new if
        the same operator makes it, and hands out nothing else of it."""
        group = self.home.get(base)
        while group is not None and self.facts[base].copied:
            behind = [b for n in base.all_input_nodes for b in self._tensors_behind(n)]
            if len(behind) != 1 or self.home.get(behind[0]) != group or self._storages(behind[0]) & self.crossing:
                return False
            (base,) = behind
        return group is not None

    def maker(self, node: fx.Node) -> int | None:
        """The group that hands out this node's result."""
        base = self._base(node)
        while base not in self.home and base.target is operator.getitem:
            base = base.args[0]  # type: ignore[assignment]
        return self.home.get(base)

    def _refusal(
        self, piece: _Piece, declared: bool | None, outs: list[fx.Node]
    ) -> tuple[str | None, str | None]:
        if declared is False:
            return "its rule says splittable=False", None
        refused = [(reason, source_line(n)) for n in piece.made for reason in self.facts[n].refusals.values()]
        if declared is True:
            broken = self._broken_promise(piece, outs) if refused else (None, None)
        else:
            broken = refused[0] if refused else self._shared_state(piece)
        if broken[0] is not None:
            return broken
        for n in piece.made:
            if self._fails_on_a_part(n):
                return f"{target_names(n)[0]} puts the rows behind another dim; use reshape", source_line(n)
            if self._may_copy(n):
                return f"{target_names(n)[0]} may copy memory that is written, or not, as the rows fall", source_line(n)
            if self.is_view_of_rows(n) and self.is_written_later(n) and self._comes_of_a_copy(n):
                return f"{target_names(n)[0]} may fail on a single row, as it lies in memory", source_line(n)
        return None, None

    def _shared_state(self, piece: _Piece) -> tuple[str | None, str | None]:
        nodes = self.groups[piece.group].nodes if piece.group is not None else []
        made = {s for n in nodes for s in self.facts[n].made}
        for n in nodes:
            if self.facts[n].writes - made - {RNG} and has_no_rows(n, self.probe):
                return f"{target_names(n)[0]} writes state that is shared by all rows", source_line(n)
        return None, None

    def _broken_promise(self, piece: _Piece, outs: list[fx.Node]) -> tuple[str | None, str | None]:
        """Why a region that was declared splittable can't be split, though the rules refuse some of it.

        The declaration says that the region treats each row by itself, and values are cut and joined by position. So
        wherever a value goes in or out, a row must be a position. For results that the rules can't follow, only the
        declaration says so; and it speaks of what the region returns, not of what is saved for a backward pass.
        """
        facts, says = self.facts, "its rule says splittable=True, but"
        lost = self._lost_in(piece)
        group = self.groups[piece.group]  # type: ignore[index]
        for n in piece.made:
            if addresses_memory(n):
                return f"{says} {target_names(n)[0]} addresses memory directly, wherever the rows lie", source_line(n)
            if facts[n].refusals and n not in group.nodes and not is_inside(n, group.claim.key):  # type: ignore[union-attr]
                reason, line = next(iter(facts[n].refusals.values())), source_line(n)
                return f"{says} it is given a view, made outside of its region, that mixes rows: {reason}", line
        for n in piece.reads:
            if facts[n].merged:
                return f"{says} {n.name} goes in with the batch merged with another dim", source_line(n)
            if n in lost:  # another rule cut the region in pieces
                return f"{says} the rows of {n.name}, which is inside of its region, can't be followed", source_line(n)
        layouts = {self._rows_of(n) for n in piece.reads}
        for n in outs:
            if facts[n].reduced:
                return f"{says} {n.name} comes out without rows", source_line(n)
            if n in lost and not (self._stays(n, lost) and self._is_returned_by_rows(n, piece, layouts)):
                return f"{says} the rows of {n.name}, which comes out, can't be followed", source_line(n)
        return None, None

    def _stays(self, node: fx.Node, lost: set[fx.Node]) -> bool:
        """Whether what is written to a result later has its rows where the result has them."""
        clean = {node}
        for n in self.graph.gm.graph.nodes:
            if self.position[n] <= self.position[node] or n not in lost:
                continue
            if not self.facts[n].refusals and all(a in clean for a in n.all_input_nodes if a in lost):
                clean.add(n)
            elif self.facts[n].writes & self._storages(node):
                return False
        return True

    def _lost_in(self, piece: _Piece) -> set[fx.Node]:
        """What is made in the region of a piece by way of something whose rows can't be followed."""
        group = self.groups[piece.group]  # type: ignore[index]
        lost: set[fx.Node] = set()
        own = {*group.nodes, *piece.made}
        region = [n for n in self.graph.gm.graph.nodes if n in own or is_inside(n, group.claim.key)]  # type: ignore[union-attr]
        for n in region:
            if self.facts[n].refusals or any(a in lost for a in n.all_input_nodes):
                lost.add(n)
        return lost

    def _rows_of(self, node: fx.Node) -> tuple[int | None, ...]:
        """How long each dim is that carries the batch."""
        value = self.facts[node].value
        if not isinstance(value, torch.Tensor):
            return ()
        return tuple(None if (dim := dim_in(place)) is None else value.shape[dim] for place in self.probe.dims(node))

    def _is_returned_by_rows(self, node: fx.Node, piece: _Piece, layouts: set[tuple[int | None, ...]]) -> bool:
        """Whether the rest of the model gets a region's result, and each time in a layout in which a row is a position:
        with the batch on a dim of its own, or as one of the region's arguments has it."""
        key = self.groups[piece.group].claim.key  # type: ignore[index, union-attr]
        uses = 0

        def is_clear(n: fx.Node) -> bool:
            return not self.facts[n].merged or self._rows_of(n) in layouts

        def is_known(view: fx.Node, known: bool | None) -> bool | None:
            """None for good after a view that mixes rows; but outside the region, views are made of joined values."""
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
                    seen = given not in self.graph.saved
                elif user in self.home:
                    claim = self.groups[self.home[user]].claim
                    seen = (claim is None or claim.key != key) and not is_inside(user, key)
                else:  # a view, which each of its users makes for itself
                    todo.append((user, is_known(user, known)))
                    continue
                if seen and not known:
                    return False
                uses += seen
        return uses > 0

    def _may_copy(self, node: fx.Node) -> bool:
        """reshape and its kin look at memory or copy it, as the strides fall: not to be left to the slice."""
        if target_names(node)[0] not in _MAY_COPY and not self._is_reshaped(node):
            return False
        dims = self.probe.dims(node)
        # What was written before is the same in a copy and in a view: only later writes tell them apart.
        written = {s for s, at in self.last_write.items() if at > self.position[node]}
        if self.facts[node].view:  # any rows of it are a view as well when they are outermost
            return bool(self._storages(node) & written) and any(dims)
        if any(_is_converted(self.facts[a].value, self.facts[node].value) for a in node.all_input_nodes):
            return False
        # It copies. A single row may be a view, and then a write to one side is seen on the other.
        memory = self._storages(node).union(*(self._storages(a) for a in node.all_input_nodes))
        return bool(memory & written) and any(dim is not None for dim in dims)

    def _is_reshaped(self, node: fx.Node) -> bool:
        """It puts rows behind another dim, so a part of the rows is no view of a part of its argument, but a copy."""
        return node.target in _VIEWS and self.probe.is_merged(node)

    def is_view_of_rows(self, node: fx.Node) -> bool:
        """It insists on a view. A single row may lie in memory as no view can show: `reshape`, where it copies several
        rows, may make a view of one."""
        if node.target not in _VIEWS or any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
            return False
        return any(dim is not None for dim in self.probe.dims(node))

    def is_written_later(self, node: fx.Node) -> bool:
        """If not, nobody can tell a view from a copy."""
        return any(self.last_write.get(s, -1) > self.position[node] for s in self._storages(node))

    def _comes_of_a_copy(self, node: fx.Node) -> bool:
        """Whether a call that may copy or not has copied what it is made of."""
        todo, seen = [node], {node}
        while todo:
            for n in todo.pop().all_input_nodes:
                if n not in seen and n in self.facts:
                    if target_names(n)[0] in _MAY_COPY and not self.facts[n].view:
                        return True
                    seen.add(n)
                    todo.append(n)
        return False

    def _fails_on_a_part(self, node: fx.Node) -> bool:
        """It does so as well, and would insist on a view."""
        copies = node.target in _VIEWS or target_names(node)[0] in _MAY_COPY
        if copies or not self.facts[node].view or not self.probe.is_merged(node) or self.is_item(node):
            return False
        return not any(self.probe.is_merged(a) for a in node.all_input_nodes)

    def _name(self, g: int) -> str:
        group = self.groups[g]
        if group.claim is not None:
            return group.claim.name
        stacks = [[path for path, _ in module_stack(n)] for n in group.nodes]
        common = [p for p in (stacks[0] if stacks else []) if all(p in s for s in stacks)]
        return f"{common[-1] if common else ''}:{target_names(group.nodes[0])[0].strip('_')}".lstrip(":")


def _is_converted(given: Any, made: Any) -> bool:
    """Whether a tensor was copied to another type or device."""
    both = isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor)
    return both and (given.dtype, given.device) != (made.dtype, made.device)


_MAY_COPY = {"reshape", "reshape_as", "contiguous", "flatten", "to", "type", "float", "half", "bfloat16", "type_as",
             "ravel"}  # fmt: skip


_VIEWS: dict[Any, Any] = {
    "view": "reshape",
    "view_as": "reshape_as",
    torch.Tensor.view: torch.Tensor.reshape,
    torch.Tensor.view_as: torch.Tensor.reshape_as,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Calls that fail where the result can't be a view, and what to call there instead."""


class _Piece:
    """One operator's graph in the making: nodes are copied in, and what they need comes along or is read."""

    def __init__(self, build: Build, group: int | None) -> None:
        self.build, self.group = build, group
        self.out = fx.Graph()
        self.env: dict[Any, Any] = {}
        self.symbols: list[Any] = []
        self.reads: list[fx.Node] = []
        self.made: list[fx.Node] = []
        """Original nodes that were copied, in order."""
        self.results: tuple[Any, ...] = ()
        self.region = build.regions.start

    def copy_work(self) -> set[fx.Node]:
        """Copies the group's nodes; returns the nodes of other groups that it reads."""
        for node in self.build.groups[self.group].nodes:  # type: ignore[index]
            self._enter(self.build.regions.at[node])
            self.env[node] = self._copy(node)
        self._enter(self.build.regions.start)
        return {n for n in self.reads if n not in self.build.input_of}

    def copy_results(self, returned: list[Any]) -> set[fx.Node]:
        self.results = tuple(self.get(n) if isinstance(n, fx.Node) else n for n in returned)
        return {n for n in self.reads if n not in self.build.input_of}

    def get(self, node: fx.Node) -> Any:
        if node in self.env:
            return self.env[node]
        build = self.build
        fact = build.facts[node]
        if node in build.input_of:
            given = build.graph.inputs[build.input_of[node]]
            result = self._symbol(given.symbol) if given.symbol is not None else self._read(node)
        elif node.op == "get_attr":
            result = self._copy(node)
        elif fact.returns is not None:
            result = self.get(fact.returns)
        elif node in build.home or self._is_elsewhere(node):
            result = self._read(node)
        else:
            result = self._copy(node)
        self.env[node] = result
        return result

    def _is_elsewhere(self, node: fx.Node) -> bool:
        """Another operator hands it out as it is."""
        build = self.build
        if self.group is None and node in build.early:
            return True
        return build.is_item(node) and build.maker(node) != self.group

    def _copy(self, node: fx.Node) -> fx.Node:
        self.made.append(node)
        for a in node.all_input_nodes:
            self.get(a)
        copy = self.out.node_copy(node, lambda n: self.env[n])
        build, part = self.build, self.group is not None
        if build._is_reshaped(node) or (part and build.is_view_of_rows(node) and not build.is_written_later(node)):
            copy.target = _VIEWS[node.target]
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
        first = next(iter(self.out.nodes), None)
        if first is None:
            return self.out.placeholder(name)
        with self.out.inserting_before(first):
            return self.out.placeholder(name)

    def _enter(self, region: _Region) -> None:
        """Leaves the regions that the next node is not in, and enters those that it is in."""
        now = self.region
        shared = 0
        while shared < min(len(now.open), len(region.open)) and now.open[shared] is region.open[shared]:
            shared += 1
        for entry in reversed(now.open[shared:]):
            self.out.call_function(_torch.REGIONS[entry.target], (self.env[("region", entry)],))
        for entry in region.open[shared:]:
            opening: Any = entry.target
            self.env[("region", entry)] = self.out.call_function(opening, entry.args, entry.kwargs)
        if now.grad != region.grad:
            self.out.call_function(_torch.SET_GRAD, (region.grad,))
        self.region = region

    def module(self, results: tuple[Any, ...]) -> fx.GraphModule:
        self.out.output(tuple(results))
        self._sort_placeholders()
        return fx.GraphModule(self.build.graph.gm, self.out, class_name="Operator")

    def _sort_placeholders(self) -> None:
        """Symbols first, then values in the order of `reads`."""
        wanted = [self.env[("symbol", s)] for s in self.symbols] + [self.env[n] for n in self.reads]
        for node in reversed(wanted):
            first = next(iter(self.out.nodes))
            if node is not first:
                first.prepend(node)


@dataclass(frozen=True, slots=True)
class _Region:
    """The ambient state in which a node runs: open autocast or inference regions, and grad mode."""

    open: tuple[fx.Node, ...]
    grad: bool


@dataclass(frozen=True, slots=True)
class _Regions:
    start: _Region
    at: dict[fx.Node, _Region]


def _regions(graph: CapturedGraph) -> _Regions:
    start = now = _Region((), graph.grad)
    at = {}
    for node in graph.gm.graph.nodes:
        if node.target in _torch.REGIONS:
            now = _Region((*now.open, node), now.grad)
        elif node.target in _torch.REGIONS.values():
            now = _Region(tuple(n for n in now.open if n is not node.args[0]), now.grad)
        elif node.target is _torch.SET_GRAD:
            now = _Region(now.open, bool(node.args[0]))
        at[node] = now
    return _Regions(start, at)


def bases_of(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
    """The nodes that made what `node` looks at: through views, sizes and in-place results."""
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


def is_spread(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """The node's result is a DTensor. Its rows are not followed: it should stay inside of one operator."""
    return _torch.shard_of(facts[node].value) is not None


def is_region(node: fx.Node) -> bool:
    pairs = _torch.REGIONS
    return node.target in pairs or node.target in pairs.values() or node.target is _torch.SET_GRAD


def _chain(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
    """The views between `node` and what it looks at."""
    found, todo = [], [node]
    while todo:
        n = todo.pop()
        if n.op not in ("placeholder", "get_attr") and (facts[n].view or facts[n].scalar) and n not in found:
            found.append(n)
            todo.extend(n.all_input_nodes)
    return found


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = defaultdict(int)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result
