"""The two entry points: `compile(model, scheduler=...)`, and the torch.compile backend "dynaflow".

Both make an `Engine` from `Options`; torch.compile then calls it as a backend, with each graph that Dynamo captures.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from dynaflow import _torch
from dynaflow.capture.captured_graph import BatchDims, DynamicDims
from dynaflow.capture.optimizer_ops import check_model
from dynaflow.capture.torch_modules import TRACED
from dynaflow.core import validate
from dynaflow.core.device import device_for, device_named
from dynaflow.core.module_proxy import (
    ModuleProxy,
    Proxy,
    function_of,
    is_async,
    modules_of,
    special_methods,
    with_methods,
)
from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.engine.engine import Engine, marks, take_marks_back
from dynaflow.engine.planner import Facts, PlanReady
from dynaflow.engine.runner import DeferredError
from dynaflow.engine.snapshot import NoRoom, Snapshot
from dynaflow.errors import DynaFlowError, PlanError, RecordingError, model_is_gone, shown, user_line
from dynaflow.lower.compile_ops import Mode
from dynaflow.lower.lower import CudaGraph, OnTask
from dynaflow.options import Options, check_options, combined, defaults, scheduler_of
from dynaflow.schedule.base import OpSchedulerBase

if TYPE_CHECKING:  # imported on use: running a model needs none of them
    from dynaflow.cost.costs import Profile
    from dynaflow.cost.simulation import Simulation
    from dynaflow.observe.report import Report
    from dynaflow.tune.explain import Explanation

MAX_VARIANTS = 8
"""Captured functions of a compiled model, one for each set of hooks on its modules."""

INLINED = "called inside of another compiled function: it is part of that graph and not scheduled by itself"


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
    """Returns the model with its operators run as `scheduler` says. The model itself is not changed.

    scheduler: your own, or the name of a strategy, which takes `scheduler_options`.
    scheduler_options: options of the strategy, by name, e.g. {"parts": 3}.
    batch_dims: which inputs carry the batch, and on which dim, e.g. {"input_ids": 0}; by default dim 0 of the
        inputs that share its size.
    dynamic_dims: other dims that change from call to call, e.g. {"input_ids": [1]}, so that one capture serves
        all their sizes. With other dims, the model is captured again at the second size.
    facts: what the scheduler can read from ctx.facts: a mapping, or a function that returns one for each call.
    operators: "inductor" compiles them; "eager" runs them as they are.
    verify: compares the first run of each plan with the plain model.
    check: proves each plan safe before it runs.
    fullgraph: raises where the model breaks the graph, as torch.compile does.
    cudagraph: "plan" replays a whole plan, all its lanes, as one CUDA graph; "pieces" leaves operators tagged
        "no_capture" outside and captures the pieces in between; None launches kernel by kernel. No effect on CPU.
    static_inputs: names (or globs) of inputs that have the same address in every call, so that a CUDA graph uses
        them in place. Parameters, buffers, tensors marked by torch._dynamo.mark_static_address and inputs that the
        model writes are used in place anyway; others are copied in.
    on_task: called as on_task(task, "start" | "stop") around each task, on its lane, for instrumentation.
    offload_saved: in training, tensors of at least so many bytes that the forward pass saves for the backward pass
        go to host memory; with the scheduler "prefetch" the copies run beside the computation.
    offload_most: the most bytes that go there, spread over the layers: copies that take longer than the computation
        beside them delay it.
    optimizer: its steps (SGD, Adam, AdamW) run during the backward pass, one layer at a time; with the scheduler
        "optimizer_overlap", beside the backward of the layers below. Each backward pass is a step, with the settings
        of that moment. Gradients are freed by it, and optimizer.step() does only what remains.
    """
    if not callable(model) or isinstance(model, type):
        raise DynaFlowError(
            f"compile() got {shown(model)}", line=user_line(),
            advice="pass a module, a function or another callable object",
        )
    if is_async(model):
        raise DynaFlowError(
            f"compile() got {shown(model)}, which is asynchronous", line=user_line(),
            advice="compile what it awaits: a module or a function that returns tensors",
        )
    options = Options(
        scheduler=scheduler,
        scheduler_options=scheduler_options,
        batch_dims=batch_dims,
        dynamic_dims=dynamic_dims,
        facts=facts,
        operators=operators,
        verify=verify,
        check=check,
        cudagraph=cudagraph,
        static_inputs=static_inputs,
        on_task=on_task,
        offload_saved=offload_saved,
        offload_most=offload_most,
        optimizer=optimizer,
    )
    fullgraph = validate.flag(fullgraph, "fullgraph")
    made: CompiledModel = with_methods(*_kind_of(model))(model, new_engine(model, options), fullgraph, options)
    return made


class CompiledModel(Proxy):
    """A model under a schedule. It is called like the model; all other attributes are the model's own.

    If the model is an nn.Module, so is this: `eval`, `to`, `load_state_dict` and all other methods act on the model,
    and return the compiled model where they would return the model. Copies and unpickled models are compiled again.
    """

    __slots__ = (
        "_df_current",
        "_df_engine",
        "_df_forward",
        "_df_fullgraph",
        "_df_hooks",
        "_df_latest",
        "_df_note",
        "_df_options",
        "_df_takes_facts",
        "_df_variants",
    )

    def __init__(self, model: Any, engine: Engine, fullgraph: bool, options: Options) -> None:
        super().__init__(model)
        self._df_engine, self._df_fullgraph, self._df_options = engine, fullgraph, options
        engine.owned = True
        self._df_takes_facts = "facts" in _signature(model)
        self._df_forward: Callable[..., Any] | None = None
        """What was assigned to `forward`."""
        self._df_variants: dict[frozenset[int], _Variant] = {}
        """By the hooks on the model's modules: Dynamo does not guard on hooks that are added."""
        self._df_current: tuple[int, Any] = (-1, None)
        """The variant for the present hooks, and how many hooks had ever been registered when it was chosen."""
        self._df_latest: Callable[..., Any] | None = None
        self._df_hooks = -1
        """The same for the fast path: the function, and the number of hooks; -1 if the slow path has to be taken."""
        self._df_note = _inlined_noter(engine.stats)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model.

        `facts={...}` goes to the scheduler, unless the model has a parameter of that name; `**kwargs` doesn't get it.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._df_inlined(args, kwargs)
        if self._df_hooks != _torch.Hooks.next_id or "facts" in kwargs:
            return self._df_scheduled(args, kwargs) if self._df_forward is None else self._df_forward(*args, **kwargs)
        try:
            return self._df_latest(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as e:
            if not _torch.wait_for_other_trace(e, (args, kwargs)):
                raise
        finally:
            if marks.undo:  # a capture failed
                take_marks_back()
        return self(*args, **kwargs)

    def _df_inlined(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """What Dynamo traces when another compiled model calls this one: the other one's scheduler decides."""
        self._df_note()
        if not self._df_takes_facts:
            kwargs.pop("facts", None)
        return self._df_model(*args, **kwargs) if self._df_forward is None else self._df_forward(*args, **kwargs)

    def _df_scheduled(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if "facts" in kwargs and not self._df_takes_facts:
            given, advice = kwargs.pop("facts"), 'pass a mapping: {"phase": "decode"}'
            local = self._df_engine.planner.local
            before, local.facts = local.facts, None if given is None else validate.mapping(given, "facts", advice)
            try:
                return self._df_scheduled(args, kwargs)
            finally:
                local.facts = before
        registered = _torch.Hooks.next_id
        call = self._df_variant(registered)
        try:
            if not call.captured:
                self._df_engine.prepare(args, kwargs)
            try:
                result = call.function(*args, **kwargs)
            except PlanReady:
                call.captured = True
                raise
            except RuntimeError as e:
                if not _torch.wait_for_other_trace(e, (args, kwargs)):
                    raise
                return self(*args, **kwargs)
            call.captured = True
            self._df_engine.look_for_graphs()
            if self._df_forward is None:
                self._df_latest, self._df_hooks = call.function, registered
            return result
        finally:
            take_marks_back()

    def _df_variant(self, registered: int) -> _Variant:
        """Returns the variant for the present hooks, given how many have ever been registered."""
        if self._df_current[0] != registered:
            hooks, variants = _torch.hooks_of(modules_of(self._df_model)), self._df_variants
            if hooks not in variants and len(variants) >= MAX_VARIANTS:
                variants.pop(next(iter(variants)), None)
            found = variants.get(hooks) or variants.setdefault(hooks, _Variant(self._df_compiled()))
            self._df_current = registered, found
        return self._df_current[1]

    def _df_compiled(self) -> Callable[..., Any]:
        backend = _backend_of(self._df_engine)
        return torch.compile(_own_frame(self._df_model), backend=backend, fullgraph=self._df_fullgraph)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these inputs, without running the model; of its first graph, if it breaks the graph."""
        return self._df_ready(args, kwargs).plan

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explains why these inputs run as they do: what was tried, how fast it was, what limits it. Print it."""
        from dynaflow.tune.explain import Explanation

        ready = self._df_ready(args, kwargs)
        try:
            simulation = _simulated(ready)
        except Exception:  # best effort
            simulation = None
        refusals = tuple((op.name, op.refusal) for op in ready.graph.ops if op.refusal is not None)
        return Explanation(plan=ready.plan, decision=ready.note, simulation=simulation, refusals=refusals)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Measures how long each operator of these inputs' plan takes alone. What the model writes is restored."""
        from dynaflow.tune.profile import Profiler

        ready = self._df_ready(args, kwargs)
        profiler = Profiler(ready.graph.graph.device)
        try:
            snapshot = Snapshot(ready.graph, ready.trials.args)
        except NoRoom as e:
            raise RecordingError(str(e), advice="record calls of your own with df.record()") from e
        profiler.measure(ready.trials.plan(), ready.trials, snapshot.restore)
        return profiler.profile

    def simulate(
        self, *args: Any, device: str | None = None, profile: Profile | None = None, **kwargs: Any
    ) -> Simulation:
        """Simulates these inputs' plan by the cost model: on this device, or on one named, e.g. "b200x8"."""
        return _simulated(self._df_ready(args, kwargs), device, profile)

    def report(self, *args: Any, profile: Profile | None = None, **kwargs: Any) -> Report:
        """Describes a run: what was busy, what overlapped, how close it is to the bound and why. Print it.

        Takes a recording (`df.record`), or inputs. Then their plan is run now, a few times, in turns with its tasks one
        after the other and with the uncut graph; what the model writes is restored. `profile`: for the simulator's
        prediction; by default, times that were measured on this machine before.
        """
        from dynaflow.observe.live_report import report_now
        from dynaflow.observe.recording import Recording

        if len(args) == 1 and not kwargs and isinstance(args[0], Recording):
            return args[0].report(self._df_engine.planner)
        return report_now(self._df_ready(args, kwargs), self._df_engine.planner, _checked_profile(profile))

    def _df_ready(self, args: Any, kwargs: Any) -> PlanReady:
        if (ready := self._df_engine.planner.planned(lambda: self(*args, **kwargs))) is not None:
            return ready
        reasons = "; ".join(dict.fromkeys(self.stats.plain_reasons))
        why = f" ({reasons})" if reasons else ""
        raise PlanError(f"the model gave no graph to plan{why}", advice="does it use torch operators on tensors?")

    @property
    def stats(self) -> Stats:
        """Counters of captures, plans and runs."""
        return self._df_engine.stats

    def set_scheduler(self, scheduler: OpSchedulerBase | str, **options: Any) -> None:
        """Sets the scheduler from the next call on. Compiled operators are reused. May be called from any thread."""
        self._df_engine.planner.set_scheduler(scheduler_of(scheduler, options))
        self._df_options = dataclasses.replace(
            self._df_options, scheduler=scheduler, scheduler_options=options or None
        )

    def __repr__(self) -> str:
        return f"dynaflow.compile({self._df_model!r})"

    # Copies and pickles have the model and its options

    def __reduce__(self) -> Any:
        return _blank, _kind_of(self._df_model), self._df_state()

    def __setstate__(self, state: tuple[Any, Options, bool, Any]) -> None:
        model, options, fullgraph, forward = state
        CompiledModel.__init__(self, model, new_engine(model, options), fullgraph, options)
        self._df_forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = _blank(*_kind_of(self._df_model))
        made.__setstate__(copy.deepcopy(self._df_state(), memo))
        return made

    def __copy__(self) -> Any:
        made = _blank(*_kind_of(self._df_model))
        made.__setstate__((copy.copy(self._df_model), *self._df_state()[1:]))
        return made

    def _df_state(self) -> tuple[Any, Options, bool, Any]:
        if self._df_options.optimizer is not None:
            raise DynaFlowError(
                "a model that was compiled with optimizer= can't be copied or pickled: its optimizer has the parameters"
                " of this model",
                line=user_line(),
                advice="copy the model itself, and compile the copy with an optimizer of its own",
            )
        return self._df_model, self._df_options, self._df_fullgraph, self._df_forward


class CompiledFunction(CompiledModel):
    """A function under a schedule. In a class body it becomes a method, like any function."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class CompiledModule(CompiledModel, ModuleProxy):
    """An nn.Module under a schedule."""

    __slots__ = ()

    _call_impl = _wrapped_call_impl = CompiledModel.__call__

    @property
    def forward(self) -> Callable[..., Any]:
        """Also runs under the schedule. A function assigned to it is called by `__call__`, and may call this one."""
        if self._df_forward is not None:
            return self._df_forward

        def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return self._df_model(*args, **kwargs)
            return self._df_scheduled(args, kwargs)

        forward.__doc__ = self._df_model.forward.__doc__
        with contextlib.suppress(TypeError, ValueError):  # builtins have none
            own = inspect.signature(self._df_model.forward)
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
        return types.MethodType(forward, self)

    @forward.setter
    def forward(self, function: Callable[..., Any]) -> None:
        self._df_forward, self._df_hooks = function, -1

    @forward.deleter
    def forward(self) -> None:
        self._df_forward = None


class _Variant:
    """The model as a function for Dynamo, and whether it has been captured."""

    __slots__ = ("captured", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.captured = function, False


def engine_of(compiled: CompiledModel) -> Engine:
    """Returns the engine of a compiled model, for tests and tools."""
    return compiled._df_engine


def _kind_of(model: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns the class of the compiled model, and the model's special methods that it gets."""
    if isinstance(model, nn.Module):
        return CompiledModule, special_methods(model)
    return (CompiledFunction if isinstance(model, types.FunctionType) else CompiledModel), ()


def _blank(kind: Any, special: tuple[str, ...]) -> Any:
    """Returns an empty compiled model: the model that it will get may refer to it."""
    return object.__new__(with_methods(kind, special))


def _inlined_noter(stats: Stats) -> Callable[[], bool]:
    def note() -> bool:
        if INLINED not in stats.plain_reasons:
            stats.plain_reasons.append(INLINED)
        return True

    return _torch.constant_in_trace(note)


def _simulated(ready: PlanReady, device: str | None = None, profile: Profile | None = None) -> Simulation:
    from dynaflow.cost.costs import Costs
    from dynaflow.cost.simulate import simulate

    target = device_for(ready.graph.graph.device) if device is None else device_named(device)
    costs = Costs(ready.graph, target, _checked_profile(profile), sizes=ready.trials.plan().values)
    return simulate(ready.plan, ready.graph, costs, target, cudagraph=ready.trials.cudagraph)


def _checked_profile(profile: Any) -> Profile | None:
    known = isinstance(profile, Mapping) and all(isinstance(key, tuple) and len(key) == 3 for key in profile)
    if profile is not None and not known:
        raise validate.invalid("profile", profile, "pass what fast.profile(**inputs) gave")
    return profile


def backend(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="dynaflow", options={"scheduler": ...})`: the options are those of `compile`.

    Options that are not given come from `configure` and the environment; mode "reduce-overhead" means CUDA graphs.
    """
    # torch.compile passes the same options object for every graph of a model: one engine serves them all.
    engine = _engines.get(id(options)) if options else None
    if engine is None or engine.options is not options:
        far = {"cudagraph": "plan"} if mode == "reduce-overhead" else {}
        try:
            engine = new_engine(None, combined(combined(far, defaults()), check_options(options or {})))
        except DynaFlowError as e:  # Dynamo would wrap it: raise it in the call instead
            return DeferredError(e)
        if options:
            _engines[id(options)], engine.options = engine, options
    return engine.backend(gm, example_inputs)


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

_backend = backend
del backend


def __getattr__(name: str) -> Any:
    """`backend`, which torch looks up before it traces a model for it."""
    if name == "backend":
        _torch.patch_dynamo(TRACED)
        return _backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def new_engine(model: Any, options: Options | Mapping[str, Any]) -> Engine:
    if not isinstance(options, Options):
        options = Options(**check_options(options))
    if options.optimizer is not None:
        check_model(model)
    name = "model" if model is None else getattr(model, "__name__", model.__class__.__name__)
    scheduler = scheduler_of(options.scheduler, options.scheduler_options)
    return Engine(scheduler, parameters=_signature(model), name=name, **options.for_engine())


def _signature(model: Any) -> tuple[str, ...]:
    if model is None:
        return ()
    try:
        return tuple(inspect.signature(function_of(model)).parameters)
    except (TypeError, ValueError):
        return ()


def _backend_of(engine: Engine) -> Callable[..., Any]:
    """Returns the engine as a backend that doesn't keep it alive: Dynamo keeps backends, and an engine has threads."""
    engine_of = weakref.ref(engine)

    def call(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found = engine_of()
        if found is None:
            raise model_is_gone()
        return found.backend(gm, example_inputs)

    call.plain_reasons = engine.stats.plain_reasons  # type: ignore[attr-defined]
    return call


def _own_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with its own code object that calls the model.

    Dynamo stores compiled code and counts recompiles per code object, and remembers changed sizes by file name and
    line. Otherwise models would share all of it, and it would outlive the compiled model.
    """
    # Dynamo assumes that the forward of a module's class doesn't change, unless the traced code reads it.
    look = "    assert type(model).forward is not None\n" if isinstance(model, nn.Module) else ""
    body = f"  def call(*args, **kwargs):\n{look}    return model(*args, **kwargs)\n"
    source = f"def bind(model):\n{body}  return call\n"
    names: dict[str, Any] = {"__name__": __name__}
    exec(builtins.compile(source, f"<dynaflow call {next(_numbers)}>", "exec"), names)
    # Dynamo keeps the globals alive as long as the code: they must not refer to it.
    return names.pop("bind")(model)


_numbers = itertools.count()
