"""The passes of lowering: text before and after each, and that a pass changes only what its contract says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.core.plan import Plan
from dynaflow.lower.bind import bind
from dynaflow.lower.compile_ops import Operators
from dynaflow.lower.ir import Call, New, Program, Step
from dynaflow.lower.liveness import add_frees
from dynaflow.lower.memory import place_buffers
from dynaflow.partition.op_graph import OpGraph
from tests.helpers import Scheduler, compiled, graph_of

GOLDEN = Path(__file__).parent / "golden"
RULES = [df.SplitModule(nn.Linear), df.SplitModule(nn.ReLU)]


class Line(nn.Module):
    """Values that die early, one that is joined, one that every lane reads, and a counter that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        with df.mark("mix"):
            y = y - y.mean(0)
        return self.act(self.last(y)) + x


def halves(ctx: df.ScheduleContext) -> None:
    ctx.split([1, 2])
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, lane="ab"[op.micro_batch.index % 2])


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, OpGraph]:
    fast = compiled(Line(), Scheduler(halves, RULES))
    with torch.no_grad():
        plan = fast.plan(torch.ones(3, 2))
    return plan, graph_of(fast)


def bound(planned: tuple[Plan, OpGraph], *, buffers: bool = True, **options: bool) -> Program:
    plan, graph = planned
    operators = Operators("eager")
    operators.writes_into = buffers
    return bind(plan, graph, {**graph.graph.hints, **dict.fromkeys(graph.batch_axes[0], 3)}, operators, {}, **options)


def test_golden_text(planned: tuple[Plan, OpGraph]) -> None:
    """To the letter. UPDATE_GOLDEN=1 writes what is found: then read the difference."""
    program = bound(planned)
    texts = {"bind": str(bound(planned, buffers=False)), "liveness": str(add_frees(bound(planned, buffers=False)))}
    texts |= {"bind_into_buffers": str(program), "memory": str(place_buffers(add_frees(program)))}
    texts["elastic"] = str(add_frees(bound(planned, elastic=True)))
    for name, text in texts.items():
        file = GOLDEN / f"{name}.ir.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            file.write_text(text)
        assert text == file.read_text(), name


def without_frees(program: Program) -> Program:
    return replace(program, steps=tuple(replace(step, frees=(), frees_first=()) for step in program.steps))


def test_liveness_only_adds_frees(planned: tuple[Plan, OpGraph]) -> None:
    before = bound(planned, buffers=False)
    after = add_frees(before)
    assert without_frees(after) == before
    freed = [v for step in after.steps for v in (*step.frees_first, *step.frees)]
    assert freed and len(freed) == len(set(freed)), "each is let go once"
    assert not {v.root for v in freed} & {v.root for v in after.final_reads}, "results are not"


@pytest.mark.parametrize("elastic", [False, True])
def test_nothing_is_read_after_it_was_let_go(planned: tuple[Plan, OpGraph], elastic: bool) -> None:
    program = add_frees(bound(planned, buffers=False, elastic=elastic))
    before = program.happens_before
    for s, step in enumerate(program.steps):
        for var in (*step.frees_first, *step.frees):
            readers = [r for r, other in enumerate(program.steps) if var.root in {v.root for v in other.reads}]
            assert all(before[s] >> r & 1 or r == s for r in readers), f"{var} at step {s}, read at {readers}"
        assert not set(step.frees_first) & set(step.reads)


def test_memory_only_adds_places(planned: tuple[Plan, OpGraph]) -> None:
    before = add_frees(bound(planned))
    after = place_buffers(before)
    assert before.arena_bytes == 0 and not before.views
    assert after.arena_bytes > 0 and {v for v, _ in after.views} >= {b.var for b in after.buffers if not b.own}

    def calls(program: Program) -> list[Call]:
        return [i for step in program.steps for i in step.needs if isinstance(i, Call)]

    def rest(step: Step) -> Step:
        return replace(step, before=())

    assert calls(after) == calls(before)
    assert [rest(step) for step in after.steps] == [rest(step) for step in before.steps]
    made = [i.out for i in (*after.start, *(i for step in after.steps for i in step.before)) if isinstance(i, New)]
    assert made == [b.var for b in after.buffers if b.own], "each buffer of its own is allocated once"


def test_a_program_on_one_lane_waits_for_nothing(planned: tuple[Plan, OpGraph]) -> None:
    program = place_buffers(add_frees(bound(planned)))
    assert any(step.after for step in program.steps) and len(program.lanes) == 2
    row = program.on_one_lane()
    assert row.lanes == program.lanes[:1] and not any(step.after for step in row.steps)
    assert [step.call for step in row.steps] == [step.call for step in program.steps]
