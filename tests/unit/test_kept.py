"""Plans on disk, through df.compile: found again when nothing has changed, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import compiled, randn


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def twice(x: Tensor, *weights: Tensor) -> Tensor:
    return nn.functional.linear(x, *weights)


class Halves(df.OpSchedulerBase):
    def __init__(self, lanes: int = 2, fuse: bool = False) -> None:
        self.lanes, self.fuse = lanes, fuse

    def partition(self) -> list[Any]:
        return [df.SplitModule("a"), df.SplitModule("b")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(ctx.facts.get("parts", 2))
        while ops := ctx.get_ready_ops():
            for op in ops:
                function = twice if self.fuse and op.name == "a" else None
                ctx.execute(op, lane=f"lane{op.micro_batch % self.lanes}", replace_func=function)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNAFLOW_CACHE", "1")
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path))
    return tmp_path


def run(model: nn.Module, scheduler: df.OpSchedulerBase, x: Tensor, **options: Any) -> df.Stats:
    fast = compiled(model, scheduler, **options)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    return fast.stats


def test_the_scheduler_is_asked_once_for_two_models_alike() -> None:
    x = randn(6, 4)
    first, second = run(Model(), Halves(), x), run(Model(), Halves(), x)
    assert (first.scheduler_calls, first.plans_stored, first.plans_loaded) == (1, 1, 0)
    assert (second.scheduler_calls, second.plans_stored, second.plans_loaded) == (0, 0, 1)


@pytest.mark.parametrize("change", ["state", "size", "width", "facts"])
def test_what_has_changed_is_decided_anew(change: str) -> None:
    run(Model(), Halves(), randn(6, 4))
    width = 8 if change == "width" else 4
    lanes = 1 if change == "state" else 2
    facts = {"parts": 3} if change == "facts" else {}
    stats = run(Model(width), Halves(lanes), randn(8 if change == "size" else 6, width), facts=facts)
    assert stats.scheduler_calls == 1 and stats.plans_loaded == 0


def test_facts_are_told_apart_and_found_again() -> None:
    x = randn(6, 4)
    for parts in (2, 3):
        run(Model(), Halves(), x, facts={"parts": parts})
    for parts in (3, 2):
        fast = compiled(Model(), Halves(), facts={"parts": parts})
        with torch.no_grad():
            assert len(fast.plan(x).micro_batches) == parts and fast.stats.plans_loaded == 1


def test_fusions_are_found_by_name() -> None:
    x = randn(6, 4)
    assert run(Model(), Halves(fuse=True), x).plans_stored == 1
    assert run(Model(), Halves(fuse=True), x).plans_loaded == 1


def test_damaged_files_mean_asking_again(own_folder: Path) -> None:
    x = randn(6, 4)
    run(Model(), Halves(), x)
    files = [f for f in own_folder.rglob("*") if f.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-7])
    stats = run(Model(), Halves(), x)
    assert stats.scheduler_calls == 1 and stats.plans_stored == 1


def test_a_scheduler_that_can_not_be_judged_keeps_nothing(own_folder: Path) -> None:
    scheduler = Halves()
    scheduler.noise = torch.randn(3)  # type: ignore[attr-defined]
    assert run(Model(), scheduler, randn(6, 4)).plans_stored == 0
    assert not [f for f in own_folder.rglob("*") if f.is_file()]


def test_another_process_finds_it(own_folder: Path) -> None:
    script = (
        "from tests.unit.test_kept import *\n"
        "stats = run(Model(), Halves(), randn(6, 4))\n"
        "print(stats.scheduler_calls, stats.plans_loaded)"
    )
    root = Path(__file__).parents[2]
    for expected in ("1 0", "0 1"):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=dict(os.environ), capture_output=True, text=True, check=True
        )
        assert done.stdout.strip().splitlines()[-1] == expected
