"""vLLM under a schedule, as a plugin: no fork, no patch, no edited model.

`LLM(..., additional_config={"dynaflow": {"scheduler": "auto"}})`, or `DYNAFLOW_SCHEDULER=auto vllm serve ...`. Without
either, vLLM is untouched. With it, vLLM hands us the `Graph` of the whole forward pass. Operators that ask
vLLM's forward context for their layer's metadata are then told their rows; so a micro-batch finds its own metadata.
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
from dynaflow.capture.op_registry import by_rows, collective, left_alone
from dynaflow.engine.engine import Engine
from dynaflow.errors import DynaFlowError
from dynaflow.integrations.vllm_batches import PARTS, Blocks, Step, remember_builds
from dynaflow.options import check_options, defaults, scheduler_of
from dynaflow.serving.host import TOLD, Hosted, Kept, Source, tell_rows, wrap
from dynaflow.serving.scheduler import Serving, serving

VERSIONS = ("0.26", "0.32")  # the first was measured on CUDA, the second is tested on CPU
BACKEND = f"{__name__}.Graph"
OPTIONS = ("scheduler", "scheduler_options", "operators", "verify", "check", "cudagraph")
"""Of those of `df.compile`: vLLM itself says what the others would."""
_within = lambda start, stop: Step.now.entered(start, stop)  # noqa: E731


@functools.cache
def plugin() -> None:
    """What vLLM calls in each of its processes, before it reads its configuration."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.v1.worker.utils import AttentionGroup
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrap(VllmConfig, "__post_init__", _configure)
    wrap(CompilationConfig, "init_backend", _with_options)
    wrap(CompilationConfig, "is_attention_compiled_piecewise", lambda usual, c: c.backend == BACKEND or usual(c))
    wrap(AttentionGroup, "create_metadata_builders", with_builders)
    wrap(WorkerWrapperBase, "initialize_from_config", with_blocks)


def options_of(config: Any) -> dict[str, Any] | None:
    """What the user asks of us; None: nothing. Operators are compiled where vLLM compiles its own: on CUDA."""
    from vllm.platforms import current_platform

    asked = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    elsewhere = {name: value for name, value in defaults().items() if name in OPTIONS}
    given = asked.get("dynaflow", elsewhere if "scheduler" in elsewhere else None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise DynaFlowError(
            f"additional_config says {given!r} for dynaflow, which is no option with its name",
            advice=f"say {json.dumps({'dynaflow': {'scheduler': given if isinstance(given, str) else 'nanoflow'}})}",
        )
    operators = "inductor" if current_platform.is_cuda_alike() else "eager"
    return {"operators": operators, **given}


def _configure(post_init: Callable[..., None], config: Any) -> None:
    """Has vLLM hand us its graph, if the user wants us; if it can't, vLLM runs as it is, and says why."""
    if (options := options_of(config)) is not None:
        check_options(options)  # now: what is misspelled is no reason to go on without it
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
    import vllm

    compilation, model = config.compilation_config, config.model_config
    if not vllm.__version__.startswith(VERSIONS):
        return f"vLLM {vllm.__version__} is none of {', '.join(VERSIONS)}"
    if model is not None and model.enforce_eager:
        return "enforce_eager=True turns off the compilation that hands us the model's graph; leave it out"
    if compilation.backend not in ("", None, "inductor", BACKEND) or compilation.mode not in (None, 2, 3):
        return f"compilation_config has backend {compilation.backend!r} and mode {compilation.mode}; leave both out"
    # Parts of a batch may not find, or leave, what they should.
    untried = {"a KV connector": config.kv_transfer_config, "LoRA": config.lora_config}
    untried["DeepEP's kernels for throughput"] = config.parallel_config.all2all_backend == "deepep_high_throughput"
    if model is not None:
        untried |= {"an encoder": model.is_encoder_decoder, "a pooler": model.pooler_config}
        untried["an indexer of sparse attention"] = hasattr(model.hf_text_config, "index_topk")
    return next((f"it was not tried with {what}" for what, there in untried.items() if there), "")


def take_over(config: Any, operators: str, post_init: Callable[..., None]) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = config.compilation_config
    graphs, compilation.mode = compilation.cudagraph_mode, CompilationMode.DYNAMO_TRACE_ONCE
    # A graph keeps the cuts that it was captured with: these fit all batches of a size only if they are of answers, a
    # token each. Others are captured by pieces, in sequence; vLLM takes it that only its own compiler can do that.
    if mixed := current_platform.is_cuda_alike() and (graphs is None or graphs.mixed_mode() != CUDAGraphMode.NONE):
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    # By the backend's name vLLM decides whether layers are written out for a compiler, or call kernels of its own.
    compilation.backend = "inductor" if operators == "inductor" else BACKEND
    post_init(config)
    if compilation.mode != CompilationMode.DYNAMO_TRACE_ONCE:
        compilation.backend = "inductor"
        return _stay_out(f"it has turned off the compilation that hands us the model's graph (mode {compilation.mode})")
    compilation.backend = BACKEND
    if mixed and operators == "inductor" and compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


def _with_options(init_backend: Callable[..., Any], compilation: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    found = init_backend(compilation, config, *args, **kwargs)
    return (lambda gm, _: Graph.captured(gm, config)) if found is Graph else found


def with_builders(create: Callable[..., None], group: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Micro-batches have builders of metadata of their own, beside vLLM's."""
    if vllm_config.compilation_config.backend != BACKEND:
        return create(group, vllm_config, *args, **kwargs)
    kwargs["num_metadata_builders"] = max(1 + PARTS, kwargs.get("num_metadata_builders", 1))
    create(group, vllm_config, *args, **kwargs)
    remember_builds(group)


def with_blocks(initialize: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Steps are judged before they run, where requests may share what they have in the cache."""
    initialize(wrapper, *args, **kwargs)
    config, runner = wrapper.vllm_config, wrapper.worker.model_runner
    if config.compilation_config.backend == BACKEND:
        Step.entangled = ""
        if config.cache_config.enable_prefix_caching:
            ranks, groups = config.parallel_config.decode_context_parallel_size, runner.kv_cache_config.kv_cache_groups
            Blocks([group.kv_cache_spec.block_size * ranks for group in groups]).watch(runner)
        wrap(wrapper.worker, "compile_or_warm_up_model", functools.partial(_with_warning, config))


def _with_warning(config: Any, warm_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Says so if the model has run, and no graph of it has come to us."""
    result = warm_up(*args, **kwargs)
    if Step.told.isdisjoint(config.compilation_config.static_forward_context):
        _stay_out("it does not compile this model, or no operator of the graph asks for a layer's metadata")
    return result


class Graph(Kept):
    """The graph of vLLM's forward pass, which vLLM keeps on disk."""

    def scheduled(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from vllm.utils.torch_utils import LayerName

        by_rows("vllm::*", "_C::*", "_moe_C::*", flat=True)  # they treat each token by itself, or with its request
        collective("vllm::all_reduce", "vllm::minimax_qk_norm_fusion", group="group_name", named=torch_group)
        collective("vllm::all_gather", "vllm::reduce_scatter", group="group_name", dim="dim", named=torch_group)
        collective("_C::shm_allreduce", group="handle", named=torch_group)
        collective("_C::shm_all_gather", group="handle", dim=0, named=torch_group)
        given, compilation = {"operators": "eager", **(options_of(self.host) or {})}, self.host.compilation_config
        scheduler = in_vllm(given.pop("scheduler", None), given.pop("scheduler_options", None))
        asked = Asked(compilation.static_forward_context)
        source = tell_rows(gm, inputs, asked, _within, opaque=LayerName)
        rows: dict[str, Any] = {"facts": {"whole": True}}  # nobody knows what they are
        if source is not None:
            asked.declare()
            left_alone(f"{TOLD}::moe_forward*", capturable=True)  # experts know nothing of requests
            rows = {"facts": lambda: Step.now.facts, "batch_dims": source.dims if any(source.dims.values()) else None}
        engine = api.new_engine(None, {**given, **rows, "scheduler": scheduler})
        # For passes of its own vLLM asks for the older way to call what writes its arguments, which copies views.
        engine.operators.settings = compilation.inductor_compile_config | {"enable_auto_functionalized_v2": True}
        if compilation.cudagraph_mode.has_piecewise_cudagraphs():
            engine.operators.captured = functools.partial(captured_pieces, self.host)
        run = engine.backend(gm, inputs)
        return run if source is None else Forward(run, source, engine, asked.why_whole)


class Asked:
    """The operators of a graph that ask vLLM's forward context for a layer, found by the names that they are given."""

    _states: ClassVar[dict[str, set[str]]] = {}
    """Operator -> the arguments by which it names layers that keep something of requests, in any graph."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.layers = layers
        self.why_whole = ""
        """Why the graph's batches can't be cut, if they can't."""
        self._named: set[str] = set()

    def __call__(self, op: _torch.OpOverload, given: Mapping[str, Any]) -> bool:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        if op.namespace != "vllm":
            return False
        names = {argument: getattr(value, "value", value) for argument, value in given.items()}
        named = {argument: name for argument, name in names.items() if isinstance(name, str) and name in self.layers}
        if not named and "layer_name" not in given:
            return False
        if not named:  # vLLM may count the calls to tell the layer
            self.why_whole = f"{op} asks for a layer that is not known by name: {names['layer_name']!r}"
        states = {argument for argument, name in named.items() if isinstance(self.layers[name], AttentionLayerBase)}
        self._states.setdefault(op._opname, set()).update(states)
        self._named.update(named.values())
        return True

    def declare(self) -> None:
        """What a layer keeps of requests, whatever it is, is read and written in the order of their tokens. Attention
        that gets something from the operator which fills its cache only reads: it waits for that one alone."""
        Step.told |= self._named
        for op, states in self._states.items():
            by_rows(f"{TOLD}::{op}", follows=["kv_cache_dummy_dep"], state=sorted(states), flat=True)

    @classmethod
    def folder(cls) -> Path | None:
        from vllm import envs

        return Path(envs.VLLM_CACHE_ROOT)


def captured_pieces(config: Any, calls: list[Any]) -> list[Any]:
    """The pieces of the forward pass in sequence, as vLLM captures them: in its runs without metadata."""
    from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    def captured(call: Any, first: bool, last: bool) -> Any:
        how = CUDAGraphOptions(debug_log_enable=first, gc_disable=not first, weak_ref_output=last)
        graphs = CUDAGraphWrapper(call, config, CUDAGraphMode.PIECEWISE, how)
        known = graphs.concrete_cudagraph_entries
        return lambda args: graphs(args) if Step.now.size in known or not Step.now.metadata else call(args)

    return [captured(call, i == 0, i == len(calls) - 1) for i, call in enumerate(calls)]


def in_vllm(scheduler: Any = None, scheduler_options: Any = None) -> Serving:
    """As `df.compile` takes them; but a server does not stand still to tune, and vLLM's CPU kernels share a buffer."""
    return serving(scheduler_of(scheduler, scheduler_options, tuning=0.0), most=PARTS, in_turns=True)


def torch_group(given: str | int) -> str:
    """Torch's name of a group that vLLM knows by a name of its own; on CPU, by the handle of its shared memory."""
    from vllm.distributed.parallel_state import _groups

    for group in filter(None, (reference() for reference in _groups.values())):
        if given in (group.unique_name, getattr(getattr(group.device_communicator, "dist_module", 0), "handle", None)):
            return str(group.device_group.group_name)
    return ANY


class Forward(Hosted):
    """vLLM's forward pass: called with its arguments, under its forward context."""

    def __init__(self, run: Callable[..., Any], source: Source, engine: Engine, why_whole: str = "") -> None:
        super().__init__(run, source, engine)
        self.why_whole = why_whole

    def begin(self, rows: int) -> None:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        Step.now = Step(context, rows, self.why_whole)


def forwards() -> list[Forward]:
    """The models that vLLM runs under a schedule in this process: `.stats` counts, `.plans` says what runs."""
    return [hosted for hosted in Hosted.alive if isinstance(hosted, Forward)]
