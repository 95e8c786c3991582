"""The two doors: `compile(model, scheduler=...)`, and the torch.compile backend "dynaflow"."""

from __future__ import annotations

import builtins
import contextlib
import copy
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
    Face,
    ModuleFace,
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
from dynaflow.engine.runner import Raiser
from dynaflow.engine.snapshot import NoRoom, Snapshot
from dynaflow.errors import DynaFlowError, PlanError, RecordingError, shown, user_line
from dynaflow.lower.compile_ops import Mode
from dynaflow.lower.lower import CudaGraph, OnTask
from dynaflow.options import check_options, combined, defaults
from dynaflow.options import scheduler_of as _scheduler
from dynaflow.schedule.base import OpSchedulerBase

if TYPE_CHECKING:  # and where they are asked for: who only runs models needs none of them
    from dynaflow.cost.costs import Profile
    from dynaflow.cost.simulation import Simulation
    from dynaflow.observe.report import Report
    from dynaflow.tune.explain import Explanation

CALLS_KEPT = 8
"""Of each compiled model, for different hooks on its modules."""

INLINED = "called inside of another compiled function: it is a part of that one's graph, and not scheduled by itself"


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
    options = {
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
    }
    fullgraph = validate.flag(fullgraph, "fullgraph")
    made: CompiledModel = with_methods(*_kind_of(model))(model, new_engine(model, options), fullgraph, options)
    return made


class CompiledModel(Face):
    """A model under a schedule. Called like the model; all other attributes are the model's own.

    Where the model is an nn.Module, so is this: `eval`, `to`, `load_state_dict` and all other methods act on the model,
    and return the compiled model where they would return the model. Copies and unpickled ones are compiled anew.
    """

    __slots__ = (
        "_df_calls",
        "_df_engine",
        "_df_fit",
        "_df_forward",
        "_df_fullgraph",
        "_df_hooks",
        "_df_latest",
        "_df_note",
        "_df_options",
        "_df_takes_facts",
    )

    def __init__(self, model: Any, engine: Engine, fullgraph: bool, options: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._df_engine, self._df_fullgraph, self._df_options = engine, fullgraph, options
        engine.owned = True
        self._df_takes_facts = "facts" in _signature(model)
        self._df_forward: Callable[..., Any] | None = None
        """What somebody has put in the place of `forward`."""
        self._df_calls: dict[frozenset[int], _Call] = {}
        """By the hooks on the model's modules: Dynamo does not look whether there are more."""
        self._df_fit: tuple[int, Any] = (-1, None)
        """How many hooks had ever been registered, and what was called then."""
        self._df_latest: Callable[..., Any] | None = None
        self._df_hooks = -1
        """The same again, for calls to come; -1 if there is more to be done than to call the function."""
        self._df_note = _noting(engine.stats)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. `facts={...}` goes to the scheduler, unless the model has a parameter of that name; one that
        takes `**kwargs` does not get it."""
        if torch.compiler.is_dynamo_compiling():
            return self._df_inlined(args, kwargs)
        if self._df_hooks != _torch.Hooks.next_id or "facts" in kwargs:
            return self._df_scheduled(args, kwargs) if self._df_forward is None else self._df_forward(*args, **kwargs)
        try:
            return self._df_latest(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as e:
            if not _torch.waits_for_a_trace(e, (args, kwargs)):
                raise
        finally:
            if marks.undo:  # a capture failed half-way
                take_marks_back()
        return self(*args, **kwargs)

    def _df_inlined(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """What Dynamo traces inside of another compiled model, whose backend or scheduler decides."""
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
        call = self._df_fitting(registered)
        try:
            if not call.captured:
                self._df_engine.prepare(args, kwargs)
            try:
                result = call.function(*args, **kwargs)
            except PlanReady:
                call.captured = True
                raise
            except RuntimeError as e:
                if not _torch.waits_for_a_trace(e, (args, kwargs)):
                    raise
                return self(*args, **kwargs)
            call.captured = True
            self._df_engine.look_for_graphs()
            if self._df_forward is None:
                self._df_latest, self._df_hooks = call.function, registered
            return result
        finally:
            take_marks_back()

    def _df_fitting(self, registered: int) -> _Call:
        """What is called with the hooks that are there now, when so many have ever been registered."""
        if self._df_fit[0] != registered:
            hooks, calls = _torch.hooks_of(modules_of(self._df_model)), self._df_calls
            if hooks not in calls and len(calls) >= CALLS_KEPT:
                calls.pop(next(iter(calls)), None)
            self._df_fit = registered, calls.get(hooks) or calls.setdefault(hooks, _Call(self._df_compiled()))
        return self._df_fit[1]

    def _df_compiled(self) -> Callable[..., Any]:
        backend = _backend_of(self._df_engine)
        return torch.compile(_own_frame(self._df_model), backend=backend, fullgraph=self._df_fullgraph)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these inputs, without running the model. If the model breaks the graph: for its first part."""
        return self._df_ready(args, kwargs).plan

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Why these inputs run as they do: what was tried, what each gave, and what limits it. Print it."""
        from dynaflow.tune.explain import Explanation

        ready = self._df_ready(args, kwargs)
        try:
            simulation = _simulated(ready)
        except Exception:  # best effort
            simulation = None
        refusals = tuple((op.name, op.refusal) for op in ready.graph.ops if op.refusal is not None)
        return Explanation(plan=ready.plan, decision=ready.note, simulation=simulation, refusals=refusals)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """How long each operator of these inputs' plan takes alone, measured now; what the model writes is put back."""
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
        """The timeline of these inputs' plan by the cost model: on this device, or on one named ("b200x8")."""
        return _simulated(self._df_ready(args, kwargs), device, profile)

    def report(self, *args: Any, profile: Profile | None = None, **kwargs: Any) -> Report:
        """A run in words: what was busy, what overlapped, how near to the bound it is and why no nearer. Print it.

        Takes a recording (`df.record`), or inputs: then their plan is run now, a few times, beside its calls in a row
        and the uncut graph; what the model writes is put back. `profile` is for the simulator, which says what it
        expects; by default, what was measured on this machine before.
        """
        from dynaflow.observe.live_report import reported_now
        from dynaflow.observe.recording import Recording

        if len(args) == 1 and not kwargs and isinstance(args[0], Recording):
            return args[0].report(self._df_engine.planner)
        return reported_now(self._df_ready(args, kwargs), self._df_engine.planner, _checked_profile(profile))

    def _df_ready(self, args: Any, kwargs: Any) -> PlanReady:
        if (ready := self._df_engine.planner.planned(lambda: self(*args, **kwargs))) is not None:
            return ready
        reasons = "; ".join(dict.fromkeys(self.stats.plain_reasons))
        why = f" ({reasons})" if reasons else ""
        raise PlanError(f"the model gave no graph to plan{why}", advice="does it use torch operators on tensors?")

    @property
    def stats(self) -> Stats:
        """Counters of what was captured, planned and run."""
        return self._df_engine.stats

    def set_scheduler(self, scheduler: OpSchedulerBase | str, **options: Any) -> None:
        """From the next call on, `scheduler` decides. Compiled operators stay. May be called from any thread."""
        self._df_engine.planner.set_scheduler(_scheduler(scheduler, options))
        self._df_options = {**self._df_options, "scheduler": scheduler, "scheduler_options": options or None}

    def __repr__(self) -> str:
        return f"dynaflow.compile({self._df_model!r})"

    # Copies and pickles: the model, and how it was compiled

    def __reduce__(self) -> Any:
        return _blank, _kind_of(self._df_model), self._df_state()

    def __setstate__(self, state: tuple[Any, Mapping[str, Any], bool, Any]) -> None:
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

    def _df_state(self) -> tuple[Any, Mapping[str, Any], bool, Any]:
        if self._df_options["optimizer"] is not None:
            raise DynaFlowError(
                "a model that was compiled with optimizer= can't be copied or pickled: the steps are another model's",
                line=user_line(),
                advice="copy the model itself, and compile the copy with an optimizer of its own",
            )
        return self._df_model, self._df_options, self._df_fullgraph, self._df_forward


class CompiledFunction(CompiledModel):
    """A function under a schedule. In the body of a class it is a method, as any function."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class CompiledModule(CompiledModel, ModuleFace):
    """An nn.Module under a schedule."""

    __slots__ = ()

    _call_impl = _wrapped_call_impl = CompiledModel.__call__

    @property
    def forward(self) -> Callable[..., Any]:
        """Under the schedule, too. What is set in its place is called by `__call__`, and may call what was here."""
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


class _Call:
    """The model as Dynamo captures it, and whether it has."""

    __slots__ = ("captured", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.captured = function, False


def engine_of(compiled: CompiledModel) -> Engine:
    """What works behind a compiled model: for tests and tools."""
    return compiled._df_engine


def _kind_of(model: Any) -> tuple[Any, tuple[str, ...]]:
    """The class of the compiled model, and the special methods that it has of the model's."""
    if isinstance(model, nn.Module):
        return CompiledModule, special_methods(model)
    return (CompiledFunction if isinstance(model, types.FunctionType) else CompiledModel), ()


def _blank(kind: Any, special: tuple[str, ...]) -> Any:
    """A compiled model that has nothing yet: the model that it will get may refer to it."""
    return object.__new__(with_methods(kind, special))


def _noting(stats: Stats) -> Callable[[], bool]:
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
        raise validate.wrong("profile", profile, "pass what fast.profile(**inputs) gave")
    return profile


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
            engine = new_engine(None, combined(combined(far, defaults()), check_options(options or {})))
        except DynaFlowError as e:  # Dynamo would wrap it: let the call raise it instead
            return Raiser(e)
        if options:
            _engines[id(options)], engine.options = engine, options
    return engine.backend(gm, example_inputs)


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

_backend = backend
del backend


def __getattr__(name: str) -> Any:
    """`backend`, which torch asks for before it traces a model for it."""
    if name == "backend":
        _torch.teach_dynamo(TRACED)
        return _backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def new_engine(model: Any, options: Mapping[str, Any]) -> Engine:
    options = check_options(options)
    if options.get("optimizer") is not None:
        check_model(model)
    given = {k: v for k, v in options.items() if not k.startswith("scheduler") and v is not None}
    name = "model" if model is None else getattr(model, "__name__", model.__class__.__name__)
    return Engine(_scheduler(**options), parameters=_signature(model), name=name, **given)


def _signature(model: Any) -> tuple[str, ...]:
    if model is None:
        return ()
    try:
        return tuple(inspect.signature(function_of(model)).parameters)
    except (TypeError, ValueError):
        return ()


def _backend_of(engine: Engine) -> Callable[..., Any]:
    """The engine as a backend. Dynamo keeps its backends for good; the engine, with its threads, must not be."""
    engine_of = weakref.ref(engine)

    def call(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found = engine_of()
        assert found is not None, "captured by a compiled model that is gone"
        return found.backend(gm, example_inputs)

    call.plain_reasons = engine.stats.plain_reasons  # type: ignore[attr-defined]
    return call


def _own_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own that calls the model.

    Dynamo keeps what it compiles with a function's code, counts recompiles there, and remembers by file name and
    line which sizes have changed: models would share all of it, and outlive their compiled object.
    """
    # Dynamo takes the forward of a module's class for one that stays as it is, unless somebody looks at it.
    look = "    assert type(model).forward is not None\n" if isinstance(model, nn.Module) else ""
    body = f"  def call(*args, **kwargs):\n{look}    return model(*args, **kwargs)\n"
    source = f"def bind(model):\n{body}  return call\n"
    names: dict[str, Any] = {"__name__": __name__}
    exec(builtins.compile(source, f"<dynaflow call {next(_numbers)}>", "exec"), names)
    # Dynamo keeps the globals until the code is gone: they must not lead back to it.
    return names.pop("bind")(model)


_numbers = itertools.count()
