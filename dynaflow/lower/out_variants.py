"""Out-variants of operators: results are written into given memory, without a copy.

Contract
    `write_into` takes an operator's graph and the positions of results. Returns a new graph that computes the same,
    takes one more tensor at the end for each position, writes the result into it, and does not return it.
    The given graph is unchanged. Nothing raises.

Steps
    1. Copy the placeholders, and add one for each output buffer.
    2. Copy the body. A matrix product that makes such a result is called by its out-variant, which says what it
       writes: it has no loop that a copy could be fused into.
    3. Follow all other results by `out.copy_(result)`, which Inductor fuses into their loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dynaflow import _torch

_PRODUCTS: dict[Any, tuple[str, int]] = {
    _torch.LINEAR: ("linear_out", 3), torch.mm: ("mm_out", 2), torch.addmm: ("addmm_out", 3), torch.bmm: ("bmm_out", 2),
    torch.ops.dynaflow.fetch: ("fetch_out", 2), torch.ops.dynaflow.fetch.default: ("fetch_out", 2),
}  # fmt: skip
"""For each matrix product in a captured graph: its out-variant, and how many arguments that takes before `out`."""


def is_product(node: Any) -> bool:
    """Whether a node is a matrix product with an out-variant, called with arguments that the variant accepts."""
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
    """The same computation, with the results at `positions` written into additional tensors instead of returned."""
    # 1.
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    body = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = out.node_copy(node)
    given = {p: out.placeholder(f"out_{p}") for p in positions}
    (ending,) = module.graph.find_nodes(op="output")
    results = ending.args[0]
    # 2.
    products = {results[p]: p for p in positions if is_product(results[p])}
    for node in body:
        if node in products:
            name, count = _PRODUCTS[node.target]
            args = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
            args += [None] * (count - len(args))
            out.call_function(getattr(torch.ops.dynaflow, name).default, (*args, given[products[node]]))
        else:
            env[node] = out.node_copy(node, lambda n: env[n])
    # 3.
    for p in positions:
        if results[p] not in products:
            out.call_method("copy_", (given[p], env[results[p]]))
    out.output(tuple(env[n] for p, n in enumerate(results) if p not in given))
    return fx.GraphModule(module, out, class_name="Operator")
