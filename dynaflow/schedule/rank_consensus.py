"""Ranks that meet in collectives must have planned to meet alike, or they wait for each other forever.

Each rank leaves what it has planned in the store of its process group and reads what the others left, before the plan
is compiled. No collective is needed for that, so it can't hang: a rank that leaves nothing is named after a while.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from datetime import timedelta

from dynaflow import _torch
from dynaflow.core.plan import Plan
from dynaflow.errors import PlanError
from dynaflow.partition.op_graph import OpGraph

PATIENCE = timedelta(minutes=10)
"""Another rank may be tracing or compiling a model meanwhile."""
_EXCHANGE = "all_to_all_single"
_numbers = itertools.count()


class RankConsensus:
    """The plans of one compiled model that have been compared with those of other ranks."""

    def __init__(self) -> None:
        self._model: int | None = None
        self._plans = 0

    def verify(self, plan: Plan, graph: OpGraph) -> None:
        """Returns when all ranks that meet in this plan's collectives have planned the same order of them."""
        groups = sorted({group for op in graph.ops for group in op.groups})
        ranks = _torch.ranks_of(groups) if groups else ()
        if len(ranks) < 2:
            return
        if self._model is None:  # ranks compile the same models in the same order
            self._model = next(_numbers)
        mine, said = _torch.rank(), _digest(plan, graph)
        prefix = f"dynaflow/{self._model}/{self._plans}"
        self._plans += 1
        heard = _torch.exchange_texts(prefix, mine, ranks, said, PATIENCE)
        silent = [rank for rank in ranks if rank not in heard]
        if silent:
            raise PlanError(
                f"rank {silent[0]} has planned nothing to meet with rank {mine} in {PATIENCE.total_seconds():.0f} s",
                advice="call the compiled model on all ranks, in the same order and with the same shapes",
            )
        other = next((rank for rank in ranks if heard[rank] != said), None)
        if other is not None:
            raise PlanError(
                f"ranks {mine} and {other} have planned to meet in different orders, and would wait for each other "
                "forever",
                advice="let the schedule depend only on what all ranks have in common; compare print(fast.plan(...))",
            )


def _digest(plan: Plan, graph: OpGraph) -> str:
    """The meetings in order; and the sizes, which must be the same wherever ranks don't just exchange rows."""
    meetings: list[object] = []
    alike = False
    for task in plan.tasks or ():
        for item in task.items:
            op = graph.by_name[item.op]
            if op.groups:
                meetings.append((op.groups, item.op, item.micro_batches))
    for op in graph.ops:
        alike |= bool(op.groups) and _EXCHANGE not in op.functions
    sizes = [(m.start, m.stop) for m in plan.micro_batches] if alike else len(plan.micro_batches)
    return hashlib.sha256(json.dumps([plan.sequential, meetings, sizes]).encode()).hexdigest()
