"""Inserts an optimizer's steps into the backward graph: one `torch.ops.dynaflow.update` per layer.

*Contract.* Consumes the forward graph (read only) and then the backward graph, which it changes in place: weights
become inputs, each layer gets an update after the last use of its weights, and the updated gradients become None.
Raises DynaFlowError for graphs with breaks and for sparse gradients. The order of the other nodes does not change.

An update writes weights, so all uses of these must be visible: saved views of weights are recomputed from the weights.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.node_info import module_stack
from dynaflow.capture.optimizer_ops import OptimizerInBackward
from dynaflow.errors import DynaFlowError


class StepInserter:
    """Inserts the steps for the parameters of one captured model."""

    def __init__(self, updates: OptimizerInBackward, inputs: dict[str, Any], partial: bool) -> None:
        """`inputs`: the example arguments, by AOTAutograd's names."""
        if partial:
            raise DynaFlowError(
                "optimizer=: the model breaks the graph, and a parameter may get gradients from several of its parts",
                advice="fullgraph=True shows where; remove the break, or compile without optimizer=",
            )
        known = updates.parameters()
        # Copies to a device may still read parameters in host memory: the optimizer's own step updates those.
        away = any(isinstance(t, torch.Tensor) and not t.is_cpu for t in inputs.values())
        mine = {n: t for n, t in inputs.items() if id(t) in known and t.requires_grad and not (away and t.is_cpu)}
        # Dynamo keeps the passes as long as the model's code. They must not keep the weights alive.
        self._updates = weakref.ref(updates)
        self._weights: dict[str, Callable[[], Any]] = {n: weakref.ref(p) for n, p in mine.items()}
        self._places: dict[str, fx.Node] = {}
        self._views: dict[str, fx.Node] = {}
        """Views of weights that the forward graph returns, by their name in both passes."""
        self._updated = self._weights
        """Those that the backward graph has gradients of. There are several such graphs if results may be unused."""
        self._added: list[str] = []
        """Weights that the backward graph takes in addition to the saved values."""

    def read_forward(self, gm: fx.GraphModule) -> None:
        self._places = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
        (output,) = gm.graph.find_nodes(op="output")
        for node in output.args[0]:
            if isinstance(node, fx.Node) and base(node).name in self._weights:
                self._views[node.name] = node
                if not _is_of_one_tensor(node):  # then it is not updated
                    del self._weights[base(node).name]

    def add_to_backward(self, gm: fx.GraphModule) -> None:
        """Inserts a step for each layer after the last use of its weights."""
        updates = self._updates()
        assert updates is not None
        (output,) = gm.graph.find_nodes(op="output")
        results = list(output.args[0])
        gradients = {f"primals_{i}": g for i, g in enumerate(results, 1) if isinstance(g, fx.Node)}
        self._updated, self._added = {name: w for name, w in self._weights.items() if name in gradients}, []
        if any(gradients[name].meta["val"].layout is not torch.strided for name in self._updated):
            raise DynaFlowError(
                "optimizer=: a gradient is sparse", advice="use sparse=False, or compile without optimizer="
            )
        weights = self._use_weights(gm)
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        last = {node: node for node in weights.values()}
        for node in order:
            for weight in {base(a) for a in node.all_input_nodes if node is not output} & last.keys():
                last[weight] = node
        *_, end_of_inputs = gm.graph.find_nodes(op="placeholder")
        layers: dict[str, list[str]] = {}
        for name in weights:
            layers.setdefault(_layer(gradients[name]), []).append(name)
        for layer, names in layers.items():
            own = [gradients[name] for name in names]
            before = max((end_of_inputs, *own, *(last[weights[name]] for name in names)), key=order.__getitem__)
            number = updates.new([self._updated[name]() for name in names])
            with gm.graph.inserting_after(before):
                args = ([weights[name] for name in names], own, number)
                update = gm.graph.call_function(torch.ops.dynaflow.update.default, args)
            update.meta = {"nn_module_stack": _stack_down_to(layer, own[0])}
        output.args = (tuple(None if f"primals_{i}" in weights else g for i, g in enumerate(results, 1)),)
        gm.recompile()

    def _use_weights(self, gm: fx.GraphModule) -> dict[str, fx.Node]:
        """Makes the weights inputs of the graph, in place of saved views of them."""
        places = gm.graph.find_nodes(op="placeholder")
        known = {node.name: node for node in places}
        with gm.graph.inserting_after(places[-1]):
            for name in reversed([name for name in self._updated if name not in known]):
                known[name] = gm.graph.node_copy(self._places[name])
                self._added.insert(0, name)
        weights = {name: known[name] for name in self._updated}

        def recompute(node: fx.Node) -> fx.Node:
            return weights.get(node.name) or gm.graph.node_copy(node, recompute)

        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
            for place in places:
                view = self._views.get(place.name)
                if view is not None and place.users and base(view).name in weights and place.name not in weights:
                    place.replace_all_uses_with(recompute(view))
        return weights

    def call(self, run: _torch.Boxed) -> _torch.Boxed:
        """The backward pass with AOTAutograd's arguments: adds the weights."""
        updates_of, weights = self._updates, tuple(self._updated.values())
        added = [self._updated[name] for name in self._added]

        def call(args: list[Any]) -> Any:
            updates = updates_of()
            assert updates is not None, "called by a compiled model that was freed"
            updates.begin([weight() for weight in weights])
            args.extend(weight() for weight in added)
            return run(args)

        return call


def base(node: fx.Node) -> fx.Node:
    """The base of a view; the node itself, if it is not a view."""
    *_, found = _torch.view_chain(node)
    return found


def _is_of_one_tensor(view: fx.Node) -> bool:
    """Whether a view depends on its base only, so that it can be recomputed from it."""
    return all(len(n.all_input_nodes) == 1 for n in _torch.view_chain(view) if n.op != "placeholder")


def _layer(gradient: fx.Node) -> str:
    """The outermost numbered module around a gradient, as layers are; else the innermost module."""
    paths = [path for path, _ in module_stack(gradient)]
    numbered = (path for path in paths if re.search(r"(^|\.)\d+$", path))
    return next(numbered, paths[-1] if paths else gradient.name)


def _stack_down_to(layer: str, node: fx.Node) -> dict[str, Any]:
    """The modules around a node down to the layer, so that the step is named after the layer."""
    paths = [path for path, _ in module_stack(node)]
    depth = paths.index(layer) + 1 if layer in paths else 0
    return dict(list((node.meta.get("nn_module_stack") or {}).items())[:depth])
