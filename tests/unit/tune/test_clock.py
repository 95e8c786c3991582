"""On a CPU. What it does on a GPU is in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dynaflow.tune.clock import Clock


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock will read."""
    found: list[float] = []
    monkeypatch.setattr("dynaflow.tune.clock.time", SimpleNamespace(perf_counter=lambda: found.pop(0)))
    return found


def test_each_thing_has_the_time_between_its_start_and_its_end(moments: list[float]) -> None:
    clock = Clock(torch.device("cpu"))

    def work() -> None:
        for task in ("one", "two"):
            clock(task, "start")
            clock(task, "stop")

    moments[:] = [1.0, 3.0, 4.0, 4.5]
    assert clock.time(work) == [2.0, 0.5]
    moments[:] = [0.0, 1.0, 2.0, 3.0]
    assert clock.time(work) == [1.0, 1.0], "what was noted before is forgotten"


def test_it_looks_only_while_it_times(moments: list[float]) -> None:
    clock, calls = Clock(torch.device("cpu")), []
    clock.warm_up(lambda: calls.append(clock()))
    assert len(calls) == 1 and not moments


def test_work_that_fails_leaves_it_off(moments: list[float]) -> None:
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        clock.time(lambda: 1 / 0)
    clock()
    assert not moments, "it would have read one"
