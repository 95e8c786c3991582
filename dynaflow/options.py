"""The options of a compiled model: what they are, and where the torch.compile backend "dynaflow" reads them.

`Options` is the one list of them. `dynaflow.compile` takes its fields as keyword arguments and documents them. For the
backend the nearest source wins: `options=` of torch.compile, then `configure(...)`, then the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from dynaflow.core import validate
from dynaflow.errors import DynaFlowError, shown
from dynaflow.schedule.base import OpSchedulerBase, Sequential, checked_scheduler
from dynaflow.strategies import make

if TYPE_CHECKING:  # `configure` needs none of them
    from dynaflow.capture.captured_graph import BatchDims, DynamicDims
    from dynaflow.engine.planner import Facts
    from dynaflow.lower.compile_ops import Mode
    from dynaflow.lower.lower import CudaGraph, OnTask

OPERATORS = ("inductor", "eager")
CUDAGRAPHS = ("plan", "pieces")

Check = Callable[[Any, str], Any]
"""Returns the value of an option as it is used, given the value and the option's name; raises if it is invalid."""


def _one_of(*allowed: str) -> Check:
    def check(value: Any, what: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise validate.invalid(what, value, f"say {' or '.join(map(repr, allowed))}")
        return value

    return check


def _batch_dims(value: Any, what: str) -> dict[str, int | None]:
    advice = 'say on which dim each input carries the batch: {"input_ids": 0}'
    given = validate.mapping(value, what, advice)
    return {n: None if d is None else validate.integer(d, f"{what}[{n!r}]", advice) for n, d in given.items()}


def _dynamic_dims(value: Any, what: str) -> dict[str, list[int]]:
    advice = 'list the dims that vary: {"input_ids": [1]}'
    found = {}
    for name, dims in validate.mapping(value, what, advice).items():
        here = f"{what}[{name!r}]"
        found[name] = [validate.integer(d, here, advice) for d in validate.sequence(dims, here, advice)]
    return found


def _facts(value: Any, what: str) -> Any:
    advice = 'pass a mapping, {"phase": "decode"}, or a function that returns one'
    return value if callable(value) and not isinstance(value, type) else validate.mapping(value, what, advice)


def _optimizer(value: Any, what: str) -> torch.optim.Optimizer:
    if not isinstance(value, torch.optim.Optimizer):
        raise validate.invalid(what, value, "pass an optimizer of torch.optim: SGD, Adam or AdamW")
    return value


def _scheduler_options(value: Any, what: str) -> Mapping[str, Any]:
    return validate.mapping(value, what, 'pass the strategy\'s options by name: {"parts": 3}')


def _static_inputs(value: Any, what: str) -> tuple[str, ...]:
    return tuple(validate.names(value, what, 'list the names, or globs: ["past_key_values.*"]'))


def _on_task(value: Any, what: str) -> Any:
    return validate.function(value, what, "pass a function: on_task(task, moment)")


def _bytes(value: Any, what: str) -> int:
    return validate.integer(value, what, f"pass a number of bytes: {what}=1 << 20", least=0)


def _flag(text: str) -> bool:
    return {"0": False, "false": False, "1": True, "true": True}[text.lower()]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `dynaflow.compile`, which explains them. They are checked when it is made; None: the default.

    `check` of a field returns the value as it is used, or raises; `read` parses the variable DYNAFLOW_<NAME>, where
    there is one.
    """

    scheduler: OpSchedulerBase | str | None = field(default=None, metadata={"read": str})
    scheduler_options: Mapping[str, Any] | None = field(
        default=None, metadata={"check": _scheduler_options, "read": json.loads}
    )
    batch_dims: BatchDims | None = field(default=None, metadata={"check": _batch_dims})
    dynamic_dims: DynamicDims | None = field(default=None, metadata={"check": _dynamic_dims})
    facts: Facts | None = field(default=None, metadata={"check": _facts})
    operators: Mode = field(default="inductor", metadata={"check": _one_of(*OPERATORS), "read": str})
    verify: bool = field(default=False, metadata={"check": validate.flag, "read": _flag})
    check: bool = field(default=True, metadata={"check": validate.flag})
    cudagraph: CudaGraph = field(default=None, metadata={"check": _one_of(*CUDAGRAPHS), "read": str})
    static_inputs: Sequence[str] = field(default=(), metadata={"check": _static_inputs})
    on_task: OnTask | None = field(default=None, metadata={"check": _on_task})
    offload_saved: int | None = field(default=None, metadata={"check": _bytes})
    offload_most: int | None = field(default=None, metadata={"check": _bytes})
    optimizer: torch.optim.Optimizer | None = field(default=None, metadata={"check": _optimizer})

    def __post_init__(self) -> None:
        given = check_options({f.name: getattr(self, f.name) for f in fields(self)})
        for f in fields(self):
            object.__setattr__(self, f.name, f.default if given[f.name] is None else given[f.name])

    def for_engine(self) -> dict[str, Any]:
        """All but the scheduler's, as keyword arguments."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("scheduler")}


_FIELDS = {f.name: f for f in fields(Options)}
OPTIONS = tuple(_FIELDS)
ENVIRONMENT = {f"DYNAFLOW_{name.upper()}": f for name, f in _FIELDS.items() if "read" in f.metadata}
"""Variable -> the option that it sets."""

_configured: Mapping[str, Any] = {}


def configure(**options: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets options of the torch.compile backend "dynaflow" for this process.

    They apply to what is compiled from now on, where `options=` of torch.compile does not set them. None unsets an
    option. `with configure(...):` sets them for the block. They are those of `compile`, which itself ignores these.
    """
    global _configured
    before = _configured
    options = check_options(options)
    after = {name: value for name, value in combined(before, options).items() if value is not None}
    scheduler_of(**after)
    _configured = after
    undo = contextlib.ExitStack()
    undo.callback(_set, before)
    return undo


def _set(options: Mapping[str, Any]) -> None:
    global _configured
    _configured = options


def defaults() -> dict[str, Any]:
    """The backend's options where torch.compile's `options=` does not set them."""
    return combined(_from_environment(), _configured)


def combined(far: Mapping[str, Any], near: Mapping[str, Any]) -> dict[str, Any]:
    """Merges both; `near` wins. A scheduler's options are replaced together with it."""
    remaining = {k: v for k, v in far.items() if not ("scheduler" in near and k == "scheduler_options")}
    return {**remaining, **near}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns these options as they are used. Raises if a name or a value is invalid."""
    for name in validate.mapping(options, "options", 'pass options by name: {"scheduler": "nanoflow"}'):
        if name not in _FIELDS:
            raise DynaFlowError(f"unknown option {shown(name)}", advice=f"the options are {', '.join(OPTIONS)}")
    checks = {name: _FIELDS[name].metadata.get("check", lambda value, _: value) for name in options}
    options = {name: None if v is None else checks[name](v, name) for name, v in options.items()}
    if options.get("offload_most") is not None and options.get("offload_saved") is None:
        raise DynaFlowError(
            "offload_most= without offload_saved=: nothing goes to host memory",
            advice="say how large a tensor must be to go there: offload_saved=1 << 20",
        )
    if options.get("optimizer") is not None and options.get("verify"):
        raise DynaFlowError(
            "verify=True with optimizer=: the comparison with the plain model would make optimizer steps as well",
            advice="verify the plans without optimizer=, and then train",
        )
    return options


def scheduler_of(
    scheduler: OpSchedulerBase | str | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
    tuning: float | None = None,
    **_: Any,
) -> OpSchedulerBase:
    """Returns the scheduler that the options name. `tuning`: the default of "auto" for its option `seconds`."""
    if isinstance(scheduler, str):
        if scheduler == "auto" and tuning is not None:
            scheduler_options = {"seconds": tuning, **(scheduler_options or {})}
        return make(scheduler, **(scheduler_options or {}))
    if scheduler_options:
        raise DynaFlowError(
            f"scheduler_options={dict(scheduler_options)!r} without the name of a strategy",
            advice='give a name, scheduler="nanoflow"; or the options to your scheduler itself',
        )
    return checked_scheduler(Sequential() if scheduler is None else scheduler)


def _from_environment() -> dict[str, Any]:
    found = {}
    for variable, option in ENVIRONMENT.items():
        if text := os.environ.get(variable):
            try:
                found[option.name] = option.metadata["read"](text)
            except (ValueError, KeyError, RecursionError):
                raise DynaFlowError(
                    f"{variable}={text!r} can't be read",
                    advice='write it as JSON: {"parts": 3} for options, 1 or 0 for a flag',
                ) from None
    return found
