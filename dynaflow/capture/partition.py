"""Cuts a captured graph into operators, where the rules say.

1. claim:  which nodes does a rule or a mark want, and under which name.
2. order:  which node must come after which: by data, and by memory that one of them writes.
3. group:  nodes of one name join one operator as long as that forms no cycle; what nobody claims becomes the
           operators between, one for each connected run.
4. build:  each group becomes a small graph of its own. Views and sizes are computed again where they are
           used, so what crosses operators is always a tensor that owns its memory.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.graph import CapturedGraph
from dynaflow.capture.ops import Op, OpGraph, Value
from dynaflow.capture.probe import RNG, NodeFacts, Probe
from dynaflow.capture.rules import (
    Rule,
    SplitFunc,
    SplitModule,
    marks_of,
    module_calls,
    module_stack,
    source_line,
    tag_tuple,
    target_names,
)
from dynaflow.errors import PartitionError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rule's wish for a node. Nodes with equal keys are to be one operator."""

    key: tuple[str, ...]
    name: str
    tags: frozenset[str]
    splittable: bool | None


@dataclass(slots=True, kw_only=True)
class Group:
    claim: Claim | None
    nodes: list[fx.Node] = field(default_factory=list)


def partition(graph: CapturedGraph, probe: Probe, rules: Sequence[Rule], *, complete: bool) -> OpGraph:
    """`complete`: the graph is the whole model, so a rule that matches nothing in it is a mistake."""
    work = [n for n in graph.gm.graph.nodes if _is_work(n, probe.facts)]
    claims = _claim(work, probe, rules, complete)
    after = _order(work, probe)
    groups = _group(work, claims, after)
    return _Build(graph, probe, groups, after).result()


def _is_work(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """Nodes that compute. The others (inputs, views, sizes, regions) are redone wherever they are needed."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    fact = facts[node]
    return not (fact.scalar or fact.view or _is_region(node))


def _is_region(node: fx.Node) -> bool:
    pairs = _torch.AUTOCAST_PAIRS
    return node.target in pairs or node.target in pairs.values() or node.target is _torch.SET_GRAD


# 1. claim


def _claim(work: list[fx.Node], probe: Probe, rules: Sequence[Rule], complete: bool) -> dict[fx.Node, Claim | None]:
    claims: dict[fx.Node, Claim | None] = {}
    unused = list(rules)
    regions = _mark_regions(work)
    for node in work:
        claims[node] = _claim_node(node, rules, unused, regions)
    if unused and complete:
        raise _no_match(unused[0], work)
    makers = {s: claims[n] for n in work for s in probe.facts[n].made}
    for node in work:
        if _writes_shared_state(node, probe, makers, claims[node]):
            claims[node] = _state_claim(node, claims[node])
    return claims


def _mark_regions(work: list[fx.Node]) -> dict[str, list[str]]:
    """For each entry of a mark: the calls of modules that hold all of it, outermost first."""
    regions: dict[str, list[str]] = {}
    for node in work:
        calls = module_calls(node)
        for entry, _ in marks_of(node):
            around = regions.get(entry, calls)
            regions[entry] = [a for a, b in zip(around, calls, strict=False) if a == b]
    return regions


def _claim_node(
    node: fx.Node, rules: Sequence[Rule], unused: list[Rule], regions: dict[str, list[str]]
) -> Claim | None:
    stack, calls = module_stack(node), module_calls(node)
    tags: set[str] = set()
    key: tuple[str, ...] | None = None
    name, splittable = "", None
    best = -1
    for rule in rules:
        if not isinstance(rule, SplitModule):
            continue
        for depth, (path, kind) in enumerate(stack):
            if rule.matches(path, kind):
                tags.update(tag_tuple(rule.tag))
                if rule in unused:
                    unused.remove(rule)
                if depth > best:  # the innermost match names the operator
                    best, key, name = depth, ("module", calls[depth]), path or type_name(kind)
                    splittable = rule.splittable
    for entry, (mark_name, mark_tags, mark_splittable) in marks_of(node):
        tags.update(mark_tags)
        tags.add(mark_name)
        around = len(regions[entry])
        if around > best:  # else the module is called inside the marked region
            key = ("mark", entry)
            name, splittable = _below(stack[:around], mark_name), mark_splittable
    for rule in rules:
        if isinstance(rule, SplitFunc) and (site := _called(rule, node, stack)) is not None:
            tags.update(tag_tuple(rule.tag))
            if rule in unused:
                unused.remove(rule)
            key = ("func", *calls[: site.depth], *site.frames)
            name, splittable = _below(stack[: site.depth], site.name), rule.splittable
    return None if key is None else Claim(key=key, name=name, tags=frozenset(tags), splittable=splittable)


def _below(stack: list[tuple[str, type]], name: str) -> str:
    return f"{stack[-1][0] if stack else ''}.{name}".lstrip(".")


def type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A call that a SplitFunc matches: the modules around it, by number, and what tells it from other calls."""

    name: str
    depth: int
    frames: tuple[str, ...]


def _called(rule: SplitFunc, node: fx.Node, stack: list[tuple[str, type]]) -> _Site | None:
    """Where the rule's function was called, if `node` is or comes from that call."""
    if rule.matches(node):
        return _Site(name=target_names(node)[0], depth=len(stack), frames=(node.name,))
    if isinstance(rule.match, types.FunctionType):  # Dynamo inlined it: its nodes remember the frames
        frames = (node.meta.get("stack_trace") or "").split('File "')[1:]
        depth = 0
        for i, frame in enumerate(frames):
            if _is_frame_of(rule.match, frame):
                lines = tuple(f.split("\n")[0] for f in frames[:i])
                return _Site(name=rule.match.__name__, depth=depth, frames=lines)
            # torch's own modules leave no frame: step over them
            inner = range(depth, len(stack))
            depth = next((d + 1 for d in inner if _is_frame_of(getattr(stack[d][1], "forward", None), frame)), depth)
    return None


def _is_frame_of(function: Any, frame: str) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return code is not None and frame.startswith(f'{code.co_filename}"') and f", in {code.co_name}\n" in frame


def _no_match(rule: Rule, work: list[fx.Node]) -> PartitionError:
    if isinstance(rule, SplitModule):
        names = list(dict.fromkeys(path for n in work for path, _ in module_stack(n) if path))
        if isinstance(rule.match, type):
            names = list(dict.fromkeys(type_name(kind) for n in work for _, kind in module_stack(n)))
        wanted = rule.match if isinstance(rule.match, str) else getattr(rule.match, "pattern", None) or type_name(rule.match)
    else:
        names = list(dict.fromkeys(name for n in work for name in target_names(n)[:2]))
        wanted = rule.match if isinstance(rule.match, str) else getattr(rule.match, "__name__", str(rule.match))
    close = ", ".join(nearest(str(wanted), names)) or "none: the graph has no such names"
    return PartitionError(
        f"{rule} matches nothing in the graph",
        op=str(wanted),
        advice=f"the nearest names are {close}",
    )


def _writes_shared_state(
    node: fx.Node, probe: Probe, makers: dict[int, Claim | None], claim: Claim | None
) -> bool:
    """A counter, a running statistic: written once for all rows, never once for each micro-batch."""
    fact = probe.facts[node]
    inside = {s for s in fact.writes if s in makers and makers[s] == claim}
    if not fact.writes - inside - {RNG} or fact.refusals:
        return False
    nodes = [*node.all_input_nodes, node]
    return not any(
        dim is not None
        for n in nodes
        if isinstance(probe.facts[n].value, torch.Tensor)
        for dim in probe.dims(n)
    )


def _state_claim(node: fx.Node, claim: Claim | None) -> Claim:
    stack = module_stack(node)
    owner = claim.name if claim else (stack[-1][0] if stack else "model")
    key = ("state", *(claim.key if claim else (owner,)))
    return Claim(key=key, name=f"{owner}.state", tags=frozenset({"state"}), splittable=None)


# 2. order


def _order(work: list[fx.Node], probe: Probe) -> dict[fx.Node, set[fx.Node]]:
    """Direct predecessors of every node, by value and by memory."""
    facts = probe.facts
    after: dict[fx.Node, set[fx.Node]] = {}
    written = {s for n in work for s in facts[n].writes}
    writer: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in work:
        deps = {base for a in node.all_input_nodes for base in _bases(a, facts) if base in after}
        for s in facts[node].reads & written:
            if s in writer:
                deps.add(writer[s])
        for s in facts[node].writes:
            if s in writer:
                deps.add(writer[s])
            deps.update(readers[s])
        for s in facts[node].reads & written:
            readers[s].append(node)
        for s in facts[node].writes:
            writer[s], readers[s] = node, []
        deps.discard(node)
        after[node] = deps
    return after


def _bases(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
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


# 3. group


def _group(
    work: list[fx.Node], claims: dict[fx.Node, Claim | None], after: dict[fx.Node, set[fx.Node]]
) -> list[Group]:
    groups: list[Group] = []
    ancestors: list[int] = []  # a bit mask of the groups that come before each
    home: dict[fx.Node, int] = {}
    current: dict[Any, int] = {}
    run = 0
    previous: Any = None
    for node in work:
        claim = claims[node]
        key: Any = claim.key if claim else None
        if key is None and previous is not None:
            run += 1
        previous = key
        key = key or ("between", run)
        deps = {home[d] for d in after[node]}
        mine = current.get(key)
        if mine is None or any(ancestors[d] >> mine & 1 for d in deps if d != mine):
            mine = current[key] = len(groups)
            groups.append(Group(claim=claim))
            ancestors.append(0)
        groups[mine].nodes.append(node)
        home[node] = mine
        deps.discard(mine)
        new = ancestors[mine]
        for d in deps:
            new |= ancestors[d] | 1 << d
        if new != ancestors[mine]:
            for g in range(len(groups)):
                if g == mine or ancestors[g] >> mine & 1:
                    ancestors[g] |= new
    groups = [part for group in groups for part in _components(group, after)]
    return _sorted(groups, after)


def _components(group: Group, after: dict[fx.Node, set[fx.Node]]) -> list[Group]:
    """An unclaimed run may hold unrelated work: each connected part is its own operator."""
    if group.claim is not None:
        return [group]
    inside = set(group.nodes)
    root = {n: n for n in group.nodes}

    def find(n: fx.Node) -> fx.Node:
        while root[n] is not n:
            n = root[n]
        return n

    for n in group.nodes:
        for d in after[n] & inside:
            root[find(d)] = find(n)
    parts: dict[fx.Node, Group] = {}
    for n in group.nodes:
        parts.setdefault(find(n), Group(claim=None)).nodes.append(n)
    return list(parts.values())


def _sorted(groups: list[Group], after: dict[fx.Node, set[fx.Node]]) -> list[Group]:
    """Dependencies first; among the ready, the one that starts first in the model."""
    import heapq

    order = {n: i for i, n in enumerate(after)}
    home = {n: g for g, group in enumerate(groups) for n in group.nodes}
    deps = [{home[d] for n in group.nodes for d in after[n]} - {g} for g, group in enumerate(groups)]
    users: list[list[int]] = [[] for _ in groups]
    for g, before in enumerate(deps):
        for d in before:
            users[d].append(g)
    missing = [len(d) for d in deps]
    ready = [(order[group.nodes[0]], g) for g, group in enumerate(groups) if not missing[g]]
    heapq.heapify(ready)
    result = []
    while ready:
        _, g = heapq.heappop(ready)
        result.append(groups[g])
        for u in users[g]:
            missing[u] -= 1
            if not missing[u]:
                heapq.heappush(ready, (order[groups[u].nodes[0]], u))
    assert len(result) == len(groups), "the grouping formed a cycle"
    return result


# 4. build


class _Build:
    """Makes the operators' own graphs, and the values between them."""

    def __init__(
        self, graph: CapturedGraph, probe: Probe, groups: list[Group], after: dict[fx.Node, set[fx.Node]]
    ) -> None:
        self.graph, self.probe, self.facts, self.groups, self.after = graph, probe, probe.facts, groups, after
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
        ending = _Piece(self, None)
        needed |= ending.copy_results(returned)
        self.crossing = {s for n in needed for s in self._storages(n)}
        names = _unique([self._name(g) for g in range(len(self.groups))])
        ops = [self._op(piece, name, needed) for piece, name in zip(pieces, names, strict=True)]
        plain = not ending.made and not ending.symbols and all(isinstance(n, fx.Node) for n in returned)
        outputs = tuple(self._value(n) for n in ([self._held(n) for n in returned] if plain else ending.reads))
        return OpGraph(
            graph=self.graph,
            spaces=self.probe.spaces,
            ops=tuple(ops),
            values=tuple(self.values),
            outputs=outputs,
            ending=None if plain else ending.module(ending.results),
            ending_symbols=tuple(ending.symbols),
        )

    def _held(self, node: fx.Node) -> fx.Node:
        """An in-place node's result is its argument."""
        while (written := self.facts[node].returns) is not None:
            node = written
        return node

    def _returned(self) -> list[Any]:
        output = next(iter(self.graph.gm.graph.find_nodes(op="output")))
        (results,) = output.args
        return list(results)  # type: ignore[arg-type]

    def _is_item(self, node: Any) -> bool:
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
        if not isinstance(node, fx.Node) or not self.facts[node].view or self._is_item(node):
            return False
        bases = [b for b in _bases(node, self.facts) if isinstance(self.facts[b].value, torch.Tensor)]
        if len(bases) != 1 or bases[0] not in self.home:
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
            self.value_of[node] = len(self.values)
            self.values.append(
                Value(
                    index=len(self.values),
                    name=node.name if given is None else self.graph.inputs[given].name,
                    dims=self.probe.dims(node) if tensor else (None,) * len(self.probe.spaces),
                    shape=self.graph.shapes.get(node),
                    storage=next(iter(self._storages(node)), None),
                    input=given,
                )
            )
        return self.value_of[node]

    def _op(self, piece: _Piece, name: str, needed: set[fx.Node]) -> Op:
        assert piece.group is not None
        group = self.groups[piece.group]
        outs = [n for n in sorted(needed, key=self.position.__getitem__) if self._maker(n) == piece.group]
        for n in outs:
            piece.get(n)
        reads = [self._value(n) for n in piece.reads]
        writes = [self._value(n) for n in outs]
        shared = not any(self.values[v].carries_batch for v in (*reads, *writes))
        declared = group.claim.splittable if group.claim else None
        refusal, line = self._refusal(piece, declared)
        touches: dict[int, bool] = {}
        for n in group.nodes:
            fact = self.facts[n]
            touches.update({s: touches.get(s, False) for s in fact.reads if s in self.written or s in self.crossing})
            touches.update({s: True for s in fact.writes})
        touches.update({s: True for n in outs for s in self._storages(n)})
        return Op(
            index=piece.group,
            name=name,
            tags=group.claim.tags if group.claim else frozenset(),
            module=piece.module(tuple(piece.env[n] for n in outs)),
            symbols=tuple(piece.symbols),
            reads=tuple(reads),
            writes=tuple(writes),
            touches=tuple(sorted(touches.items())),
            after=tuple(sorted({self.home[d] for n in group.nodes for d in self.after[n]} - {piece.group})),
            shared=shared,
            refusal=None if shared else refusal,
            line=line or next((ln for n in group.nodes if (ln := source_line(n))), None),
            functions=tuple(target_names(n)[0] for n in group.nodes),
        )

    def _maker(self, node: fx.Node) -> int | None:
        """The group that hands out this node's result."""
        base = _bases(node, self.facts)[0] if node in self.early else node
        while base not in self.home and base.target is operator.getitem:
            base = base.args[0]  # type: ignore[assignment]
        return self.home.get(base)

    def _refusal(self, piece: _Piece, declared: bool | None) -> tuple[str | None, str | None]:
        if declared is True:
            return None, None
        if declared is False:
            return "its rule says splittable=False", None
        for n in piece.made:
            for reason in self.facts[n].refusals.values():
                return reason, source_line(n)
        for n in piece.made:
            if self._may_copy(n):
                return f"{target_names(n)[0]} may copy memory that is written, or not, as the rows fall", source_line(n)
        return None, None

    def _may_copy(self, node: fx.Node) -> bool:
        """reshape and its kin look at memory or copy it, as the strides fall: not to be left to the slice."""
        if target_names(node)[0] not in _MAY_COPY:
            return False
        dims = self.probe.dims(node)
        # What was written before is the same in a copy and in a view: only later writes tell them apart.
        written = {s for s, at in self.last_write.items() if at > self.position[node]}
        if self.facts[node].view:  # any rows of it are a view as well when they are outermost
            return bool(self._storages(node) & written) and any(dims)
        # It copies. A single row may be a view, and then a write to one side is seen on the other.
        memory = self._storages(node).union(*(self._storages(a) for a in node.all_input_nodes))
        return bool(memory & written) and any(dim is not None for dim in dims)

    def _name(self, g: int) -> str:
        group = self.groups[g]
        if group.claim is not None:
            return group.claim.name
        stacks = [[path for path, _ in module_stack(n)] for n in group.nodes]
        common = [p for p in (stacks[0] if stacks else []) if all(p in s for s in stacks)]
        return f"{common[-1] if common else ''}:{target_names(group.nodes[0])[0].strip('_')}".lstrip(":")


_MAY_COPY = {"reshape", "contiguous", "flatten", "to", "type", "float", "half", "bfloat16", "type_as", "ravel"}


class _Piece:
    """One operator's graph in the making: nodes are copied in, and what they need comes along or is read."""

    def __init__(self, build: _Build, group: int | None) -> None:
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
        elif node in build.home or (self.group is None and node in build.early):
            result = self._read(node)
        elif build._is_item(node) and build._maker(node) != self.group:
            result = self._read(node)
        else:
            result = self._copy(node)
        self.env[node] = result
        return result

    def _copy(self, node: fx.Node) -> fx.Node:
        self.made.append(node)
        for a in node.all_input_nodes:
            self.get(a)
        copy = self.out.node_copy(node, lambda n: self.env[n])
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
            self.out.call_function(_torch.AUTOCAST_PAIRS[entry.target], (self.env[("region", entry)],))
        for entry in region.open[shared:]:
            self.env[("region", entry)] = self.out.call_function(entry.target, entry.args, entry.kwargs)
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
        if node.target in _torch.AUTOCAST_PAIRS:
            now = _Region((*now.open, node), now.grad)
        elif node.target in _torch.AUTOCAST_PAIRS.values():
            now = _Region(tuple(n for n in now.open if n is not node.args[0]), now.grad)
        elif node.target is _torch.SET_GRAD:
            now = _Region(now.open, bool(node.args[0]))
        at[node] = now
    return _Regions(start, at)


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
