"""Recordings: what really ran, as data, as a trace and in words; and nothing changed when none is on."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import threading
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.engine import recorder
from dynaflow.lower.compile_ops import Operators
from dynaflow.lower.emit import emit, event_count
from dynaflow.lower.passes import make_program
from dynaflow.lower.segments import make_segments
from dynaflow.lower.timing import make_marks
from dynaflow.observe import recording as recordings
from dynaflow.observe.document import Document
from dynaflow.observe.page import page
from dynaflow.observe.readers import of_trace, read
from tests.helpers import STACK_RULES, Each, Stack, compiled, lowered_of, pretend_graphs, randn, ready_for
from tests.unit.lower.test_shape_polymorphic import CUTS, Stretching
from tests.zoo import ZOO


class Line(nn.Module):
    """Three operators, of which the second has a lane of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


class Lanes(df.OpSchedulerBase):
    def __init__(self, parts: int = 2) -> None:
        self.parts = parts

    def partition(self) -> list[Any]:
        return [df.SplitModule("b", tag="middle")]

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if self.parts == 0:
            return ctx.sequential()
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="side" if "middle" in op.tags else "main")


@pytest.fixture
def line() -> tuple[Any, Any, Tensor]:
    model = Line()
    with torch.no_grad():
        fast = compiled(model, Lanes())
        fast(randn(6, 16))
    return model, fast, randn(6, 16)


# Off and on


def test_off_runs_the_very_same_function(line: Any) -> None:
    """What a plan runs outside of a recording is the object that it ran before: that is why off costs nothing."""
    model, fast, x = line
    (lowered,) = lowered_of(fast)
    source = lowered.plan.code
    before = (lowered, lowered.entry.call, lowered.code, lowered.code.run, lowered.code.run.__code__)
    with torch.no_grad():
        with df.record() as recording:
            torch.testing.assert_close(fast(x), model(x))
        assert recorder.now is None and len(recording.calls) == 1
        torch.testing.assert_close(fast(x), model(x))
    (lowered,) = lowered_of(fast)
    after = (lowered, lowered.entry.call, lowered.code, lowered.code.run, lowered.code.run.__code__)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert lowered.plan.code == source and "marks" not in source and "clock" not in source
    assert "clock()" in lowered.marked().code.source


def test_the_code_that_marks_calls_the_same_operators(line: Any) -> None:
    _, fast, x = line
    compiled_before = fast.stats.operators_compiled
    with torch.no_grad(), df.record():
        fast(x)
    (lowered,) = lowered_of(fast)
    marked = lowered.marked()
    assert fast.stats.operators_compiled == compiled_before and fast.stats.plans == 1
    own = [text.strip() for text in lowered.code.source.splitlines()]
    with_marks = [text.strip() for text in marked.code.source.splitlines() if "marks" not in text]
    assert own == with_marks


def test_spans_are_those_of_the_plan(line: Any) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record() as recording:
        for _ in range(5):
            fast(x)
    (plan,) = recording.plans
    assert len(plan.calls) == len(recording.calls) == 5
    assert [t.lane for t in plan.plan.tasks] == [t.lane for t in fast.plan(x).tasks]  # no two of them are one call
    for call in plan.calls:
        assert len(call.spans) == len(plan.plan.tasks) and call.model == "Line" and call.phase == "inference"
        assert call.memory is None and call.note == "" and call.overlap > 0
        assert call.begin <= min(s for s, _ in call.spans) and max(e for _, e in call.spans) <= call.end
        for task, (start, end) in zip(plan.plan.tasks, call.spans, strict=True):
            assert start <= end
            assert all(call.spans[a][1] <= start for a in task.after)
    for earlier, later in zip(recording.calls, recording.calls[1:], strict=False):
        assert earlier.end <= later.begin
    assert "Line: batch of 6 as [3, 3]: 5 calls" in str(recording) and plan.draw().count("\n") == 2


def test_tasks_that_are_one_call_are_one_task() -> None:
    fast = compiled(Stack(), Each(STACK_RULES, 2, lanes=2))
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 8))
    (plan,) = recording.plans
    assert len(plan.plan.tasks) == 2 < len(fast.plan(randn(6, 8)).tasks)
    (document,) = recording.documents
    assert " + " in document.tasks[0].op and document.tasks[0].tags == ("attention", "mlp")


def test_the_uncut_graph_is_one_span() -> None:
    fast = compiled(Line(), Lanes(0))
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 16))
    (plan,) = recording.plans
    assert plan.plan.sequential and len(plan.calls[0].spans) == 1
    assert [t.op for t in recording.documents[0].tasks] == ["model"]
    assert "in sequence" in str(recording)


def test_lanes_really_overlap() -> None:
    """Two lanes that wait for each other in their tasks can't but run at the same time."""
    meeting = threading.Barrier(2, timeout=30)
    fast = compiled(Stack(), Each(STACK_RULES, 2, lanes=2), on_task=lambda task, moment: meeting.wait())
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 8))
    (call,) = recording.calls
    assert call.overlap > 1.2
    report = recording.report()
    assert report.overlaps and report.overlap == pytest.approx(call.overlap, rel=1e-3)


def test_the_last_calls_are_kept(line: Any) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record(keep=2) as recording:
        for _ in range(5):
            fast(x)
    assert len(recording.calls) == 2
    with pytest.raises(df.RecordingError, match="keep=0"), df.record(keep=0):
        pass


def test_one_at_a_time(line: Any) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record() as recording:
        with pytest.raises(df.RecordingError, match="on already"), df.record():
            pass
        fast(x)
        with pytest.raises(df.RecordingError, match="still on"):
            _ = recording.calls
        assert str(recording) == "a recording that is still on"
    assert len(recording.calls) == 1
    with torch.no_grad(), df.record() as again:
        fast(x)
    (call,) = again.calls
    assert 0 <= call.begin < call.end <= again.ended - again.began, "counted from the start of the recording"


def test_an_error_leaves_all_as_before(line: Any) -> None:
    model, fast, x = line
    with torch.no_grad():
        recording = record_and_fail(fast, x)
        assert recorder.now is None and len(recording.calls) == 1
        with df.record() as again:
            torch.testing.assert_close(fast(x), model(x))
        assert len(again.calls) == 1


def record_and_fail(fast: Any, x: Tensor) -> Any:
    with contextlib.suppress(ZeroDivisionError), df.record() as recording:
        fast(x)
        raise ZeroDivisionError
    return recording


def test_a_call_that_fails_is_no_call() -> None:
    broken = [False]

    def on_task(task: Any, moment: str) -> None:
        if broken[0] and task.lane == "side":
            raise ValueError("no")

    model = Line()
    fast = compiled(model, Lanes(), on_task=on_task)
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 16))
        broken[0] = True
        with pytest.raises(ValueError, match="no") as failed:
            fast(randn(6, 16))
        broken[0] = False
        torch.testing.assert_close(fast(randn(6, 16)), model(randn(6, 16)))
    assert len(recording.calls) == 2
    assert any("in task" in note and "lane side" in note for note in failed.value.__notes__)


# What it holds


def test_two_models_and_two_threads() -> None:
    one, other = compiled(Line(), Lanes()), compiled(Stack(), Each(STACK_RULES, 3, lanes=3))

    def call(fast: Any, x: Tensor) -> None:
        with torch.no_grad():
            for _ in range(5):
                fast(x)

    call(one, randn(6, 16)), call(other, randn(6, 8))
    given = [(one, randn(6, 16)), (other, randn(6, 8)), (one, randn(6, 16))]
    with df.record() as recording:
        threads = [threading.Thread(target=call, args=args, name=f"caller {i}") for i, args in enumerate(given)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted((plan.model, len(plan.calls)) for plan in recording.plans) == [("Line", 10), ("Stack", 5)]
    assert {call.thread for call in recording.calls} == {"caller 0", "caller 1", "caller 2"}
    assert len(recording.documents) == 2
    assert other.report(recording).title.startswith("Stack") and one.report(recording).title.startswith("Line")


def test_a_model_that_is_gone_is_not_taken_for_the_next(line: Any) -> None:
    """Which may well have its address."""
    _, fast, x = line
    marked = engine_of(fast).planner.marked(lowered_of(fast)[0])
    with torch.no_grad():
        given = arguments(fast, x)

    class Gone:
        name = "Line"

    with torch.no_grad(), df.record() as recording:
        for _ in range(30):
            recording.run(marked, [*given], Gone())  # type: ignore[arg-type]
    assert [len(plan.calls) for plan in recording.plans] == [1] * 30
    with pytest.raises(df.RecordingError, match="no times of tasks"):
        fast.report(recording)


def test_training_has_both_passes() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, 2, lanes=2))
    x = randn(6, 8)
    fast(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with df.record() as recording:
        fast(x).sum().backward()
    assert [plan.phase for plan in recording.plans] == ["forward", "backward"]
    assert all(call.spans for call in recording.calls)
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)


@pytest.mark.parametrize("parts", [1, 3])
def test_elastic_plans(parts: int) -> None:
    entry = ZOO["llama"]
    model = entry.build()
    fast = df.compile(model, Stretching(parts, CUTS), operators="eager")
    with torch.no_grad():
        for inputs in map(entry.inputs, (6, 9)):
            fast(**inputs)
        with df.record() as recording:
            for inputs in map(entry.inputs, (6, 9, 12)):
                torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert [plan.plan.batch_size for plan in recording.plans] == [6, 9, 12]
    assert all(call.spans for call in recording.calls) and fast.stats.plans == 1


def test_what_is_not_recorded_is_told() -> None:
    fast = compiled(Line(), Lanes(), verify=True)
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 16)), fast(randn(6, 16))
    assert len(recording.calls) == 1
    assert "1 call not recorded: it was compared with the plain model" in str(recording)


def test_a_plan_that_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_graphs(monkeypatch)
    model = Line()
    fast = compiled(model, Lanes(), cudagraph="plan")
    x = randn(6, 16)
    with torch.no_grad():
        fast(x), fast(x)
        assert fast.stats.captures == 1
        with df.record() as recording:
            torch.testing.assert_close(fast(x), model(x))
            assert fast.stats.captures == 2  # at once: the kernels are warm
            torch.testing.assert_close(fast(x), model(x))
        replays = fast.stats.graph_replays
        fast(x)
    assert fast.stats.captures == 2 and fast.stats.graph_replays == replays + 1
    assert all(call.spans for call in recording.calls)


def test_launches_of_one_graph_have_one_set_of_times(line: Any) -> None:
    """A real graph fills the marks that it was captured with, again at each launch."""
    _, fast, _ = line
    (lowered,) = lowered_of(fast)
    marks = replace(engine_of(fast).planner.marked(lowered).marks, own=True)
    moments = [float(i) for i in range(marks.count)]
    owner = weakref.ref(engine_of(fast).planner)
    with df.record() as recording:
        calls = [recordings.RawCall(marks, moments, i, i + 1.0, "thread", "Line", owner, None) for i in range(3)]
        recording.raw_calls[marks.key] = deque(calls)
    assert [bool(call.spans) for call in recording.calls] == [False, False, True]
    assert f"2 without the times of tasks: {recordings.LAST_LAUNCH_ONLY}" in str(recording)
    assert recording.plans[0].median is recording.calls[-1]


def test_calls_without_times_count_for_what_took_most() -> None:
    """Of a graph's launches only the last has times; there may be many of them all the same."""
    calls = [(6, [2.0]), (4, [1.0, None, None])]
    assert made_up(calls).report().title.startswith("Line: batch of 4")


def test_both_sides_of_a_speed_up_are_medians() -> None:
    """The same one: not the faster of two calls against the slower."""
    fast = compiled(Line(), Lanes())
    x = randn(6, 16)
    with torch.no_grad(), df.record() as recording:
        fast(x)
        fast.set_scheduler(Lanes(0))
        fast(x)
    for plan in recording.plans:
        set_times(plan, [1.0, 3.0])
    assert recording.report().speedup == 1.0


def made_up(sizes: list[tuple[int, list[float | None]]]) -> Any:
    """A recording of calls that took so many seconds, by the size of their batch."""
    fast = compiled(Line(), Lanes())
    with torch.no_grad(), df.record() as recording:
        for size, _ in sizes:
            fast(randn(size, 16))
    for plan, (_, times) in zip(recording.plans, sizes, strict=True):
        set_times(plan, times)
    return recording


def set_times(plan: Any, times: list[float | None]) -> None:
    (call,) = plan.calls
    spans = [() if t is None else ((0.0, t),) * len(call.spans) for t in times]
    plan.calls = tuple(replace(call, spans=s) for s in spans)


# On CUDA, as far as it can be told without


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Mark:
    """An event."""

    def __init__(self, name: str, log: list[str], ms: float = 0.0) -> None:
        self.name, self.log, self.ms = name, log, ms

    def record(self, stream: Stream) -> None:
        self.log.append(f"{self.name} on {stream.name}")

    def elapsed_time(self, other: Mark) -> float:
        return other.ms - self.ms


def cuda_code(fast: Any, x: Tensor, segmented: bool = False) -> tuple[Any, ...]:
    with torch.no_grad():
        ready = ready_for(fast, x)
    plan, graph, sizes = ready.plan, ready.graph, ready.trials.plan().values
    program = make_program(plan, graph, sizes, Operators("eager"), {}, pieces=segmented)
    segments = make_segments(program, frozenset()) if segmented else ()
    marks = make_marks(plan, graph, sizes, program, segments)
    return emit(program, cuda=True, hook=False, segments=segments, marks=marks), marks, ready.trials.args, program


@pytest.mark.parametrize("segmented", [False, True])
def test_events_are_recorded_on_the_streams_of_tasks(line: Any, segmented: bool) -> None:
    """Behind the waits of a task, and before others can wait for it."""
    model, fast, x = line
    code, marks, args, program = cuda_code(fast, x, segmented)
    log: list[str] = []
    for name, segment in code.names.copy().items():
        if name.startswith("segment_"):
            code.names[name.replace("segment", "graph")] = segment
    streams = (Stream("s0", log), Stream("s1", log))
    events = [Mark(f"e{i}", log) for i in range(event_count(program))]
    moments = [Mark(f"mark {i}", log) for i in range(marks.count)]
    with torch.no_grad():
        (found,) = code.run([*args, moments], streams, events, lambda stream: None)
        torch.testing.assert_close(found, model(x))
    for (first, last), task in zip(marks.spans, marks.plan.tasks, strict=True):
        stream = "s1" if task.lane == "side" else "s0"
        assert f"mark {last} on {stream}" in log and f"mark {first} on {stream}" in log
        assert log.index(f"mark {first} on {stream}") < log.index(f"mark {last} on {stream}")
        for a in task.after:
            other = "s0" if stream == "s1" else "s1"
            assert log.index(f"mark {marks.spans[a][1]} on {other}") < log.index(f"mark {first} on {stream}")
    assert len([entry for entry in log if entry.startswith("mark")]) == marks.count


def test_events_become_spans_by_the_hosts_clock(line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, x = line
    _, marks, *_ = cuda_code(fast, x)
    device = torch.device("cuda")
    marks = replace(marks, device=device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(recordings.spare_events, device, [])
    moments = [Mark("m", [], 2000.0 + i) for i in range(marks.count)]
    owner = weakref.ref(engine_of(fast).planner)
    with df.record() as recording:
        recording.clock_events[device] = (Mark("base", [], 1000.0), recording.began + 0.5)
        recording.raw_calls[marks.key] = deque([recordings.RawCall(marks, moments, 1.0, 2.0, "t", "Line", owner, 7)])
    (call,) = recording.calls
    assert call.spans == tuple((pytest.approx(1.5 + a / 1e3), pytest.approx(1.5 + b / 1e3)) for a, b in marks.spans)
    assert recordings.spare_events[device] == moments and recordings.take_events(2, device) == moments[-2:]


def test_a_recording_ends_while_a_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the first one on its device."""
    with df.record() as recording:
        late = lambda device: recording.clock_events.setdefault(torch.device("cuda", 1), (None, 0.0))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "synchronize", late)
        recording.clock_events[torch.device("cuda", 0)] = (None, 0.0)
    assert recording.calls == ()


# The trace


def test_a_trace_is_read_back(line: Any, tmp_path: Path) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record() as recording:
        fast(x), fast(x)
    recording.save(tmp_path / "run.json")
    document = read(tmp_path / "run.json")
    first, second = (recording.plans[0].document(call) for call in recording.calls)
    assert document.source == "measured" and {lane.name for lane in document.lanes} == {"main", "side"}
    assert len(document.tasks) == len(first.tasks) + len(second.tasks)
    own = sorted([*first.tasks, *second.tasks], key=lambda t: t.start)
    began = own[0].start
    for found, task in zip(document.tasks, own, strict=True):
        assert (found.name, found.op, found.lane) == (task.name, task.op, task.lane)
        assert found.start == pytest.approx(task.start - began, abs=1e-9)
        assert found.end == pytest.approx(task.end - began, abs=1e-9)
        assert (found.micro_batches, found.tags, found.rows, found.bytes) == (
            task.micro_batches, task.tags, task.rows, task.bytes)  # fmt: skip
        assert found.note == "" and found.bytes
    waits = {(document.tasks[a].op, t.op) for t in document.tasks for a in t.after}
    assert waits == {(d.tasks[a].op, t.op) for d in (first, second) for t in d.tasks for a in t.after} != set()
    assert "sms" in {counter.name for counter in document.counters}
    page([document, *recording.documents])
    assert Document.from_json(recording.documents[0].to_json()) == recording.documents[0]


def test_a_trace_as_perfetto_wants_it(line: Any) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record() as recording:
        fast(x), fast(x)
    events = json.loads(json.dumps(recording.trace()))["traceEvents"]
    by = {phase: [e for e in events if e["ph"] == phase] for phase in "XMsfC"}
    assert len(events) == sum(map(len, by.values()))
    names = {e["args"]["name"] for e in by["M"] if e["name"].endswith("_name")}
    assert names == {"host", threading.current_thread().name, "Line on cpu", "main", "side"}
    slices = {(e["pid"], e["tid"]): [] for e in by["X"]}
    for e in by["X"]:
        slices[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert sum(e["cat"] == "call" for e in by["X"]) == 2
    assert len(by["s"]) == len(by["f"]) == sum(len(e["args"].get("after", ())) for e in by["X"]) > 0
    for leaves, arrives in zip(by["s"], by["f"], strict=True):
        assert leaves["id"] == arrives["id"] and leaves["ts"] <= arrives["ts"]
        for end in (leaves, arrives):
            assert any(a - 1e-3 <= end["ts"] <= b + 1e-3 for a, b in slices[end["pid"], end["tid"]])
    assert {e["name"] for e in by["C"]} == {"sms"}


def test_what_runs_at_the_same_time_has_curves_of_its_own() -> None:
    """Mixed in one, the end of one call would say that nothing runs while another does."""
    one, other = compiled(Line(), Lanes()), compiled(Stack(), Each(STACK_RULES, 2, lanes=2))

    def call() -> None:
        with torch.no_grad():
            one(randn(6, 16))

    call()
    with df.record() as recording:
        threads = [threading.Thread(target=call, name=name) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {c.name for c in of_trace(recording.trace()).counters} == {"sms (first)", "sms (second)"}
    with torch.no_grad(), df.record() as recording:
        one(randn(6, 16)), other(randn(6, 8))
    assert {c.name for c in of_trace(recording.trace()).counters} == {"sms (2)", "sms (3)"}


def test_memory_is_read_back_as_bytes(line: Any) -> None:
    _, fast, x = line
    with torch.no_grad(), df.record() as recording:
        fast(x)
    (plan,) = recording.plans
    plan.calls = tuple(replace(call, memory=1 << 20) for call in plan.calls)
    for document in (of_trace(recording.trace()), *recording.documents):
        assert {c.name: c.unit for c in document.counters} == {"sms": "fraction", "allocated": "bytes"}


def test_shares_are_a_curve() -> None:
    class Shared(Lanes):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.lane("side", sms=1)
            super().schedule(ctx)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        fast = compiled(Line(), Shared())
        with torch.no_grad(), df.record() as recording:
            fast(randn(6, 16))
        (counter,) = recording.documents[0].counters
    finally:
        torch.set_num_threads(threads)
    assert {value for _, value in counter.points} <= {0.0, 0.25, 0.75, 1.0} and counter.points[-1][1] == 0.0


def profiled() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_a_profile_joins_on_one_clock(line: Any, tmp_path: Path) -> None:
    _, fast, x = line
    with torch.no_grad(), profiled() as profile, df.record() as recording:
        fast(x)
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    theirs = json.loads((tmp_path / "profile.json").read_text())
    joined = recording.trace(tmp_path / "profile.json")
    events = joined["traceEvents"]
    (call,) = [e for e in events if e.get("cat") == "call"]
    assert call["pid"] not in {e.get("pid") for e in theirs["traceEvents"]}
    assert all(e in events for e in theirs["traceEvents"])
    (task, *_), near = [e for e in events if e.get("cat") == "task"], 1e3  # microseconds
    products = [e for e in events if e.get("name") == "aten::addmm" or e.get("name") == "aten::linear"]
    assert products and all(call["ts"] - near <= e["ts"] <= call["ts"] + call["dur"] + near for e in products)
    assert task["pid"] != call["pid"]
    assert len(of_trace(joined).tasks) == len(recording.calls[0].spans)


def test_a_profile_itself(line: Any, tmp_path: Path) -> None:
    _, fast, x = line
    with torch.no_grad(), profiled() as profile, df.record() as recording:
        fast(x)
    recording.save(tmp_path / "both.json", profile=profile)
    assert "aten::linear" in (tmp_path / "both.json").read_text()
    damaged = tmp_path / "profile.json.gz"
    damaged.write_bytes(gzip.compress(b"{}")[:10] + b"\xff" * 20)
    missing = tmp_path / "none.json"
    for wrong, why in ((missing, "can't be read"), (damaged, "damaged"), ({"no": 1}, "no traceEvents")):
        with pytest.raises(df.TimelineError, match=why):
            recording.trace(wrong)


# In words


def test_a_report_on_inputs(line: Any) -> None:
    model, fast, x = line
    with torch.no_grad():
        report = fast.report(x)
        torch.testing.assert_close(fast(x), model(x))
    assert report.sequence and report.speedup == pytest.approx(report.sequence / report.seconds)
    assert set(report.lanes) == {"main", "side"} and report.calls == 9
    assert report.bound <= report.sequence and report.host is None
    text = str(report)
    for part in ("Line: batch of 6 as [3, 3] on cpu", "by the cost model", "speed-up", "The bound is"):
        assert part in text
    assert fast.stats.plans == 2  # the sequence was made once


def test_a_report_hears_nothing_of_other_models(line: Any) -> None:
    """Other threads may call theirs meanwhile. A model that is called in a task of ours does so at a sure moment."""
    _, other, x = line
    fast = compiled(Line(), Lanes(), on_task=lambda task, moment: other(x))
    with torch.no_grad():
        report = fast.report(x)
    assert report.title == "Line: batch of 6 as [3, 3]" and recorder.now is None


def test_calls_in_a_row_compute_the_same(line: Any) -> None:
    model, fast, x = line
    (lowered,) = lowered_of(fast)
    row = engine_of(fast).planner.marked(lowered, row=True)
    with torch.no_grad(), df.record() as recording:
        (found,) = recording.run(row, [*arguments(fast, x)], engine_of(fast).planner)
        torch.testing.assert_close(found, model(x))
    (call,) = recording.calls
    assert len(call.plan.lanes) == 1 and len(call.spans) == len(fast.plan(x).tasks)
    assert all(a[1] == b[0] for a, b in zip(call.spans, call.spans[1:], strict=False)) and call.overlap == 1.0


def arguments(fast: Any, x: Tensor) -> Any:
    return ready_for(fast, x).trials.args


def test_what_a_report_runs_leaves_no_trace() -> None:
    class Counting(Line):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    ended = itertools.count()

    def on_task(task: Any, moment: str) -> None:
        if moment == "stop" and next(ended) == 40:  # in the midst of a report
            raise ValueError("no")

    model = Counting()
    fast = compiled(model, Lanes(), on_task=on_task)
    with torch.no_grad():
        fast(randn(6, 16))
        with pytest.raises(ValueError, match="no"):
            fast.report(randn(6, 16))
        assert model.calls.item() == 1, "nor if it fails"
        fast.report(randn(6, 16))
    assert model.calls.item() == 1


def test_a_report_on_a_sequence() -> None:
    fast = compiled(Line(), Lanes(0))
    with torch.no_grad():
        report = fast.report(randn(6, 16))
    assert report.sequence is None and not report.overlaps and not report.reasons
    assert "Nothing ran at the same time." in str(report)


def test_a_recorded_sequence_is_what_a_plan_is_compared_with() -> None:
    fast = compiled(Line(), Lanes())
    with torch.no_grad(), df.record() as recording:
        fast(randn(6, 16))
        fast.set_scheduler(Lanes(0))
        fast(randn(6, 16))
    report = recording.report()
    assert report.title.endswith("as [3, 3]") and report.sequence is not None
    with df.record() as empty:
        pass
    with pytest.raises(df.RecordingError, match="no times of tasks"):
        empty.report()


def test_a_report_knows_what_the_simulator_says() -> None:
    fast = compiled(Line(), Lanes())
    with torch.no_grad():
        report = fast.report(randn(6, 16), profile=fast.profile(randn(6, 16)))
    assert report.predicted is not None and "The simulator says" in str(report)
