"""The Dynamo backend of one compiled model.

Each captured graph becomes a GraphRunner, which gets the plan of each call from the model's Planner; in training,
AOTAutograd makes two graphs of it first. What can't be scheduled runs as captured, with the reason in `stats`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.input_aliasing import InputAliasing, written_inputs
from dynaflow.capture.batch_analysis.probe import ProbeFailed, Unschedulable, probe
from dynaflow.capture.captured_graph import BatchDims, CapturedGraph, DynamicDims, make_batch_dynamic
from dynaflow.capture.dynamic_dims import mark_arguments
from dynaflow.capture.higher_order import inline_subgraphs
from dynaflow.capture.joint_graph import JointGraph
from dynaflow.capture.optimizer_ops import OptimizerInBackward
from dynaflow.capture.result_aliasing import TraceMismatch, returns_or_writes, untraceable_views, views_returned
from dynaflow.capture.serialize import has_example_args
from dynaflow.capture.torch_modules import TRACED, remove_noop_dropouts, replace_embedding_bags
from dynaflow.capture.trace_conditions import (
    declares_regions,
    opaque_features,
    returns_gradients,
    takes_nested,
    wants_gradients,
)
from dynaflow.core.fx_graphs import copy_module
from dynaflow.core.stats import Stats
from dynaflow.engine.analyzed_graph import AnalyzedGraph
from dynaflow.engine.planner import Facts, Planner
from dynaflow.engine.runner import DeferredError, GraphRunner, PlainRunner
from dynaflow.engine.user_code import rules_of
from dynaflow.errors import NOT_FAILURES, DynaFlowError, fall_back
from dynaflow.lower.compile_ops import Mode, Operators
from dynaflow.lower.lower import CudaGraph, Lowerer, OnTask
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.split import request_count

NOT_CAPTURED = "torch.compile captured nothing: it is turned off (TORCHDYNAMO_DISABLE), or there is nothing to compute"


class _Marks(threading.local):
    """How to undo the marks that make the batch dynamic, on tensors of the call that is being captured."""

    undo: tuple[Callable[[], None], ...] = ()
    again: Any = ()
    """The frame that is traced again after more tensors were marked."""


marks = _Marks()


def take_marks_back() -> None:
    for undo in reversed(marks.undo):  # a tensor may have been marked twice
        undo()
    marks.undo, marks.again = (), ()


class Engine:
    def __init__(
        self,
        scheduler: OpSchedulerBase,
        *,
        batch_dims: BatchDims | None = None,
        dynamic_dims: DynamicDims | None = None,
        operators: Mode = "inductor",
        verify: bool = False,
        check: bool = True,
        facts: Facts | None = None,
        cudagraph: CudaGraph = None,
        static_inputs: Sequence[str] = (),
        on_task: OnTask | None = None,
        parameters: tuple[str, ...] = (),
        offload_saved: int | None = None,
        offload_most: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        name: str = "model",
    ) -> None:
        _torch.patch_dynamo(TRACED)
        _torch.name_complex_constants()
        self.name, self.offload = name, (offload_saved, offload_most)
        self.updates = None if optimizer is None else OptimizerInBackward(optimizer)
        self.batch_dims, self.verify, self.parameters = batch_dims, verify, parameters
        self.dynamic_dims = dynamic_dims or {}
        self.stats = Stats()
        self.options: Mapping[str, Any] | None = None
        self.owned = False
        """A CompiledModel references it; else its graphs do."""
        self.refuse: Callable[[fx.GraphModule], None] | None = None
        """Called with each captured graph. Raises if the graph is not allowed."""
        self.operators = Operators(operators)
        self.operators.failures = self.stats.compile_failures
        self.rewrite = operators == "inductor"
        """In training, Inductor's joint-graph passes may rewrite the graph, as they do when it is compiled."""
        lowerer = Lowerer(self.operators, on_task, self.stats, cudagraph, tuple(static_inputs))
        self.planner = Planner(scheduler, lowerer, {} if facts is None else facts, self.stats, check=check, name=name)
        self._breaks: Counter[str] = Counter()
        """Graph breaks of the process before the first call."""

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a first call: makes dims that look like the batch dynamic, so that one trace suffices."""
        self._breaks = _torch.graph_break_reasons()
        if self.operators.mode == "inductor":
            _torch.warm_compiler()  # while the model is traced
        requests = self._requests()
        take_marks_back()  # of a call that encloses this one
        for undo in mark_arguments(args, kwargs, self.parameters, self.batch_dims, requests, self.dynamic_dims):
            marks.undo = (*marks.undo, undo)  # one by one, so that an interrupt leaves no mark

    def _requests(self) -> int:
        """The number of requests in the ragged batch of this call."""
        return request_count(self.planner.facts().get("num_tokens"))

    def look_for_graphs(self) -> None:
        """After a first call: notes why, if the model was not captured at all."""
        if not self.stats.graphs:
            self.stats.plain_reasons.extend(_torch.graph_break_reasons() - self._breaks or [NOT_CAPTURED])

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """What Dynamo calls with a captured graph."""
        try:
            frame = _torch.traced_frame()
            if marks.again not in ((), frame):
                take_marks_back()  # of a frame whose second trace failed
            if not (marks.again == frame or has_example_args(gm)):
                more = make_batch_dynamic(gm, self.batch_dims, self._requests(), self.parameters, self.dynamic_dims)
                if more:
                    marks.undo, marks.again = (*marks.undo, *more), frame
                    raise _torch.restart_capture()  # trace again, now that the batch may vary
            take_marks_back()
            self.operators.look_for_compiler({e.device.type for e in example_inputs if isinstance(e, torch.Tensor)})
            if self.refuse is not None:
                self.refuse(gm)
            if takes_nested(gm):
                return self._plain(gm, "it takes nested tensors, whose sizes are not integers")
            left_out = remove_noop_dropouts(gm)
            training = wants_gradients(gm)
            if not training and returns_gradients(gm):
                return self._plain(gm, "gradients are off, but a part of it turns them on and returns such tensors")
            inline_subgraphs(gm, training=training)
            replace_embedding_bags(gm)
            if training or opaque_features(gm) is not None:
                if left_out and returns_or_writes(gm, left_out):  # AOTAutograd does not know these nodes
                    return self._plain(gm, "the result of a dropout that drops nothing is returned or written")
                return self._traced(gm, example_inputs, training)
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))
        except DynaFlowError as e:  # Dynamo would wrap the error: raise it in the call instead
            take_marks_back()
            return DeferredError(e)
        except Exception as e:
            if isinstance(e, NOT_FAILURES) or _torch.is_restart(e):
                raise
            take_marks_back()
            gm.graph.lint()
            return self._plain(gm, fall_back(e, self.name))

    def _traced(self, gm: fx.GraphModule, example_inputs: list[Any], training: bool) -> Callable[..., Any]:
        """Traces a graph with AOTAutograd: into both passes of training, each with plans of its own; or into one graph,
        in which the transforms of torch.func are applied."""
        strange = opaque_features(gm)
        if self._clash(gm, strange):
            if strange is not None:
                return self._plain(gm, f"it has {strange}, and inputs that share memory")
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))
        if (why := untraceable_views(gm)) is not None:
            return self._plain(gm, why)
        merge_calls = not declares_regions(gm, self._rules_now())
        passes = JointGraph(gm, self.parameters, self.batch_dims, *self.offload, self.updates,
                        training=training, merged_calls=merge_calls)  # fmt: skip
        native = self.operators.mode == "eager"
        ours: list[Exception] = []
        written: set[int] = set()
        engine_of = weakref.ref(self)  # AOTAutograd keeps `make`

        def runner(part: fx.GraphModule, backward: bool) -> _torch.Boxed:
            engine = engine_of()
            try:
                assert engine is not None, "captured by a compiled model that is gone"
                return engine._runner(passes.read(part, backward)).boxed
            except Exception as e:
                ours.append(e)
                if not backward or engine is None or engine.updates is not None or isinstance(e, NOT_FAILURES):
                    raise
                engine.stats.plain_graphs += 1
                engine.stats.plain_reasons.append(fall_back(e, f"the backward pass of {engine.name}"))
                return _torch.boxed_forward(_torch.with_compiled_draws(part))

        def make(part: fx.GraphModule, backward: bool) -> _torch.Boxed:
            written.update(_torch.written_inputs())
            if training and native:
                _torch.draw_from_seeds(part)
            return passes.call(part, backward, runner)

        try:
            made = _torch.compile_passes(
                copy_module(gm), example_inputs, make, native=native, native_random=native and not training,
                rewrite=self.rewrite, merge_calls=merge_calls,
            )  # fmt: skip
            made = self._unless_shared(made, gm, frozenset(written), strange) if written else made
            return self._keep_engine(made, passes, gm) if training else made
        except Exception as e:
            if ours and isinstance(ours[0], TraceMismatch):
                return self._plain(gm, str(ours[0]))
            if ours and not isinstance(ours[0], NOT_FAILURES):
                return self._plain(gm, fall_back(ours[0], self.name))
            if ours or _torch.is_restart(e):
                raise
            why = f"{type(e).__name__}: {e}".strip().splitlines()[0]
            if strange is not None:
                return self._plain(gm, f"it has {strange}, and can't be traced ({why})")
            warnings.warn(
                f"the backward pass can't be traced ({why}); forward runs as scheduled, backward as autograd orders it",
                stacklevel=2,
            )
            return self._runner(CapturedGraph(gm, self.parameters, self.batch_dims))

    def _rules_now(self) -> tuple[Any, ...]:
        """The scheduler's rules; none if `partition` fails, which is reported when a plan is made."""
        try:
            return rules_of(self.planner.cache.scheduler)
        except Exception:
            return ()

    def _plain(self, gm: fx.GraphModule, why: str) -> PlainRunner:
        self.stats.graphs += 1
        self.stats.graph_breaks += _torch.is_partial_graph(gm)
        self.stats.plain_graphs += 1
        self.stats.plain_reasons.append(why)
        return PlainRunner(self.planner, gm, why)

    def _clash(self, gm: fx.GraphModule, strange: str | None) -> bool:
        """Whether inputs of this call share memory that the graph writes, which its passes would not see. A graph with
        opaque features may write all its inputs."""
        nodes = gm.graph.find_nodes(op="placeholder")
        given = [_torch.graph_input(node)[2] for node in nodes]
        found = InputAliasing().find(given)
        if not found:
            return False
        returned = views_returned(gm)
        # AOTAutograd regenerates views of a self-overlapping input by calls that have other gradients.
        windows = [o.one for o in found if o.one == o.other and given[o.one].requires_grad]
        if strange is not None or any(nodes[i] in returned for i in windows):
            return True
        graph = CapturedGraph(copy_module(gm), self.parameters, self.batch_dims)
        try:
            return bool(InputAliasing(written_inputs(graph, probe(graph, ()))).find(given))
        except (ProbeFailed, Unschedulable):  # it runs plainly in any case
            return True

    def _keep_engine(self, made: Callable[..., Any], passes: JointGraph, gm: fx.GraphModule) -> Callable[..., Any]:
        """The function of AOTAutograd, with results that reference the engine: the compiled model may be gone when
        backward runs. `gm` runs in forward-mode AD, which AOTAutograd's function does not support."""
        engine_of = weakref.ref(self)
        without, notes = passes.without_gradients(), passes.may_leave_some_unused()
        plain = PlainRunner(self.planner, gm, "forward-mode AD is on")

        def run(*args: Any) -> Any:
            if _torch.in_forward_mode():
                return plain(*args)
            results = made(*args)
            _torch.keep_alive(engine_of(), results)
            if notes:
                _torch.note_unused(results)
            if any(results[i].requires_grad for i in without):
                results = [r.detach() if i in without else r for i, r in enumerate(results)]
            return results

        return run

    def _unless_shared(
        self, passes: Callable[..., Any], gm: fx.GraphModule, written: frozenset[int], strange: str | None
    ) -> Callable[..., Any]:
        """The passes; for calls whose inputs share memory that the graph writes, the graph itself, plainly if it
        has opaque features."""
        runner = self._run_by(CapturedGraph(copy_module(gm), self.parameters, self.batch_dims))
        sharing = InputAliasing(written)

        def run(*args: Any) -> Any:
            if not sharing.find(list(args)):
                return passes(*args)
            if strange is not None and runner.graph.plain is None:
                runner.run_plainly(f"it has {strange}, and inputs share memory that it writes")
            return runner(*args)

        return run

    def _runner(self, graph: CapturedGraph) -> GraphRunner:
        self.stats.graphs += 1
        self.stats.graph_breaks += graph.partial
        return self._run_by(graph)

    def _run_by(self, graph: CapturedGraph) -> GraphRunner:
        # Dynamo references runners as long as the model's code lives: they must not keep an owned engine alive.
        return GraphRunner(self.planner, AnalyzedGraph(graph), self.verify, owner=None if self.owned else self)
