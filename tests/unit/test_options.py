"""`Options` is the list of options; the signature of `compile`, its docstring, the environment and the pages agree."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import dynaflow as df
from dynaflow.lower.compile_ops import Mode
from dynaflow.lower.lower import CudaGraph
from dynaflow.options import CUDAGRAPHS, ENVIRONMENT, OPERATORS, OPTIONS, Options

DOCS = Path(df.__file__).parents[1] / "docs"


def test_the_signature_of_compile() -> None:
    given = [(p.name, p.annotation, p.default) for p in inspect.signature(df.compile).parameters.values()]
    assert given[0] == ("model", "Callable[..., Any]", inspect.Parameter.empty)
    ours = [(f.name, f.type, f.default) for f in fields(Options)]
    assert [g for g in given[1:] if g[0] != "fullgraph"] == ours, "fullgraph is torch.compile's own"


def test_the_docstring_of_compile() -> None:
    described = re.findall(r"^    (\w+): ", df.compile.__doc__ or "", re.MULTILINE)
    assert [name for name in described if name != "fullgraph"] == list(OPTIONS)


def test_allowed_values() -> None:
    assert get_args(Mode) == OPERATORS
    assert tuple(a for part in get_args(CudaGraph) for a in get_args(part)) == CUDAGRAPHS


def test_the_table_of_variables() -> None:
    page = (DOCS / "systems" / "transformers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(DYNAFLOW_\w+)=.*?` \| `(\w+)`", page, re.MULTILINE)
    assert rows == [(variable, option.name) for variable, option in ENVIRONMENT.items()]


def test_options_for_vllm_are_ours() -> None:
    source = (Path(df.__file__).parent / "integrations" / "vllm.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^OPTIONS = \((.*)\)$", source, re.MULTILINE)
    assert set(re.findall(r'"(\w+)"', listed)) < set(OPTIONS)


def test_none_is_the_default() -> None:
    assert Options(operators=None, check=None) == Options()  # type: ignore[arg-type]
    assert Options().operators == "inductor" and Options().check is True and Options().static_inputs == ()
