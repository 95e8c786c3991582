"""Arguments of several commands: a model and its sizes, a strategy, a device."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any

import torch
import typer

from dynaflow.core.importing import import_object, on_sys_path
from dynaflow.errors import DynaFlowError, ScheduleError, raised_at
from dynaflow.models.build import Attention, Workload, build
from dynaflow.models.build import inputs as inputs_of
from dynaflow.options import CUDAGRAPHS, OPERATORS
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.strategies import kind_named, make, takes_several

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `dynaflow list` shows; a folder with a config.json; or module:function, or file.py:function, "
        "which returns a model and its inputs: keyword arguments, or a list of them for `tune` (others take the "
        "first).",
    ),
]
Strategy = Annotated[str, typer.Option(help="A strategy's name, or module:Class, or file.py:Class.")]
Options = Annotated[list[str] | None, typer.Option("--option", help="An option of the strategy: name=value.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Number of requests, or of images.")]
Prompt = Annotated[int | None, typer.Option(min=0, help="Tokens in each prompt; 0: decode one token.")]
Context = Annotated[int | None, typer.Option(min=1, help="Tokens before the one that is decoded.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Use only the first layers.")]
Where = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default cuda where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Type of the weights; by default bfloat16 on cuda, float32 on cpu.")]
Operators = Annotated[str, typer.Option(help=f"{' or '.join(OPERATORS)}.")]
CudaGraph = Annotated[str | None, typer.Option(help=f"{' or '.join(CUDAGRAPHS)}, as in df.compile.")]
Json = Annotated[bool, typer.Option("--json", help="Print only one JSON object.")]

USUAL = Workload(batch=8, prompt=64, context=64)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model, ready to be called."""

    name: str
    model: Any
    all_inputs: list[dict[str, Any]]
    """Keyword arguments."""

    @property
    def inputs(self) -> dict[str, Any]:
        return self.all_inputs[0]

    @property
    def title(self) -> str:
        return f"{self.name}, {described(self.inputs)}"


def load_model(
    name: str,
    *,
    device: torch.device | str | None,
    batch: int | None = None,
    prompt: int | None = None,
    context: int | None = None,
    layers: int | None = None,
    usual: Workload = USUAL,
    dtype: str | None = None,
    attention: Attention = "sdpa",
    tp: int = 1,
    ep: int = 1,
) -> LoadedModel:
    """Loads the model of that name. None: the size of `usual`; a user's function determines all sizes itself."""
    place, weights = device if isinstance(device, torch.device) else device_named(device), dtype_named(dtype)
    if ":" in name:
        if any(size is not None for size in (batch, prompt, context, layers, dtype)) or max(tp, ep) > 1:
            raise DynaFlowError(
                f"{name} determines the sizes of its model and inputs itself",
                advice="leave out --batch, --prompt, --context, --layers, --dtype, --tp and --ep",
            )
        return _own(name)
    situation = Workload(
        batch=usual.batch if batch is None else batch,
        prompt=usual.prompt if prompt is None else prompt,
        context=usual.context if context is None else context,
    )
    if weights is None:  # bfloat16 matmuls are slow on a CPU
        weights = torch.float32 if place.type == "cpu" else torch.bfloat16
    model = build(name, tp=tp, ep=ep, layers=layers, device=place, dtype=weights, attention=attention)
    return LoadedModel(name=name, model=model, all_inputs=[inputs_of(model, situation)])


def _own(name: str) -> LoadedModel:
    with on_sys_path(os.getcwd()):  # as `python -m` does: the user's file is probably in this folder
        function = import_object(name, "function")
    try:
        found = function()
    except Exception as e:
        raise DynaFlowError(
            f"{name} failed: {type(e).__name__}: {e}", line=raised_at(e),
            advice="it is called without arguments and has to return a model and its keyword arguments",
        ) from e  # fmt: skip
    advice = "return a model and its keyword arguments, (model, {'x': x}), or a list of those"
    if not isinstance(found, tuple) or len(found) != 2:
        raise DynaFlowError(f"{name} returned {type(found).__name__}", advice=advice)
    model, inputs = found
    if isinstance(model, type) or not callable(model):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise DynaFlowError(f"{name} returned {kind} in place of a model", advice=advice)
    situations = inputs if isinstance(inputs, list) else [inputs]
    if not situations or not all(isinstance(given, dict) for given in situations):
        kinds = ", ".join(dict.fromkeys(type(given).__name__ for given in situations)) or "an empty list"
        raise DynaFlowError(f"{name} returned a model and {kinds}", advice=advice)
    for given in situations:
        _bind(name, model, given)
    return LoadedModel(name=name, model=model, all_inputs=situations)


@contextlib.contextmanager
def blaming_model(loaded: LoadedModel, inputs: dict[str, Any] | None = None) -> Iterator[None]:
    """Reports a failure as the model's own if it also fails without dynaflow; other errors keep their traceback."""
    try:
        yield
    except DynaFlowError:
        raise
    except Exception as e:
        try:
            loaded.model(**(inputs or loaded.inputs))
        except Exception as own:
            raise DynaFlowError(
                f"the model of {loaded.name} fails by itself: {type(own).__name__}: {own}", line=raised_at(own),
                advice="fix the model or its inputs: it is called with these keyword arguments only",
            ) from e  # fmt: skip
        raise


def _bind(name: str, model: Any, inputs: dict[str, Any]) -> None:
    """Raises if the model can't be called with them."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins have no signature
        return
    try:
        signature.bind(**inputs)
    except TypeError as e:
        kind = type(model).__name__ if isinstance(model, torch.nn.Module) else "the model"
        raise DynaFlowError(
            f"{name} gave {', '.join(inputs) or 'nothing'}, but {kind} takes {', '.join(signature.parameters)}: {e}",
            advice="return the arguments of its forward, by name",
        ) from None


def sizes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in inputs.items() if isinstance(t, torch.Tensor)}


def described(inputs: dict[str, Any]) -> str:
    tensors = [f"{name} {'x'.join(map(str, shape))}" for name, shape in sizes(inputs).items() if name != "position_ids"]
    layers = getattr(inputs.get("past_key_values"), "layers", None)
    cached = [f"after {layers[0].keys.shape[2] - 1} tokens"] if layers else []
    return ", ".join([*tensors, *cached])


def device_named(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DynaFlowError(f"no device is named {name!r}", advice="use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DynaFlowError("there is no CUDA device here", advice="use --device cpu; `dynaflow doctor` says more")
    return device


def dtype_named(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name is not None else None
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise DynaFlowError(f"no type of weights is named {name!r}", advice="use float32, bfloat16 or float16")
    return found


def scheduler_named(strategy: str, options: list[str] | None) -> OpSchedulerBase:
    """Returns a strategy by name, or a user's scheduler by module:Class or file.py:Class."""
    with on_sys_path(os.getcwd()):
        kind = kind_named(strategy)
        return make(strategy, **dict(_option(text, kind) for text in options or ()))


def _option(text: str, kind: type) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ScheduleError(f"--option {text!r}", advice="write name=value, such as parts=3")
    found = _literal(value)
    if takes_several(kind, name) and not isinstance(found, (list, tuple, set, NoneType)):
        found = [_literal(word) for word in value.split(",")]
    return name, found


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # a word
        return value
