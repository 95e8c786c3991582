"""Cuts a captured graph into operators, as the rules say.

*Contract.* Consumes a captured graph, its probe and the rules. Returns an OpGraph whose operators, in order, compute
what the graph does. Does not change the captured graph. Raises PartitionError if a rule of a whole model matches
nothing.

1. claim:  which nodes a rule or a mark wants, and under which name (`claims`).
2. order:  which node must come after which: by data, by memory that one of them writes, by declared state.
3. group:  nodes of one claim join one operator unless that forms a cycle; each connected run of unclaimed nodes becomes
an operator too. Nodes that mix rows are separated from those that don't, which can be split.
4. build:  each group becomes an operator with a graph of its own (`build`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from dynaflow.capture.batch_analysis.node_facts import NodeFacts, Probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.op_registry import serial_calls
from dynaflow.partition.build import build
from dynaflow.partition.claims import Claim, claim
from dynaflow.partition.grouped_graph import Group, bases_of, is_dtensor, is_region
from dynaflow.partition.op_graph import OpGraph
from dynaflow.partition.rules import Rule

WEIGHTS = "weights"
"""In a backward pass: the suffix and tag of operators that compute gradients of weights."""


def partition(graph: CapturedGraph, probe: Probe, rules: Sequence[Rule], *, complete: bool) -> OpGraph:
    """`complete`: the graph is the whole model, so a rule that matches nothing in it is an error."""
    # 1. claim
    work = [n for n in graph.gm.graph.nodes if _is_work(n, probe.facts)]
    claims = claim(work, probe, rules, complete)
    # 2. order
    serial = serial_calls(graph.gm.graph)
    after = _order(work, probe, serial)
    # 3. group
    if graph.phase == "backward":
        claims = _claim_weight_gradients(work, _without_declarations(claims), after, probe)
    groups = _group(work, claims, after, probe)
    # 4. build
    return build(graph, probe, groups, after, serial)


def _is_work(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """Whether the node computes. Others (inputs, views, sizes, regions) are recomputed wherever they are used."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    fact = facts[node]
    return not (fact.scalar or fact.view or is_region(node))


# 2. order


def _order(
    work: list[fx.Node], probe: Probe, serial: dict[fx.Node, list[fx.Node]]
) -> dict[fx.Node, set[fx.Node]]:
    """Direct predecessors of each node: by value, by memory, and by declared state."""
    facts = probe.facts
    after: dict[fx.Node, set[fx.Node]] = {}
    written = {s for n in work for s in facts[n].writes}
    writer: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in work:
        read = (*node.all_input_nodes, *serial.get(node, ()))
        deps = {base for a in read for base in bases_of(a, facts) if base in after}
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


def _without_declarations(claims: dict[fx.Node, Claim | None]) -> dict[fx.Node, Claim | None]:
    """Drops `splittable=True`, which holds for the forward pass: gradients of weights are summed over rows."""
    return {n: replace(claim, splittable=None) if claim and claim.splittable else claim for n, claim in claims.items()}


def _claim_weight_gradients(
    work: list[fx.Node], claims: dict[fx.Node, Claim | None], after: dict[fx.Node, set[fx.Node]], probe: Probe
) -> dict[fx.Node, Claim | None]:
    """Gives the nodes of a claim that sum over rows, for gradients of weights, a claim of their own. They run whole."""
    runs: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
    for node in work:
        if (claim := claims[node]) is not None and claim.splittable is None:
            runs[claim.key].append(node)
    found = dict(claims)
    for run in runs.values():
        apart = _mixing(run, after, probe)
        for node in run:
            if after[node] & apart and not any(dim is not None for dim in probe.dims(node)):  # no rows of its own
                apart.add(node)
        for node in apart:
            claim = claims[node]
            assert claim is not None
            key, name = (*claim.key, WEIGHTS), f"{claim.name}.{WEIGHTS}"
            found[node] = replace(claim, key=key, name=name, tags=claim.tags | {WEIGHTS})
    return found


# 3. group


def _group(
    work: list[fx.Node], claims: dict[fx.Node, Claim | None], after: dict[fx.Node, set[fx.Node]], probe: Probe
) -> list[Group]:
    groups: list[Group] = []
    ancestors: list[int] = []  # bit masks of the groups before each group
    home: dict[fx.Node, int] = {}
    current: dict[Any, int] = {}
    keys = _keys(work, claims, after, probe)
    for node in work:
        key = keys[node]
        deps = {home[d] for d in after[node]}
        mine = current.get(key)
        if mine is None or any(ancestors[d] >> mine & 1 for d in deps if d != mine):
            mine = current[key] = len(groups)
            groups.append(Group(claim=claims[node]))
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


def _keys(
    work: list[fx.Node], claims: dict[fx.Node, Claim | None], after: dict[fx.Node, set[fx.Node]], probe: Probe
) -> dict[fx.Node, Any]:
    """A key for each node. Nodes of one operator share a key: a claim's, or that of a run of unclaimed nodes."""
    runs: list[list[fx.Node]] = [[]]
    for node in work:
        if claims[node] is None:
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    keys: dict[fx.Node, Any] = {node: claim.key for node, claim in claims.items() if claim is not None}
    for number, run in enumerate(runs):
        mixing = _mixing(run, after, probe)
        keys.update({node: ("between", number, node in mixing) for node in run})
    return keys


def _mixing(run: list[fx.Node], after: dict[fx.Node, set[fx.Node]], probe: Probe) -> set[fx.Node]:
    """The nodes of a run that mix rows, and those between them: they run whole, the others need not.

    Nodes that make or read a DTensor are included: a DTensor must not cross operators.
    """
    inside = set(run)
    facts = probe.facts
    refuses = {n for n in run if facts[n].refusals or any(is_dtensor(a, facts) for a in (n, *n.all_input_nodes))}
    below, above = set(refuses), set(refuses)
    for node in run:
        if after[node] & below:
            below.add(node)
    for node in reversed(run):
        if node in above:
            above |= after[node] & inside
    return below & above


def _components(group: Group, after: dict[fx.Node, set[fx.Node]]) -> list[Group]:
    """Divides an unclaimed run into its connected components."""
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
    """Topological order; among ready groups, the one that starts first in the model."""
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
