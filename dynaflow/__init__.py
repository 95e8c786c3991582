"""DynaFlow: programmable intra-device parallelism for PyTorch."""

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
"""Where the public names are. Each is imported when it is asked for; types are in `__init__.pyi`."""

_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

_PACKAGES = ("integrations", "strategies")
"""Imported when asked for, too: `dynaflow.strategies.NanoFlow`."""

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
