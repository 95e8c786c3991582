"""The two doors: `compile(model, scheduler=...)`, and the torch.compile backend "dynaflow"."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynaflow.capture.graph import BatchDims, DynamicDims
from dynaflow.engine import Engine, Facts, take_marks_back
from dynaflow.errors import DynaFlowError, PlanError
from dynaflow.lower.lower import CudaGraph, OnTask
from dynaflow.lower.operators import Mode
from dynaflow.options import check_options, combined, defaults
from dynaflow.options import scheduler_of as _scheduler
from dynaflow.recording import Recording
from dynaflow.reporting import reported_now
from dynaflow.runner import PlanReady, Raiser
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.plan import Plan
from dynaflow.stats import Stats
from dynaflow.tune.cost import Costs, Profile
from dynaflow.tune.device import device_for, device_named
from dynaflow.tune.explain import Explanation
from dynaflow.tune.measure import Snapshot
from dynaflow.tune.profile import Profiler
from dynaflow.tune.simulate import simulate
from dynaflow.tune.simulation import Simulation
from dynaflow.updates import check_model
from dynaflow.view.report import Report


def compile(
    model: Callable[..., Any],
    scheduler: OpSchedulerBase | str | None = None,
    *,
    scheduler_options: Mapping[str, Any] | None = None,
    batch_dims: BatchDims | None = None,
    dynamic_dims: DynamicDims | None = None,
    facts: Facts | None = None,
    operators: Mode = "inductor",
    verify: bool = False,
    check: bool = True,
    fullgraph: bool = False,
    cudagraph: CudaGraph = None,
    static_inputs: Sequence[str] = (),
    on_task: OnTask | None = None,
    offload_saved: int | None = None,
    offload_most: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> CompiledModel:
    """Returns the model with its operators run as `scheduler` says. The model itself is left as it is.

    scheduler: one of your own, or the name of a strategy, which takes `scheduler_options`.
    batch_dims: which inputs carry the batch, and on which dim, e.g. {"input_ids": 0}; by default dim 0 of the
        inputs that share its size.
    dynamic_dims: other dims that change from call to call, e.g. {"input_ids": [1]}, so that one capture serves
        all their sizes. Those that are not named here are captured again at their second size.
    facts: what the scheduler may ask by ctx.facts: a mapping, or a function that gives one for each call.
    operators: "inductor" compiles them; "eager" runs them as they are.
    verify: the first run of each plan is compared with the plain model's.
    check: prove each plan safe before it runs.
    cudagraph: "plan" replays a whole plan, all its lanes, as one CUDA graph; "pieces" leaves operators tagged
        "no_capture" outside and captures what lies between; None launches kernel by kernel. No effect on CPU.
    static_inputs: names (or globs) of inputs that stay where they are in memory from call to call, so that a
        CUDA graph uses them in place. Parameters, buffers, tensors marked by torch._dynamo.mark_static_address
        and inputs that the model writes are used in place anyway; others are copied in.
    on_task: called as on_task(task, "start" | "stop") around each task, on its lane, for instrumentation.
    offload_saved: in training, what the forward pass saves for the backward pass goes to host memory, if it has that
        many bytes; the scheduler "prefetch" has the copy engines do it beside the computation.
    offload_most: of that, so many bytes at most, spread over the layers: copies that take longer than the computation
        that they run beside hold it up.
    optimizer: its steps (SGD, Adam, AdamW) are made during the backward pass, a layer at a time; the scheduler
        "optimizer_beside" has them run beside the backward of the layers below. Each backward pass is a step, with the
        settings of the moment; the gradients are gone after it, and optimizer.step() does what remains.
    """
    return CompiledModel(
        model,
        _engine(
            model,
            {
                "scheduler": scheduler,
                "scheduler_options": scheduler_options,
                "batch_dims": batch_dims,
                "dynamic_dims": dynamic_dims,
                "facts": facts,
                "operators": operators,
                "verify": verify,
                "check": check,
                "cudagraph": cudagraph,
                "static_inputs": static_inputs,
                "on_task": on_task,
                "offload_saved": offload_saved,
                "offload_most": offload_most,
                "optimizer": optimizer,
            },
        ),
        fullgraph,
    )


class CompiledModel:
    """A model under a schedule. Called like the model; other attributes are the model's own."""

    def __init__(self, model: Callable[..., Any], engine: Engine, fullgraph: bool) -> None:
        self._model, self._engine = model, engine
        engine.owned = True
        self._call = torch.compile(_own_frame(model), backend=_backend_of(engine), fullgraph=fullgraph)
        self._captured = False
        self._takes_facts = "facts" in _signature(model)
        with contextlib.suppress(TypeError, ValueError):  # builtins have none
            self.__signature__ = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. `facts={...}` goes to the scheduler, unless the model has such a parameter."""
        local = self._engine.local
        if "facts" in kwargs and not self._takes_facts:
            local.facts = kwargs.pop("facts")
        try:
            if self._captured:
                return self._call(*args, **kwargs)
            self._engine.prepare(args, kwargs)
            try:
                result = self._call(*args, **kwargs)
            except PlanReady:
                self._captured = True
                raise
            self._captured = True
            return result
        finally:
            local.facts = None
            take_marks_back()  # if the capture failed half-way

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these inputs, without running the model. If the model breaks the graph: for its first part."""
        return self._ready(args, kwargs).plan

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Why these inputs run as they do: what was tried, what each gave, and what limits it. Print it."""
        ready = self._ready(args, kwargs)
        try:
            simulation = _simulated(ready)
        except Exception:  # a prediction is a help, and never a duty
            simulation = None
        refusals = tuple((op.name, op.refusal) for op in ready.graph.ops if op.refusal is not None)
        return Explanation(plan=ready.plan, decision=ready.note, simulation=simulation, refusals=refusals)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """How long each operator of these inputs' plan takes alone, measured now; what the model writes is put back."""
        ready = self._ready(args, kwargs)
        profiler = Profiler(ready.graph.graph.device)
        profiler.measure(ready.trials.plan(), ready.trials, Snapshot(ready.graph, ready.trials.args).restore)
        return profiler.profile

    def simulate(
        self, *args: Any, device: str | None = None, profile: Profile | None = None, **kwargs: Any
    ) -> Simulation:
        """The timeline of these inputs' plan by the cost model: on this device, or on one named ("b200x8")."""
        return _simulated(self._ready(args, kwargs), device, profile)

    def report(self, *args: Any, profile: Profile | None = None, **kwargs: Any) -> Report:
        """A run in words: what was busy, what overlapped, how near to the bound it is and why no nearer. Print it.

        Takes a recording (`df.record`), or inputs: then their plan is run now, a few times, beside its calls in a row
        and the uncut graph; what the model writes is put back. `profile` is for the simulator, which says what it
        expects; by default, what was measured on this machine before.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], Recording):
            return args[0].report(self._engine)
        return reported_now(self._ready(args, kwargs), self._engine, profile)

    def _ready(self, args: Any, kwargs: Any) -> PlanReady:
        if (ready := self._engine.planned(lambda: self(*args, **kwargs))) is not None:
            return ready
        raise PlanError("the model gave no graph to plan", advice="does it use torch operators on tensors?")

    @property
    def stats(self) -> Stats:
        """Counters of what was captured, planned and run."""
        return self._engine.stats

    def set_scheduler(self, scheduler: OpSchedulerBase | str, **options: Any) -> None:
        """From the next call on, `scheduler` decides. Compiled operators stay. May be called from any thread."""
        self._engine.set_scheduler(_scheduler(scheduler, options))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return f"dynaflow.compile({self._model!r})"


def _simulated(ready: PlanReady, device: str | None = None, profile: Profile | None = None) -> Simulation:
    target = device_for(ready.graph.graph.device) if device is None else device_named(device)
    costs = Costs(ready.graph, target, profile, sizes=ready.trials.plan().values)
    return simulate(ready.plan, ready.graph, costs, target, cudagraph=ready.trials.cudagraph)


def backend(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="dynaflow", options={"scheduler": ...})`: options are those of `compile`.

    What they leave open, `configure` and the environment say; mode "reduce-overhead" stands for CUDA graphs.
    """
    # torch.compile hands over the same options for every graph of a model: one engine serves them all.
    engine = _engines.get(id(options)) if options else None
    if engine is None or engine.options is not options:
        far = {"cudagraph": "plan"} if mode == "reduce-overhead" else {}
        try:
            engine = _engine(None, combined(combined(far, defaults()), options or {}))
        except DynaFlowError as e:  # Dynamo would wrap it: let the call raise it instead
            return Raiser(e)
        if options:
            _engines[id(options)], engine.options = engine, options
    return engine.backend(gm, example_inputs)


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


def _engine(model: Any, options: Mapping[str, Any]) -> Engine:
    check_options(options)
    if options.get("optimizer") is not None:
        check_model(model)
    given = {k: v for k, v in options.items() if not k.startswith("scheduler") and v is not None}
    name = "model" if model is None else getattr(model, "__name__", type(model).__name__)
    return Engine(_scheduler(**options), parameters=_signature(model), name=name, **given)


def _signature(model: Any) -> tuple[str, ...]:
    if model is None:
        return ()
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _backend_of(engine: Engine) -> Callable[..., Any]:
    """The engine as a backend. Dynamo keeps its backends for good; the engine, with its threads, must not be."""
    engine_of = weakref.ref(engine)

    def call(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found = engine_of()
        assert found is not None, "captured by a compiled model that is gone"
        return found.backend(gm, example_inputs)

    return call


def _own_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own that calls the model.

    Dynamo keeps what it compiles with a function's code, counts recompiles there, and remembers by file name and
    line which sizes have changed: models would share all of it, and outlive their compiled object.
    """
    source = "def bind(model):\n  def call(*args, **kwargs):\n    return model(*args, **kwargs)\n  return call\n"
    names: dict[str, Any] = {"__name__": __name__}
    exec(builtins.compile(source, f"<dynaflow call {next(_numbers)}>", "exec"), names)
    # Dynamo keeps the globals until the code is gone: they must not lead back to it.
    return names.pop("bind")(model)


_numbers = itertools.count()
