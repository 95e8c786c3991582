"""Matches rules and marks with nodes: which nodes become one operator, and under which name.

*Contract.* Consumes the nodes that compute, their probe, and the rules. Returns a claim, or None, for each node.
Changes nothing. Raises PartitionError for a rule that matches nothing, if the graph is the whole model.

1. match:       the innermost matching module, mark or function gives each node a claim.
2. state:       nodes that write state shared by all rows get a claim of their own.
3. collectives: a collective and the wait for its result share a claim.
4. promises:    `splittable=True` is void for a region with another operator that mixes rows.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dynaflow.capture.annotations import marks_of, tag_tuple
from dynaflow.capture.batch_analysis.aten_calls import RNG
from dynaflow.capture.batch_analysis.node_facts import Probe
from dynaflow.capture.collectives import awaited_collective
from dynaflow.capture.node_info import ORIGIN, module_calls, module_stack, names_of, target_names
from dynaflow.capture.optimizer_ops import UPDATE
from dynaflow.errors import PartitionError, nearest
from dynaflow.partition.rules import Rule, SplitFunc, SplitModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A rule's claim to a node. Nodes with equal keys become one operator."""

    key: tuple[str, ...]
    name: str
    tags: frozenset[str]
    splittable: bool | None


def claim(work: list[fx.Node], probe: Probe, rules: Sequence[Rule], complete: bool) -> dict[fx.Node, Claim | None]:
    # 1. match
    claims: dict[fx.Node, Claim | None] = {}
    unused = [rule for rule in rules if not rule.optional]
    regions = _mark_regions(work)
    for node in work:
        claims[node] = _claim_node(node, rules, unused, regions)
    if unused and complete:
        raise _no_match(unused[0], work)
    # 2. state
    makers = {s: claims[n] for n in work for s in probe.facts[n].made}
    for node in work:
        if _writes_shared_state(node, probe, makers, claims[node]):
            claims[node] = _state_claim(node, claims[node])
    # 3. collectives
    for place, node in enumerate(work):
        if (collective := awaited_collective(node)) is not None:
            if claims[collective] is None and work[place - 1] is not collective:  # another node may come in between
                stack = module_stack(collective)
                name = _below(stack, target_names(collective)[0])
                claims[collective] = Claim(key=("func", collective.name), name=name, tags=frozenset(), splittable=None)
            claims[node] = claims[collective]
    # 4. promises
    broken = _broken_regions(work, claims, probe)
    return {n: replace(c, splittable=None) if c and c.splittable and c.key in broken else c for n, c in claims.items()}


def _broken_regions(work: list[fx.Node], claims: dict[fx.Node, Claim | None], probe: Probe) -> set[tuple[str, ...]]:
    """Regions that contain another operator which mixes rows. As that runs whole, their `splittable=True` is void."""
    broken: set[tuple[str, ...]] = set()
    for node in work:
        claim = claims[node]
        if probe.facts[node].refusals and not (claim and claim.splittable):
            broken.update(("module", call) for call in module_calls(node))
            broken.update(("mark", entry) for entry, _ in marks_of(node))
    return broken


def is_inside(node: fx.Node, key: tuple[str, ...]) -> bool:
    """Whether a node is in the region of a claim, even if another rule claims the node."""
    kind, *where = key
    if kind == "module":
        return where[0] in module_calls(node)
    return kind == "mark" and any(entry == where[0] for entry, _ in marks_of(node))


def _mark_regions(work: list[fx.Node]) -> dict[str, list[str]]:
    """For each marked region: the module calls that enclose all of it, outermost first."""
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
    """A call that a SplitFunc matches."""

    name: str
    depth: int
    """Number of modules around it."""
    frames: tuple[str, ...]
    """Distinguishes it from other calls."""


def _called(rule: SplitFunc, node: fx.Node, stack: list[tuple[str, type]]) -> _Site | None:
    """The call of the rule's function that `node` is, or comes from."""
    call, called = node.meta.get(ORIGIN, ("", None))
    if call and rule.matches_call(called):
        return _Site(name=names_of(called)[0], depth=len(stack), frames=(call,))
    if rule.matches(node):
        return _Site(name=target_names(node)[0], depth=len(stack), frames=(node.name,))
    if isinstance(rule.match, types.FunctionType):  # Dynamo inlined it: stack traces have its frames
        frames = (node.meta.get("stack_trace") or "").split('File "')[1:]
        depth = 0
        for i, frame in enumerate(frames):
            if _is_frame_of(rule.match, frame):
                lines = tuple(f.split("\n")[0] for f in frames[:i])
                return _Site(name=rule.match.__name__, depth=depth, frames=lines)
            # torch's own modules have no frame: skip them
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
    else:
        names = list(dict.fromkeys(name for n in work for name in target_names(n)[:2]))
    match = rule.match
    wanted = match if isinstance(match, str) else getattr(match, "pattern", None) or type_name(match)
    close = ", ".join(nearest(wanted, names)) or "none: the graph has no such names"
    return PartitionError(
        f"{rule} matches nothing in the graph",
        op=wanted,
        advice=f"the nearest names are {close}",
    )


def _writes_shared_state(node: fx.Node, probe: Probe, makers: dict[int, Claim | None], claim: Claim | None) -> bool:
    """Whether the node writes a counter or a running statistic: once for all rows, not for each micro-batch."""
    fact = probe.facts[node]
    inside = {s for s in fact.writes if s in makers and makers[s] == claim}
    return bool(fact.writes - inside - {RNG}) and not fact.refusals and has_no_rows(node, probe)


def has_no_rows(node: fx.Node, probe: Probe) -> bool:
    """Whether none of the node's arguments and results carries the batch."""
    tensors = [n for n in (*node.all_input_nodes, node) if isinstance(probe.facts[n].value, torch.Tensor)]
    return not any(dim is not None for n in tensors for dim in probe.dims(n))


def _state_claim(node: fx.Node, claim: Claim | None) -> Claim:
    stack = module_stack(node)
    owner = claim.name if claim else (stack[-1][0] if stack else "model")
    if node.target is torch.ops.dynaflow.update.default:  # a scheduler may place each by itself
        return Claim(key=(UPDATE, node.name), name=f"{owner}.{UPDATE}", tags=frozenset({UPDATE}), splittable=None)
    key = ("state", *(claim.key if claim else (owner,)))
    return Claim(key=key, name=f"{owner}.state", tags=frozenset({"state"}), splittable=None)
