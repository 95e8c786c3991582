"""Results written straight into memory that is given: the last operation stores there, and nothing is copied.

A loop over elements is followed by `out.copy_(result)`, which Inductor fuses into the loop. A matrix product has
no loop to fuse into, so it is called by an out-variant: an operator that says what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from dynaflow import _torch
from dynaflow.offload import fetch_into

# Autocast casts what goes into a product to the type of its result, but knows nothing of these: they do it themselves.


def _linear_out(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    count = x.shape[:-1].numel()  # not -1, which is ambiguous where a row is empty
    rows, flat = x.reshape(count, x.shape[-1]), out.view(count, out.shape[-1])
    if bias is None:
        _mm_out(rows, weight.t(), flat)
    else:
        _addmm_out(bias, rows, weight.t(), flat)


def _mm_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _addmm_out(c: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.addmm(c.to(out.dtype), a.to(out.dtype), b.to(out.dtype), out=out)


def _bmm_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)


_VARIANTS: dict[str, tuple[str, Callable[..., None]]] = {
    "linear_out": ("(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()", _linear_out),
    "mm_out": ("(Tensor a, Tensor b, Tensor(a!) out) -> ()", _mm_out),
    "addmm_out": ("(Tensor c, Tensor a, Tensor b, Tensor(a!) out) -> ()", _addmm_out),
    "bmm_out": ("(Tensor a, Tensor b, Tensor(a!) out) -> ()", _bmm_out),
    "fetch_out": ("(Tensor host, Device device, Tensor(a!) out) -> ()", fetch_into),
}
_PRODUCTS: dict[Any, tuple[str, int]] = {
    _torch.LINEAR: ("linear_out", 3), torch.mm: ("mm_out", 2), torch.addmm: ("addmm_out", 3), torch.bmm: ("bmm_out", 2),
    torch.ops.dynaflow.fetch: ("fetch_out", 2), torch.ops.dynaflow.fetch.default: ("fetch_out", 2),
}  # fmt: skip
"""What stands for a product in a captured graph: its out-variant, and how many arguments that takes before `out`."""


@cache
def _variants() -> Mapping[str, Any]:
    """Registers the out-variants with torch, once."""
    library = torch.library.Library("dynaflow", "DEF")
    for name, (signature, function) in _VARIANTS.items():
        library.define(name + signature, tags=(torch.Tag.needs_fixed_stride_order,))
        for device in ("CPU", "CUDA"):
            library.impl(name, function, device)
        library.impl(name, lambda *args: None, "Meta")
    # The library unregisters what it defined when it goes: kept with the result.
    return {"library": library} | {name: getattr(torch.ops.dynaflow, name).default for name in _VARIANTS}


def is_product(node: Any) -> bool:
    """A matrix product with an out-variant, called in the one way that the variant knows."""
    return (
        isinstance(node, fx.Node)
        and node.target in _PRODUCTS
        and not node.kwargs
        and len(node.args) <= _PRODUCTS[node.target][1]
        and len(node.users) == 1
    )


def result_node(module: fx.GraphModule, position: int) -> Any:
    (output,) = module.graph.find_nodes(op="output")
    return output.args[0][position]


def write_into(module: fx.GraphModule, positions: list[int]) -> fx.GraphModule:
    """The same work, with the results at `positions` written into tensors that are given last, and not returned."""
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    body = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = out.node_copy(node)
    given = {p: out.placeholder(f"out_{p}") for p in positions}
    (ending,) = module.graph.find_nodes(op="output")
    results = ending.args[0]
    products = {results[p]: p for p in positions if is_product(results[p])}
    for node in body:
        if node in products:
            name, count = _PRODUCTS[node.target]
            args = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
            args += [None] * (count - len(args))
            out.call_function(_variants()[name], (*args, given[products[node]]))
        else:
            env[node] = out.node_copy(node, lambda n: env[n])
    for p in positions:
        if results[p] not in products:
            out.call_method("copy_", (given[p], env[results[p]]))
    out.output(tuple(env[n] for p, n in enumerate(results) if p not in given))
    return fx.GraphModule(module, out, class_name="Operator")
