"""Calls in captured graphs, and their operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from dynaflow._torch.versions import Boxed
from dynaflow.core.fx_graphs import copy_graph


def overload_of(node: fx.Node) -> Any:
    """The overload that torch chooses for a call of an operator's packet. Seen on 2.11 and 2.13."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
    try:
        name = torch._C._jit_resolve_packet(node.target._qualified_op_name, *args, **kwargs)  # type: ignore[union-attr]
    except RuntimeError:
        return None
    return getattr(node.target, name or "default")


def name_complex_constants() -> None:
    """Generated code of fx graphs has constants as `repr` writes them, such as `(nan+nanj)`. fx defines `inf` and `nan`
    there, but not these. Seen on 2.13."""
    for name in ("infj", "nanj"):
        fx.graph._register_custom_builtin(name, f"{name} = complex({name!r})", complex(name))


def packet_of(target: Any) -> Any:
    """The packet of an overload; any other target as it is."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


def schema_of(target: Any) -> Any:
    """The schema of an overload; None for a higher-order operator, or a function. Seen on 2.11 and 2.13."""
    return getattr(target, "_schema", None)


def op_name(target: Any) -> str:
    """`mm` for `aten::mm.default`; empty for what is no overload. Seen on 2.11 and 2.13."""
    return getattr(target, "_opname", "")


def qualified_name(target: Any) -> str:
    """`aten::mm` for an overload or its packet. Seen on 2.11 and 2.13."""
    name: str = packet_of(target)._qualified_op_name
    return name


def is_torchs_own(function: Any) -> bool:
    """Whether torch defines the function. An operator of another library lives in torch._ops as well. Seen on 2.11 and
    2.13."""
    module = getattr(function, "__module__", None) or "torch"
    return module.split(".")[0] == "torch" and (not module.startswith("torch._ops.") or module == "torch._ops.aten")


def is_view(schema: Any) -> bool:
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def view_chain(node: fx.Node) -> Iterator[fx.Node]:
    """A node of a traced graph, and its chain of view bases."""
    while True:
        yield node
        called: Any = node.args[0] if node.target is operator.getitem else node  # one of several views
        if not (isinstance(called.target, OpOverload) and is_view(called.target._schema)):
            return
        node = called.args[0]


def view_base(node: Any) -> Any:
    """The last base of a view; the node itself, if it is not a view."""
    return [*view_chain(node)][-1] if isinstance(node, fx.Node) else node


def boxed_forward(gm: fx.GraphModule, direct: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType({})) -> Boxed:
    """The graph's generated function, uncompiled, which takes its arguments in a list and empties it. `direct` replaces
    operators by functions. Seen on 2.11 and 2.13."""
    from torch.fx.graph import CodeGen

    class FromAList(CodeGen):
        def gen_fn_def(self, free_vars: list[str], *_: Any, **__: Any) -> str:
            names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
            taken = f"    {', '.join(names)}, = box\n    box.clear()" if names else ""
            return f"def forward(self, box):\n{taken}"

    graph = copy_graph(gm.graph)
    for node in graph.nodes:
        node.target = direct.get(node.target, node.target)
    graph.set_codegen(FromAList())
    return cast("Boxed", fx.GraphModule(gm, graph).forward)


def has_transforms(gm: fx.GraphModule) -> bool:
    """Whether the graph enters levels of torch.func, whose tensors wrap others: its nodes can't be analyzed one by one.
    Seen on 2.11 and 2.13."""
    modules = ("torch._functorch.", "torch._C._functorch", "torch.autograd.forward_ad")
    called = (getattr(n.target, "__module__", "") for n in gm.graph.nodes if n.op == "call_function")
    return any(str(module).startswith(modules) for module in called)


def opaque_type_name(kind: type) -> str:
    """The name of a class of opaque objects in schemas, which print all of them as PyObject. Seen on 2.13."""
    from torch._library.opaque_object import get_opaque_type_name

    return get_opaque_type_name(kind)


REGIONS: dict[Any, Any] = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
"""Calls by which Dynamo marks regions in a graph: enter -> exit."""

SET_GRAD = torch._C._set_grad_enabled

SUBGRAPHS: dict[Any, int] = {torch.ops.higher_order.invoke_subgraph: 2}
CHECKPOINTS: dict[Any, int] = {torch.ops.higher_order.tag_activation_checkpoint: 1}
"""Higher-order operators that only call a graph (CHECKPOINTS: if no gradients are needed) -> position of its first
argument."""

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
FLEX_ATTENTION_BACKWARD = torch.ops.higher_order.flex_attention_backward

LINEAR = torch._C._nn.linear
"""torch.nn.functional.linear in a captured graph."""


def dtensor_method(node: fx.Node) -> str | None:
    """The DTensor method that a node may call: a method call on 2.13, a function named `prim_to_local` on 2.11."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix("prim_") if name.startswith("prim_") else None
