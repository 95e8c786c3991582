"""The options of a compiled model, and where the torch.compile backend "dynaflow" gets them from.

Whoever is nearest wins: `options=` of torch.compile, then `configure(...)`, then the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynaflow.core import validate
from dynaflow.errors import DynaFlowError, shown
from dynaflow.schedule.base import OpSchedulerBase, Sequential, checked_scheduler
from dynaflow.strategies import make

Options = Mapping[str, Any]

OPTIONS = (
    "scheduler",
    "scheduler_options",
    "batch_dims",
    "dynamic_dims",
    "facts",
    "operators",
    "verify",
    "check",
    "cudagraph",
    "static_inputs",
    "on_task",
    "offload_saved",
    "offload_most",
    "optimizer",
)
"""Those of `dynaflow.compile`, where they are explained."""

ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "DYNAFLOW_SCHEDULER": ("scheduler", str),
    "DYNAFLOW_SCHEDULER_OPTIONS": ("scheduler_options", json.loads),
    "DYNAFLOW_OPERATORS": ("operators", str),
    "DYNAFLOW_CUDAGRAPH": ("cudagraph", str),
    "DYNAFLOW_VERIFY": ("verify", lambda text: {"0": False, "false": False, "1": True, "true": True}[text.lower()]),
}
"""Variable -> the option that it sets, and how it is read."""

_configured: Options = {}


def configure(**options: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets options of the torch.compile backend "dynaflow" for this process: for what is compiled from now on, and
    where `options=` of torch.compile says nothing else. None takes an option back. `with configure(...):` sets them
    for the block. They are those of `compile`, which does not look at these.
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


def _set(options: Options) -> None:
    global _configured
    _configured = options


def defaults() -> dict[str, Any]:
    """What the backend does where torch.compile's `options=` say nothing."""
    return combined(_from_environment(), _configured)


def combined(far: Options, near: Options) -> dict[str, Any]:
    """Both, the near ones winning. A scheduler's options go with it."""
    kept = {k: v for k, v in far.items() if not ("scheduler" in near and k == "scheduler_options")}
    return {**kept, **near}


def check_options(options: Options) -> dict[str, Any]:
    """The options as they are used. Raises if there is no such option, or a value that it can't have."""
    for name in validate.mapping(options, "options", 'pass options by name: {"scheduler": "nanoflow"}'):
        if name not in OPTIONS:
            raise DynaFlowError(f"unknown option {shown(name)}", advice=f"the options are {', '.join(OPTIONS)}")
    usual = lambda value, _: value  # noqa: E731
    options = {k: None if v is None else CHECKS.get(k, usual)(v, k) for k, v in options.items()}
    if options.get("offload_most") is not None and options.get("offload_saved") is None:
        raise DynaFlowError(
            "offload_most= without offload_saved=: nothing goes to host memory",
            advice="say how large a tensor must be to go there: offload_saved=1 << 20",
        )
    if options.get("optimizer") is not None and options.get("verify"):
        raise DynaFlowError(
            "verify=True with optimizer=: what runs beside the plan would make steps of its own",
            advice="verify the plans without optimizer=, and then train",
        )
    return options


def _one_of(*allowed: str) -> Callable[[Any, str], str]:
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


def _bytes(value: Any, what: str) -> int:
    return validate.integer(value, what, f"pass a number of bytes: {what}=1 << 20", least=0)


CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "scheduler_options": lambda v, n: validate.mapping(v, n, 'pass the strategy\'s options by name: {"parts": 3}'),
    "batch_dims": _batch_dims,
    "dynamic_dims": _dynamic_dims,
    "facts": _facts,
    "operators": _one_of("inductor", "eager"),
    "verify": validate.flag,
    "check": validate.flag,
    "cudagraph": _one_of("plan", "pieces"),
    "static_inputs": lambda v, n: validate.names(v, n, 'list the names, or globs: ["past_key_values.*"]'),
    "on_task": lambda v, n: validate.function(v, n, "pass a function: on_task(task, moment)"),
    "offload_saved": _bytes,
    "offload_most": _bytes,
    "optimizer": _optimizer,
}
"""What becomes of the value of an option, if it is one that the option can have."""


def scheduler_of(
    scheduler: OpSchedulerBase | str | None = None,
    scheduler_options: Options | None = None,
    tuning: float | None = None,
    **_: Any,
) -> OpSchedulerBase:
    """The scheduler that the options name, or are. `tuning`: seconds that "auto" takes, unless its options say."""
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
    for variable, (option, read) in ENVIRONMENT.items():
        if text := os.environ.get(variable):
            try:
                found[option] = read(text)
            except (ValueError, KeyError, RecursionError):
                raise DynaFlowError(
                    f"{variable}={text!r} can't be read",
                    advice='write it as JSON: {"parts": 3} for options, 1 or 0 for a flag',
                ) from None
    return found
