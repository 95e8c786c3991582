"""DynaFlow: programmable intra-device parallelism for PyTorch.

`compile(model, scheduler)` captures a model, cuts its graph into operators, and runs them as a scheduler says: on
lanes, in micro-batches, in any order that is safe. All public names are here; each is imported on first use, so that
`import dynaflow` loads nothing else. The packages, from the top; each imports only those below it:

- `cli`, `integrations`, `api`, `options`: the entry points. `training`, `serving`, `strategies`: schedules by name.
- `observe`: what ran. `tune`: measurements and the search. `engine`: from a call to a compiled plan.
- `lower`, `runtime`: a plan as code on streams or threads. `schedule`: what a scheduler sees; the check.
- `cost`: the cost model and the simulator. `partition`, `capture`: the graph and its operators.
- `core`: plans, devices, errors and other common nouns. `_torch`: private APIs of torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "dynaflow.api": ("CompiledModel", "compile"),
    "dynaflow.capture.annotations": ("mark",),
    "dynaflow.capture.offload": ("offload", "restore"),
    "dynaflow.capture.op_registry": ("by_rows", "collective"),
    "dynaflow.core.plan": ("Item", "Lane", "MicroBatch", "Plan", "Task"),
    "dynaflow.core.plan_text": ("draw",),
    "dynaflow.core.stats": ("Stats",),
    "dynaflow.errors": (
        "DynaFlowError",
        "FallbackWarning",
        "PartitionError",
        "PlanError",
        "RecordingError",
        "ScheduleError",
        "SplitError",
        "TimelineError",
        "VerifyError",
    ),
    "dynaflow.observe.recording": ("Recording", "record"),
    "dynaflow.observe.report": ("Report",),
    "dynaflow.options": ("configure",),
    "dynaflow.partition.op_graph": ("Op",),
    "dynaflow.partition.rules": ("SplitFunc", "SplitModule"),
    "dynaflow.schedule.base": ("OpSchedulerBase", "Sequential", "WrappingScheduler"),
    "dynaflow.schedule.check": ("check",),
    "dynaflow.schedule.context": ("ScheduleContext",),
    "dynaflow.schedule.op_item": ("OpItem",),
    "dynaflow.strategies.choice": ("choose",),
    "dynaflow.training.train_step": ("TrainStep",),
}
"""The module of each public name, imported on first use. Types are in `__init__.pyi`."""

_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

_PACKAGES = ("integrations", "strategies")
"""Packages that are imported on first use: `dynaflow.strategies.NanoFlow`."""

__all__ = sorted(_PLACE_OF)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_PLACE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_PACKAGES]
