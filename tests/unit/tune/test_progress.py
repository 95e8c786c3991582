from __future__ import annotations

import sys

import pytest

from dynaflow.tune.progress import progress_bar


def test_no_budget_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(0) as say:
        say("something")
    assert capsys.readouterr().out == ""


def test_a_bar_says_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with progress_bar(5.0) as say:
        say("something")
    assert "something" in capsys.readouterr().out


def test_plain_lines_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress_bar(5.0) as say:
        say("one")
        say("another")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("s of 5] one") and second.endswith("s of 5] another")
