"""Cuts a captured graph into operators, where the rules say.

1. claim:  which nodes does a rule or a mark want, and under which name (claims.py).
2. order:  which node must come after which: by data, and by memory that one of them writes.
3. group:  nodes of one name join one operator as long as that forms no cycle; what nobody claims becomes the
           operators between, one for each connected run.
4. build:  each group becomes a small graph of its own (pieces.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from dynaflow.capture.batch_analysis.probe import NodeFacts, Probe
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.op_registry import followed
from dynaflow.partition.build import Build, Group, bases_of, is_region, is_spread
from dynaflow.partition.claims import Claim, claim
from dynaflow.partition.op_graph import OpGraph
from dynaflow.partition.rules import Rule

WEIGHTS = "weights"
"""In a backward pass: the part of an operator, and its tag, that makes gradients of weights."""


def partition(graph: CapturedGraph, probe: Probe, rules: Sequence[Rule], *, complete: bool) -> OpGraph:
    """`complete`: the graph is the whole model, so a rule that matches nothing in it is a mistake."""
    work = [n for n in graph.gm.graph.nodes if _is_work(n, probe.facts)]
    claims = claim(work, probe, rules, complete)
    follows = followed(graph.gm.graph)
    after = _order(work, probe, follows)
    if graph.phase == "backward":
        claims = _weights_apart(work, _without_promises(claims), after, probe)
    groups = _group(work, claims, after, probe)
    return Build(graph, probe, groups, after, follows).result()


def _is_work(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """Nodes that compute. The others (inputs, views, sizes, regions) are redone wherever they are needed."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    fact = facts[node]
    return not (fact.scalar or fact.view or is_region(node))


# 2. order


def _order(
    work: list[fx.Node], probe: Probe, follows: dict[fx.Node, list[fx.Node]]
) -> dict[fx.Node, set[fx.Node]]:
    """Direct predecessors of every node, by value, by memory, and by state that was declared."""
    facts = probe.facts
    after: dict[fx.Node, set[fx.Node]] = {}
    written = {s for n in work for s in facts[n].writes}
    writer: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in work:
        read = (*node.all_input_nodes, *follows.get(node, ()))
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


def _without_promises(claims: dict[fx.Node, Claim | None]) -> dict[fx.Node, Claim | None]:
    """`splittable=True` says that forward treats each row by itself. Gradients of weights are summed over rows."""
    return {n: replace(claim, splittable=None) if claim and claim.splittable else claim for n, claim in claims.items()}


def _weights_apart(
    work: list[fx.Node], claims: dict[fx.Node, Claim | None], after: dict[fx.Node, set[fx.Node]], probe: Probe
) -> dict[fx.Node, Claim | None]:
    """Of each claim, what sums over rows for the gradients of weights is an operator of its own, and runs whole."""
    runs: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
    for node in work:
        if (claim := claims[node]) is not None and claim.splittable is None:
            runs[claim.key].append(node)
    found = dict(claims)
    for run in runs.values():
        apart = _mixing(run, after, probe)
        for node in run:
            if after[node] & apart and not any(dim is not None for dim in probe.dims(node)):  # made of nothing else
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
    ancestors: list[int] = []  # a bit mask of the groups that come before each
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
    """What is to be one operator has one key: a claim's, or that of a run of nodes between claims."""
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
    """The nodes of a run that mix rows, and those on the way from one to another: they run whole, the rest need not.

    Those that make or read a DTensor as well: none may go from one operator to another.
    """
    inside = set(run)
    facts = probe.facts
    refuses = {n for n in run if facts[n].refusals or any(is_spread(a, facts) for a in (n, *n.all_input_nodes))}
    behind, ahead = set(refuses), set(refuses)
    for node in run:
        if after[node] & behind:
            behind.add(node)
    for node in reversed(run):
        if node in ahead:
            ahead |= after[node] & inside
    return behind & ahead


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
