"""The backward graph with an optimizer's steps in it: a call of `torch.ops.dynaflow.update` for each layer.

The graph computes and does not write, up to here. A step writes weights, so whatever looks at them must be seen to do
so: what forward saved for backward may be views of weights, which are made again from the weights themselves.
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
from dynaflow.capture.optimizer_ops import Updates
from dynaflow.errors import DynaFlowError


class Updating:
    """The parameters of one captured model that its backward pass updates."""

    def __init__(self, updates: Updates, inputs: dict[str, Any], partial: bool) -> None:
        """`inputs`: what the model got when it was captured, by the names that AOTAutograd gives."""
        if partial:
            raise DynaFlowError(
                "optimizer=: the model breaks the graph, and a parameter may get gradients from several of its parts",
                advice="fullgraph=True shows where; mend that, or compile without optimizer=",
            )
        known = updates.parameters()
        # A device may still be reading what is in host memory: that is left to the optimizer's own step.
        away = any(isinstance(t, torch.Tensor) and not t.is_cpu for t in inputs.values())
        mine = {n: t for n, t in inputs.items() if id(t) in known and t.requires_grad and not (away and t.is_cpu)}
        # Dynamo keeps what runs the passes for as long as the model's code lives: the weights must not be.
        self._updates = weakref.ref(updates)
        self._weights: dict[str, Callable[[], Any]] = {n: weakref.ref(p) for n, p in mine.items()}
        self._places: dict[str, fx.Node] = {}
        self._views: dict[str, fx.Node] = {}
        """What the forward graph returns that looks at the weights, by the name that it has in both passes."""
        self._updated = self._weights
        """Those that the backward graph has gradients of. There are several such graphs if results may be unused."""
        self._added: list[str] = []
        """What it gets beside all that was saved for it."""

    def look_at_forward(self, gm: fx.GraphModule) -> None:
        self._places = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
        (output,) = gm.graph.find_nodes(op="output")
        for node in output.args[0]:
            if isinstance(node, fx.Node) and base(node).name in self._weights:
                self._views[node.name] = node
                if not _is_of_one_tensor(node):  # nor updated, then
                    del self._weights[base(node).name]

    def add_to_backward(self, gm: fx.GraphModule) -> None:
        """Behind the last that has to do with a layer's weights stands the step for them."""
        updates = self._updates()
        assert updates is not None
        (output,) = gm.graph.find_nodes(op="output")
        results = list(output.args[0])
        gradients = {f"primals_{i}": g for i, g in enumerate(results, 1) if isinstance(g, fx.Node)}  # as the inputs
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
        """The weights as inputs of the graph, in place of the views of them that were saved."""
        places = gm.graph.find_nodes(op="placeholder")
        known = {node.name: node for node in places}
        with gm.graph.inserting_after(places[-1]):
            for name in reversed([name for name in self._updated if name not in known]):
                known[name] = gm.graph.node_copy(self._places[name])
                self._added.insert(0, name)
        weights = {name: known[name] for name in self._updated}

        def again(node: fx.Node) -> fx.Node:
            return weights.get(node.name) or gm.graph.node_copy(node, again)

        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
            for place in places:
                view = self._views.get(place.name)
                if view is not None and place.users and base(view).name in weights and place.name not in weights:
                    place.replace_all_uses_with(again(view))
        return weights

    def call(self, run: _torch.Boxed) -> _torch.Boxed:
        """The backward pass as AOTAutograd calls it, which knows nothing of what was added."""
        updates_of, weights = self._updates, tuple(self._updated.values())
        added = [self._updated[name] for name in self._added]

        def call(args: list[Any]) -> Any:
            updates = updates_of()
            assert updates is not None, "called by a compiled model that is gone"
            updates.begin([weight() for weight in weights])
            args.extend(weight() for weight in added)
            return run(args)

        return call


def base(node: fx.Node) -> fx.Node:
    """What a node is a view of; itself, if it is none."""
    *_, found = _torch.looked_through(node)
    return found


def _is_of_one_tensor(view: fx.Node) -> bool:
    """And of numbers that are known: so it can be made again from the tensor alone."""
    return all(len(n.all_input_nodes) == 1 for n in _torch.looked_through(view) if n.op != "placeholder")


def _layer(gradient: fx.Node) -> str:
    """The outermost module that is one of several, as layers are; or else the innermost around the gradient."""
    paths = [path for path, _ in module_stack(gradient)]
    numbered = (path for path in paths if re.search(r"(^|\.)\d+$", path))
    return next(numbered, paths[-1] if paths else gradient.name)


def _stack_down_to(layer: str, node: fx.Node) -> dict[str, Any]:
    """The modules around a node, but for those inside of the layer: so the step is called after the layer."""
    paths = [path for path, _ in module_stack(node)]
    depth = paths.index(layer) + 1 if layer in paths else 0
    return dict(list((node.meta.get("nn_module_stack") or {}).items())[:depth])
