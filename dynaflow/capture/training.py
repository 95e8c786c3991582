"""Forward and backward of a captured model: the graphs that AOTAutograd makes of it, read like one that Dynamo made.

AOTAutograd traces both passes at once, decomposes them as Inductor wants it, and decides what forward saves for
backward and what is computed again. Either graph then has operators, plans and lanes of its own. Nodes of the
backward graph know the modules whose forward they belong to, so operators have the same names in both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.graph import BatchDims, CapturedGraph, copied
from dynaflow.capture.rules import ORIGIN, module_stack
from dynaflow.capture.updating import Updating, base
from dynaflow.updates import Updates


def wants_gradients(gm: fx.GraphModule) -> bool:
    """Whether a backward pass may follow."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    return torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


class Passes:
    """The two passes of one captured model."""

    def __init__(
        self,
        gm: fx.GraphModule,
        parameters: Sequence[str],
        declared: BatchDims | None,
        offload_saved: int | None,
        offload_most: int | None,
        updates: Updates | None,
    ) -> None:
        self._parameters, self._declared = parameters, declared
        self._at_least, self._most = offload_saved, offload_most
        self._partial = _torch.is_part(gm)
        places = gm.graph.find_nodes(op="placeholder")
        self._inputs = {f"primals_{i}": node.meta for i, node in enumerate(places, 1)}
        """Of the graph that Dynamo made; AOTAutograd gives them these names, in both passes."""
        self._calls = {sources[-1][0]: n.target for n in gm.graph.nodes if (sources := n.meta.get("source_fn_stack"))}
        self._forward: CapturedGraph | None = None
        self._stored: dict[str, fx.Node] = {}
        """What the forward pass stores in host memory, by the name that it has in both passes."""
        self._updating: Updating | None = None
        if updates is not None:
            real = {name: _torch.graph_input(node)[2] for name, node in zip(self._inputs, places, strict=True)}
            self._updating = Updating(updates, real, self._partial)

    def read(self, gm: fx.GraphModule, backward: bool) -> CapturedGraph:
        """One of the passes. The forward pass comes first."""
        gm = copied(gm)
        for node in gm.graph.nodes:
            self._name_as_dynamo_does(node)
            if backward and node.op == "call_function" and not node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = _around(node)
        if self._at_least is not None:
            self._fetch(gm) if backward else self._store(gm, self._at_least)
        if self._updating is not None:
            self._updating.add_to_backward(gm) if backward else self._updating.look_at_forward(gm)
        rows = self._forward.batch_symbols if backward and self._forward is not None else None
        graph = CapturedGraph(
            gm, self._parameters, self._declared if rows is None else None,
            phase="backward" if backward else "forward", partial=self._partial, batch_symbols=rows,
        )  # fmt: skip
        if not backward:
            self._forward = graph
        return graph

    def call(self, run: _torch.Boxed, backward: bool) -> _torch.Boxed:
        """What runs a pass, as AOTAutograd calls it."""
        return self._updating.call(run) if backward and self._updating is not None else run

    def _store(self, gm: fx.GraphModule, at_least: int) -> None:
        """What the backward pass gets, and the caller does not, goes to the host: if it is that many bytes."""
        (output,) = gm.graph.find_nodes(op="output")
        results, saved = list(output.args[0]), range(len(output.args[0]))[_torch.saved_results()]
        returned = {results[i] for i in range(len(results)) if i not in saved}
        sizes = {
            results[i]: size
            for i in saved
            if isinstance(results[i], fx.Node) and results[i] not in returned  # a number, or a result as well
            if base(results[i]).op == "call_function"  # not a view of a weight
            if (size := _bytes(results[i].meta["val"])) >= max(at_least, 1)
        }
        for node in _chosen(gm, sizes, math.inf if self._most is None else self._most):
            with gm.graph.inserting_after(node):
                stored = gm.graph.call_function(torch.ops.dynaflow.store.default, (node,))
            stored.meta = {**node.meta, "example_value": _on_host(node.meta["val"])}
            results = [stored if i in saved and result is node else result for i, result in enumerate(results)]
            self._stored[node.name] = node
        output.args = (tuple(results),)
        gm.recompile()

    def _fetch(self, gm: fx.GraphModule) -> None:
        """And comes back where it is used first."""
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

    def _name_as_dynamo_does(self, node: fx.Node) -> None:
        meta = node.meta
        if "val" in meta:
            meta["example_value"] = meta["val"]
        if not meta.get("nn_module_stack") and meta.get("fwd_nn_module_stack"):
            meta["nn_module_stack"] = meta["fwd_nn_module_stack"]
        sources = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack")
        if sources and (call := sources[-1][0]) in self._calls:
            meta[ORIGIN] = (call, self._calls[call])
        if node.op == "placeholder" and "grapharg" in self._inputs.get(node.name, ()):
            meta["grapharg"] = self._inputs[node.name]["grapharg"]


def _chosen(gm: fx.GraphModule, sizes: Mapping[fx.Node, int], most: float) -> list[fx.Node]:
    """Which of them go, `most` bytes together: copies should be spread over the passes, beside all that they compute.

    What is alike in all layers goes as a whole, the largest first; of what is left, the first made, which is used last.
    """
    alike: dict[Any, list[fx.Node]] = {}
    counts: Counter[Any] = Counter()
    for node in (n for n in gm.graph.nodes if n in sizes):
        path = module_stack(node)[-1][0] if module_stack(node) else ""
        kind = (node.target, sizes[node])
        counts[path, kind] += 1
        alike.setdefault((re.sub(r"\d+", "*", path), kind, counts[path, kind]), []).append(node)
    found: list[fx.Node] = []
    for nodes in sorted(alike.values(), key=lambda nodes: -sum(sizes[n] for n in nodes)):
        if (total := sum(sizes[n] for n in nodes)) <= most:
            most -= total
            found += nodes
    for node in (n for n in gm.graph.nodes if n in sizes and n not in found):
        if sizes[node] <= most:
            most -= sizes[node]
            found.append(node)
    return found


def _bytes(value: Any) -> int:
    """Of floating-point data; 0 for what is something else, or spread out in memory, and stays where it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0
    sizes, strides = ([_torch.hinted(n) for n in ns] for ns in (value.size(), value.stride()))
    complete = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != complete:
            return 0
        complete *= size
    return complete * value.element_size()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.new_empty_strided(value.size(), value.stride(), device="cpu")


def _around(node: fx.Node) -> dict[str, Any]:
    """The modules that have all that goes into a node. Autograd adds gradients up without a word of where."""
    stacks = [a.meta["nn_module_stack"] for a in node.all_input_nodes if a.meta.get("nn_module_stack")]
    if not stacks:
        return {}
    shared = [key for key in stacks[0] if all(key in stack for stack in stacks)]
    return {key: stacks[0][key] for key in shared}
