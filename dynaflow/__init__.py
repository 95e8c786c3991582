"""DynaFlow: programmable intra-device parallelism for PyTorch."""

import importlib
from typing import Any

from dynaflow.api import CompiledModel, compile
from dynaflow.capture.declared import by_rows, collective
from dynaflow.capture.ops import Op
from dynaflow.capture.rules import SplitFunc, SplitModule, mark
from dynaflow.errors import (
    DynaFlowError,
    FallbackWarning,
    PartitionError,
    PlanError,
    RecordingError,
    ScheduleError,
    SplitError,
    TimelineError,
    VerifyError,
)
from dynaflow.offload import offload, restore
from dynaflow.options import configure
from dynaflow.recording import Recording, record
from dynaflow.schedule.base import OpSchedulerBase, Sequential, choose
from dynaflow.schedule.check import check
from dynaflow.schedule.context import OpItem, ScheduleContext
from dynaflow.schedule.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.stats import Stats
from dynaflow.training import TrainStep
from dynaflow.view.report import Report
from dynaflow.view.text import draw

__version__ = "0.1.0"

__all__ = [
    "CompiledModel",
    "DynaFlowError",
    "FallbackWarning",
    "Item",
    "Lane",
    "MicroBatch",
    "Op",
    "OpItem",
    "OpSchedulerBase",
    "PartitionError",
    "Plan",
    "PlanError",
    "Recording",
    "RecordingError",
    "Report",
    "ScheduleContext",
    "ScheduleError",
    "Sequential",
    "SplitError",
    "SplitFunc",
    "SplitModule",
    "Stats",
    "Task",
    "TimelineError",
    "TrainStep",
    "VerifyError",
    "by_rows",
    "check",
    "choose",
    "collective",
    "compile",
    "configure",
    "draw",
    "mark",
    "offload",
    "record",
    "restore",
]


def __getattr__(name: str) -> Any:
    """`dynaflow.integrations`, imported when asked for."""
    if name == "integrations":
        return importlib.import_module("dynaflow.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
