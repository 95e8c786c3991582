"""Verifies that all ranks plan their collectives in the same order; otherwise they would deadlock.

Contract
    `RankConsensus.verify` takes a plan and its graph, before the plan is compiled. Returns nothing, changes nothing.
    Errors with PlanError, which names the ranks, if plans differ or a rank does not answer within PATIENCE.
    Runs no collective, so it can't deadlock itself.

Steps
    1. Collect the ranks of all process groups in the graph. With fewer than two, there is nothing to verify.
    2. Write a digest of the collectives, in order, to the store of the process group, and read those of the others.
    3. Compare.
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
"""Another rank may be tracing or compiling a model in the meantime."""
_EXCHANGE = "all_to_all_single"
_numbers = itertools.count()


class RankConsensus:
    """The plans of one compiled model that have been compared with those of other ranks."""

    def __init__(self) -> None:
        self._model: int | None = None
        self._plans = 0

    def verify(self, plan: Plan, graph: OpGraph) -> None:
        """Returns when all ranks have planned the same order of collectives."""
        # 1.
        groups = sorted({group for op in graph.ops for group in op.groups})
        ranks = _torch.ranks_of(groups) if groups else ()
        if len(ranks) < 2:
            return
        # 2.
        if self._model is None:  # ranks compile the same models in the same order
            self._model = next(_numbers)
        mine, digest = _torch.rank(), _digest(plan, graph)
        prefix = f"dynaflow/{self._model}/{self._plans}"
        self._plans += 1
        found = _torch.exchange_texts(prefix, mine, ranks, digest, PATIENCE)
        # 3.
        silent = [rank for rank in ranks if rank not in found]
        if silent:
            raise PlanError(
                f"rank {silent[0]} has planned nothing to meet with rank {mine} in {PATIENCE.total_seconds():.0f} s",
                advice="call the compiled model on all ranks, in the same order and with the same shapes",
            )
        other = next((rank for rank in ranks if found[rank] != digest), None)
        if other is not None:
            raise PlanError(
                f"ranks {mine} and {other} have planned to meet in different orders, and would wait for each other "
                "forever",
                advice="let the schedule depend only on what all ranks have in common; compare print(fast.plan(...))",
            )


def _digest(plan: Plan, graph: OpGraph) -> str:
    """The collectives in order, and the sizes, which must be equal unless ranks only exchange rows."""
    collectives: list[object] = []
    equal_sizes = False
    for task in plan.tasks or ():
        for item in task.items:
            op = graph.by_name[item.op]
            if op.groups:
                collectives.append((op.groups, item.op, item.micro_batches))
    for op in graph.ops:
        equal_sizes |= bool(op.groups) and _EXCHANGE not in op.functions
    sizes = [(m.start, m.stop) for m in plan.micro_batches] if equal_sizes else len(plan.micro_batches)
    return hashlib.sha256(json.dumps([plan.sequential, collectives, sizes]).encode()).hexdigest()
