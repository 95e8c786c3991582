"""What a fresh graph of Dynamo needs of AOTAutograd: gradients, regions, and features that hide its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.annotations import marks_of


def wants_gradients(gm: fx.GraphModule) -> bool:
    """Whether a backward pass may follow."""
    examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    return torch.is_grad_enabled() and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


def returns_gradients(gm: fx.GraphModule) -> bool:
    """Whether results require gradients although grad mode is off around the graph: a region inside turns it on."""
    (output,) = gm.graph.find_nodes(op="output")
    examples = (node.meta.get("example_value") for node in output.all_input_nodes if node.op != "placeholder")
    return any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples)


def declares_regions(gm: fx.GraphModule, rules: Sequence[Any]) -> bool:
    """Whether a mark or a rule has `splittable=True`."""
    marked = any(splittable for node in gm.graph.nodes for _, (_, _, splittable) in marks_of(node))
    return marked or any(getattr(rule, "splittable", None) for rule in rules)


def opaque_features(gm: fx.GraphModule) -> str | None:
    """The feature, if any, that prevents an analysis node by node until AOTAutograd has traced the graph."""
    if _torch.has_transforms(gm):
        return "transforms of torch.func"
    return "nested tensors" if any(map(_is_nested, gm.graph.nodes)) else None


def takes_nested(gm: fx.GraphModule) -> bool:
    return any(map(_is_nested, gm.graph.find_nodes(op="placeholder")))


def _is_nested(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.is_nested
