"""What is read from files: plans that name functions, the cache folder, and graphs that a system keeps."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.cli.doctor import disk_cache_check
from dynaflow.core import disk_cache
from dynaflow.core.disk_cache import DiskCache
from dynaflow.serving.host import SerializableGraph
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, randn, run_both
from tests.unit.schedule.test_plan_store import Halves, Model, run

X = torch.ones(6, 8)


def edited(text: str, **changes: Any) -> str:
    """A plan's JSON with the first task changed."""
    data = json.loads(text)
    data["tasks"][0].update(changes)
    return json.dumps(data)


@pytest.fixture(scope="module")
def text() -> str:
    with torch.no_grad():
        return compiled(Stack(), Each(STACK_RULES, split=None)).plan(X).to_json()


# --- functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:eval", "torch:relu", "subprocess:check_output", "trap:function", "", ":", "os", "#2",
     "dynaflow.core.disk_cache:default_root", "tests.unit.test_trust:edited"],
)  # fmt: skip
def test_a_plan_calls_no_function_that_nobody_gave_it(name: str, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = df.Plan.from_json(edited(text, replace=name))
    with pytest.raises(df.PlanError, match="does not know") as caught, torch.no_grad():
        compiled(Stack(), Scheduler(lambda ctx: plan, STACK_RULES))(X)
    assert "functions" in caught.value.advice
    assert "trap" not in sys.modules


def fused(x: Tensor, *weights: Tensor) -> Tensor:
    return nn.functional.linear(x, *weights)


class FromJson(df.OpSchedulerBase):
    functions = (fused,)

    def __init__(self, text: str) -> None:
        self.text = text

    def partition(self) -> list[Any]:
        return [df.SplitModule("a"), df.SplitModule("b")]

    def schedule(self, ctx: df.ScheduleContext) -> df.Plan:
        return df.Plan.from_json(self.text)


def fuse_a(ctx: df.ScheduleContext) -> None:
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, replace_func=fused if op.name == "a" else None)


@pytest.mark.parametrize("wrap", [lambda s: s, df.strategies.Prefetch, df.strategies.OptimizerOverlap])
def test_listed_functions_are_called(wrap: Any) -> None:
    rules = [df.SplitModule("a"), df.SplitModule("b")]
    with torch.no_grad():
        text = compiled(Model(), Scheduler(fuse_a, rules)).plan(randn(6, 4)).to_json()
    assert f"{__name__}:fused" in text
    run_both(Model(), (randn(6, 4),), wrap(FromJson(text)))


@pytest.mark.parametrize("functions", [3, [3], None, {"m:f": fused}, "abc"])
def test_functions_of_a_wrong_kind(functions: Any, text: str) -> None:
    scheduler = Scheduler(lambda ctx: df.Plan.from_json(text), STACK_RULES)
    scheduler.functions = functions
    with pytest.raises(df.ScheduleError, match="functions"):
        compiled(Stack(), scheduler).plan(X)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNAFLOW_CACHE", "1")
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "failures", itertools.count())
    return tmp_path / "cache"


def test_a_kept_plan_calls_only_what_its_scheduler_reaches(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is replaced by a plan that names another function, with a checksum that is right."""
    x = randn(6, 4)
    assert run(Model(), Halves(fuse=True), x).plans_stored == 1
    usual = DiskCache.get

    def changed(self: DiskCache, key: str) -> str | None:
        found = usual(self, key)
        return found and found.replace("tests.unit.schedule.test_plan_store:twice", "os:abort")

    monkeypatch.setattr(DiskCache, "get", changed)
    stats = run(Model(), Halves(fuse=True), x)
    assert stats.plans_loaded == 0 and stats.scheduler_calls == 1
    monkeypatch.setattr(DiskCache, "get", usual)
    assert run(Model(), Halves(fuse=True), x).plans_loaded == 1


# --- names that end up in generated code -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x\n        raise SystemExit('injected')", "a\rb", "\0", "\ud800", " ", "", "\x0c"])
def test_a_lane_can_not_be_code(name: str, text: str) -> None:
    data = json.loads(text)
    data["lanes"][0]["name"] = name
    for task in data["tasks"]:
        task["lane"] = name
    data["lanes"].append({"name": "other"})
    data["tasks"][-1]["lane"], data["tasks"][-1]["after"] = "other", [len(data["tasks"]) - 2]
    plan = df.Plan.from_json(json.dumps(data))
    with pytest.raises(df.PlanError, match="can be printed"), torch.no_grad():
        compiled(Stack(), Scheduler(lambda ctx: plan, STACK_RULES))(X)
    with pytest.raises(df.PlanError):
        df.draw(plan)


@pytest.mark.parametrize("name", ["a\nb", "a\n    raise SystemExit()", "a\0b", "\ud800"])
def test_an_operator_may_have_any_name(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 8))
            self.other = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self._modules[name](x).relu())  # type: ignore[misc]

    model = Named()
    fast = compiled(model, Each([df.SplitModule(nn.Linear)], split=2, lanes=2))
    with torch.no_grad():
        assert_equal(fast(X), model(X))


# --- the cache folder --------------------------------------------------------------------------------------


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def test_the_folder_is_for_the_user_alone(own_folder: Path) -> None:
    before = os.umask(0)
    try:
        DiskCache("plans").put("key", "text")
    finally:
        os.umask(before)
    assert modes(own_folder) == {0o700, 0o600}
    assert DiskCache("plans").get("key") == "text"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o702])
@pytest.mark.parametrize("which", ["", "plans", "file"])
def test_nothing_is_read_from_where_others_can_write(own_folder: Path, which: str, mode: int, caplog: Any) -> None:
    kept = DiskCache("plans")
    kept.put("key", "text")
    (file,) = (own_folder / "plans").iterdir()
    place = file if which == "file" else own_folder / which
    place.chmod(mode)
    for _ in range(2):
        assert kept.get("key") is None
        if which != "file":
            kept.put("another", "text")
    (record,) = caplog.records
    assert "others can write" in record.message and "chmod go-w" in record.message
    assert len(list((own_folder / "plans").iterdir())) == 1
    place.chmod(0o700)
    assert kept.get("key") == "text"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["", "plans", "file"])
def test_nothing_is_read_from_what_belongs_to_another(own_folder: Path, which: str, caplog: Any) -> None:
    kept = DiskCache("plans")
    kept.put("key", "text")
    (file,) = (own_folder / "plans").iterdir()
    os.chown(file if which == "file" else own_folder / which, 12345, 12345)
    assert kept.get("key") is None
    (record,) = caplog.records
    assert "belongs to user 12345" in record.message


def test_a_folder_that_others_can_read_is_used(own_folder: Path) -> None:
    own_folder.mkdir(mode=0o755)
    DiskCache("plans").put("key", "text")
    assert DiskCache("plans").get("key") == "text"


def test_the_scheduler_is_asked_where_the_folder_is_shared(own_folder: Path) -> None:
    run(Model(), Halves(), randn(6, 4))
    own_folder.chmod(0o777)
    stats = run(Model(), Halves(), randn(6, 4))
    assert stats.plans_loaded == 0 and stats.scheduler_calls == 1


def test_doctor_tells_of_a_shared_folder(own_folder: Path) -> None:
    assert disk_cache_check().ok
    own_folder.chmod(0o777)
    assert not disk_cache_check().ok and "others can write" in disk_cache_check().found


# --- graphs that are unpickled -----------------------------------------------------------------------------


def test_a_graph_is_not_unpickled_from_where_others_can_write(tmp_path: Path) -> None:
    class Ran(Exception):
        pass

    class InAFolder(SerializableGraph):
        scheduled = None  # type: ignore[assignment]

        @classmethod
        def folder(cls) -> Path:
            return tmp_path

        def __init__(self, gm: Any) -> None:
            raise Ran

    data = b"dynaflow graph 1\n"
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        InAFolder.deserialize_compile_artifacts(data)
    tmp_path.chmod(0o700)
    with pytest.raises(EOFError):  # it is read now
        InAFolder.deserialize_compile_artifacts(data)
