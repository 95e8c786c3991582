from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

import dynaflow as df
from dynaflow.core.importing import import_object, on_sys_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "own_module_for_imports.py").write_text("class Mine:\n    inner = 3\n")
    (tmp_path / "broken_for_imports.py").write_text("\nraise ValueError('no')\n")
    (tmp_path / "exits_for_imports.py").write_text("raise SystemExit(2)\n")
    return tmp_path


def test_a_module_and_a_file(folder: Path) -> None:
    assert import_object("math:pi", "number") is math.pi
    mine = import_object("own_module_for_imports.py:Mine", "class")
    assert mine.inner == 3 and import_object(f"{folder}/own_module_for_imports.py:Mine.inner", "number") == 3
    assert str(folder) not in sys.path, "searched for this import alone"


@pytest.mark.parametrize(
    ("path", "message", "advice"),
    [
        ("math:pii", "no number at 'math:pii': math has no 'pii'", "nearest names"),
        ("own_module_for_imports.py:Mien", "has no 'Mien'", "Mine"),
        ("nowhere_for_imports:a", "no number at 'nowhere_for_imports:a'", "package.module:name"),
        ("nowhere.py:a", "there is no file nowhere.py", "folder/file.py:name"),
        ("pi", "no number at 'pi'", "package.module:name"),
        ("broken_for_imports.py:a", "importing broken_for_imports.py failed: ValueError: no", "fix the error"),
        ("exits_for_imports.py:a", "failed: SystemExit: 2", "fix the error"),
    ],
)
def test_what_is_not_there(folder: Path, path: str, message: str, advice: str) -> None:
    with pytest.raises(df.PlanError) as caught:
        import_object(path, "number", df.PlanError)
    assert message in str(caught.value) and advice in str(caught.value.advice)


def test_an_error_in_the_users_file_names_its_line(folder: Path) -> None:
    with pytest.raises(df.DynaFlowError) as caught:
        import_object("broken_for_imports.py:a", "number")
    assert str(caught.value.line).endswith("broken_for_imports.py:2")


def test_a_file_whose_name_is_taken(folder: Path) -> None:
    (folder / "math.py").write_text("pi = 4\n")
    with pytest.raises(df.DynaFlowError, match="another module of that name is already imported"):
        import_object("math.py:pi", "number")


def test_a_folder_is_searched_first_and_no_longer_than_that(tmp_path: Path) -> None:
    before = list(sys.path)
    with on_sys_path(str(tmp_path)):
        assert sys.path == [str(tmp_path), *before]
    assert sys.path == before
