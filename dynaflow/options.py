"""The options of a compiled model, and where the torch.compile backend "dynaflow" gets them from.

Whoever is nearest wins: `options=` of torch.compile, then `configure(...)`, then the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from dynaflow.errors import DynaFlowError
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
    "DYNAFLOW_VERIFY": ("verify", lambda text: bool(json.loads(text))),
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
    after = {name: value for name, value in combined(before, options).items() if value is not None}
    check_options(options)
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


def check_options(options: Options) -> None:
    """Raises if there is no such option, or a value that it can't have."""
    for name in options:
        if name not in OPTIONS:
            raise DynaFlowError(f"unknown option {name!r}", advice=f"the options are {', '.join(OPTIONS)}")
    if options.get("operators") not in (None, "inductor", "eager"):
        raise DynaFlowError(f"operators={options['operators']!r}", advice='say "inductor" or "eager"')
    if options.get("cudagraph") not in (None, "plan", "pieces"):
        raise DynaFlowError(f"cudagraph={options['cudagraph']!r}", advice='say "plan", "pieces" or None')
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
    return checked_scheduler(scheduler or Sequential())


def _from_environment() -> dict[str, Any]:
    found = {}
    for variable, (option, read) in ENVIRONMENT.items():
        if text := os.environ.get(variable):
            try:
                found[option] = read(text)
            except ValueError:
                raise DynaFlowError(
                    f"{variable}={text!r} can't be read",
                    advice='write it as JSON: {"parts": 3} for options, 1 or 0 for a flag',
                ) from None
    return found
