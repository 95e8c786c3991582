"""The commands: what they print, with which exit code, and that their options change only on purpose."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shlex
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

import dynaflow as df
from dynaflow.cli import app, doctor, main
from dynaflow.strategies import make

GOLDEN = Path(__file__).parent / "golden" / "commands.txt"
HERE = __name__
COMMANDS: dict[str, Any] = {c.name or c.callback.__name__: c.callback for c in app.registered_commands if c.callback}
NAMES = sorted(COMMANDS)
EAGER = ["--operators", "eager"]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a folder of its own for each test."""
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DYNAFLOW_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)


def called(*arguments: str, code: int = 0) -> Any:
    """What a command prints as JSON."""
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == code, (found.output, found.exception)
    return json.loads(found.stdout)  # one object, and nothing else


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is used in the wrong way says on stderr."""
    monkeypatch.setattr(sys, "argv", ["dynaflow", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out, said
    return " ".join(said.err.split())


# The options


def frozen() -> str:
    """Commands, options, types and defaults, as the functions say: typer's own objects change with its versions."""
    lines = []
    for name, function in COMMANDS.items():
        lines.append(name)
        hints = typing.get_type_hints(function, include_extras=True)
        for given, parameter in inspect.signature(function).parameters.items():
            if hints[given] is not typer.Context:
                lines.append(f"  {described(given, hints[given], parameter.default)}")
    return "\n".join(lines) + "\n"


def described(given: str, hint: Any, default: Any) -> str:
    kind, told = typing.get_args(hint)
    names = [name for name in (told.default, *(told.param_decls or ())) if isinstance(name, str)]
    usual = f"--{given.replace('_', '-')}" if isinstance(told, typer.models.OptionInfo) else given.upper()
    words = [names[0] if names else usual, kind.__name__ if isinstance(kind, type) else str(kind)]
    words += [f">= {told.min}"] if told.min is not None else []
    words += ["required"] if default is inspect.Parameter.empty else [f"= {default!r}"]
    return " ".join([*words, *(["hidden"] if told.hidden else [])]).replace("pathlib.", "")


def test_options_change_only_on_purpose() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(frozen())
    assert frozen() == GOLDEN.read_text(), (
        "commands or options are not what they were. If that is what you want, tell docs/guide.md, and run "
        "UPDATE_GOLDEN=1 python -m pytest tests/unit/cli/test_commands.py -k purpose"
    )


@pytest.mark.parametrize("name", NAMES)
def test_help_ends_with_an_example(name: str) -> None:
    found = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    assert found.output.strip().splitlines()[-1].strip() == f"Example: {example(name)}"
    assert example(name).startswith(f"dynaflow {name}")
    assert "--json" in found.output


def example(name: str) -> str:
    return importlib.import_module(f"dynaflow.cli.{ {'list': 'names'}.get(name, name) }").EXAMPLE


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("demo", "view")])  # compiles; needs a plan
def test_examples_work(name: str) -> None:
    found = CliRunner().invoke(app, shlex.split(example(name))[1:])
    assert found.exit_code == 0, (found.output, found.exception)
    assert found.output


def test_demo() -> None:
    rows = called("demo", *EAGER)["rows"]
    assert [row["name"] for row in rows] == ["Sequential", "TwoBatches", "ThreeWays"]
    assert all(row["agrees"] and row["ms"] > 0 and row["plain_ms"] > 0 for row in rows)


# Widths

MEASURED = [f"{__name__}:own", "--strategy", f"{__name__}:Beside", "--operators", "eager", "--seconds", "0.1"]
WHOLE = {
    "plan": (["llama-tiny", "--layers", "1"], ["self_attn.", "scaled_dot_product_attention", " memory ", " yes "]),
    "doctor": ([], ['operators="inductor",', "transformers", torch.__version__]),
    "simulate": (["llama-tiny", "--strategy", "optimizer_overlap"], ["optimizer_overlap", "limited by", "compute"]),
    "list": ([], ["deepseek-v2-lite", "DeepseekV2ForCausalLM", "optimizer_overlap"]),
    "run": (MEASURED, ["plain model", "against sequence", "tests.unit.cli.test_commands:Beside", "micro-batches"]),
    "tune": (["llama-tiny", "--layers", "1", "--seconds", "0", *EAGER], ["nanoflow(parts=2)", "limited by"]),
}  # fmt: skip
"""A command's arguments, and what it may not break."""


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", WHOLE)
def test_lines_fit_the_terminal_and_words_stay_whole(name: str, columns: int) -> None:
    arguments, whole = WHOLE[name]
    found = CliRunner().invoke(app, [name, *arguments], env={"COLUMNS": str(columns)})
    assert found.exit_code == 0, (found.output, found.exception)
    assert max(map(len, found.stdout.splitlines())) <= columns
    assert [word for word in whole if word not in found.stdout] == []
    assert "…" not in found.stdout


def test_a_pipe_gets_all_of_it_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = CliRunner().invoke(app, ["plan", "llama-tiny", "--layers", "1"]).stdout.splitlines()
    (row,) = [line.split() for line in lines if line.startswith(" 9 ")]
    attention = "model.layers.0.self_attn.scaled_dot_product_attention"
    assert row[:6] == ["9", attention, "memory", "0", "4", "memory"]


def test_a_drawing_is_folded_between_steps_and_names() -> None:
    found = CliRunner().invoke(app, ["plan", "llama-tiny", "--layers", "4"], env={"COLUMNS": "70"})
    drawn = [line for line in found.stdout.splitlines() if " |" in line or line.startswith("compute |")]
    assert len(drawn) == 4 and all(line.count("[") == line.count("]") for line in drawn)
    assert "E model.layers.*.self_attn.scaled_dot_product_attention" in found.stdout


# Models, by their three names


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Beside(df.OpSchedulerBase):
    """The halves of the batch on two lanes."""

    def partition(self) -> list[Any]:
        return [df.SplitModule("a", tag="first")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch}")  # here


class Wrong(df.OpSchedulerBase):
    """Computes something else."""

    def partition(self) -> list[Any]:
        return [df.SplitModule("a"), df.SplitModule("b")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, replace_func=twice if op.name == "b" else None)


def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, weight, bias)


def own() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Two(), {"x": torch.randn(6, 4)}


def no_model() -> int:
    return 3


def a_tensor() -> tuple[nn.Module, Tensor]:
    return Two(), torch.ones(6, 4)


def too_little() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(4, 4), {}


def broken() -> float:
    return 1 / 0


def an_int() -> tuple[int, dict[str, Tensor]]:
    return 3, {"x": torch.ones(6, 4)}


def a_class() -> tuple[type, dict[str, Tensor]]:
    return Two, {"x": torch.ones(6, 4)}


def too_wide() -> tuple[nn.Module, dict[str, Tensor]]:
    return Two(), {"x": torch.ones(6, 5)}


class Picky(df.Sequential):
    def __init__(self, parts: int = 2) -> None:
        if parts > 3:
            raise ValueError("too many")


def dropping() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), {"input": torch.ones(6, 64)}


def test_a_file_is_as_good_as_a_module(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    lines = ["import torch", "def mine():", "    return torch.nn.Linear(4, 4), {'input': torch.ones(2, 4)}"]
    (folder / "of_mine.py").write_text("\n".join(lines))
    assert called("plan", "elsewhere/of_mine.py:mine")["inputs"] == {"input": [2, 4]}


def test_a_scheduler_in_a_file_is_as_good_as_in_a_module(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    lines = ["import dynaflow as df", "class Mine(df.Sequential):", "    def __init__(self, x=1): self.x = x"]
    (folder / "scheduler_of_mine.py").write_text("\n".join(lines))
    path = "elsewhere/scheduler_of_mine.py:Mine"
    assert called("plan", f"{HERE}:own", "--strategy", path, "--option", "x=2")["strategy"] == path
    assert make(path, x=3).x == 3  # type: ignore[attr-defined]


def test_a_file_that_is_named_as_another_module_is_not_mistaken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text("def mine(): ...")
    assert "rename the file" in fails(monkeypatch, capsys, "plan", "json.py:mine")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\nimport no_such_package", "No module named 'no_such_package' at: {file}:2"),
        ("import torch\n1 / 0", "ZeroDivisionError: division by zero at: {file}:2"),
        ("def mine(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_whose_import_fails(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "failing_import.py"
    file.write_text(text)
    for arguments in (["failing_import:mine"], ["llama-tiny", "--strategy", "failing_import.py:Mine"]):
        assert told.format(file=file) in fails(monkeypatch, capsys, "plan", *arguments)


def test_plan_says_why_nothing_is_cut() -> None:
    found = CliRunner().invoke(app, ["plan", f"{HERE}:own", "--strategy", "nanoflow"])
    assert found.exit_code == 0 and "finds no operators that it knows" in found.stdout
    assert "this model has a, b" in found.stdout


def test_a_model_in_training_mode_is_named_as_the_reason() -> None:
    found = CliRunner().invoke(app, ["run", f"{HERE}:dropping", "--strategy", "nanoflow", *EAGER])
    assert found.exit_code == 1 and "model.eval()" in found.output


def test_plan_tells_why() -> None:
    told = called("plan", f"{HERE}:own", "--strategy", f"{HERE}:Beside", "--out", "plan.json", "--page", "plan.html")
    assert [m["stop"] for m in told["plan"]["micro_batches"]] == [3, 6]
    assert {task["lane"] for task in told["tasks"]} == {"lane0", "lane1"}
    assert {op["name"]: op["tags"] for op in told["ops"]}["a"] == ["first"]
    source = Path(__file__).read_text().splitlines()
    for task in told["tasks"]:
        file, _, line = task["line"].rpartition(":")
        assert file == __file__ and source[int(line) - 1].endswith("# here")
        assert task["rows"] == 3 and task["split"] == "yes"
    plan = df.Plan.from_json(Path("plan.json").read_text())
    assert len(plan.tasks) == len(told["tasks"]) and "lane1" in Path("plan.html").read_text()
    assert called(*shlex.split(example("view"))[1:])["timelines"][0]["source"] == "planned"


def test_plan_of_a_named_model_has_no_weights_and_is_for_a_device() -> None:
    told = called("plan", "inception-tiny", "--strategy", "branches", "--device", "h200", "--batch", "2")
    assert len({task["lane"] for task in told["tasks"]}) > 1, "small kernels leave most of an H200 idle"
    assert {task["line"].rpartition("/")[2].split(":")[0] for task in told["tasks"]} == {"branches.py"}
    assert told["inputs"] == {"x": [2, 3, 20, 20]}


def test_plan_says_why_not() -> None:
    found = CliRunner().invoke(app, ["plan", "llama-tiny", "--layers", "1", "--batch", "4"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert "[4]" not in found.output and "as [2, 2]" in found.output
    assert "depend on the position in the batch" in " ".join(found.output.split())


def test_plan_of_a_folder() -> None:
    from dynaflow.models.build import build

    config = build("gpt2-tiny").config
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained("folder")
    assert called("plan", "folder", "--layers", "1", "--prompt", "4")["inputs"] == {"input_ids": [8, 4]}


def test_simulate_another_kind_of_model() -> None:
    told = called("simulate", "inception-tiny", "--strategy", "branches", "--batch", "8", "--device", "h200")
    assert told["speed_up"] > 1.1 and told["fits"] and told["scheduled"]["limited_by"] == "chain"


# Runs


def test_run_agrees() -> None:
    told = called("run", f"{HERE}:own", "--strategy", f"{HERE}:Beside", "--seconds", "0.1", "--device", "cpu", *EAGER)
    assert told["agrees"] and told["micro_batches"] == [3, 3] and told["plans"] == 1
    assert told["lanes"] == ["lane0", "lane1"] and told["overlap"] > 0 and told["host_ms"] is None
    assert told["bytes_copied"] == told["stats"]["joined_bytes"]
    assert told["speed_up"] == pytest.approx(told["ms"]["sequence"] / told["ms"]["strategy"], rel=0.5)


def test_run_a_decode_step_of_a_named_model() -> None:
    told = called("run", "llama-tiny", "--layers", "1", "--prompt", "0", "--context", "6", "--seconds", "0.1", *EAGER)
    assert told["agrees"] and not told["stays_in_sequence"] and told["inputs"]["input_ids"] == [8, 1]


def test_run_tells_that_results_differ() -> None:
    command = ["run", f"{HERE}:own", "--strategy", f"{HERE}:Wrong", *EAGER]
    told = called(*command, code=1)
    assert not told["agrees"] and "off by up to" in told["difference"] and "ms" not in told
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 1 and not found.stdout and "verify=True" in found.stderr


def test_trace_can_be_viewed() -> None:
    told = called("trace", f"{HERE}:own", "--strategy", f"{HERE}:Beside", "--page", "trace.html", *EAGER)
    assert told["tasks"] == 2 and told["ms"] > 0  # on each lane two that are one call
    assert '"title":"in sequence"' in Path("trace.html").read_text()
    (seen,) = called("view", "trace.json", "--no-open")["timelines"]
    assert seen["tasks"] == 2 * 5 and seen["source"] == "measured"
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {"lane0", "lane1"} < {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_trace_of_a_sequence() -> None:
    told = called("trace", f"{HERE}:own", "--strategy", "sequential", "--calls", "1", *EAGER)
    assert told["tasks"] == 1 and told["overlap"] == pytest.approx(1)


def test_tune_as_json() -> None:
    told = called("tune", f"{HERE}:own", "--seconds", "1", *EAGER)
    assert told["situations"][0]["chosen"] in told["paste"] and told["situations"][0]["inputs"] == {"x": [6, 4]}


# The machine


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {check["name"]: check for check in called("doctor")["checks"]}
    assert told["torch"]["ok"] and told["torch"]["found"] == torch.__version__ and told["cache"]["ok"]
    monkeypatch.setattr(doctor, "NEWEST", (2, 10))
    monkeypatch.setenv("DYNAFLOW_CACHE", "0")
    told = {check["name"]: check for check in called("doctor", code=1)["checks"]}
    assert not told["torch"]["ok"] and "install torch 2.11" in told["torch"]["advice"]
    assert not told["cache"]["ok"] and not told["cache"]["essential"]


def test_doctor_on_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    told = {check["name"]: check for check in called("doctor", code=1)["checks"]}
    assert 'operators="eager"' in told["C++ compiler"]["advice"]


def test_bench_without_the_repository(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(df, "__file__", "/somewhere/dynaflow/__init__.py")
    assert "clone the repository" in fails(monkeypatch, capsys, "bench")


def test_list_as_json() -> None:
    told = called("list")
    assert {"name": "llama-3-70b", "about": "70 B", "class": "LlamaForCausalLM", "own": False} in told["models"]
    assert "b200x8" in told["devices"] and "nanoflow" in told["strategies"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan", "lama-tiny"], "there are llama-tiny"),
        (["plan", "nowhere:nothing"], "no function at 'nowhere:nothing': No module named"),
        (["plan", "nowhere.py:nothing"], "there is no file nowhere.py"),
        (["plan", "llama-tiny", "--strategy", "nowhere.py:Nothing"], "no scheduler at 'nowhere.py:Nothing': there"),
        (["plan", "llama-tiny", "--strategy", f"{HERE}:Besides"], "test_commands: Beside"),
        (["plan", f"{HERE}:to_little"], "test_commands: too_little"),
        (["plan", ":nothing"], "no function at ':nothing'"),
        (["plan", f"{HERE}:no_model"], "return a model and its keyword arguments"),
        (["plan", f"{HERE}:a_tensor"], "returned a model and Tensor"),
        (["plan", f"{HERE}:too_little"], "gave nothing, but Linear takes input: missing a required argument: 'input'"),
        (["plan", f"{HERE}:broken"], "broken failed: ZeroDivisionError: division by zero"),
        (["plan", "mine.py"], "name a function in it: mine.py:function"),
        (["plan", "."], "the folder . has no config.json"),
        (["plan", f"{HERE}:an_int"], "returned int in place of a model"),
        (["plan", f"{HERE}:a_class"], "returned the class Two in place of a model"),
        (["plan", f"{HERE}:too_wide"], "fails by itself: RuntimeError: mat1 and mat2 shapes"),
        (["run", f"{HERE}:too_wide", "--operators", "eager"], "fails by itself: RuntimeError: mat1 and mat2 shapes"),
        (["plan", f"{HERE}:own", "--strategy", "mine.py"], "name a class in it: mine.py:Class"),
        (["plan", f"{HERE}:own", "--strategy", f"{HERE}:Picky", "--option", "parts=4"], "ValueError: too many"),
        (["plan", f"{HERE}:own", "--batch", "3"], "leave out --batch"),
        (["plan", "llama-tiny", "--strategy", "nanoflow", "--option", "part=3"], "its options are"),
        (["plan", "inception-tiny", "--layers", "1"], "leave out --layers"),
        (["run", "bert-tiny", "--prompt", "0"], "--prompt 64"),
        (["run", "llama-tiny", "--device", "gpu"], "use cpu or cuda"),
        (["run", "llama-tiny", "--dtype", "int8"], "float32"),
        (["run", f"{HERE}:own", "--operators", "fast"], "say 'inductor' or 'eager'"),
        (["run", f"{HERE}:own", "--cudagraph", "all"], "say 'plan' or 'pieces'"),
        (["trace", f"{HERE}:own", "--operators", "eager", "--out", "nowhere/trace.json"], "create the folder nowhere"),
        (["plan", "nowhere:nothing", "--out", "nowhere/plan.json"], "create the folder nowhere"),
        (["view", "nothing.json"], "name an existing file"),
    ],
)  # fmt: skip
def test_wrong_use_is_told_and_what_to_do(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = fails(monkeypatch, capsys, *arguments)
    assert told in text and "what to do:" in text


@pytest.mark.parametrize("name", ["plan", "run", "simulate", "trace"])
def test_a_users_file_that_prints_leaves_json_alone(name: str, tmp_path: Path) -> None:
    lines = ["import dynaflow as df", "print('hello')", "class Mine(df.Sequential): ..."]
    (tmp_path / f"printing_{name}.py").write_text("\n".join(lines))
    eager = [] if name in ("plan", "simulate") else EAGER
    assert called(name, f"{HERE}:own", "--strategy", f"printing_{name}.py:Mine", *eager)["strategy"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "dynaflow[demo]" in fails(monkeypatch, capsys, "plan", "llama-tiny")
    assert called("plan", "flux-tiny", "--strategy", "branches")["tasks"], "which needs nothing but torch"
