"""vLLM under a schedule, as a plugin: no fork, no edited file. `HOOKS` lists the functions of vLLM that are wrapped.

`LLM(..., additional_config={"dynaflow": {"scheduler": "auto"}})`, or `DYNAFLOW_SCHEDULER=auto vllm serve ...`. Without
either, the wrapped functions do what they did before. With it, vLLM passes the graph of the whole forward pass to
`Graph`. Operators that look up their layer's metadata in vLLM's forward context become row-aware, so that a micro-batch
finds its own metadata.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from dynaflow import _torch, api
from dynaflow.capture.collectives import ANY
from dynaflow.capture.op_registry import by_rows, collective, opaque_ops
from dynaflow.engine.engine import Engine
from dynaflow.errors import DynaFlowError
from dynaflow.integrations.hooks import Hook, Hooks
from dynaflow.integrations.vllm_batches import PARTS, CacheBlocks, Step, record_builds
from dynaflow.options import check_options, defaults, scheduler_of
from dynaflow.serving.host import ROW_AWARE, BatchInput, HostedGraph, SerializableGraph, inject_row_ranges
from dynaflow.serving.scheduler import Serving, serving

VERSIONS = ("0.26", "0.32")
"""The first was measured on CUDA, the second is tested on CPU."""
BACKEND = f"{__name__}.Graph"
OPTIONS = ("scheduler", "scheduler_options", "operators", "verify", "check", "cudagraph")
"""The options of `df.compile` that apply here; vLLM itself determines what the others would say."""
_within = lambda start, stop: Step.now.within(start, stop)  # noqa: E731


def plugin() -> None:
    """vLLM calls it in each of its processes, before it reads its configuration."""
    HOOKS.apply()


def unplug() -> None:
    """Restores all functions of vLLM."""
    HOOKS.restore()


def options_of(config: Any) -> dict[str, Any] | None:
    """The user's options for dynaflow; None if there are none. Operators are compiled where vLLM compiles: on CUDA."""
    from vllm.platforms import current_platform

    asked = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    elsewhere = {name: value for name, value in defaults().items() if name in OPTIONS}
    given = asked.get("dynaflow", elsewhere if "scheduler" in elsewhere else None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise DynaFlowError(
            f"additional_config has {given!r} for dynaflow, which is not a mapping of options",
            advice=f"pass {json.dumps({'dynaflow': {'scheduler': given if isinstance(given, str) else 'nanoflow'}})}",
        )
    operators = "inductor" if current_platform.is_cuda_alike() else "eager"
    return {"operators": operators, **given}


def _configure(post_init: Callable[..., None], config: Any) -> None:
    """Selects our backend if the user has set options for it and vLLM supports it; otherwise logs why not."""
    if (options := options_of(config)) is not None:
        check_options(options)  # now: a misspelled option is an error
        for name in options:
            if name not in OPTIONS:
                raise DynaFlowError(f"option {name!r} is not for vLLM", advice=f"the options are {', '.join(OPTIONS)}")
        scheduler_of(**options)
        if not (why := _refusal(config)):
            return take_over(config, options["operators"], post_init)
        _stay_out(why)
    post_init(config)


def _stay_out(why: str) -> None:
    logging.getLogger(__name__).warning("dynaflow stays out, vLLM runs as it is: %s", why)


def _refusal(config: Any) -> str:
    """Why this configuration is not supported; "" if it is."""
    import vllm

    compilation, model = config.compilation_config, config.model_config
    if not vllm.__version__.startswith(VERSIONS):
        return f"vLLM {vllm.__version__} is none of {', '.join(VERSIONS)}"
    if model is not None and model.enforce_eager:
        return "enforce_eager=True turns off the compilation that hands us the model's graph; leave it out"
    if compilation.backend not in ("", None, "inductor", BACKEND) or compilation.mode not in (None, 2, 3):
        return f"compilation_config has backend {compilation.backend!r} and mode {compilation.mode}; leave both out"
    # With these, parts of a batch might not find, or not leave, the state that they should.
    untried = {"a KV connector": config.kv_transfer_config, "LoRA": config.lora_config}
    untried["DeepEP's kernels for throughput"] = config.parallel_config.all2all_backend == "deepep_high_throughput"
    if model is not None:
        untried |= {"an encoder": model.is_encoder_decoder, "a pooler": model.pooler_config}
        untried["an indexer of sparse attention"] = hasattr(model.hf_text_config, "index_topk")
    return next((f"it was not tried with {what}" for what, there in untried.items() if there), "")


def take_over(config: Any, operators: str, post_init: Callable[..., None]) -> None:
    """Makes vLLM compile the whole forward pass once, with our backend."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = config.compilation_config
    graphs, compilation.mode = compilation.cudagraph_mode, CompilationMode.DYNAMO_TRACE_ONCE
    # A CUDA graph keeps the cuts that it was captured with. They fit all batches of a size only in decoding, one token
    # a request. Other batches are captured piecewise, in sequence; vLLM assumes that only its own compiler can do that.
    if mixed := current_platform.is_cuda_alike() and (graphs is None or graphs.mixed_mode() != CUDAGraphMode.NONE):
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    # vLLM decides by the backend's name whether layers are written out for a compiler or call its own kernels.
    compilation.backend = "inductor" if operators == "inductor" else BACKEND
    post_init(config)
    if compilation.mode != CompilationMode.DYNAMO_TRACE_ONCE:
        compilation.backend = "inductor"
        return _stay_out(f"it has turned off the compilation that hands us the model's graph (mode {compilation.mode})")
    compilation.backend = BACKEND
    if mixed and operators == "inductor" and compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


def _with_options(init_backend: Callable[..., Any], compilation: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives our backend vLLM's configuration."""
    found = init_backend(compilation, config, *args, **kwargs)
    return (lambda gm, _: Graph.captured(gm, config)) if found is Graph else found


def _is_piecewise(usual: Callable[..., bool], compilation: Any) -> bool:
    return compilation.backend == BACKEND or usual(compilation)


def with_builders(create: Callable[..., None], group: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Adds a metadata builder for each micro-batch."""
    if vllm_config.compilation_config.backend != BACKEND:
        return create(group, vllm_config, *args, **kwargs)
    kwargs["num_metadata_builders"] = max(1 + PARTS, kwargs.get("num_metadata_builders", 1))
    create(group, vllm_config, *args, **kwargs)
    record_builds(group, HOOKS.wrap)


def with_blocks(initialize: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Checks each step for requests that share cache blocks, where prefix caching is on."""
    initialize(wrapper, *args, **kwargs)
    config, runner = wrapper.vllm_config, wrapper.worker.model_runner
    if config.compilation_config.backend == BACKEND:
        Step.hazard = ""
        if config.cache_config.enable_prefix_caching:
            ranks, groups = config.parallel_config.decode_context_parallel_size, runner.kv_cache_config.kv_cache_groups
            CacheBlocks([group.kv_cache_spec.block_size * ranks for group in groups]).watch(runner, HOOKS.wrap)
        HOOKS.wrap(wrapper.worker, "compile_or_warm_up_model", functools.partial(_with_warning, config))


def _with_warning(config: Any, warm_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Warns if the model has run, and vLLM has passed us no graph of it."""
    result = warm_up(*args, **kwargs)
    if Step.row_aware.isdisjoint(config.compilation_config.static_forward_context):
        _stay_out("it does not compile this model, or no operator of the graph asks for a layer's metadata")
    return result


HOOKS = Hooks(
    VERSIONS,
    (
        Hook(
            target="vllm.config:VllmConfig.__post_init__",
            function=_configure,
            why="selects our backend if the user has set options for it",
        ),
        Hook(
            target="vllm.config:CompilationConfig.init_backend",
            function=_with_options,
            why="gives our backend vLLM's configuration",
        ),
        Hook(
            target="vllm.config:CompilationConfig.is_attention_compiled_piecewise",
            function=_is_piecewise,
            why="our backend can be captured piecewise, as vLLM's own",
        ),
        Hook(
            target="vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
            function=with_builders,
            why="adds a metadata builder for each micro-batch",
        ),
        Hook(
            target="vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config",
            function=with_blocks,
            why="hooks each worker, below",
        ),
        Hook(
            target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
            why="on each runner with prefix caching: sets Step.hazard before a step (CacheBlocks.watch)",
        ),
        Hook(
            target="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
            why="on each worker: warns if vLLM has passed us no graph (_with_warning)",
        ),
        Hook(
            target="vllm.v1.attention.backend:AttentionMetadataBuilder.build",
            why="on vLLM's builder of each group, with build_for_cudagraph_capture and update_block_table: metadata"
            " remember how they were built (record_builds)",
        ),
    ),
)


class Graph(SerializableGraph):
    """The graph of vLLM's forward pass, which vLLM stores on disk."""

    def scheduled(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from vllm.utils.torch_utils import LayerName

        by_rows("vllm::*", "_C::*", "_moe_C::*", flat=True)  # they treat each token by itself, or with its request
        collective("vllm::all_reduce", "vllm::minimax_qk_norm_fusion", group="group_name", named=torch_group)
        collective("vllm::all_gather", "vllm::reduce_scatter", group="group_name", dim="dim", named=torch_group)
        collective("_C::shm_allreduce", group="handle", named=torch_group)
        collective("_C::shm_all_gather", group="handle", dim=0, named=torch_group)
        given, compilation = {"operators": "eager", **(options_of(self.host) or {})}, self.host.compilation_config
        scheduler = in_vllm(given.pop("scheduler", None), given.pop("scheduler_options", None))
        layers = RowAwareLayers(compilation.static_forward_context)
        source = inject_row_ranges(gm, inputs, layers, _within, opaque=LayerName)
        rows: dict[str, Any] = {"facts": {"whole": True}}  # its rows are not known
        if source is not None:
            layers.declare()
            opaque_ops(f"{ROW_AWARE}::moe_forward*", capturable=True)  # experts don't depend on requests
            rows = {"facts": lambda: Step.now.facts, "batch_dims": source.dims if any(source.dims.values()) else None}
        engine = api.new_engine(None, {**given, **rows, "scheduler": scheduler})
        # vLLM's own passes need the older form of auto-functionalized calls, which copies views.
        engine.operators.settings = compilation.inductor_compile_config | {"enable_auto_functionalized_v2": True}
        if compilation.cudagraph_mode.has_piecewise_cudagraphs():
            engine.operators.captured = functools.partial(captured_pieces, self.host)
        run = engine.backend(gm, inputs)
        return run if source is None else Forward(run, source, engine, layers.why_whole)

    @classmethod
    def folder(cls) -> Path | None:
        from vllm import envs

        return Path(envs.VLLM_CACHE_ROOT)


class RowAwareLayers:
    """Finds the operators of a graph that look up a layer in vLLM's forward context, by the layer names they get."""

    _states: ClassVar[dict[str, set[str]]] = {}
    """Operator -> the arguments that name layers with state of requests, in any graph."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.layers = layers
        self.why_whole = ""
        """Why the graph's batches can't be split; "" if they can."""
        self._named: set[str] = set()

    def __call__(self, op: _torch.OpOverload, given: Mapping[str, Any]) -> bool:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        if op.namespace != "vllm":
            return False
        names = {argument: getattr(value, "value", value) for argument, value in given.items()}
        named = {argument: name for argument, name in names.items() if isinstance(name, str) and name in self.layers}
        if not named and "layer_name" not in given:
            return False
        if not named:  # vLLM may identify the layer by counting the calls
            self.why_whole = f"{op} asks for a layer that is not known by name: {names['layer_name']!r}"
        states = {argument for argument, name in named.items() if isinstance(self.layers[name], AttentionLayerBase)}
        self._states.setdefault(_torch.op_name(op), set()).update(states)
        self._named.update(named.values())
        return True

    def declare(self) -> None:
        """Declares that the state of a layer is read and written in the order of the tokens.

        Attention that takes a result of the operator which fills its cache only reads: it waits for that operator
        alone.
        """
        Step.row_aware |= self._named
        for op, states in self._states.items():
            by_rows(f"{ROW_AWARE}::{op}", follows=["kv_cache_dummy_dep"], state=sorted(states), flat=True)


def captured_pieces(config: Any, calls: list[Any]) -> list[Any]:
    """The pieces of the forward pass in sequence, captured as vLLM does: in its runs without metadata."""
    from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    def captured(call: Any, first: bool, last: bool) -> Any:
        how = CUDAGraphOptions(debug_log_enable=first, gc_disable=not first, weak_ref_output=last)
        graphs = CUDAGraphWrapper(call, config, CUDAGraphMode.PIECEWISE, how)
        known = graphs.concrete_cudagraph_entries
        return lambda args: graphs(args) if Step.now.size in known or not Step.now.metadata else call(args)

    return [captured(call, i == 0, i == len(calls) - 1) for i, call in enumerate(calls)]


def in_vllm(scheduler: Any = None, scheduler_options: Any = None) -> Serving:
    """The scheduler that the options name, for a server: it does not stop to tune, and vLLM's CPU kernels share a
    buffer."""
    return serving(scheduler_of(scheduler, scheduler_options, tuning=0.0), max_parts=PARTS, in_turns=True)


def torch_group(given: str | int) -> str:
    """Torch's name of a group, given vLLM's name or, on CPU, the handle of its shared memory."""
    from vllm.distributed.parallel_state import _groups

    for group in filter(None, (reference() for reference in _groups.values())):
        if given in (group.unique_name, getattr(getattr(group.device_communicator, "dist_module", 0), "handle", None)):
            return str(group.device_group.group_name)
    return ANY


class Forward(HostedGraph):
    """vLLM's forward pass: called with its arguments, in its forward context."""

    def __init__(self, run: Callable[..., Any], source: BatchInput, engine: Engine, why_whole: str = "") -> None:
        super().__init__(run, source, engine)
        self.why_whole = why_whole

    def begin(self, rows: int) -> None:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        Step.now = Step(context, rows, self.why_whole)


def forwards() -> list[Forward]:
    """The models that vLLM runs under a schedule in this process: `.stats` counts, `.plans` are those in use."""
    return [hosted for hosted in HostedGraph.alive if isinstance(hosted, Forward)]
