"""Memory layouts of values that cross a cut: those that Inductor would choose for the uncut graph.

Inductor stores the images inside a convolution network channels-last, whatever the model says. When the graph is cut,
each operator would convert them back at its end.

Contract
    `image_layouts` takes a partitioned graph and returns the values between operators that are to be channels-last,
    with that layout; none when Inductor would not choose it, or when another image is neither that nor contiguous.
    `arrange` takes an operator's graph and returns a copy whose results have given memory formats.
    Results of the model and the values themselves are unchanged. Neither raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from dynaflow.capture.captured_graph import Shape
from dynaflow.partition.op_graph import OpGraph

_GROUPED_AT_MOST = 1 / 3
"""Inductor weights convolutions by their FLOPs: a grouped one loses about as much as two others gain."""
_NODES_AT_MOST = 300
"""For each convolution. Beyond that, Inductor does not change layouts."""


def image_layouts(graph: OpGraph) -> dict[int, Shape]:
    """The values between operators that are to have their channels last, with that layout."""
    if not _prefers_channels_last(graph.graph.gm):
        return {}
    made = {v.index: v.shape for v in graph.values if v.input is None and v.shape and len(v.shape.size) == 4}
    found = {
        v: _channels_last(shape)
        for v, shape in made.items()
        if v not in graph.outputs and shape.dtype.is_floating_point  # results are as the model has them
    }
    # `arrange` makes the others contiguous, so they must be that already.
    return found if all(v in found or _is_contiguous(shape) for v, shape in made.items()) else {}


def _prefers_channels_last(gm: fx.GraphModule) -> bool:
    """What Inductor decides for the whole graph, with convolutions counted instead of weighted."""
    groups = [
        node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
        for node in gm.graph.nodes
        if node.target is torch.conv2d
    ]
    few = len(gm.graph.nodes) >= _NODES_AT_MOST * len(groups)
    return not few and sum(g != 1 for g in groups) <= _GROUPED_AT_MOST * len(groups)


def _is_contiguous(shape: Shape) -> bool:
    return all(s == prod(shape.size[d + 1 :], start=sympy.Integer(1)) for d, s in enumerate(shape.stride))


def _channels_last(shape: Shape) -> Shape:
    one = sympy.Integer(1)
    _, channels, height, width = shape.size
    return replace(shape, stride=(prod((channels, height, width), start=one), one, width * channels, channels))


def arrange(module: fx.GraphModule, formats: Mapping[int, torch.memory_format]) -> fx.GraphModule:
    """The same computation, with the results at these positions in these memory formats."""
    out = fx.Graph()
    results: list[Any] = list(out.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    for position, memory_format in formats.items():
        asked: dict[str, Any] = {"memory_format": memory_format}
        results[position] = out.call_method("contiguous", (results[position],), asked)
    out.output(tuple(results))
    return fx.GraphModule(module, out, class_name="Operator")
