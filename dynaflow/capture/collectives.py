"""Collectives in a graph: torch's functional ones, which give a result that has to be waited for, and declared ones.

All that torch.distributed does in a compiled graph is traced to `_c10d_functional` and a `wait_tensor` on the result.
Until then the result may be looked at by nobody, so a collective and its wait are always one operator's. What other
libraries have is a collective if somebody says so (`declared.collective`); its result needs no wait.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.op_registry import arguments, collective_of

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
WAIT = "wait_tensor"
ANY = "*"
"""Stands for the groups in which ranks meet inside of an operator of DTensor's: they are not known."""
_HIDDEN = ("redistribute", "full_tensor")
EXCHANGING = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""They move slices of dim 0 between ranks."""
ELEMENTWISE = ("all_reduce", "broadcast", WAIT, "_wrap_tensor_autograd")
"""The result is like the input, element by element."""


def name_of(node: fx.Node) -> str | None:
    """Which of torch's collectives, or wait, the node calls."""
    return _called(node.target)


def _called(target: Any) -> str | None:
    if not isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return None
    namespace, name = _torch.qualified_name(target).split("::")
    return name if namespace in NAMESPACES else None


def group_of(node: fx.Node) -> str | None:
    """The process group in which the node makes ranks meet."""
    if _torch.dtensor_method(node) in _HIDDEN:
        return ANY
    if (declared := collective_of(node.target)) is not None:
        group = arguments(node).get(declared.group)
        return ANY if group is None or isinstance(group, fx.Node) else declared.named(group)
    name = name_of(node)
    if name is None or name in (WAIT, "_wrap_tensor_autograd"):
        return None
    return str(node.kwargs.get("group_name", node.args[-1] if node.args else ""))


def is_collective(target: Any) -> bool:
    """It makes ranks meet, or waits for them, as far as can be seen: not inside of a DTensor's method."""
    return _called(target) is not None or collective_of(target) is not None


def waited(node: fx.Node) -> fx.Node | None:
    """The collective whose result a node waits for."""
    if name_of(node) != WAIT:
        return None
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and name_of(source) is None and source.args:  # one of several results
        source = source.args[0]
    return source if isinstance(source, fx.Node) and group_of(source) is not None else None


def make_contiguous(gm: fx.GraphModule) -> None:
    """What is exchanged has to be contiguous, on 2.11 at least. In the model it is; a slice of it may not be."""
    changed = False
    for node in gm.graph.nodes:
        if (name_of(node) or "").removesuffix("_coalesced") in EXCHANGING and isinstance(node.args[0], fx.Node):
            given = node.args[0]
            with gm.graph.inserting_before(node):
                dense = gm.graph.call_method("contiguous", (given,))
            dense.meta = {**node.meta, "example_value": given.meta.get("example_value")}
            node.update_arg(0, dense)
            changed = True
    if changed:
        gm.recompile()
