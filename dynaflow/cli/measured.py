"""A model run under a schedule, and watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import dynaflow as df
from dynaflow.schedule.base import OpSchedulerBase
from dynaflow.view.document import Document
from dynaflow.view.makers import of_spans
from dynaflow.view.summary import summarize


def restorer(inputs: Mapping[str, Any]) -> Callable[[], None]:
    """Makes the next call equal to the first: a cache counts its tokens, and what it holds is written again."""
    layers = getattr(inputs.get("past_key_values"), "layers", ())
    counters = [c for layer in layers if isinstance(c := getattr(layer, "cumulative_length", None), torch.Tensor)]
    kept = [(counter, counter.clone()) for counter in counters]

    def restore() -> None:
        for counter, before in kept:
            counter.copy_(before)

    return restore


def device_of(model: Any, inputs: Mapping[str, Any]) -> torch.device:
    found = [*getattr(model, "parameters", list)(), *(t for t in inputs.values() if isinstance(t, torch.Tensor))]
    return found[0].device if found else torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def watched(
    model: Any, scheduler: OpSchedulerBase, inputs: Mapping[str, Any], *, operators: str, calls: int, title: str
) -> Document:
    """When each task of the last of some calls ran."""
    seen = df.Timeline()
    fast = df.compile(model, scheduler, operators=operators, on_task=seen)  # type: ignore[arg-type]
    restore, device = restorer(inputs), device_of(model, inputs)
    start = end = 0.0
    for _ in range(calls):
        restore()
        start = time.perf_counter()
        fast(**inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
    restore()
    ready = fast._ready((), inputs)
    if ready.plan.sequential:  # one call, which has no tasks to watch
        return of_spans(ready.plan, [(0.0, end - start)], title=title, device=device_name(device))
    spans = [(a / 1e3, b / 1e3) for a, b in seen.spans(ready.plan)]
    return of_spans(ready.plan, spans, ready.graph, title=title, device=device_name(device))


def overlap(document: Document) -> float:
    """How many lanes were busy on average."""
    return sum(lane.busy for lane in summarize(document).lanes) / document.length if document.length else 1.0
