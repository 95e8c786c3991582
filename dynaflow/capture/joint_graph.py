"""The graphs that AOTAutograd makes of a captured model, as captured graphs.

AOTAutograd traces forward and backward together, decomposes them for Inductor, and decides what forward saves and what
backward recomputes. Each graph then has its own operators, plans and lanes. Backward nodes know the modules of the
forward nodes that they belong to, so operators have the same names in both. A model without gradients goes the same way
if its nodes can't be analyzed one by one: it has a forward graph only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.captured_graph import BatchDims, CapturedGraph, Phase, input_name
from dynaflow.capture.gradient_paths import (
    has_several_gradients,
    results_of_inputs,
    sources_of_gradients,
    sources_of_nodes,
    without_unused,
)
from dynaflow.capture.node_info import ORIGIN
from dynaflow.capture.optimizer_ops import OptimizerInBackward
from dynaflow.capture.optimizer_steps import StepInserter, base
from dynaflow.capture.result_aliasing import (
    Aliasing,
    TraceMismatch,
    check_views,
    copy_aliases,
    is_written_input,
    without_bases,
)
from dynaflow.capture.saved_offload import SavedOffload, saved_only
from dynaflow.core.bounded import BoundedDict
from dynaflow.core.fx_graphs import copy_module, results_of
from dynaflow.errors import DynaFlowError

MAX_BACKWARD_GRAPHS = 16
"""Of one model, for losses that depend on different results."""
Make = Callable[[fx.GraphModule, bool], _torch.Boxed]
"""Returns what runs a graph; the flag: whether it is the backward graph."""


class JointGraph:
    """The forward and the backward graph of one captured model.

    *Contract.* Created from Dynamo's graph, which it only reads. `read` takes a copy of AOTAutograd's forward graph,
    then of its backward graph, while AOTAutograd compiles them, and returns a CapturedGraph. `call` wraps what runs a
    graph. Raises TraceMismatch if AOTAutograd's graph would not do what the model does.

    1. names:     each node gets Dynamo's example, modules and origin.
    2. aliasing:  (forward) results share memory as in eager mode.
    3. offload:   saved values are stored to, and fetched from, the host.
    4. optimizer: updates of weights are added to the backward graph.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        parameters: Sequence[str],
        declared: BatchDims | None,
        offload_saved: int | None,
        offload_most: int | None,
        optimizer: OptimizerInBackward | None,
        *,
        training: bool,
        merged_calls: bool,
    ) -> None:
        self._training, self._merged_calls = training, merged_calls
        self._parameters, self._declared = parameters, declared
        self._offload = SavedOffload(offload_saved, offload_most) if training and offload_saved is not None else None
        self._partial = _torch.is_partial_graph(gm)
        self._inputs = [fx.Graph().node_copy(node) for node in gm.graph.find_nodes(op="placeholder")]
        """Of Dynamo's graph, which is freed."""
        self._calls = {sources[-1][0]: n.target for n in gm.graph.nodes if (sources := n.meta.get("source_fn_stack"))}
        """Calls of Dynamo's graph by name."""
        self._aliasing = Aliasing.of(gm)
        self._reached = results_of_inputs(gm)
        self._forward: CapturedGraph | None = None
        self._fresh: list[int] = []
        """Positions of forward results that are views of nothing that the caller knows."""
        self._with_gradients: list[int] = []
        """Positions of forward results whose gradients the backward graph takes."""
        self._own_results: list[int] = []
        """Their positions among the results of Dynamo's graph; less than 0 for an input that is written."""
        self._several = any(map(has_several_gradients, gm.graph.nodes))
        """Whether a user's own function gets zeros for the gradients of unused results."""
        self._steps = self._step_inserter(optimizer) if optimizer is not None and training else None

    def _step_inserter(self, optimizer: OptimizerInBackward) -> StepInserter:
        real = [_torch.graph_input(node)[2] for node in self._inputs]
        if any(_torch.count_inner_tensors(tensor) not in (None, 1) for tensor in real):
            raise DynaFlowError(
                "optimizer=: a weight consists of several tensors",
                advice="compile without optimizer=, and call the optimizer's step() yourself",
            )
        # AOTAutograd gives inputs these names, in both graphs.
        named = {f"primals_{i}": tensor for i, tensor in enumerate(real, 1)}
        return StepInserter(optimizer, named, self._partial)

    def read(self, gm: fx.GraphModule, backward: bool) -> CapturedGraph:
        """A captured graph of AOTAutograd's forward graph; then, with `backward`, of its backward graph."""
        gm = copy_module(gm)
        # 1. names
        for node in gm.graph.nodes:
            self._add_dynamo_meta(node)
            if backward and node.op == "call_function" and not node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = _common_modules(node)
        # 2. aliasing
        if not backward:
            self._match_aliasing(gm)
        # 3. offload
        if self._offload is not None:
            self._offload.fetch(gm) if backward else self._offload.store(gm)
        # 4. optimizer
        if self._steps is not None:
            self._steps.add_to_backward(gm) if backward else self._steps.read_forward(gm)
        graph = self._captured(gm, backward)
        for given in graph.inputs:
            given.node.meta.pop(_torch.GRAPH_INPUT, None)  # it would keep the tensor alive
        if not backward:
            self._forward = graph
        return graph

    def _match_aliasing(self, gm: fx.GraphModule) -> None:
        self._check_saved(gm)
        check_views(gm, self._aliasing)
        copy_aliases(gm, self._aliasing)
        results = results_of(gm.graph)
        self._fresh = [i for i in _torch.fresh_results() if _is_made(results[i])]
        self._with_gradients = _torch.results_of_gradients()
        first, bases = _torch.first_result(), _torch.bases_of_results()
        self._own_results = [bases.get(i, i) - first for i in self._with_gradients]

    def _captured(self, gm: fx.GraphModule, backward: bool) -> CapturedGraph:
        forward = self._forward if backward else None
        rows = forward.batch_symbols if forward is not None else None
        phase: Phase = "inference" if not self._training else "backward" if backward else "forward"
        return CapturedGraph(
            gm, self._parameters, self._declared if rows is None else None,
            phase=phase, partial=self._partial, batch_symbols=rows,
            saved=saved_only(gm) if phase == "forward" else frozenset(),
            forward=forward, merged_calls=self._merged_calls,
        )  # fmt: skip

    def without_gradients(self) -> list[int]:
        """Results without gradients in eager mode. AOTAutograd gives gradients to copies of what gets some later."""
        return [i for i, wanted in enumerate(self._aliasing.gradients) if wanted is False]

    def may_leave_some_unused(self) -> bool:
        """Whether a loss may depend on some results only."""
        return len(self._with_gradients) > 1

    def call(self, gm: fx.GraphModule, backward: bool, make: Make) -> _torch.Boxed:
        """What AOTAutograd calls to run a graph. `make` returns what runs it as it is."""
        if not backward:
            run = make(gm, False)
            return without_bases(run, self._fresh) if self._fresh else run

        def made(graph: fx.GraphModule) -> _torch.Boxed:
            run = make(graph, True)
            return run if self._steps is None else self._steps.call(run)

        return self._unless_unused(gm, made) if self.may_leave_some_unused() else made(gm)

    def _unless_unused(self, gm: fx.GraphModule, make: Callable[[fx.GraphModule], _torch.Boxed]) -> _torch.Boxed:
        """Runs the backward graph; if results are unused, one that does not compute what depends on them only."""
        sources = sources_of_nodes(gm, self._with_gradients)
        needed = sources_of_gradients(gm, sources, self._with_gradients, self._own_results, self._reached)
        run = make(gm)
        others = BoundedDict(MAX_BACKWARD_GRAPHS)
        """By unused results: what runs the graph without them."""

        def call(args: list[Any]) -> Any:
            unused = _torch.unused_results()
            if not unused:
                return run(args)
            found = others.get(unused)
            if found is None:
                smaller = without_unused(gm, unused, sources, needed, zeros=not self._several)
                found = others[unused] = run if smaller is None else make(smaller)
            return found(args)

        return call

    def _check_saved(self, gm: fx.GraphModule) -> None:
        """AOTAutograd (2.13) saves an input after the forward graph has written it."""
        for node in results_of(gm.graph)[_torch.saved_results()]:
            if isinstance(node, fx.Node) and is_written_input(made_of := base(node)):
                name = input_name(_torch.graph_input(made_of)[0], self._parameters)
                raise TraceMismatch(f"the backward pass needs the input {name!r} as it was before the model writes it")

    def _add_dynamo_meta(self, node: fx.Node) -> None:
        meta = node.meta
        if "val" in meta:
            meta["example_value"] = meta["val"]
        if not meta.get("nn_module_stack") and meta.get("fwd_nn_module_stack"):
            meta["nn_module_stack"] = meta["fwd_nn_module_stack"]
        sources = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack")
        if sources and (call := sources[-1][0]) in self._calls:
            meta[ORIGIN] = (call, self._calls[call])
        if node.op == "placeholder" and (given := _torch.traced_input(node)) is not None:
            index, attributes = given
            if attributes:
                meta[_torch.GRAPH_INPUT] = self._inside(self._inputs[index], attributes)
            elif "grapharg" in self._inputs[index].meta:
                meta["grapharg"] = self._inputs[index].meta["grapharg"]

    def _inside(self, node: fx.Node, attributes: Sequence[str]) -> tuple[str, bool, Any]:
        """`graph_input` of a tensor inside a wrapper subclass."""
        name, owned, real = _torch.graph_input(node)
        owned = owned or isinstance(real, torch.nn.Parameter)
        return ".".join((name, *attributes)), owned, reduce(lambda t, name: getattr(t, name, None), attributes, real)


def _is_made(node: Any) -> bool:
    """Whether a result is a tensor that the graph makes."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and base(node).op != "placeholder"


def _common_modules(node: fx.Node) -> dict[str, Any]:
    """The modules around all of a node's arguments, for sums of gradients, which autograd inserts without an origin."""
    stacks = [a.meta["nn_module_stack"] for a in node.all_input_nodes if a.meta.get("nn_module_stack")]
    if not stacks:
        return {}
    shared = [key for key in stacks[0] if all(key in stack for stack in stacks)]
    return {key: stacks[0][key] for key in shared}
