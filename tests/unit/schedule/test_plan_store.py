"""Plans on disk, through df.compile: found again when nothing has changed, and only then."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow import strategies
from dynaflow.schedule.plan_store import identity
from dynaflow.strategies.prefetch import Prefetch
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
    functions = (twice,)

    def __init__(self, lanes: int = 2, fuse: bool = False) -> None:
        self.lanes, self.fuse = lanes, fuse

    def cache_key(self) -> Any:
        return self.lanes, self.fuse

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


class WithoutKey(Halves):
    def cache_key(self) -> Any:
        return None


class Unlisted(Halves):
    functions = ()


@pytest.mark.parametrize("scheduler", [WithoutKey(), df.Sequential(), Unlisted(fuse=True)])
def test_what_can_not_be_found_again_is_not_stored(own_folder: Path, scheduler: df.OpSchedulerBase) -> None:
    assert run(Model(), scheduler, randn(6, 4)).plans_stored == 0
    assert not [f for f in own_folder.rglob("*") if f.is_file()]


class Strange(Halves):
    def cache_key(self) -> Any:
        return {"noise": torch.randn}


class Failing(Halves):
    def cache_key(self) -> Any:
        raise KeyError("no")


@pytest.mark.parametrize(("scheduler", "says"), [(Strange(), "is not plain data"), (Failing(), "raised KeyError")])
def test_mistakes_in_a_cache_key(scheduler: df.OpSchedulerBase, says: str) -> None:
    with pytest.raises(df.ScheduleError, match=says):
        run(Model(), scheduler, randn(6, 4))


def test_wrapped_schedulers_count() -> None:
    assert identity(Prefetch(Halves())) is not None
    assert len({identity(Prefetch(Halves(lanes), ahead=ahead)) for lanes in (1, 2) for ahead in (1, 2)}) == 4
    assert identity(Prefetch(WithoutKey())) is None


class OtherParts(Halves):
    """Its base class's cache key does not have its option."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0])


class SameParts(Halves):
    """Adds nothing that a plan depends on."""


class OtherPartsWithKey(OtherParts):
    def cache_key(self) -> Any:
        return self.parts


def test_a_subclass_with_options_needs_its_own_key() -> None:
    assert identity(OtherParts(2)) is None
    assert identity(SameParts()) is not None
    assert identity(OtherPartsWithKey(2)) != identity(OtherPartsWithKey(3))
    assert run(Model(), OtherParts(2), randn(6, 4)).plans_stored == 0


def test_a_class_without_a_file_is_not_stored() -> None:
    assert identity(type("Made", (Halves,), {"__module__": "sys"})()) is None


def test_an_edited_scheduler_is_asked_anew(tmp_path: Path) -> None:
    """Its file counts; and one that was edited while the process runs stores nothing, since what was imported is not
    what lies there."""
    file = tmp_path / "mine.py"
    source = "from tests.unit.schedule.test_plan_store import *\nclass Mine(Halves):\n    pass\n"
    script = (
        "import os, sys\nfrom tests.unit.schedule.test_plan_store import *\nimport mine\n"
        "{}\nstats = run(Model(), mine.Mine(), randn(6, 4))\nprint(stats.scheduler_calls, stats.plans_stored)"
    )
    edit = "os.utime(mine.__file__, (2e9, 2e9))"

    def ran(first: str = "") -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", script.format(first)], cwd=Path(__file__).parents[3],
                              env=environment, capture_output=True, text=True, check=True)  # fmt: skip
        return done.stdout.strip().splitlines()[-1]

    file.write_text(source)
    assert ran(edit) == "1 0"
    file.write_text(source)
    assert [ran(), ran()] == ["1 1", "0 0"]
    file.write_text(source + "\n# another\n")
    assert ran() == "1 1"


@pytest.mark.parametrize("name", sorted(set(strategies.CLASSES) - {"auto", "sequential", "token_weave"}))
def test_all_options_of_a_strategy_count(name: str) -> None:
    """In its cache key, or in its rules, which are part of the graph's identity."""

    def seen(**options: Any) -> str:
        scheduler = strategies.make(name, **options)
        wrapped = isinstance(scheduler, df.WrappingScheduler)
        return f"{scheduler.cache_key()} {[] if wrapped else scheduler.partition()}"

    others: dict[str, Any] = {"lanes": 3, "wait": 1e-3, "cuts": ["x"], "by_rows": True, "merged": ["x"], "sms": 8}
    for option, parameter in inspect.signature(strategies.kind_named(name)).parameters.items():
        if option == "inner":
            continue
        usual = parameter.default
        changed = not usual if type(usual) is bool else usual + 1 if type(usual) in (int, float) else "x"
        other = others.get(option, changed)
        assert seen(**{option: other}) != seen(), option


def test_merged_operators_are_part_of_nanoflows_key() -> None:
    """Its schedule reads the globs: equal cuts are not enough."""
    assert len({identity(strategies.make("nanoflow", merged=globs)) for globs in (["m"], ["m*"])}) == 2


def test_another_process_finds_it(own_folder: Path) -> None:
    script = (
        "from tests.unit.schedule.test_plan_store import *\n"
        "stats = run(Model(), Halves(), randn(6, 4))\n"
        "print(stats.scheduler_calls, stats.plans_loaded)"
    )
    root = Path(__file__).parents[3]
    for expected in ("1 0", "0 1"):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=dict(os.environ), capture_output=True, text=True, check=True
        )
        assert done.stdout.strip().splitlines()[-1] == expected
