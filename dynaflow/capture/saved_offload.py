"""Offloads values saved for the backward pass to host memory.

*Contract.* Changes a forward graph, and then its backward graph, in place. Large saved values that the caller does not
get are stored to the host where they are made (`dynaflow.store`) and fetched at their first use in the backward graph
(`dynaflow.fetch`). Other values, and the order of other nodes, don't change.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.node_info import module_stack
from dynaflow.capture.optimizer_steps import base


class SavedOffload:
    """Offloads the saved values of one model."""

    def __init__(self, at_least: int, most: int | None) -> None:
        """`at_least`: bytes of a value that is worth a copy. `most`: bytes to offload in total; None: no limit."""
        self._at_least, self._most = max(at_least, 1), math.inf if most is None else most
        self._stored: dict[str, fx.Node] = {}
        """By name, which is the same in both passes."""

    def store(self, gm: fx.GraphModule) -> None:
        """Inserts the stores into a forward graph."""
        (output,) = gm.graph.find_nodes(op="output")
        results, saved = list(output.args[0]), range(len(output.args[0]))[_torch.saved_results()]
        sizes = {
            node: size
            for node in saved_only(gm)
            if base(node).op == "call_function"  # not a view of a weight
            if (size := _dense_bytes(node.meta["val"])) >= self._at_least
        }
        for node in _chosen(gm, sizes, self._most):
            with gm.graph.inserting_after(node):
                stored = gm.graph.call_function(torch.ops.dynaflow.store.default, (node,))
            stored.meta = {**node.meta, "example_value": _on_host(node.meta["val"])}
            results = [stored if i in saved and result is node else result for i, result in enumerate(results)]
            self._stored[node.name] = node
        output.args = (tuple(results),)
        gm.recompile()

    def fetch(self, gm: fx.GraphModule) -> None:
        """Inserts the fetches into the backward graph."""
        for node in gm.graph.find_nodes(op="placeholder"):
            made = self._stored.get(node.name)
            if made is None or not node.users:
                continue
            value = node.meta["val"]
            with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n in node.users)):
                fetched = gm.graph.call_function(torch.ops.dynaflow.fetch.default, (node, value.device))
            fetched.meta = {**made.meta, "example_value": value}
            node.replace_all_uses_with(fetched, lambda user, own=fetched: user is not own)
            node.meta["example_value"] = _on_host(value)
        gm.recompile()


def saved_only(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """The results of a forward graph that only the backward graph gets, and not the caller."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    saved = range(len(results))[_torch.saved_results()]
    returned = {id(result) for i, result in enumerate(results) if i not in saved}
    found = (results[i] for i in saved)
    return frozenset(node for node in found if isinstance(node, fx.Node) and id(node) not in returned)


def _chosen(gm: fx.GraphModule, sizes: Mapping[fx.Node, int], most: float) -> list[fx.Node]:
    """The nodes to offload, up to `most` bytes. Copies should be spread over the passes, to overlap with all
    computation.

    So values that correspond in all layers go together, the largest first. Of the rest, the first made go first: they
    are used last.
    """
    layers: dict[Any, list[fx.Node]] = {}
    counts: Counter[Any] = Counter()
    for node in (n for n in gm.graph.nodes if n in sizes):
        path = module_stack(node)[-1][0] if module_stack(node) else ""
        kind = (node.target, sizes[node])
        counts[path, kind] += 1
        layers.setdefault((re.sub(r"\d+", "*", path), kind, counts[path, kind]), []).append(node)
    found: list[fx.Node] = []
    for nodes in sorted(layers.values(), key=lambda nodes: -sum(sizes[n] for n in nodes)):
        if (total := sum(sizes[n] for n in nodes)) <= most:
            most -= total
            found += nodes
    for node in (n for n in gm.graph.nodes if n in sizes and n not in found):
        if sizes[node] <= most:
            most -= sizes[node]
            found.append(node)
    return found


def _dense_bytes(value: Any) -> int:
    """Bytes of a dense floating-point tensor; 0 for other values, which stay on the device."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0
    sizes, strides = ([_torch.hint_of(n) for n in ns] for ns in (value.size(), value.stride()))
    complete = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != complete:
            return 0
        complete *= size
    return complete * value.element_size()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device="cpu")
