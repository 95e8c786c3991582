"""Transformers: `generate` under a schedule, prefill and decode, on a model that stays as it is otherwise.

`generate` calls the model once for the prompt and then once for each token. With a static cache the tensors of all
decoding steps have the same shape, so one plan serves them all: `accelerate` sets it in the model's generation_config.
The calls reach our compiled model through the instance's `forward`. No class is touched.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from dynaflow import api
from dynaflow._torch import shard_of
from dynaflow.core.plan import Plan
from dynaflow.core.stats import Stats
from dynaflow.errors import DynaFlowError
from dynaflow.integrations.transformers_caches import CacheMemory, Layer
from dynaflow.lower.lower import CudaGraph
from dynaflow.options import check_options, scheduler_of
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext
from dynaflow.strategies.auto import Auto
from dynaflow.tune.explain import Explanation

OLDEST = (5, 17)
"""The first release whose caches and generation settings are known to be as they are used here."""

LENGTHS = {
    "input_ids": [1],
    "inputs_embeds": [1],
    "position_ids": [-1],
    "token_type_ids": [1],
    "attention_mask*": [-2, -1],
    "*.keys": [2],
    "*.values": [2],
}
"""Where the model's inputs are as long as the prompt, or as the cache. One capture serves all lengths."""

PACKED = {"input_ids": 1, "position_ids": 1, "attention_mask": 2, "*write_index.*": 0}
"""Where continuous batching has its tokens, those of all requests one after the other. Its batch has one row."""

PACKED_LENGTHS = {"attention_mask": [-1], "*read_index.*": [0], "logits_to_keep": [0], "logits_indices": [0]}

SETTINGS = {"use_cache": True, "cache_implementation": "static", "disable_compile": True}
"""Of the model's generation_config: a static cache, and no torch.compile of generate's own around our forward."""

TUNING = 15.0
"""Seconds for each situation: there are two in the first call, prompt and decoding, and more to come."""

Model = TypeVar("Model", bound=torch.nn.Module)


def accelerate(
    model: Model,
    scheduler: OpSchedulerBase | str = "auto",
    *,
    max_cache_len: int | None = None,
    fullgraph: bool = False,
    cudagraph: CudaGraph | Literal["default"] = "default",
    **options: Any,
) -> Model:
    """Returns the model itself; from now on, `model.generate(...)` runs under the scheduler.

    scheduler: one of your own, or the name of a strategy, which takes `scheduler_options`. "auto" tunes prompts and
        decoding for 15 seconds each, unless they say otherwise.
    max_cache_len: how many tokens the cache is made for. By default as many as the longest call so far needed; each
        time it grows, plans are made anew.
    cudagraph: on a GPU a decoding step is one CUDA graph, unless the model is spread over ranks; "plan", "pieces" or
        None say it otherwise. Prompts are launched kernel by kernel: they have too many lengths.
    options: those of `dynaflow.compile`. The scheduler finds "prefill" or "decode" under ctx.facts["phase"].

    Calls that have no static cache, or that need gradients, run as before. `release` takes everything back.
    """
    _check(model)
    if cudagraph == "default":
        cudagraph = None if _has_ranks(model) else "plan"
    check_options({"cudagraph": cudagraph, **options})
    chosen = _scheduler(scheduler, options.pop("scheduler_options", None))
    release(model)
    options |= {"fullgraph": fullgraph, "cudagraph": cudagraph}
    model.forward = Generation(model, chosen, max_cache_len, options)
    return model


def release(model: Model) -> Model:
    """Takes back what `accelerate` did. Returns the model."""
    if isinstance(generation := vars(model).get("forward"), Generation):
        generation.take_back()
    return model


def compiled(model: torch.nn.Module) -> Generation:
    """What runs in an accelerated model: `compiled(model).prefill.stats`, `compiled(model).explain(...)`."""
    found = vars(model).get("forward")
    if not isinstance(found, Generation):
        raise DynaFlowError(f"{type(model).__name__} is not accelerated", advice="call accelerate(model) first")
    return found


def packed(scheduler: OpSchedulerBase | str = "auto", **options: Any) -> Any:
    """A CompileConfig for `ContinuousBatchingConfig(varlen_compile_config=packed("nanoflow"))`.

    The batch is split among its tokens; attention, which writes to a cache that all of them share, runs whole.
    """
    _check_version()
    from transformers import CompileConfig

    options = {"batch_dims": PACKED, "dynamic_dims": PACKED_LENGTHS, "scheduler": scheduler, **options}
    check_options(options)
    scheduler_of(**options)
    return CompileConfig(backend="dynaflow", mode=None, options=options)  # type: ignore[arg-type]


class Phase:
    """The model under a schedule, called with many tokens a row, or with one.

    One engine, but functions of their own for a batch of one row and for each set of arguments, such as with padding
    and without: Dynamo captures each of them, counts its captures by function, and gives up after eight. What is left
    to a function are a few more: before and after a sliding window is full, a cache that has grown.
    """

    def __init__(
        self, name: str, plain: Callable[..., Any], scheduler: OpSchedulerBase, options: Mapping[str, Any]
    ) -> None:
        self._plain, self._fullgraph = _of_equal_lengths(plain), options["fullgraph"]
        given = options.get("facts") or {}
        facts = (lambda: {"phase": name, **given()}) if callable(given) else {"phase": name, **given}
        self.compiled = api.compile(self._plain, scheduler, **{"dynamic_dims": LENGTHS, **options, "facts": facts})
        self._functions: dict[Any, api.CompiledModel] = {}

    @property
    def stats(self) -> Stats:
        """Counters of what was captured, planned and run."""
        return self.compiled.stats

    def set_scheduler(self, scheduler: OpSchedulerBase) -> None:
        self.compiled.set_scheduler(scheduler)

    def function(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> api.CompiledModel:
        """What is called with these arguments."""
        given = [name for name, value in kwargs.items() if value is not None]
        kind = (_tokens(args, kwargs).size(0) == 1, len(args), *given)
        if kind not in self._functions:
            engine, options = self.compiled._df_engine, self.compiled._df_options
            self._functions[kind] = api.CompiledModel(self._plain, engine, self._fullgraph, options)
        return self._functions[kind]


class Generation:
    """The forward of an accelerated model: `prefill` for many tokens a row, `decode` for one."""

    def __init__(
        self, model: Any, scheduler: OpSchedulerBase, max_cache_len: int | None, options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, model.forward)  # generate looks at its signature
        self._model, self._plain, self._before = model, model.forward, vars(model).get("forward")
        self.prefill = Phase("prefill", self._plain, scheduler, {**options, "cudagraph": None})
        self.decode = Phase("decode", self._plain, scheduler, options)
        self.memory = CacheMemory()
        self._seen: dict[Any, Any] = {}
        """Caches for one token, by device and type: a model may be moved."""
        self._ready: Callable[[], Any] = lambda: None
        """The last cache that was called with, if it lives: it is static, and has its memory."""
        wanted = {**SETTINGS, **({"max_cache_len": max_cache_len} if max_cache_len else {})}
        self._settings = {name: getattr(model.generation_config, name) for name in wanted}
        model.generation_config.update(**wanted)

    def set_scheduler(self, scheduler: OpSchedulerBase | str, **options: Any) -> None:
        """From the next call on, `scheduler` decides. What was captured and compiled stays."""
        chosen = _scheduler(scheduler, options)
        self.prefill.set_scheduler(chosen)
        self.decode.set_scheduler(chosen)

    def take_back(self) -> None:
        if self._before is None:
            del self._model.forward
        else:
            self._model.forward = self._before
        self._model.generation_config.update(**self._settings)
        self.memory.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        if cache is not self._ready() and (not cache.is_compileable or type(cache).__name__ == "DynamicCache"):
            warnings.warn(
                f"dynaflow: generation with a {type(cache).__name__} runs without a schedule: it needs a static cache."
                " Is generate() told another cache_implementation, or was the pipeline made before accelerate()?",
                stacklevel=2,
            )
            return self._plain(*args, **kwargs)
        return self._function(args, kwargs)(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for a call of the model with these inputs, which have a static cache; without making the call."""
        return self._function(args, kwargs).plan(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Why a call with these inputs runs as it does. Print it."""
        return self._function(args, kwargs).explain(*args, **kwargs)

    def _function(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> api.CompiledModel:
        tokens, cache = _tokens(args, kwargs), kwargs["past_key_values"]
        if cache is not self._ready():
            if not all(layer.is_initialized for layer in cache.layers):
                self._initialise(cache, tokens)
            self._ready = weakref.ref(cache)
        return (self.decode if tokens.size(1) == 1 else self.prefill).function(args, kwargs)

    def _initialise(self, cache: Any, tokens: torch.Tensor) -> None:
        """Gives the cache its memory before the model is captured: else the graph would make it, and hand it out.

        The shapes are seen in a cache for one token, that the plain model has filled: no configuration tells them for
        all kinds of attention.
        """
        where = (tokens.device, self._model.dtype)
        if where not in self._seen:
            small = type(cache)(config=self._model.config.get_text_config(decoder=True), max_cache_len=1)
            name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
            self._plain(**{name: tokens[:1, :1]}, past_key_values=small, use_cache=True)
            self._seen[where] = small
        empty = [
            Layer(layer, *(_of_no_tokens(t, tokens.size(0)) for t in (seen.keys, seen.values)))
            for layer, seen in zip(cache.layers, self._seen[where].layers, strict=True)
            if layer.supports_early_init and not layer.is_initialized
        ]
        stats = (self.prefill.stats, self.decode.stats)
        self.memory.fill(cache, empty, made=sum(s.graphs + s.plans for s in stats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is a plain one: what was compiled has the weights of this."""
        return type(self._model).forward.__get__(memo[id(self._model)])


def _of_equal_lengths(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tells Dynamo that a layer's keys are as many as its values, which attention does not.

    Else the values of each layer have a length of their own, which every call has to look up.
    """

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for layer in kwargs["past_key_values"].layers:
            if getattr(layer, "keys", None) is not None:
                assert layer.keys.size(2) == layer.values.size(2)
        return plain(*args, **kwargs)

    return forward


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What has a row for each sequence, and in it a place for each token: ids, or their embeddings."""
    ids = args[0] if args else kwargs.get("input_ids")
    return kwargs["inputs_embeds"] if ids is None else ids


class _ByPowersOfTwo(OpSchedulerBase):
    """Tunes once for sizes up to the same power of two: a new prompt length must not mean another minute."""

    def __init__(self, tuner: Auto) -> None:
        self.tuner = tuner

    def key(self, ctx: ScheduleContext) -> Any:
        return tuple((name, *((size - 1).bit_length() for size in sizes)) for name, sizes in ctx.inputs.items())

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        return self.tuner.choose(ctx)


def _scheduler(scheduler: OpSchedulerBase | str, options: Mapping[str, Any] | None) -> OpSchedulerBase:
    """The one that is named, or is given; a tuner asked only where it may find something else."""
    chosen = scheduler_of(scheduler, options, tuning=TUNING)
    return _ByPowersOfTwo(chosen) if isinstance(chosen, Auto) else chosen


def _of_no_tokens(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_empty((rows, like.size(1), 0, like.size(3)))


def _has_ranks(model: Any) -> bool:
    """Whether the model is spread over several. Graphs with collectives were not tried on several GPUs."""
    return (getattr(model, "tp_size", None) or 1) > 1 or any(shard_of(p) is not None for p in model.parameters())


def _check(model: Any) -> None:
    """Raises if the model, or the transformers that it is of, can't be accelerated."""
    if isinstance(model, api.CompiledModel):
        raise DynaFlowError("accelerate() got a compiled model", advice="pass the model itself: it compiles its calls")
    if not hasattr(model, "generate") or getattr(model, "generation_config", None) is None:
        raise DynaFlowError(
            f"{type(model).__name__} does not generate",
            advice="pass a model of transformers that does, e.g. AutoModelForCausalLM; for others, dynaflow.compile",
        )
    _check_version()
    if model.config.is_encoder_decoder:
        raise DynaFlowError(
            f"{type(model).__name__} has an encoder and a decoder",
            advice="accelerate takes decoders; compile this one's parts by dynaflow.compile",
        )


def _check_version() -> None:
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise DynaFlowError(
            f"transformers {transformers.__version__} is too old",
            advice=f'pip install "transformers>={OLDEST[0]}.{OLDEST[1]}"',
        )


def _tell_accelerate() -> None:
    """Lets `TrainingArguments(torch_compile_backend="dynaflow")` through: accelerate knows backends by an enumeration,
    and asks `_missing_` of it, Python's own hook, for names that are not there."""
    try:
        from accelerate.utils import DynamoBackend
    except ImportError:
        return
    ours = str.__new__(DynamoBackend, "DYNAFLOW")
    ours._name_ = ours._value_ = "DYNAFLOW"
    others = DynamoBackend._missing_
    DynamoBackend._missing_ = lambda value: ours if value == ours._value_ else others(value)


_tell_accelerate()
