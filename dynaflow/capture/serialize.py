"""A captured graph as bytes, for another process.

*Contract.* `dumps` consumes a graph of calls and placeholders (no attributes or submodules, else ValueError), and does
not change it. `loads` returns an equal graph: names, arguments, examples and the `meta` in SAVED_META. Example
arguments are not stored, so `set_example_args` must supply them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.captured_graph import Shape

_HEADER = b"dynaflow graph 1\n"
"""The number is incremented with each change of the format."""
SAVED_META = ("nn_module_stack", "stack_trace", "custom")
"""Keys of `meta` that are stored, besides the example."""


@dataclass(frozen=True, slots=True)
class _NodeRef:
    """A node, among the arguments of another."""

    number: int


class _Node(NamedTuple):
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    example: Any
    meta: dict[str, Any]
    given: tuple[str, bool] | None
    """For an input: its source as text, and whether a module owns it."""


def dumps(gm: fx.GraphModule) -> bytes:
    """Raises ValueError, or pickle's error, for a graph that can't be serialized."""
    places: dict[fx.Node, Any] = {node: _NodeRef(i) for i, node in enumerate(gm.graph.nodes)}
    same: dict[Any, Any] = {}  # equal layers share examples and meta
    nodes = []
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise ValueError(f"the graph has a module or a constant of its own: {node.format_node()}")
        example = node.meta.get("example_value")
        saved = ((name, value) for name, value in node.meta.items() if name in SAVED_META)
        meta = {name: same.setdefault((name, str(value)), value) for name, value in saved}
        nodes.append(
            _Node(
                op=node.op,
                name=node.name,
                target=node.target,
                args=fx.map_arg(node.args, places.__getitem__),
                kwargs=fx.map_arg(node.kwargs, places.__getitem__),
                type=node.type,
                example=same.setdefault(_example_key(example), example),
                meta=meta,
                given=_torch.graph_input(node)[:2] if node.op == "placeholder" else None,
            )
        )
    return _HEADER + _torch.pickled(nodes)


def loads(data: bytes) -> fx.GraphModule:
    """The graph, without example arguments."""
    if not data.startswith(_HEADER):
        raise ValueError("the graph was written by another version of dynaflow")
    graph = fx.Graph()
    made: list[fx.Node] = []
    node_at = lambda arg: made[arg.number] if isinstance(arg, _NodeRef) else arg  # noqa: E731
    for n in _torch.unpickled(data[len(_HEADER) :]):
        args, kwargs = fx.node.map_aggregate((n.args, n.kwargs), node_at)
        node = graph.create_node(n.op, n.target, args, kwargs, n.name, n.type)
        node.meta = {"example_value": n.example, **n.meta}
        if n.given is not None:
            node.meta[_torch.GRAPH_INPUT] = (*n.given, None)
        made.append(node)
    return fx.GraphModule({}, graph)


def set_example_args(gm: fx.GraphModule, args: Sequence[Any]) -> None:
    """Sets the arguments that the graph counts as captured with."""
    for node, arg in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True):
        node.meta[_torch.GRAPH_INPUT] = (*_torch.graph_input(node)[:2], arg)


def has_example_args(gm: fx.GraphModule) -> bool:
    return any(_torch.GRAPH_INPUT in node.meta for node in gm.graph.find_nodes(op="placeholder"))


def _example_key(example: Any) -> Any:
    """A key: examples with equal keys are interchangeable."""
    if type(example) in (tuple, list):
        return type(example), tuple(map(_example_key, example))
    if _torch.is_fake(example):
        return Shape.of(example)
    return _torch.expression(example) if isinstance(example, torch.SymInt) else id(example)
