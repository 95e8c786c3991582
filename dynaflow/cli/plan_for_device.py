"""A model's operators and its plan for a device, without running it: the input of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynaflow.core.device import Device, planned_for
from dynaflow.core.plan import MicroBatch, Plan
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase


def capture(
    model: nn.Module, scheduler: OpSchedulerBase, given: Mapping[str, Any], device: Device
) -> tuple[OpGraph, Plan]:
    """Returns the model's operators as the scheduler cuts them, and its plan for these inputs on the device."""
    from dynaflow.api import compile as compile_model

    with torch.no_grad(), planned_for(device):
        ready = compile_model(model, scheduler, operators="eager")._df_ready((), given)
    return ready.graph, ready.plan


def in_sequence(plan: Plan) -> Plan:
    """Returns the plan of the uncut graph for the same batch."""
    whole = MicroBatch(index=0, start=0, stop=plan.batch_size)
    return Plan(graph=plan.graph, micro_batches=(whole,), lanes=(), tasks=())
