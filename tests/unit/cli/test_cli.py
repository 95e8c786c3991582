"""The command line, on one layer of a model that has no weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dynaflow as df
from dynaflow.cli import app, main

ONE_LAYER = ["simulate", "--model", "llama-3-70b", "--layers", "1", "--device", "b200", "--tp", "8"]


class Halves(df.OpSchedulerBase):
    """A scheduler to be named on the command line."""

    def __init__(self, parts: int = 2) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [df.SplitFunc("_c10d_functional*", tag="network", splittable=True)]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="network" if op.tags else "compute")


class NoScheduler:
    pass


def test_a_strategy_by_name() -> None:
    found = CliRunner().invoke(app, [*ONE_LAYER, "--strategy", "comm_overlap", "--batch", "8", "--prompt", "512"])
    assert found.exit_code == 0, found.output
    text = " ".join(found.output.split())
    assert "only its first 1 layers, tp 8, input_ids 8x512, on b200" in text
    rows = {words[0]: words for line in found.output.splitlines() if (words := line.split())}
    sequence, strategy = rows["sequence"], rows["comm_overlap"]
    assert sequence[2] == "1.000"
    assert 1.0 < float(strategy[2]) < 1.6, "collectives beside compute gain something, and not all"
    assert float(sequence[1]) == pytest.approx(float(strategy[1]) * float(strategy[2]), rel=2e-3)


def test_a_scheduler_of_the_users_with_a_trace(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    command = [*ONE_LAYER, "--strategy", f"{__name__}:Halves", "--option", "parts=4", "--batch", "16"]
    found = CliRunner().invoke(app, [*command, "--no-cudagraph", "--draw", "--trace", str(trace), "--page", str(page)])
    assert found.exit_code == 0, found.output
    assert "host" in found.output and "network |" in found.output
    names = [e["name"] for e in json.loads(trace.read_text())["traceEvents"]]
    assert any("all_reduce[3]" in name for name in names), "four micro-batches, as the option says"
    assert '"title":"sequence"' in page.read_text() and "all_reduce[3]" in page.read_text(), "both are on the page"


def test_the_names_that_there_are() -> None:
    text = " ".join(CliRunner().invoke(app, ["list"]).output.split())
    assert "llama-3-70b" in text and "b200x8" in text and "nanoflow" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "lama-3"], "there are llama-3-8b"),
        (["--device", "h300"], "no device is named 'h300'"),
        (["--strategy", "nanoflows"], "nanoflow"),
        (["--strategy", "nowhere:Class"], "no scheduler at 'nowhere:Class': No module named 'nowhere'"),
        (["--strategy", f"{__name__}:NoScheduler"], "is not a scheduler"),
        (["--option", "parts=abc"], "'nanoflow': parts='abc' is not an int what to do: its options are parts=2,"),
        (["--option", "sms=many"], "'nanoflow': sms='many' is not an int or None what"),
        (["--option", "part=3"], "'nanoflow' has no option 'part' what to do: did you mean 'parts'? its"),
        (["--strategy", f"{__name__}:Halves", "--option", "part=3"], "did you mean 'parts'? its options are parts=2"),
        (["--strategy", "sequential", "--option", "parts=3"], "it has no options"),
        (["--strategy", "branches", "--option", "x=3"], "do: its options are lanes=4, cuts=..., wait=5e-06"),
        (["--option", "parts"], "write name=value"),
        (["--device", "b200x8", "--tp", "4"], "shared by 4"),
        (["--tp", "3"], "can't be divided among 3 GPUs"),
        (["--ep", "2"], "has no experts"),
        (["--tp", "2", "--ep", "2"], "not both"),
        (["--attention", "paged"], "flash or sdpa"),
    ],
)
def test_mistakes_are_told_and_what_to_do(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dynaflow", "simulate", "--layers", "1", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    assert told in text and "what to do:" in text


def small_model() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """For `dynaflow tune`."""
    return torch.nn.Linear(4, 4), [{"input": torch.ones(2, 4)}, {"input": torch.ones(3, 4)}]


def test_tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path))
    target = "tests.unit.cli.test_cli:small_model"
    found = CliRunner().invoke(app, ["tune", target, "--seconds", "1", "--operators", "eager"])
    assert found.exit_code == 0, found.output
    assert found.output.count("chosen: sequential") == 2
    assert "df.compile(model, make('sequential'))" in found.output


def test_tune_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dynaflow", "tune", "tests.unit.cli.test_cli:nothing"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


