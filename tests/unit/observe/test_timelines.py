"""Timelines as data: made, read, summed up, and put on a page."""

from __future__ import annotations

import gzip
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import dynaflow as df
from dynaflow.cli import app, main
from dynaflow.cli.plan_for_device import in_sequence
from dynaflow.core.device import H200
from dynaflow.core.plan import Item, Lane, MicroBatch, Plan, Task
from dynaflow.core.plan_text import draw
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulate import simulate
from dynaflow.observe.document import Counter, Document, TimedTask
from dynaflow.observe.page import baselines, levels, page, scales
from dynaflow.observe.readers import of_trace, read
from dynaflow.observe.summary import AFTER, BEFORE, BETWEEN, summarize
from dynaflow.observe.timelines import of_plan, of_simulation, of_spans
from tests.helpers import STACK_RULES, Each, Stack, compiled, graph_of, lines_run


def task(name: str, lane: str, start: float, end: float, **more: Any) -> TimedTask:
    return TimedTask(name=name, lane=lane, start=start, end=end, **more)


def document(*tasks: TimedTask, **more: Any) -> Document:
    lanes = tuple(Lane(name=n) for n in dict.fromkeys(t.lane for t in tasks))
    return Document(**{"title": "made up", "source": "measured", "lanes": lanes, "tasks": tasks, **more})


def small_plan() -> Plan:
    """Two micro-batches of a, b, c, where b is on another lane."""
    def one(op: str, part: int, lane: str, *after: int) -> Task:
        return Task(items=(Item(op=op, micro_batches=(part,)),), lane=lane, after=after)

    return Plan(
        graph="g",
        micro_batches=(MicroBatch(index=0, start=0, stop=4), MicroBatch(index=1, start=4, stop=6)),
        lanes=(Lane(name="compute"), Lane(name="link", sms=16, priority=-1)),
        tasks=(one("a", 0, "compute"), one("b", 0, "link", 0), one("a", 1, "compute"), one("b", 1, "link", 2),
               one("c", 0, "compute", 1), one("c", 1, "compute", 3)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def stack() -> tuple[Any, Plan]:
    fast = compiled(Stack(), Each(STACK_RULES, 2, lanes=2))
    with torch.no_grad():
        plan = fast.plan(torch.ones(6, 8))
    return graph_of(fast), plan


# The documents


def test_a_document_is_the_same_after_json() -> None:
    whole = document(
        task("a", "x", 0.0, 1.0, op="a", tags=("t",), rows=4, reads=("v: float32 [4]",), uses={"link": 0.5}, bytes=9),
        task("b", "y", 1.0, 2.0, after=(0,), micro_batches=(1,), note="n", writes=("w",)),
        counters=(Counter(name="memory", points=((0.0, 1.0), (1.0, 0.0)), unit="bytes"),),
        whole=(0.0, 3.0),
        device="h200",
    )
    assert Document.from_json(whole.to_json()) == whole
    assert whole.length == 3.0
    assert "tags" not in whole.to_dict()["tasks"][1], "what is as usual is not written"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tasks": [{"name": "a", "lane": "x", "start": 2, "end": 1}]}, "no task ends before it starts"),
        ({"tasks": [{"name": "a", "lane": "z", "start": 0, "end": 1}]}, "list the lane"),
        ({"tasks": [{"name": "a", "lane": "x", "start": 0, "end": 1, "after": [0]}]}, "waits for [0]"),
        ({"tasks": [{"name": "a", "lane": "x", "start": 0, "end": 1, "after": [7]}]}, "waits for [7]"),
        ({"tasks": [{"name": "a", "lane": "x", "start": float("nan"), "end": 1}]}, "from nan to 1"),
        ({"tasks": [{"lane": "x", "start": 0, "end": 1}]}, "tasks[0].name: missing"),
        ({"tasks": [3]}, "malformed timeline: tasks[0]"),
        ({"lanes": [{"name": "x"}, {"name": "x"}]}, "two lanes"),
        ({"counters": [{"name": "m", "points": [[0, float("inf")]]}]}, "counter m"),
        ({"tasks": [{"name": "a", "lane": "x", "start": 0, "end": 1, "uses": {"sms": float("nan")}}]}, "uses"),
        ({"counters": [{"name": "m", "points": [[1, 0], [0, 1]]}]}, "counter m goes back"),
        ({"whole": [2, 1]}, "from 2.0 to 1.0"),
        ({"source": "guessed"}, "planned, simulated, measured"),
        ({"format": 7}, "format 7"),
        ({"title": 3}, "expected a string"),
        ({"tasks": [{"name": "a", "lane": "x", "start": 0, "end": 1, "rows": 1.5}]}, "rows: expected an integer"),
    ],
)
def test_a_wrong_document_is_told(change: dict[str, Any], told: str) -> None:
    data = {"kind": "dynaflow.timeline", "format": 1, "title": "t", "source": "measured", "lanes": [{"name": "x"}]}
    data |= {"tasks": [], **change}
    with pytest.raises(df.TimelineError, match=re.escape(told)) as found:
        Document.from_json(json.dumps(data))
    assert found.value.advice


def test_a_plan_in_steps() -> None:
    made = of_plan(small_plan())
    assert made.source == "planned" and made.unit == "steps" and made.length == 4
    assert [(t.start, t.end) for t in made.tasks] == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4)]
    assert made.tasks[3].name == "b[1]" and made.tasks[3].rows == 2 and made.tasks[3].after == (2,)
    assert made.lanes[1] == Lane(name="link", sms=16, priority=-1)
    assert not of_plan(in_sequence(small_plan())).tasks


@pytest.mark.parametrize("spans", [None, [(float(i), i + 1.0) for i in range(6)]])
@pytest.mark.parametrize("length", [105, 108, 120])
def test_a_plan_whose_lane_has_a_long_name(length: int, spans: Any) -> None:
    text = small_plan().to_json().replace("compute", "c" * length)
    rows = draw(Plan.from_json(text), spans, 110).splitlines()
    assert sum(row.startswith("c") and "A" in row.split("|")[1] for row in rows) == 1
    assert "B" in "".join(row.split("|")[1] for row in rows if row.lstrip().startswith("link"))


def test_a_plan_that_waits_for_what_comes_later() -> None:
    plan = small_plan()
    wrong = Plan(graph="g", micro_batches=plan.micro_batches, lanes=plan.lanes,
                 tasks=(plan.tasks[1], plan.tasks[0]))  # fmt: skip
    with pytest.raises(df.PlanError, match="wait cycle"):
        of_plan(wrong)


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ((), "0 operators"),
        ((Item(op="a", micro_batches=(2,)),), "not there"),
        ((Item(op="a", micro_batches=(-1,)),), "not there"),
    ],
)
def test_a_plan_whose_parts_are_not_there(items: tuple[Item, ...], told: str, tmp_path: Path) -> None:
    plan = small_plan()
    wrong = Plan(graph="g", micro_batches=plan.micro_batches, lanes=plan.lanes,
                 tasks=(Task(items=items, lane="compute"),))  # fmt: skip
    (tmp_path / "plan.json").write_text(wrong.to_json())
    with pytest.raises(df.TimelineError, match=rf"plan\.json: task 0 .*{told}"):
        read(tmp_path / "plan.json")


def test_a_plan_with_its_graph(stack: tuple[Any, Plan]) -> None:
    graph, plan = stack
    made = of_plan(plan, graph)
    first = next(t for t in made.tasks if t.op.endswith("layers.0.attn") and t.micro_batches == (0,))
    assert first.tags == ("attention",) and first.rows == 3
    assert any("float32 [3, 8]" in value for value in first.reads + first.writes)
    assert len(of_plan(in_sequence(plan), graph).tasks) == len(graph.ops)


def test_a_simulation(stack: tuple[Any, Plan]) -> None:
    graph, plan = stack
    costs = Costs(graph, H200)
    found = simulate(plan, graph, costs, H200)
    made = of_simulation(found, graph, costs, title="two parts")
    assert made.source == "simulated" and made.length == found.seconds and made.device == found.device
    assert [(t.start, t.end) for t in made.tasks] == [(s.start, s.end) for s in found.spans]
    assert all(t.uses and t.bytes for t in made.tasks if t.tags)
    assert {c.unit for c in made.counters} == {"fraction"}
    assert of_simulation(found).tasks[0].name == made.tasks[0].name, "without the graph, too"
    whole = simulate(in_sequence(plan), graph, costs, H200)
    assert [t.name for t in of_simulation(whole).tasks] == [op.name for op in graph.ops]


def test_measured_spans() -> None:
    plan = small_plan()
    made = of_spans(plan, [(float(i), i + 1.0) for i in range(6)], device="cpu")
    assert made.source == "measured" and made.unit == "s" and made.tasks[4].after == (1,)
    with pytest.raises(df.TimelineError, match="2 spans for a plan of 6 tasks"):
        of_spans(plan, [(0.0, 1.0)] * 2)
    assert [t.name for t in of_spans(in_sequence(plan), [(0.0, 3.0)]).tasks] == ["model"]


# What they say


def test_the_critical_path_goes_over_lanes() -> None:
    found = summarize(document(
        task("a", "x", 0.0, 1.0, op="l.0.a"),
        task("long", "y", 1.0, 5.0, after=(0,)),
        task("b", "x", 1.0, 2.0, op="l.1.a"),
        task("c", "x", 5.5, 6.0, after=(1,)),
        task("d", "y", 5.0, 5.2),
    ))  # fmt: skip
    assert found.path == (0, 1, 3) and found.blocked_by == (-1, 0, 0, 1, 1)
    assert [tuple(s) for s in found.on_path] == [("long", 4.0, 1), ("l.*.a", 1.0, 1), ("c", 0.5, 1)]
    assert found.waiting == pytest.approx(0.5)


def test_idle_time_has_a_name() -> None:
    found = summarize(document(
        task("a", "x", 1.0, 2.0),
        task("b", "y", 2.5, 4.0, after=(0,)),
        task("c", "x", 4.5, 5.0, after=(1,)),
        task("d", "x", 5.5, 6.0),
        whole=(0.0, 8.0),
    ))  # fmt: skip
    x, y = found.lanes
    assert (x.busy, x.idle, x.tasks) == (2.0, 6.0, 3) and (y.busy, y.idle) == (1.5, 6.5)
    assert {c.name: c.seconds for c in x.causes} == {"waiting for b on y": 2.5, AFTER: 2.0, BEFORE: 1.0, BETWEEN: 0.5}
    assert y.causes[0].name == AFTER and y.causes[1].name == "waiting for a on x"


def test_nested_calls_count_once() -> None:
    made = document(task("outer", "x", 0.0, 4.0), task("inner", "x", 1.0, 2.0), task("next", "x", 4.0, 5.0))
    assert levels(made.tasks) == [0, 1, 0]
    found = summarize(made)
    assert found.lanes[0].busy == 5.0 and found.lanes[0].idle == 0.0 and found.path == (0, 2)


def test_an_empty_timeline() -> None:
    found = summarize(Document(title="", source="planned", lanes=(Lane(name="main"),), tasks=()))
    assert found.path == () and found.lanes[0].idle == 0.0


times = st.lists(
    st.tuples(st.sampled_from("xyz"), st.integers(0, 50), st.integers(0, 9), st.lists(st.integers(0, 30), max_size=3)),
    min_size=1, max_size=30,
)  # fmt: skip


@given(times)
@settings(max_examples=150, deadline=None)
def test_whatever_a_clock_says(found: list[tuple[str, int, int, list[int]]]) -> None:
    tasks = [
        task(f"t{i}", lane, float(start), float(start + length), after=tuple(set(after) & set(range(len(found))) - {i}))
        for i, (lane, start, length, after) in enumerate(found)
    ]
    made = document(*tasks)
    told = summarize(made)
    assert len(set(told.path)) == len(told.path), "no path goes in a circle"
    assert tasks[told.path[-1]].end == made.end
    for use in told.lanes:
        assert use.busy + use.idle == pytest.approx(made.length)
    rows = levels(made.tasks)
    for i, a in enumerate(tasks):
        for j, b in enumerate(tasks[:i]):
            if (a.lane, rows[i]) == (b.lane, rows[j]):
                assert a.end <= b.start or b.end <= a.start, "no two are drawn over each other"


def test_many_tasks_at_one_moment() -> None:
    """Each is held up by the one before it, which is not looked for among all of them."""
    few, many = (document(*(task(f"t{i}", "x", 0.0, 0.0) for i in range(count))) for count in (500, 1000))
    assert summarize(many).blocked_by == tuple(range(-1, 999))
    assert lines_run(lambda: summarize(many)) < 2.2 * lines_run(lambda: summarize(few))


def test_one_scale_and_what_is_compared() -> None:
    planned = of_plan(small_plan())
    short, long = document(task("a", "x", 0.0, 1.0)), document(task("a", "x", 2.0, 10.0))
    assert scales([planned, short, long]) == [2.0, 1.0, 1.0]
    assert scales([planned, planned]) == [1.0, 1.0]
    assert baselines([planned, short, long, planned]) == [None, None, 1, 0]


# Files


def test_a_simulation_s_trace(tmp_path: Path, stack: tuple[Any, Plan]) -> None:
    graph, plan = stack
    found = simulate(plan, graph, Costs(graph, H200), H200)
    file = tmp_path / "run.json"
    file.write_text(found.to_json())
    made, direct = read(file), of_simulation(found, graph)
    assert made.source == "simulated" and made.title == "run" and made.length == pytest.approx(found.seconds)
    assert {lane.name for lane in made.lanes} == {lane.name for lane in plan.lanes}
    by_name = {t.name: t for t in made.tasks}
    for there in direct.tasks:
        here = by_name[there.name]
        assert (here.op, here.micro_batches, here.lane) == (there.op, there.micro_batches, there.lane)
        assert {made.tasks[a].name for a in here.after} == {direct.tasks[a].name for a in there.after}
        assert here.start == pytest.approx(there.start, abs=1e-12)


def test_a_profiler_s_trace(tmp_path: Path) -> None:
    def event(name: str, cat: str, tid: int, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": {"grid": 4}}

    events = [
        event("aten::mm", "cpu_op", 99, 0, 900),
        event("void gemm<float, 128>(int)", "kernel", 20, 1100, 50),
        event("void gemm<half, 64>(int)", "kernel", 7, 1010, 40),
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "GPU 0"}},
    ]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    made = read(file)
    assert made.source == "measured" and made.device == "GPU 0" and made.title == "trace"
    assert [lane.name for lane in made.lanes] == ["stream 7", "thread 20"]
    assert [t.op for t in made.tasks] == ["gemm", "gemm"], "one kind whatever the types, without the host's calls"
    assert made.length == pytest.approx(140e-6)
    assert of_trace({"traceEvents": events[:1]}).tasks[0].name == "aten::mm", "of a host alone, its calls"


def test_a_trace_of_others_may_say_after_in_its_own_way() -> None:
    said = {"ph": "X", "name": "a", "cat": "task", "ts": 0, "dur": 1, "args": {"task": 0, "after": [[1], "b", None]}}
    assert of_trace({"traceEvents": [said]}).tasks[0].after == ()


def test_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    whole = gzip.compress(b'{"traceEvents": []}' * 50)
    for part in (whole[:-12], whole[:14] + b"\0\0\0\0" + whole[18:]):
        file.write_bytes(part)
        with pytest.raises(df.TimelineError, match=r"trace\.json\.gz"):
            read(file)


def test_torch_s_profiler_can_be_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        torch.ones(8, 8) @ torch.ones(8, 8)
    file = tmp_path / "profile.json"
    found.export_chrome_trace(str(file))
    names = [t.name for t in read(file).tasks]
    assert any("mm" in name for name in names) and not any("Profiler" in name for name in names)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "can't be read: No such file"),
        ("{", "is not JSON"),
        ("3", "neither a plan, nor a timeline, nor a trace"),
        ('{"a": 1}', "neither a plan"),
        ('{"traceEvents": []}', "no complete event"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon"}]}', "write times as microseconds"),
        ('{"micro_batches": [], "format": 9}', "format 1"),
        ('{"kind": "dynaflow.timeline", "format": 9}', "format 9"),
    ],
)
def test_wrong_files(
    text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["dynaflow", "view", "--no-open", str(file)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert told in error and "wrong.json" in error.replace(" ", "") and error.count("what to do:") == 1


# The page


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    plan, run = tmp_path / "plan.json", tmp_path / "run.json"
    plan.write_text(small_plan().to_json())
    run.write_text(of_spans(small_plan(), [(float(i), i + 1.0) for i in range(6)]).to_json())
    found = CliRunner().invoke(app, ["view", str(plan), str(run), "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["page"] == str(tmp_path / "plan.html")
    assert [t["source"] for t in told["timelines"]] == ["planned", "measured"]
    assert opened == [(tmp_path / "plan.html").as_uri()]
    other = tmp_path / "other.html"
    found = CliRunner().invoke(app, ["view", str(plan), "--no-open", "--out", str(other)])
    assert found.exit_code == 0 and other.exists() and len(opened) == 1


def test_a_page_that_can_t_be_written(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(small_plan().to_json())
    found = CliRunner().invoke(app, ["view", str(plan), "--no-open", "--out", str(tmp_path / "no" / "page.html")])
    assert isinstance(found.exception, df.DynaFlowError) and "can't be written" in str(found.exception)


class Tags(HTMLParser):
    """The scripts of a page, and what its tags refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.references: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def test_the_page_needs_nothing_else() -> None:
    text = page([of_plan(small_plan())])
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)
    assert set(Tags(text).references) <= {"data:,", "#tasks"}


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!-- <script>", "{{data}} & \u2028 \\ \"'"])
def test_names_can_t_break_out(name: str) -> None:
    made = document(task(name, name, 0.0, 1.0, op=name, note=name, tags=(name,)), title=name)
    found = Tags(page([made]))
    assert len(found.scripts) == 4, "the data and the three of the page"
    data = json.loads(found.scripts[0])["documents"][0]
    assert data["title"] == name and data["tasks"][0]["name"] == name and data["lanes"][0]["name"] == name


def test_a_page_of_nothing() -> None:
    with pytest.raises(df.TimelineError, match="no timeline to show"):
        page([])
