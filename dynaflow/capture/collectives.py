"""Collectives in a graph: torch's functional ones, and declared ones.

Compiled graphs contain torch.distributed's calls as `_c10d_functional` operators, with a `wait_tensor` on the result.
Nothing may read the result before the wait, so a collective and its wait belong to one operator. Collectives of other
libraries are declared (`op_registry.collective`), and need no wait.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.op_registry import arguments, collective_of

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
WAIT = "wait_tensor"
ANY = "*"
"""Stands for the unknown process groups of collectives inside DTensor's operators."""
_HIDDEN = ("redistribute", "full_tensor")
EXCHANGING = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Collectives that move slices of dim 0 between ranks."""
ELEMENTWISE = ("all_reduce", "broadcast", WAIT, "_wrap_tensor_autograd")
"""Collectives whose result has the shape of the input, element by element."""


def name_of(node: fx.Node) -> str | None:
    """The functional collective, or wait, that the node calls."""
    return _called(node.target)


def _called(target: Any) -> str | None:
    if not isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return None
    namespace, name = _torch.qualified_name(target).split("::")
    return name if namespace in NAMESPACES else None


def group_of(node: fx.Node) -> str | None:
    """The process group of the collective that the node calls; None if it calls none."""
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
    """Whether the target is a collective or a wait. Collectives inside a DTensor's method are not seen."""
    return _called(target) is not None or collective_of(target) is not None


def awaited_collective(node: fx.Node) -> fx.Node | None:
    """The collective whose result a node waits for."""
    if name_of(node) != WAIT:
        return None
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and name_of(source) is None and source.args:  # one of several results
        source = source.args[0]
    return source if isinstance(source, fx.Node) and group_of(source) is not None else None


def make_contiguous(gm: fx.GraphModule) -> None:
    """Makes the inputs of exchanging collectives contiguous, which they must be (2.11): a slice of rows may not be.

    *Contract.* Changes the graph in place, before the analysis. Results stay equal.
    """
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
