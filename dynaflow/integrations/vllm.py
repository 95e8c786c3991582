"""vLLM under a schedule, as a plugin: no fork, no patch, no edited model.

`LLM(..., additional_config={"dynaflow": {"scheduler": "auto"}})`, or `DYNAFLOW_SCHEDULER=auto vllm serve ...`. Without
either, vLLM is untouched. With it, vLLM hands the graph of the whole forward pass to `backend`. In the graph, operators
that ask vLLM's forward context for their layer's metadata get one more argument, the rows that they are called for; so
a micro-batch finds its own metadata, wherever and whenever it runs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dynaflow import _torch, api
from dynaflow.capture.declared import by_rows
from dynaflow.capture.graph import copied
from dynaflow.engine import Engine
from dynaflow.integrations.vllm_batches import PARTS, Step, remember_builds, remember_new_tables, remember_tables
from dynaflow.options import check_options, defaults, scheduler_of
from dynaflow.schedule.base import OpSchedulerBase, Sequential
from dynaflow.schedule.context import DEFAULT_LANE, ScheduleContext
from dynaflow.schedule.plan import Lane, Plan
from dynaflow.stats import Stats
from dynaflow.strategies import named
from dynaflow.strategies.auto import Auto
from dynaflow.tune.candidates import candidates

VERSIONS = ("0.26", "0.32")
"""The first is for CUDA, and was read but not yet run; the second was seen to work, on CPU."""
SETTING = "dynaflow"
"""In vLLM's additional_config."""
BACKEND = f"{__name__}.backend"
_BY_ROWS = ("vllm::*", "_C::*", "_moe_C::*", "dynaflow_vllm::*")
"""vLLM's own operators treat each token by itself, or with its request."""


def plugin() -> None:
    """What vLLM calls in each of its processes, before it reads its configuration."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.utils import AttentionGroup

    post_init, init_backend = VllmConfig.__post_init__, CompilationConfig.init_backend
    if getattr(post_init, "_dynaflow", False):
        return

    def with_dynaflow(self: Any) -> None:
        _configure(self)
        post_init(self)

    def with_options(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        found = init_backend(self, vllm_config, *args, **kwargs)
        if found is not backend:
            return found
        if newer := sys.modules.get("vllm.v1.worker.gpu.model_runner"):  # this process has it, if it uses it
            remember_new_tables(newer.GPUModelRunner, newer.BlockTables)
        return functools.partial(backend, options=options_of(vllm_config))

    with_dynaflow._dynaflow = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = with_dynaflow
    CompilationConfig.init_backend = with_options
    remember_builds(AttentionGroup, lambda config: options_of(config) is not None)
    remember_tables(BlockTable)


def options_of(config: Any) -> dict[str, Any] | None:
    """What the user asks of us; None: nothing."""
    given = (config.additional_config or {}).get(SETTING) if isinstance(config.additional_config, Mapping) else None
    if given is None and "scheduler" in (elsewhere := defaults()):
        given = elsewhere
    return None if given is None else dict(given)


def _configure(config: Any) -> None:
    """Has vLLM hand us its graph, if the user wants us; if it can't, vLLM runs as it is, and says why."""
    options = options_of(config)
    if options is None:
        return
    check_options(options)  # now: what is misspelled is no reason to go on without it
    scheduler_of(**options)
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    if why := _refusal(config):
        _logger().warning("dynaflow stays out, vLLM runs as it is: %s", why)
        return
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # it keeps compiled code; ours is made of plans, which are kept elsewhere
    compilation = config.compilation_config
    compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
    compilation.backend = BACKEND
    if current_platform.is_cuda_alike():
        graphs = compilation.cudagraph_mode
        if graphs is None or graphs.requires_piecewise_compilation():  # which is how vLLM cuts graphs, and not we
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def _refusal(config: Any) -> str:
    import vllm

    compilation = config.compilation_config
    if not vllm.__version__.startswith(VERSIONS):
        return f"vLLM {vllm.__version__} is none of {', '.join(VERSIONS)}"
    if config.model_config is not None and config.model_config.enforce_eager:
        return "enforce_eager=True turns off the compilation that hands us the model's graph; leave it out"
    if compilation.backend not in ("", None, "inductor", BACKEND):
        return f"compilation_config names another backend, {compilation.backend!r}; leave it out"
    if compilation.mode not in (None, 2, 3):
        return f"compilation_config asks for mode {int(compilation.mode)}; leave it out"
    return ""


def backend(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What Dynamo calls with the graph of vLLM's forward pass."""
    by_rows(*_BY_ROWS)
    by_rows("dynaflow_vllm::*attention*", follows=["kv_cache_dummy_dep"])  # of a prompt that is cut, all before is read
    given: dict[str, Any] = {"operators": "eager", **(options or {})}
    scheduler = scheduler_of(given.pop("scheduler", None), given.pop("scheduler_options", None))
    engine = api._engine(None, {**given, "scheduler": in_vllm(scheduler), "facts": _facts})
    gm, inputs = copied(gm), list(example_inputs)  # Dynamo still looks at the graph that it handed out
    count = _add_rows(gm, inputs)
    run = engine.backend(gm, inputs)
    return run if count is None else Forward(run, count, engine)


def _facts() -> Mapping[str, Any]:
    """Of the batch at hand, for schedulers."""
    step = Step.now
    if step is None or step.why_whole:
        return {"whole": True}
    return {"whole": False, "num_tokens": step.requests, "phase": step.phase}


class InVllm(OpSchedulerBase):
    """A scheduler in vLLM, whose batches are different at every step: one plan for all of about the same size."""

    elastic = True

    def __init__(self, scheduler: OpSchedulerBase) -> None:
        self.scheduler = scheduler

    def partition(self) -> list[Any]:
        return self.scheduler.partition()

    def key(self, ctx: ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return None
        return ctx.facts["phase"], min(ctx.max_parts, PARTS), ctx.batch_size.bit_length(), self.scheduler.key(ctx)

    def schedule(self, ctx: ScheduleContext) -> Any:
        if ctx.facts["whole"]:
            return ctx.sequential()
        plan = self.scheduler.schedule(ctx)
        return _on_one_lane(plan or ctx.finish()) if ctx.device.type == "cpu" else plan


class ChoosingInVllm(InVllm):
    """The same for a scheduler that leaves each situation to another."""

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        scheduler = self.scheduler
        if ctx.facts["whole"]:
            return InVllm(Sequential())
        if isinstance(scheduler, Auto):
            scheduler = copy.copy(scheduler)
            scheduler.when = "first call"  # in the background it would run on the caches of a later step
            among = map(named, scheduler.among) if scheduler.among else candidates(ctx)
            scheduler.among = [(name, InVllm(other)) for name, other in among]
        chosen = scheduler.choose(ctx)
        return chosen if isinstance(chosen, InVllm) else in_vllm(chosen)


def in_vllm(scheduler: OpSchedulerBase) -> InVllm:
    chooses = type(scheduler).choose is not OpSchedulerBase.choose
    return (ChoosingInVllm if chooses else InVllm)(scheduler)


def _on_one_lane(plan: Plan) -> Plan:
    """In the order in which the tasks are issued: vLLM's CPU kernels share one scratch buffer, so they take turns."""
    tasks = tuple(dataclasses.replace(task, lane=DEFAULT_LANE, after=()) for task in plan.tasks)
    return dataclasses.replace(plan, lanes=(Lane(name=DEFAULT_LANE),) if tasks else (), tasks=tasks)


_forwards: weakref.WeakSet[Forward] = weakref.WeakSet()


def forwards() -> list[Forward]:
    """The models that vLLM runs under a schedule in this process: `.stats` counts, `.plans` says what runs."""
    return list(_forwards)


class Forward:
    """vLLM's forward pass: called with its arguments, under its forward context."""

    def __init__(self, run: Callable[..., Any], count: Callable[[tuple[Any, ...]], int], engine: Engine) -> None:
        self.engine = engine
        _forwards.add(self)
        self._run, self._count = run, count
        self._rows = torch.arange(0, dtype=torch.int32)

    def __call__(self, *args: Any) -> Any:
        rows = self._count(args)
        if len(self._rows) < rows:
            self._rows = torch.arange(2 * rows, dtype=torch.int32)
        Step.now = Step(_context(), rows)
        return self._run(*args, self._rows[:rows])

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    @property
    def plans(self) -> list[Plan]:
        """Those in use."""
        return self.engine.plans()


def _add_rows(gm: fx.GraphModule, inputs: list[Any]) -> Callable[[tuple[Any, ...]], int] | None:
    """Gives the operators that look at the forward context one more argument: the numbers of their rows.

    Returns how to find the number of all rows among the graph's arguments; None if no operator looks.
    """
    asking = [n for n in gm.graph.nodes if n.op == "call_function" and _asks_context(n.target)]
    if not asking:
        return None
    size = next(a for a in asking[0].args if isinstance(a, fx.Node)).meta["example_value"].shape[0]
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    source = next(i for i, n in enumerate(places) if _starts_with(n.meta.get("example_value"), size))
    with gm.graph.inserting_after(places[-1]):
        rows = gm.graph.placeholder("dynaflow_rows")
    rows.meta["example_value"] = places[source].meta["example_value"].new_empty(
        (size,), dtype=torch.int32, device="cpu"
    )
    inputs.append(rows.meta["example_value"])
    for node in asking:
        node.target = _twin(_torch.packet_of(node.target))
        node.args = (rows, *node.args)
    gm.recompile()
    return lambda args: args[source].shape[0]


def _asks_context(target: Any) -> bool:
    packet = _torch.packet_of(target)
    if not isinstance(packet, _torch.OpOverloadPacket) or not packet._qualified_op_name.startswith("vllm::"):
        return False
    return any(argument.name == "layer_name" for argument in packet.default._schema.arguments)


def _starts_with(example: Any, size: Any) -> bool:
    return isinstance(example, torch.Tensor) and example.ndim > 0 and str(example.shape[0]) == str(size)


_library = torch.library.Library("dynaflow_vllm", "FRAGMENT")


@functools.cache
def _twin(packet: Any) -> Any:
    """The operator with the rows it is called for as its first argument; it runs in their context."""
    op, name = packet.default, packet.default._opname
    schema = str(op._schema).partition("(")[2]
    if "PyObject" in schema:
        from vllm.utils.torch_utils import LayerName

        schema = schema.replace("PyObject", _torch.opaque_type_name(LayerName))
    _library.define(f"{name}(Tensor rows, {schema}")

    def run(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert Step.now is not None
        first = int(rows[0])
        with Step.now.entered(first, first + len(rows)):
            return op(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dynaflow_vllm::{name}", lambda rows, *a, **k: op(*a, **k), lib=_library)
    return getattr(torch.ops.dynaflow_vllm, name).default


def _context() -> Any:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return get_forward_context() if is_forward_context_available() else None


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(__name__)
