"""The public names: the lazy root, its stub and the reference say the same; and what comes with an import."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dynaflow as df

ROOT = Path(df.__file__).parent
NEVER = ("dynaflow.cost.simul", "dynaflow.observe", "dynaflow.tune", "dynaflow.cli", "dynaflow.integrations")
"""What running a model needs none of."""


@pytest.mark.parametrize("name", df.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(df, name).__name__ == name
    assert name in dir(df)


def test_the_stub_has_these_names() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    places = {alias.name: str(node.module) for node in imports for alias in node.names}
    packages = {"integrations", "strategies"}
    assert places.keys() == {*df.__all__, *packages} and {"__version__", *places} == set(dir(df))
    for name in df.__all__:
        assert getattr(importlib.import_module(places[name]), name) is getattr(df, name)


def test_the_reference_has_these_names() -> None:
    reference = (ROOT.parent / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: dynaflow\.(\w+)$", reference, re.M)) == df.__all__


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        df.Scheduler  # noqa: B018


def _loaded_by(code: str) -> set[str]:
    """Our modules that are loaded in a new process after this code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name for name in json.loads(done.stdout.splitlines()[-1]) if name.split(".")[0] == "dynaflow"}


def test_the_import_alone_loads_nothing() -> None:
    assert _loaded_by("import dynaflow") == {"dynaflow"}


def test_a_call_loads_what_it_runs() -> None:
    call = "import torch, dynaflow as df\ndf.compile(torch.sin, {scheduler!r}, operators='eager')(torch.ones(4))"
    plain = _loaded_by(call.format(scheduler="sequential"))
    split = _loaded_by(call.format(scheduler="nanoflow"))
    assert "dynaflow.api" in plain and "dynaflow.lower.lower" in plain
    assert [name for name in plain | split if name.startswith(NEVER)] == []
    assert {n for n in plain if n.startswith("dynaflow.strategies.")} == {"dynaflow.strategies.sequential"}
    assert "dynaflow.strategies.nanoflow" in split and "dynaflow.strategies.auto" not in split
