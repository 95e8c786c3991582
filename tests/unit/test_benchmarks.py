"""The benchmarks run, a wrong result never becomes a number, and the table says what the JSON holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import copies, generate, host, plan_cost, report, training
from benchmarks.__main__ import ALL, main
from benchmarks.llama import SITUATIONS, Case, build, case
from benchmarks.measure import Figure, Trial, WrongResult, agree, figure, gap, ratio
from benchmarks.report import Report, make_row, merged, take, write_table
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark, run
from benchmarks.variants import Variant, Variants
from dynaflow.engine import recorder

TINY = Settings(tiny=True, operators="eager", rounds=2)


def test_the_fast_suite_runs(tmp_path: Path) -> None:
    names = ["sequential", "cut_cost", "host", "graph_launch", "memory"]
    line = ["--suite", "fast", "--tiny", "--operators", "eager", "--rounds", "2", "--situations", "decode8"]
    reports = main([*line, "--out", str(tmp_path), "--only", *names])
    assert [r.result["benchmark"] for r in reports] == names
    for made in reports:
        assert made.rows and not [row for row in made.rows if "error" in row]
        assert made.path is not None and json.loads(made.path.read_text())["rows"] == made.rows
        for row in made.rows:
            assert row["situation"] == "decode8, tiny" and row["limit"] != ""
            assert "value" in row or "CUDA" in row["skipped"]
    assert {"fast", "core", "strategies", "systems", "training"} == {suite for b in ALL for suite in b.suites}


def test_the_strategies_suite_runs(tmp_path: Path) -> None:
    cells = "two streams 1,link 2048/14336,mixed 512/1024/1,offloaded 1x2048"
    line = ["--suite", "strategies", "--tiny", "--operators", "eager", "--rounds", "2", "--cells", cells]
    reports = main([*line, "--out", str(tmp_path), "--only", "strategies", "auto"])
    strategies, auto = reports
    for made in reports:
        assert not [row for row in made.rows if "error" in row], made.rows
    assert [row["situation"] for row in auto.rows] == cells.split(",")
    assert {row["situation"] for row in strategies.rows} == set(cells.split(","))
    assert all(row["details"]["chosen"] for row in auto.rows)


def test_what_a_recording_costs(tmp_path: Path) -> None:
    line = ["--only", "trace_cost", "--tiny", "--operators", "eager", "--rounds", "2", "--out", str(tmp_path)]
    (made,) = main(line)
    assert not [row for row in made.rows if "error" in row], made.rows
    assert len(made.rows) >= 5 and all("value" in row and row["limit"] for row in made.rows)
    assert recorder.now is None


def test_the_training_suite_runs(tmp_path: Path) -> None:
    line = ["--suite", "training", "--tiny", "--operators", "eager", "--rounds", "2", "--out", str(tmp_path)]
    (made,) = main(line)
    assert not [row for row in made.rows if "error" in row], made.rows
    assert ["value" in row for row in made.rows] == [not row.peak or torch.cuda.is_available() for row in training.ROWS]


def test_generate_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    works = [dataclasses.replace(generate.TINY[0], batch=batch) for batch in (5, 6)]
    monkeypatch.setattr(generate, "TINY", works)
    line = ["--suite", "systems", "--only", "generate", "--tiny", "--operators", "eager", "--rounds", "2"]
    (made,) = main([*line, "--out", str(tmp_path)])
    assert not [row for row in made.rows if "error" in row], made.rows
    assert [row["what"] for row in made.rows[:3]] == [
        "tokens a second with auto", "tokens a second with sequential", "first call with auto"
    ]  # fmt: skip
    assert [row["situation"] for row in made.rows[::3]] == [f"generate {n}, tiny, 8 in, 8 out" for n in (5, 6)]
    for row in (made.rows[0], made.rows[3]):
        assert row["at_least"] and row["limit"] == 1.0 and row["details"]["rounds"] == 2
        assert row["details"]["same_tokens"] == 1.0 and row["details"]["prefill_by"] and row["details"]["decode_by"]


@pytest.mark.parametrize("what", ["logits", "tokens"])
def test_generate_that_is_wrong_has_no_figure(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are looked at: how far the logits are apart, and what they say."""
    made: list[Any] = []
    sharing = generate.sharing

    def spoilt(model: Any) -> Any:
        made.append(sharing(model))
        if len(made) == 2:  # the first is the baseline's
            layer = made[-1].model.layers[1].mlp.down_proj
            layer.weight = nn.Parameter(layer.weight * (1.2 if what == "logits" else -3.0), requires_grad=False)
        return made[-1]

    monkeypatch.setattr(generate, "sharing", spoilt)
    if what == "tokens":
        monkeypatch.setattr(generate, "FP32_LIMIT", 1e9)
    rows = run([generate.BENCHMARK], TINY, None)[0].rows
    expected = "differs from the baseline" if what == "logits" else "chooses the baseline's token in"
    assert len(rows) == 3 and all(expected in row["error"] and "value" not in row for row in rows)


def test_an_unknown_cell() -> None:
    with pytest.raises(SystemExit, match="two streams 1"):
        main(["--suite", "strategies", "--tiny", "--cells", "two streams"])


def test_layers_and_planning_run() -> None:
    layers = dataclasses.replace(host.BENCHMARK, in_situation=None)  # Llama has had its turn
    rows = [row for made in run([layers, plan_cost.BENCHMARK], TINY, None) for row in made.rows]
    assert len(rows) == 10 + 2 and all(row["value"] > 0 for row in rows)


def test_compiled_operators_are_recorded() -> None:
    times, tasks = host.layer_times(dataclasses.replace(TINY, operators="inductor"), layers=2, parts=2, lanes=2)
    assert tasks == 4 and set(times) == {"by hand", "ours", "whole"}


def test_copies_run_as_scheduled() -> None:
    rows = run([copies.BENCHMARK], TINY, None)[0].rows
    checked = rows[-1]
    assert checked["what"] == "difference from the plain model" and checked["holds"]


def test_bounds_of_copies() -> None:
    times = {"both": [2.0, 4.0], "sequential": [3.0, 4.0], "compute": [1.0, 1.0], "chain": [1.5, 1.0]}
    times |= {"to host": [0.5, 3.0], "from host": [0.5, 0.5]}
    assert copies.fraction(times).value == 0.75  # the chain in one round, copies in the other
    assert copies.speed_up(times).value == 1.25


def test_decoding_starts_over() -> None:
    with torch.no_grad():
        ready = case(build(TINY), SITUATIONS["decode8"], TINY)
        plain = Variant(ready, "eager", ready.model)
        first, second = plain.results(), plain.results()
    assert agree(first, second, 0.0) == 0.0
    assert all(t.abs().sum() > 0 for t in first)
    assert torch.stack(first[-2:]).tolist() == [1024 // 64 + 1] * 2


def linear_case() -> Case:
    torch.manual_seed(0)
    return Case(name="linear", model=nn.Linear(4, 4), inputs={"input": torch.randn(6, 4)}, limit=1e-3)


def wrong(v: Variants) -> Variant:
    def call(input: torch.Tensor) -> torch.Tensor:
        result = v.case.model(input)
        result[3] += 1  # one row of six
        return result

    return Variant(v.case, "wrong", call)


def test_a_wrong_result_is_an_error_and_no_number(tmp_path: Path) -> None:
    def trials(settings: Settings) -> Any:
        v = Variants(linear_case(), settings)
        yield Trial(what="wrong", baseline="eager", limit=1.0, run=lambda: v.compare(wrong(v), v.eager()))
        yield Trial(what="right", baseline="eager", limit=1e9, run=lambda: v.compare(v.eager(), v.eager()))

    made = run([Benchmark(name="check", title="", suites=(), trials=trials)], TINY, tmp_path)[0]
    bad, good = made.rows
    assert bad["error"].startswith("WrongResult") and "value" not in bad and "holds" not in bad
    assert good["holds"] and good["value"] > 0
    assert "error" in report.cells(bad) and "no" in report.cells(bad)


def test_a_failing_benchmark_leaves_the_others(tmp_path: Path) -> None:
    def broken(settings: Settings) -> Any:
        yield Trial(what="first", baseline="", run=lambda: Figure(value=1.0))
        raise ValueError("half-way")

    def whole(settings: Settings) -> Any:
        yield Trial(what="only", baseline="", run=lambda: Figure(value=2.0))

    pair = [Benchmark(name=n, title="", suites=(), trials=t) for n, t in (("broken", broken), ("whole", whole))]
    first, second = run(pair, TINY, tmp_path)
    assert [row.get("value") for row in first.rows] == [1.0, None]
    assert first.rows[1]["error"] == "ValueError: half-way"
    assert [row["value"] for row in second.rows] == [2.0]


def test_a_situation_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("benchmarks.suite.case", no_room)
    chosen = next(b for b in ALL if b.name == "sequential")
    rows = run([chosen], Settings(tiny=True, situations=("decode8",)), None)[0].rows
    assert [row["error"] for row in rows] == ["MemoryError: no room"]


def test_ratios() -> None:
    found = ratio([2.0, 3.0, 4.0], [1.0, 2.0, 2.0])
    assert (found.value, found.low, found.high) == (2.0, 1.5, 2.0)
    assert figure([5.0]).low == 5.0
    row = make_row(Trial(what="w", baseline="b", limit=0.95, at_least=True), Figure(value=0.9))
    assert row["holds"] is False


def test_gaps() -> None:
    x = torch.randn(4, 3)
    assert gap(x, x.clone()) == 0.0
    far = x.clone()
    far[2, 1] = float("nan")
    assert gap(x, far) == float("inf")
    with pytest.raises(WrongResult, match=r"not torch\.float32"):
        gap(x, x.double())
    with pytest.raises(WrongResult, match="1 results, not 2"):
        agree([x, x], [x], 1.0)


MACHINE = {"device": "A GPU", "torch": "2.11.0", "python": "3.12.3", "dynaflow": "0.1.0"}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "speed", "title": "How fast.", "machine": MACHINE, "rows": list(rows)}


def row(what: str, **fields: Any) -> dict[str, Any]:
    base = {"what": what, "situation": "decode8", "baseline": "plain", "unit": "x", "limit": 1.01, "at_least": False}
    return {**base, "command": "python -m benchmarks", **fields}


def test_the_table(tmp_path: Path) -> None:
    rows = [
        row("ours", value=1.004, low=0.99, high=1.02, holds=True, details={"rounds": 20, "ours_ms": 4.51234}),
        row("bytes", value=12.0, low=None, high=None, holds=False, unit="bytes", limit=0, baseline="", details={}),
        row("broken", error="a | b"),
        row("elsewhere", skipped="needs CUDA", limit=0.95, at_least=True),
    ]
    old = {"benchmark": "old", "machine": {**MACHINE, "command": "python old.py"}, "rows": [{"a": 1, "b": 0.5}]}
    (tmp_path / "speed.json").write_text(json.dumps(result(*rows)))
    (tmp_path / "old.json").write_text(json.dumps(old))
    table = tmp_path / "table.md"
    write_table(tmp_path, table)
    assert table.read_text().startswith("# Benchmarks\n\nMade by `python -m benchmarks --table`")
    assert table.read_text().split("\n\n", 3)[3] == (
        "## old: A GPU\n\n"
        "torch 2.11.0, Python 3.12.3, dynaflow 0.1.0; `python old.py`\n\n"
        "| a | b |\n|---|---|\n| 1 | 0.5 |\n\n"
        "## speed: A GPU\n\nHow fast.\n\n"
        "torch 2.11.0, Python 3.12.3, dynaflow 0.1.0; `python -m benchmarks`\n\n"
        "| what | situation | baseline | value | 10-90% | limit | holds | details |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| ours | decode8 | plain | 1.004 | 0.990-1.020 | 1.010 | yes | rounds 20, ours_ms 4.512 |\n"
        "| bytes | decode8 |  | 12 bytes |  | 0 bytes | no |  |\n"
        "| broken | decode8 | plain | error |  | 1.010 | no | a \\| b |\n"
        "| elsewhere | decode8 | plain | skipped |  | at least 0.950 |  | needs CUDA |\n"
    )


def test_results_come_in_parts(tmp_path: Path) -> None:
    old = result(row("a", value=1.0), row("b", value=1.0))
    new = result(row("b", value=2.0), row("c", value=2.0))
    assert [(r["what"], r["value"]) for r in merged(old, new)["rows"]] == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    elsewhere = {**new, "machine": {**MACHINE, "torch": "2.13.0"}}
    assert merged(old, elsewhere)["rows"] == new["rows"]
    kept, taken = tmp_path / "kept", tmp_path / "taken"
    for folder, content in ((kept, old), (taken, new)):
        folder.mkdir()
        (folder / "speed.json").write_text(json.dumps(content))
    take(taken, kept)
    assert len(json.loads((kept / "speed.json").read_text())["rows"]) == 3


def test_each_row_is_kept_at_once(tmp_path: Path) -> None:
    made = Report("speed", "How fast.", tmp_path, ["--only", "speed", "--out", "there"])
    for name in ("a", "b"):
        made.add(make_row(Trial(what=name, baseline=""), Figure(value=1.0)))
        assert made.path is not None
        kept = json.loads(made.path.read_text())["rows"]
        assert kept[-1]["what"] == name and kept[-1]["command"] == "python -m benchmarks --only speed"
