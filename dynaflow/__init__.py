"""DynaFlow: programmable intra-device parallelism for PyTorch."""

from dynaflow.api import CompiledModel, compile
from dynaflow.capture.ops import Op
from dynaflow.capture.rules import SplitFunc, SplitModule, mark
from dynaflow.errors import DynaFlowError, PartitionError, PlanError, ScheduleError, SplitError, VerifyError
from dynaflow.offload import offload, restore
from dynaflow.schedule.base import OpSchedulerBase, Sequential, choose
from dynaflow.schedule.check import check
from dynaflow.schedule.context import OpItem, ScheduleContext
from dynaflow.schedule.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.stats import Stats
from dynaflow.view.text import draw
from dynaflow.view.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "CompiledModel",
    "DynaFlowError",
    "Item",
    "Lane",
    "MicroBatch",
    "Op",
    "OpItem",
    "OpSchedulerBase",
    "PartitionError",
    "Plan",
    "PlanError",
    "ScheduleContext",
    "ScheduleError",
    "Sequential",
    "SplitError",
    "SplitFunc",
    "SplitModule",
    "Stats",
    "Task",
    "Timeline",
    "VerifyError",
    "check",
    "choose",
    "compile",
    "draw",
    "mark",
    "offload",
    "restore",
]
