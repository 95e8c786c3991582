"""Results that a graph computes from numbers only, such as a counter that the model keeps in Python.

*Contract.* Consumes a fresh graph and removes these results from it, in place. Computes them beside the graph in each
call, and inserts them among its results. Plans don't depend on numbers that nothing else uses, so a changed counter
needs no new plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dynaflow.core.fx_graphs import copy_nodes


class HostScalars:
    """The numbers among a graph's results, which are removed from the graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        results = list(output.args[0])
        self._made_of = {r: made for r in results if (made := _of_numbers(r)) is not None}
        self.positions = [i for i, r in enumerate(results) if r in self._made_of]
        if not self.positions:
            return
        self._function = self._extracted(gm, [results[i] for i in self.positions])
        gm.graph.find_nodes(op="output")[0].args = (tuple(r for r in results if r not in self._made_of),)
        for node in reversed(list(gm.graph.nodes)):  # nodes that only they used
            if any(node in made for made in self._made_of.values()) and not node.users and node.op != "placeholder":
                gm.graph.erase_node(node)
        gm.recompile()

    def _extracted(self, gm: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
        """A function of the graph's arguments that computes the numbers."""
        needed = set().union(*self._made_of.values())
        graph = fx.Graph()
        env = copy_nodes((n for n in gm.graph.nodes if n.op == "placeholder" or n in needed), graph, {})
        graph.output(tuple(env[r] for r in results))
        return fx.GraphModule(gm, graph)

    def made(self, args: Sequence[Any]) -> Sequence[Any]:
        """The numbers for a call with these arguments."""
        numbers: Sequence[Any] = self._function(*args)
        return numbers

    def put_back(self, numbers: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        """The results of a call with the numbers inserted."""
        complete = list(results)
        for position, number in zip(self.positions, numbers, strict=True):
            complete.insert(position, number)
        return complete


def _of_numbers(result: Any) -> set[fx.Node] | None:
    """The nodes that compute a number from numbers only; None for any other result."""
    if not isinstance(result, fx.Node) or not _is_number(result):
        return None
    found: set[fx.Node] = set()
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if not _is_number(node) or node.op not in ("placeholder", "call_function"):
            return None
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return found


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
