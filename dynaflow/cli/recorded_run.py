"""A model run under a schedule, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import dynaflow as df
from dynaflow.api import CompiledModel
from dynaflow.errors import DynaFlowError
from dynaflow.observe.recorded_plan import RecordedPlan
from dynaflow.observe.recording import Recording


def restorer(inputs: Mapping[str, Any]) -> Callable[[], None]:
    """Returns a function that resets the cache's token counters, so that the next call equals the first."""
    layers = getattr(inputs.get("past_key_values"), "layers", ())
    counters = [c for layer in layers if isinstance(c := getattr(layer, "cumulative_length", None), torch.Tensor)]
    copies = [(counter, counter.clone()) for counter in counters]

    def restore() -> None:
        for counter, before in copies:
            counter.copy_(before)

    return restore


def device_of(model: Any, inputs: Mapping[str, Any]) -> torch.device:
    found = [*getattr(model, "parameters", list)(), *(t for t in inputs.values() if isinstance(t, torch.Tensor))]
    return found[0].device if found else torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def recorded(fast: CompiledModel, inputs: Mapping[str, Any], calls: int) -> Recording:
    """Records some calls, after one that compiles."""
    restore = restorer(inputs)
    fast(**inputs)
    with df.record() as recording:
        for _ in range(calls):
            restore()
            fast(**inputs)
    restore()
    return recording


def longest(recording: Recording) -> RecordedPlan:
    """Returns the plan that took the most time."""
    timed = [plan for plan in recording.plans if plan.timed]
    if not timed:
        raise DynaFlowError(f"no task was recorded: {recording}", advice="`dynaflow plan` shows what there is")
    return max(timed, key=lambda plan: plan.seconds)
