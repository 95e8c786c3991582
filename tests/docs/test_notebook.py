"""The notebook in examples/ runs, without jupyter, and shows its timeline."""

from __future__ import annotations

import html
import json
import sys
import types

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "timeline.ipynb"


def test_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    stand_in = types.ModuleType("IPython.display")
    vars(stand_in).update(HTML=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    module = types.ModuleType("timeline_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks a function's globals up by its module
    for n, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {n}", "exec"), vars(module))
    (frame,) = shown
    page = html.unescape(frame.partition('srcdoc="')[2].partition('"')[0])
    assert page.startswith("<!") and page.rstrip().endswith("</html>") and "the plan" in page
    assert "memory |" in capsys.readouterr().out


def test_notebook_has_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"]) and NOTEBOOK.stat().st_size < 10_000
