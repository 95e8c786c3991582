"""Transformers: `generate` under a schedule, prefill and decode; otherwise the model stays as it is.

`generate` calls the model once for the prompt and then once for each token. With a static cache the tensors of all
decoding steps have the same shape, so one plan serves them all: `accelerate` sets it in the model's generation_config.
The calls reach our compiled model through the instance's `forward`. `HOOKS` lists what is replaced, and where.
"""

from __future__ import annotations

import contextlib
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
from dynaflow.integrations.hooks import Hook, Hooks, replace
from dynaflow.integrations.transformers_caches import CacheMemory, NewLayer
from dynaflow.lower.lower import CudaGraph
from dynaflow.options import check_options, scheduler_of
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.schedule.context import ScheduleContext
from dynaflow.strategies.auto import Auto
from dynaflow.tune.explain import Explanation

OLDEST = (5, 17)
"""The first release whose caches and generation settings are known to work as expected here."""

LENGTHS = {
    "input_ids": [1],
    "inputs_embeds": [1],
    "position_ids": [-1],
    "token_type_ids": [1],
    "attention_mask*": [-2, -1],
    "*.keys": [2],
    "*.values": [2],
}
"""The dims of the model's inputs that are as long as the prompt or the cache. One capture serves all lengths."""

PACKED = {"input_ids": 1, "position_ids": 1, "attention_mask": 2, "*write_index.*": 0}
"""The dims of the tokens in continuous batching, all requests one after the other. Its batch has one row."""

PACKED_LENGTHS = {"attention_mask": [-1], "*read_index.*": [0], "logits_to_keep": [0], "logits_indices": [0]}

SETTINGS = {"use_cache": True, "cache_implementation": "static", "disable_compile": True}
"""For the model's generation_config: a static cache, and no torch.compile by `generate` itself around our forward."""

TUNING = 15.0
"""Seconds of tuning for each situation. The first call has two: prompt and decoding."""

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

    scheduler: your own, or the name of a strategy, which takes `scheduler_options`. "auto" tunes prompts and decoding
        for 15 seconds each by default.
    max_cache_len: the number of tokens that the cache is made for. By default, what the longest call so far needed;
        each time it grows, plans are made again.
    cudagraph: "plan", "pieces" or None. By default, on a GPU, a decoding step is one CUDA graph, unless the model is
        spread over ranks. Prompts are launched kernel by kernel: they have too many lengths.
    options: those of `dynaflow.compile`. The scheduler finds "prefill" or "decode" in ctx.facts["phase"].

    Calls without a static cache, and calls that need gradients, run as before. `release` restores the model.
    """
    _check(model)
    if cudagraph == "default":
        cudagraph = None if _has_ranks(model) else "plan"
    check_options({"cudagraph": cudagraph, **options})
    chosen = _scheduler(scheduler, options.pop("scheduler_options", None))
    release(model)
    options |= {"fullgraph": fullgraph, "cudagraph": cudagraph}
    Generation(model, chosen, max_cache_len, options).attach()
    return model


def release(model: Model) -> Model:
    """Restores the model as it was before `accelerate`. Returns it."""
    if isinstance(generation := vars(model).get("forward"), Generation):
        generation.detach()
    return model


def compiled(model: torch.nn.Module) -> Generation:
    """Returns what runs in an accelerated model: `compiled(model).prefill.stats`, `compiled(model).explain(...)`."""
    found = vars(model).get("forward")
    if not isinstance(found, Generation):
        raise DynaFlowError(f"{type(model).__name__} is not accelerated", advice="call accelerate(model) first")
    return found


def packed(scheduler: OpSchedulerBase | str = "auto", **options: Any) -> Any:
    """Returns a CompileConfig for `ContinuousBatchingConfig(varlen_compile_config=packed("nanoflow"))`.

    The batch is split by tokens; attention, which writes to a cache shared by all of them, runs whole.
    """
    _check_version()
    from transformers import CompileConfig

    options = {"batch_dims": PACKED, "dynamic_dims": PACKED_LENGTHS, "scheduler": scheduler, **options}
    check_options(options)
    scheduler_of(**options)
    return CompileConfig(backend="dynaflow", mode=None, options=options)  # type: ignore[arg-type]


def trainer_backend() -> contextlib.AbstractContextManager[Any]:
    """Makes `TrainingArguments(torch_compile_backend="dynaflow")` valid from now on; used in `with`, for the block.

    Accelerate accepts only the backends of its own enumeration.
    """
    HOOKS.apply()
    undo = contextlib.ExitStack()
    undo.callback(HOOKS.restore)
    return undo


def _dynamo_backend(others: Callable[[Any], Any], value: Any) -> Any:
    return _our_backend() if value == "DYNAFLOW" else others(value)


@functools.cache
def _our_backend() -> Any:
    """A member of accelerate's enumeration of backends that is not in it."""
    from accelerate.utils import DynamoBackend

    member = str.__new__(DynamoBackend, "DYNAFLOW")
    member._name_ = member._value_ = "DYNAFLOW"
    return member


HOOKS = Hooks(
    ("transformers 5.17", "accelerate 1.15"),
    (
        Hook(
            target="accelerate.utils:DynamoBackend._missing_",
            function=_dynamo_backend,
            why="trainer_backend(): the Trainer accepts our backend by name",
        ),
        Hook(
            target="transformers:PreTrainedModel.forward",
            why="accelerate(model): replaced on the model itself, until release(model) (Generation.attach)",
        ),
        Hook(
            target="transformers:GenerationMixin.generation_config",
            why="accelerate(model): SETTINGS are set on the model itself, until release(model) (Generation)",
        ),
        Hook(
            target="transformers:StaticCache.reorder_cache",
            why="on each cache that has its memory from us: tensors keep their addresses (transformers_caches)",
        ),
    ),
)


class Phase:
    """The model under a schedule, for calls with many tokens per row or for calls with one.

    One engine, but a separate function for batches of one row and for each set of arguments, such as with and without
    padding: Dynamo counts captures by function and gives up after eight. A function is still captured a few times:
    before and after a sliding window is full, and when the cache has grown.
    """

    def __init__(
        self, name: str, plain: Callable[..., Any], scheduler: OpSchedulerBase, options: Mapping[str, Any]
    ) -> None:
        self._plain, self._fullgraph = _with_equal_lengths(plain), options["fullgraph"]
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
        """Returns the function for these arguments."""
        given = [name for name, value in kwargs.items() if value is not None]
        kind = (_tokens(args, kwargs).size(0) == 1, len(args), *given)
        if kind not in self._functions:
            engine, options = self.compiled._df_engine, self.compiled._df_options
            self._functions[kind] = api.CompiledModel(self._plain, engine, self._fullgraph, options)
        return self._functions[kind]


class Generation:
    """The forward of an accelerated model: `prefill` for many tokens per row, `decode` for one."""

    def __init__(
        self, model: Any, scheduler: OpSchedulerBase, max_cache_len: int | None, options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, model.forward)  # generate reads its signature
        self._model, self._plain = model, model.forward
        self.prefill = Phase("prefill", self._plain, scheduler, {**options, "cudagraph": None})
        self.decode = Phase("decode", self._plain, scheduler, options)
        self.memory = CacheMemory()
        self._examples: dict[Any, Any] = {}
        """Caches for one token, by device and dtype: a model may be moved."""
        self._ready: Callable[[], Any] = lambda: None
        """A weak reference to the last cache that was used: it is static and has its memory."""
        self._settings = {**SETTINGS, **({"max_cache_len": max_cache_len} if max_cache_len else {})}
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        """Replaces the model's forward and generation settings."""
        before = {name: getattr(self._model.generation_config, name) for name in self._settings}
        self._undo.callback(lambda: self._model.generation_config.update(**before))
        self._model.generation_config.update(**self._settings)
        self._undo.callback(replace(self._model, "forward", self))

    def detach(self) -> None:
        """Restores both, and frees the memory of caches that are not in use."""
        self._undo.close()
        self.memory.clear()

    def set_scheduler(self, scheduler: OpSchedulerBase | str, **options: Any) -> None:
        """Sets the scheduler from the next call on. Captured graphs and compiled operators are reused."""
        chosen = _scheduler(scheduler, options)
        self.prefill.set_scheduler(chosen)
        self.decode.set_scheduler(chosen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        if cache is not self._ready() and (not cache.is_compileable or type(cache).__name__ == "DynamicCache"):
            warnings.warn(
                f"dynaflow: generation with a {type(cache).__name__} runs without a schedule: it needs a static cache."
                " Did generate() get another cache_implementation, or was the pipeline made before accelerate()?",
                stacklevel=2,
            )
            return self._plain(*args, **kwargs)
        return self._function(args, kwargs)(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for a call with these inputs, which include a static cache; does not make the call."""
        return self._function(args, kwargs).plan(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explains why a call with these inputs runs as it does. Print it."""
        return self._function(args, kwargs).explain(*args, **kwargs)

    def _function(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> api.CompiledModel:
        tokens, cache = _tokens(args, kwargs), kwargs["past_key_values"]
        if cache is not self._ready():
            if not all(layer.is_initialized for layer in cache.layers):
                self._initialise(cache, tokens)
            self._ready = weakref.ref(cache)
        return (self.decode if tokens.size(1) == 1 else self.prefill).function(args, kwargs)

    def _initialise(self, cache: Any, tokens: torch.Tensor) -> None:
        """Allocates the cache before the model is captured: otherwise the graph would allocate and return it.

        The shapes are read from a cache for one token that the plain model has filled: no configuration has them for
        all kinds of attention.
        """
        where = (tokens.device, self._model.dtype)
        if where not in self._examples:
            small = type(cache)(config=self._model.config.get_text_config(decoder=True), max_cache_len=1)
            name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
            self._plain(**{name: tokens[:1, :1]}, past_key_values=small, use_cache=True)
            self._examples[where] = small
        empty = [
            NewLayer(layer, *(_empty_like(t, tokens.size(0)) for t in (example.keys, example.values)))
            for layer, example in zip(cache.layers, self._examples[where].layers, strict=True)
            if layer.supports_early_init and not layer.is_initialized
        ]
        stats = (self.prefill.stats, self.decode.stats)
        self.memory.fill(cache, empty, made=sum(s.graphs + s.plans for s in stats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is not accelerated: the compiled functions have the weights of this model."""
        return type(self._model).forward.__get__(memo[id(self._model)])


def _with_equal_lengths(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tells Dynamo that a layer has as many keys as values.

    Otherwise the values of each layer get a symbolic length of their own, which every call has to look up.
    """

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for layer in kwargs["past_key_values"].layers:
            if getattr(layer, "keys", None) is not None:
                assert layer.keys.size(2) == layer.values.size(2)
        return plain(*args, **kwargs)

    return forward


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the ids, or their embeddings: a row for each sequence, in it an entry for each token."""
    ids = args[0] if args else kwargs.get("input_ids")
    return kwargs["inputs_embeds"] if ids is None else ids


class _TuneByPowersOfTwo(OpSchedulerBase):
    """Tunes once for all sizes up to the same power of two, not again for each prompt length."""

    def __init__(self, tuner: Auto) -> None:
        self.tuner = tuner

    def key(self, ctx: ScheduleContext) -> Any:
        return tuple((name, *((size - 1).bit_length() for size in sizes)) for name, sizes in ctx.inputs.items())

    def choose(self, ctx: ScheduleContext) -> OpSchedulerBase:
        return self.tuner.choose(ctx)


def _scheduler(scheduler: OpSchedulerBase | str, options: Mapping[str, Any] | None) -> OpSchedulerBase:
    """Returns the scheduler that the options name. A tuner runs once per power of two."""
    chosen = scheduler_of(scheduler, options, tuning=TUNING)
    return _TuneByPowersOfTwo(chosen) if isinstance(chosen, Auto) else chosen


def _empty_like(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_empty((rows, like.size(1), 0, like.size(3)))


def _has_ranks(model: Any) -> bool:
    """Whether the model is spread over ranks. CUDA graphs with collectives were not tried on several GPUs."""
    return (getattr(model, "tp_size", None) or 1) > 1 or any(shard_of(p) is not None for p in model.parameters())


def _check(model: Any) -> None:
    """Raises if the model, or the installed transformers, is not supported."""
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
