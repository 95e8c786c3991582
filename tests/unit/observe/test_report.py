"""A timeline in words: for each reason a run in which it is the largest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaflow.core.plan import Lane
from dynaflow.observe.document import Document, TimedTask
from dynaflow.observe.page import page
from dynaflow.observe.report import (
    ADVICE,
    CONTENTION,
    CUTS,
    FEW,
    FILL,
    HOST,
    IMBALANCE,
    LONGER,
    Overlap,
    Report,
    report_of,
)


def run(*tasks: tuple[str, str, float, float], **more: Any) -> Document:
    """Of tasks as (name, lane, start, end)."""
    made = tuple(TimedTask(name=n, lane=lane, start=s, end=e, tags=(n,)) for n, lane, s, e in tasks)
    lanes = tuple(Lane(name=lane) for lane in dict.fromkeys(t.lane for t in made))
    return Document(**{"title": "run", "source": "measured", "lanes": lanes, "tasks": made, **more})


def reason(report: Report) -> tuple[str, float]:
    assert report.reasons, str(report)
    assert report.advice == ADVICE[report.reasons[0].name] and report.advice in str(report)
    return report.reasons[0].name, pytest.approx(report.reasons[0].seconds)


FREE: list[list[int]] = [[], [], [], [], [], [], [], []]
"""No task needs another."""


def test_at_the_bound() -> None:
    report = report_of(run(("a", "x", 0, 4), ("b", "y", 0, 4)), sequence=8.0, alone=[4, 4])
    assert report.reasons == () and report.bound == 4 and report.limit == "critical path"
    assert report.speedup == 2 and report.overlap == 2 and report.lanes == {"x": 1.0, "y": 1.0}
    assert report.overlaps == (Overlap("a", "b", 4),)
    assert "a with b for 4000.000 ms" in str(report) and "It is at the bound" in str(report)
    assert report.advice == ""


def test_fill_and_drain() -> None:
    """A pipeline of four: the second lane starts a task later, the first ends a task earlier."""
    first = [("a", "x", float(i), i + 1.0) for i in range(4)]
    second = [("b", "y", i + 1.0, i + 2.0) for i in range(4)]
    after = [[], [], [], [], [0], [1], [2], [3]]
    report = report_of(run(*first, *second), after=after, sequence=8.0, alone=[1.0] * 8)
    assert report.bound == 2 and reason(report) == (FILL, 1.0)
    assert [r.name for r in report.reasons] == [FILL]


def test_imbalance() -> None:
    tasks = [("a", "x", float(i), i + 1.0) for i in range(6)]
    report = report_of(run(*tasks, ("b", "y", 0, 1)), after=FREE, sequence=7.0, alone=[1.0] * 7)
    assert reason(report) == (IMBALANCE, 2.5)
    assert len(report.reasons) == 1


def test_lanes_that_wait_for_each_other() -> None:
    """Each lane is idle while the other runs, in the midst of the run."""
    tasks = [("a", "x", 0, 1), ("b", "y", 0, 1), ("a", "x", 1, 2), ("b", "y", 2, 3), ("a", "x", 3, 4), ("b", "y", 3, 4)]
    report = report_of(run(*tasks), after=FREE, sequence=6.0, alone=[1.0] * 6)
    assert reason(report) == (IMBALANCE, 1.0)


def test_contention() -> None:
    report = report_of(run(("a", "x", 0, 2), ("b", "y", 0, 2)), after=FREE, sequence=2.0, alone=[1.0, 1.0])
    assert report.bound == 1 and reason(report) == (CONTENTION, 1.0)
    assert report.speedup == 1


def test_cut_cost() -> None:
    report = report_of(run(("a", "x", 0, 2), ("b", "y", 0, 2)), after=FREE, sequence=1.5, alone=[2.0, 2.0])
    assert report.bound == 1.5 and report.limit == "the sequence"
    assert reason(report) == (CUTS, 0.5)  # of the 1.25 that the pieces cost, what lies above the bound
    assert report.speedup == 0.75


def test_cuts_or_contention() -> None:
    """Without the times alone it is one or the other."""
    report = report_of(run(("a", "x", 0, 2), ("b", "y", 0, 2)), after=FREE, sequence=1.5)
    assert reason(report)[0] == LONGER


def test_one_lane_has_nobody_beside_it() -> None:
    """What its tasks take longer than the uncut graph is what the cuts cost."""
    report = report_of(run(("a", "x", 0, 1), ("b", "x", 1, 2)), after=FREE, sequence=1.5)
    assert reason(report) == (CUTS, 0.5)


@pytest.mark.parametrize("lanes", ["x", "xy"])
def test_busy_lanes_are_not_the_bound(lanes: str) -> None:
    """Nothing is lost, but tasks that need nothing of each other run one after the other."""
    tasks = [("a", lane, i, i + 1) for i in (0, 1) for lane in lanes]
    report = report_of(run(*tasks), after=FREE, sequence=float(len(tasks)), alone=[1.0] * len(tasks))
    assert report.bound == 1 and reason(report) == (FEW, 1.0)
    assert "50% of that speed" in str(report) and "It is at the bound" not in str(report)


def test_tasks_that_take_no_time() -> None:
    report = report_of(run(("a", "x", 0, 0), ("b", "x", 2, 2)), after=FREE)
    assert reason(report) == (HOST, 2.0) and "2000.000 ms, of one call." in str(report)


def test_the_host_leaves_gaps() -> None:
    tasks = [("a", "x", 1, 2), ("b", "y", 3, 4), ("a", "x", 5, 6)]
    report = report_of(run(*tasks, whole=(0.0, 7.0)), after=FREE, sequence=3.0, alone=[1.0] * 3)
    assert reason(report) == (HOST, 4.0) and "on a GPU" in report.advice


def test_the_host_issues_all_the_time() -> None:
    """On CUDA tasks seem to follow each other closely, since each lasts until the host has issued its end."""
    tasks = [("a", "x", 0, 2), ("b", "y", 0, 2)]
    report = report_of(run(*tasks), after=FREE, alone=[0.5, 0.5], host=1.95)
    assert reason(report)[0] == HOST
    assert HOST not in {r.name for r in report_of(run(*tasks), after=FREE, alone=[0.5, 0.5], host=0.5).reasons}


def test_the_busiest_resource_is_a_bound() -> None:
    both = run(("a", "x", 0, 4), ("b", "y", 0, 4))
    uses = ({"memory": 0.45, "compute": 0.1}, {"memory": 0.45, "compute": 0.9})
    both = replace(both, tasks=tuple(replace(t, uses=u) for t, u in zip(both.tasks, uses, strict=True)))
    report = report_of(both)
    assert report.resources == {"memory": pytest.approx(0.9), "compute": pytest.approx(1.0)}
    short = report_of(both, alone=[2.0, 2.0])
    assert short.resources["memory"] == pytest.approx(0.45) and short.bound == 2
    assert report_of(both, alone=[2.0, 4.0], after=FREE).limit == "critical path"
    busy = replace(both, tasks=tuple(replace(t, uses={"memory": 0.8}) for t in both.tasks))
    assert report_of(busy, alone=[2.0, 2.0]).bound == pytest.approx(3.2)
    assert report_of(busy, alone=[2.0, 2.0]).limit == "memory"
    assert "memory 90%" in str(report) and "by the cost model" in str(report)


@pytest.mark.parametrize(("device", "said", "unsaid"), [("cpu", "cores", "SMs"), ("cuda:0", "sms", "cores")])
def test_a_cpu_has_cores(device: str, said: str, unsaid: str) -> None:
    both = run(("a", "x", 0, 4), ("b", "y", 0, 4), device=device)
    both = replace(both, tasks=tuple(replace(t, uses={"sms": 0.6}) for t in both.tasks))
    report = report_of(both, alone=[2.5, 2.5], after=FREE)
    assert report.limit == "sms" and set(report.resources) == {"sms"}, "data keeps its name"
    assert f"{said} 75%" in str(report) and f"({said})" in str(report)
    assert reason(replace(report, device="cuda"))[0] == CONTENTION
    assert unsaid not in str(report)
    assert f'"{said}":0.6' in page([both]) and f'"{unsaid.lower()}":' not in page([both])


def test_pairs_are_counted_once() -> None:
    """Two of a kind beside a third: the time counts once. Tasks of one lane are no pair."""
    tasks = [("a", "x", 0, 2), ("a", "y", 0, 2), ("b", "z", 1, 3), ("c", "z", 3, 4), ("c", "x", 3, 4)]
    assert report_of(run(*tasks)).overlaps == (Overlap("a", "a", 2), Overlap("a", "b", 1), Overlap("c", "c", 1))


def test_the_path_follows_lanes_if_nothing_else_is_known() -> None:
    report = report_of(run(("a", "x", 0, 1), ("b", "x", 1, 2), ("c", "y", 3, 4)))
    assert report.path == 2 and report.limit == "critical path"


def test_nothing_ran() -> None:
    empty = report_of(Document(title="empty", source="measured", lanes=(), tasks=()))
    assert empty.seconds == 0 and empty.reasons == () and "Nothing ran" in str(empty)
