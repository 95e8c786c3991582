"""What `draw` shows; that it shows any plan is in test_plan.py and test_plan_form.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dynaflow as df
from dynaflow.core.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.core.plan_text import kind_of, on_cpu, resource_label, steps_of


def task(op: str, part: int, lane: str, *after: int) -> Task:
    return Task(items=(Item(op=op, micro_batches=(part,)),), lane=lane, after=after)


PLAN = Plan(
    graph="g",
    micro_batches=(MicroBatch(index=0, start=0, stop=2), MicroBatch(index=1, start=2, stop=4)),
    lanes=(Lane(name="main"), Lane(name="other")),
    tasks=(
        task("layers.0.attn", 0, "other"),
        task("layers.0.attn", 1, "other", 0),
        task("layers.0.mlp", 0, "main", 0),
        task("layers.1.attn", 0, "other", 2),
    ),
)


def test_steps_wait_for_their_lane_and_for_others() -> None:
    assert steps_of(PLAN) == [(0, 1), (1, 2), (1, 2), (2, 3)]


def test_a_letter_is_a_kind_of_operator_and_a_digit_a_micro_batch() -> None:
    main, other, legend = df.draw(PLAN).splitlines()
    assert main.split("|")[1] == "    [B0]"
    assert other.split("|")[1] == "[A0][A1][A0]"
    assert legend.strip() == "A layers.*.attn, B layers.*.mlp"


def test_measured_times_set_the_widths() -> None:
    main, other, *legend = df.draw(PLAN, [(0, 1), (1, 2), (1, 3), (3, 4)], width=47).splitlines()
    assert main == " main |          [B0················]"
    assert other == "other |[A0······][A1······]          [A0······]"
    assert "(4.00 ms)" in " ".join(" ".join(legend).split())


def test_a_merged_task_says_so() -> None:
    merged = replace(PLAN.tasks[0], items=(Item(op="layers.0.attn", micro_batches=(0, 1)),))
    assert "A*" in df.draw(replace(PLAN, tasks=(merged,), lanes=PLAN.lanes[1:]))


def test_a_long_plan_takes_several_rows() -> None:
    tasks = tuple(task(f"op{i}", 0, "main") for i in range(10))
    drawn = df.draw(replace(PLAN, lanes=PLAN.lanes[:1], tasks=tasks), width=26)
    rows = [line for line in drawn.splitlines() if line.startswith("main |")]
    assert len(rows) == 2 and drawn.count("[") == 10


@pytest.mark.parametrize("spans", ["0123", [(0, 1)], [(0, 1, 2)] * 4, [(0, float("nan"))] * 4, 4])
def test_wrong_times(spans: object) -> None:
    with pytest.raises(df.TimelineError, match=r"draw\(spans\)"):
        df.draw(PLAN, spans)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [0, -1, 1.5, True, "wide"])
def test_wrong_widths(width: object) -> None:
    with pytest.raises(df.TimelineError, match=r"draw\(width\)"):
        df.draw(PLAN, width=width)  # type: ignore[arg-type]


def test_kinds_and_resources() -> None:
    assert kind_of("layers.12.mlp.0#2") == "layers.*.mlp.*" and kind_of("conv2d") == "conv2d"
    assert resource_label("sms", "cpu") == "cores" and resource_label("sms", "h200") == "sms"
    assert resource_label("link", "cpu:0") == "link" and on_cpu("cpu:0") and not on_cpu("cpux")
