"""Recordings on CUDA: events on lanes, inside of graphs too; results are those without."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CYCLES = 2_000_000
"""About a millisecond."""
NEAR = 5e3
"""Microseconds: no test of how exact it is, but of the clock being the same."""


class Two(nn.Module):
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.end = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.relu(self.a(x)) + torch.tanh(self.b(x)))


class Apart(df.OpSchedulerBase):
    """Both branches on a lane each."""

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    def partition(self) -> list[Any]:
        return [df.SplitModule("a"), df.SplitModule("b", tag="b"), df.SplitModule("end")]

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if not self.parts:
            return ctx.sequential()
        if self.parts > 1:
            ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="side" if "b" in op.tags else "main")


def slow(task: Any, moment: str) -> None:
    """Each task begins with a kernel on a single SM: two of them fit side by side."""
    if moment == "start":
        torch.cuda._sleep(CYCLES)


def setup(cudagraph: Any = None, parts: int = 1, **options: Any) -> tuple[nn.Module, df.CompiledModel, Tensor]:
    torch.manual_seed(0)
    model = Two().cuda().eval()
    fast = df.compile(model, Apart(parts), operators="eager", cudagraph=cudagraph, **options)
    return model, fast, torch.randn(8, 64, device="cuda")


def test_spans_of_two_streams_overlap() -> None:
    model, fast, x = setup(on_task=slow)
    with torch.no_grad():
        fast(x)
        with df.record() as recording:
            for _ in range(3):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(recording.calls) == 3
    for call in recording.calls:
        spans = {task.items[0].op: span for task, span in zip(call.plan.tasks, call.spans, strict=True)}
        assert min(spans["a"][1], spans["b"][1]) > max(spans["a"][0], spans["b"][0]), spans
        assert spans["end"][0] >= max(spans["a"][1], spans["b"][1]) - 1e-5
        assert all(1e-4 < end - start < 1.0 for start, end in spans.values())
        # One clock: no task starts before the host has called, but for what the clocks are apart on a busy card.
        assert min(start for start, _ in call.spans) > call.begin - 5e-3
        assert call.memory and call.overlap > 1.0


@pytest.mark.parametrize("cudagraph", ["plan", "pieces"])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_graphs_tell_their_times_or_why_not(cudagraph: Any, parts: int) -> None:
    model, fast, x = setup(cudagraph, parts)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        replays = fast.stats.graph_replays
        with df.record() as recording:
            for seed in range(4):
                y = torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
                torch.testing.assert_close(fast(y), model(y), rtol=1e-4, atol=1e-4)
        assert fast.stats.graph_replays > replays and not fast.stats.capture_failures
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(recording.calls) == 4
    assert all(bool(call.spans) != bool(call.note) for call in recording.calls)
    last = recording.calls[-1]
    assert last.spans, last.note
    assert all(0.0 <= end - start < 1.0 for start, end in last.spans)
    if cudagraph == "pieces" and parts:
        assert all(call.spans for call in recording.calls)


class Uneven(nn.Module):
    """A long branch and a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 64))
        self.a, self.end = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        long = self.b(x)
        return self.end(self.a(x[:8]) + long[:8])


def test_marks_of_a_graph_wait_for_their_own_lane_alone() -> None:
    """The short branch is issued behind the long one, and marked behind it: its times are still its own."""
    torch.manual_seed(0)
    model, x = Uneven().cuda().eval(), torch.randn(8192, 64, device="cuda")
    fast = df.compile(model, Apart(1), operators="eager", cudagraph="plan")
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        with df.record() as recording:
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    (call,) = recording.calls
    tasks = zip(call.plan.tasks, call.spans, strict=True)
    spans = {item.op: span for task, span in tasks for item in task.items}
    assert spans["a"][1] < spans["b"][1] - 1e-4, spans
    assert spans["end"][0] >= spans["b"][1] - 1e-5, spans


def test_a_second_recording_reads_the_same_graph() -> None:
    _, fast, x = setup("plan", 2)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        starts = []
        for _ in range(2):
            with df.record() as recording:
                fast(x)
            starts.append(recording.calls[0].spans)
        captures = fast.stats.captures
        with df.record() as recording:
            fast(x)
    assert all(starts) and fast.stats.captures == captures
    assert all(-1e-3 < start < 10.0 for start, _ in recording.calls[0].spans)


@pytest.mark.parametrize("cudagraph", [None, "plan"])
def test_a_report(cudagraph: Any) -> None:
    _, fast, x = setup(cudagraph, 2)
    with torch.no_grad():
        report = fast.report(x)
    assert report.sequence and report.host and report.seconds > 0
    assert "speed-up" in str(report)


def test_a_trace_joins_the_profilers(tmp_path: Any) -> None:
    """Kernels of the profiler lie inside of the tasks that launched them, but for what the clocks are apart."""
    _, fast, x = setup()
    x = x.repeat(4096, 1)
    with torch.no_grad():
        fast(x)
        with torch.profiler.profile() as profile, df.record() as recording:
            fast(x)
            torch.cuda.synchronize()
    recording.save(tmp_path / "both.json", profile=profile)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    tasks = [e for e in events if e.get("cat") == "task"]
    assert tasks
    if not kernels:
        pytest.skip("torch.profiler sees no kernels here")
    first, last = min(e["ts"] for e in tasks), max(e["ts"] + e["dur"] for e in tasks)
    inside = [e for e in kernels if first - NEAR <= e["ts"] <= last + NEAR]
    assert len(inside) >= len(tasks), (first, last, kernels)
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"sms", "allocated"}
