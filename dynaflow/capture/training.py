"""Forward and backward of a captured model: the graphs that AOTAutograd makes of it, read like one that Dynamo made.

AOTAutograd traces both passes at once, decomposes them as Inductor wants it, and decides what forward saves for
backward and what is computed again. Either graph then has operators, plans and lanes of its own. Nodes of the
backward graph know the modules whose forward they belong to, so operators have the same names in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.graph import BatchDims, CapturedGraph, copied
from dynaflow.capture.rules import ORIGIN


def wants_gradients(gm: fx.GraphModule) -> bool:
    """Whether a backward pass may follow."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    return torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


class Passes:
    """The two passes of one captured model."""

    def __init__(self, gm: fx.GraphModule, parameters: Sequence[str], declared: BatchDims | None) -> None:
        self._parameters, self._declared = parameters, declared
        self._partial = _torch.is_part(gm)
        places = gm.graph.find_nodes(op="placeholder")
        self._inputs = {f"primals_{i}": node.meta for i, node in enumerate(places, 1)}
        """Of the graph that Dynamo made; AOTAutograd gives them these names, in both passes."""
        self._calls = {sources[-1][0]: n.target for n in gm.graph.nodes if (sources := n.meta.get("source_fn_stack"))}
        self._forward: CapturedGraph | None = None

    def read(self, gm: fx.GraphModule, backward: bool) -> CapturedGraph:
        """One of the passes. The forward pass comes first."""
        gm = copied(gm)
        for node in gm.graph.nodes:
            self._name_as_dynamo_does(node)
            if backward and node.op == "call_function" and not node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = _around(node)
        rows = self._forward.batch_symbols if backward and self._forward is not None else None
        graph = CapturedGraph(
            gm, self._parameters, self._declared if rows is None else None,
            phase="backward" if backward else "forward", partial=self._partial, batch_symbols=rows,
        )  # fmt: skip
        if not backward:
            self._forward = graph
        return graph


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


def _around(node: fx.Node) -> dict[str, Any]:
    """The modules that have all that goes into a node. Autograd adds gradients up without a word of where."""
    stacks = [a.meta["nn_module_stack"] for a in node.all_input_nodes if a.meta.get("nn_module_stack")]
    if not stacks:
        return {}
    shared = [key for key in stacks[0] if all(key in stack for stack in stacks)]
    return {key: stacks[0][key] for key in shared}
