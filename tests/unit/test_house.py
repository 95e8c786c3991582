"""What holds for the tests themselves: they use what dynaflow offers, their assertions can fail, and each module has
some."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynaflow

ROOT = Path(dynaflow.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
SETTERS = {"setattr", "getattr", "delattr", "hasattr"}

OTHERS = {*vars(nn.Module()), *dir(nn.Module), *dir(Tensor), *dir(torch.optim.Optimizer), "_step_supports_amp_scaling"}
"""Private names of torch that our classes have as well."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def offenders(rule: Callable[[ast.Module], Iterable[tuple[int, str]]]) -> list[str]:
    """Where the tests break a rule, which yields lines and what is there."""
    return [f"{name_of(path)}:{line}: {what}" for path in FILES for line, what in rule(tree_of(path))]


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def private_names() -> set[str]:
    """Of dynaflow, wherever they are; and those that tests once looked at."""
    found = {name for path in ROOT.rglob("*.py") for name in defined_in(tree_of(path)) if is_private(name)}
    found.discard("_torch")
    return (found | {"_engine", "_schedules"}) - OTHERS


def looks_inside(tree: ast.Module, private: set[str]) -> Iterator[tuple[int, str]]:
    """Where a test imports, reads or replaces a private name of dynaflow; what its own classes and modules define is
    the test's own affair."""
    own = set(defined_in(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "dynaflow":
                yield from ((node.lineno, a.name) for a in names if is_private(a.name) and a.name != "_torch")
            case ast.Attribute(attr=name, value=value):
                theirs = ast.unparse(value).split(".")[0] in ("self", "cls", "torch", "aten")
                if (name in private - own and not theirs) or name.startswith("_df_"):
                    yield node.lineno, name
            case ast.Call(func=function, args=[_, ast.Constant(value=str(name)), *_]) if name in private - own:
                if {getattr(function, "id", ""), getattr(function, "attr", "")} & SETTERS:
                    yield node.lineno, name
            case ast.Constant(value=str(text)) if text.startswith("dynaflow.") and " " not in text:
                yield from ((node.lineno, part) for part in text.split(".") if is_private(part) and part != "_torch")


PRIVATE = private_names()


def test_no_test_looks_at_private_names() -> None:
    assert offenders(lambda tree: looks_inside(tree, PRIVATE)) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("fast._engine.stats", ["_engine"]),
        ("fast._df_model", ["_df_model"]),
        ("pool.planner._facts", ["_facts"]),
        ("from dynaflow.api import _kind_of", ["_kind_of"]),
        ("monkeypatch.setattr(planner, '_facts', {})", ["_facts"]),
        ("monkeypatch.setattr('dynaflow.engine.planner._user', f)", ["_user"]),
        ("from dynaflow import _torch; _torch.versions", []),
        ("module._modules, tensor._base, df.__version__, x._", []),
        ("class A:\n  def __init__(self): self._facts = 1\nA()._facts", []),
    ],
)
def test_what_looks_inside_is_found(code: str, found: list[str]) -> None:
    assert [name for _, name in looks_inside(ast.parse(code), PRIVATE)] == found


def looks_up_plans(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(("planner.cache", "planner_of(fast).cache")):
            yield node.lineno, ast.unparse(node)


def test_plans_are_looked_up_in_one_place() -> None:
    """`planner.cache` belongs to tests/helpers.py: see `graphs_of`, `plans_of`, `lowered_of`."""
    assert {found.partition(":")[0] for found in offenders(looks_up_plans)} == {"helpers.py"}


def swallowed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Assertions whose message is what was to be compared: `assert len(a), len(b) == (2, 3)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            compares = node.msg is not None and any(isinstance(n, ast.Compare) for n in outside_of_texts(node.msg))
            if compares or isinstance(node.test, (ast.Tuple, ast.Constant, ast.Lambda)):
                yield node.lineno, ast.unparse(node)


def outside_of_texts(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those inside it, without filters of comprehensions: a message may list what is wrong."""
    yield node
    if not isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.JoinedStr)):
        for child in ast.iter_child_nodes(node):
            yield from outside_of_texts(child)


def test_assertions_compare_what_they_say() -> None:
    assert offenders(swallowed) == []


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("assert len(a), len(b) == (2, 3)", True),
        ("assert (x, 'message')", True),
        ("assert 'always'", True),
        ("assert x == 1, f'{x == 2}'", False),
        ("assert not bad, [b for b in bad if b > 1]", False),
        ("assert len(a) == 2, (a, b)", False),
    ],
)
def test_assertions_that_can_not_fail_are_found(code: str, bad: bool) -> None:
    assert bool(list(swallowed(ast.parse(code)))) is bad


UNIT = Path(__file__).parent
MODULES = sorted(p.relative_to(ROOT).with_suffix("") for p in ROOT.rglob("*.py") if p.name != "__init__.py")


def table_of(folder: Path) -> dict[str, str]:
    """What the docstring of a folder of tests says of modules: lines `module: test_file.py, other_test.py`."""
    text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    return dict(re.findall(r"^([\w/]+): (.+)$", text, re.M))


@pytest.mark.parametrize("module", MODULES, ids=Path.as_posix)
def test_each_module_is_tested(module: Path) -> None:
    """In the mirrored place; or the docstring of the nearest folder of tests names the files that test it, or says why
    none does."""
    if (UNIT / module.parent / f"test_{module.name}.py").exists():
        return
    folder = next(f for f in (UNIT / module.parent, *(UNIT / module.parent).parents) if (f / "__init__.py").exists())
    said = table_of(folder).get((UNIT / module).relative_to(folder).as_posix(), "")
    place = f"tests/unit/{module.parent}/test_{module.name}.py"
    assert said, f"write {place}, or name it in the docstring of {folder}/__init__.py"
    files = re.findall(r"[\w./]+\.py", said)
    assert files or len(said.split()) > 1
    assert [file for file in files if not (folder / file).exists()] == []


@pytest.mark.parametrize("folder", sorted({p.parent for p in UNIT.rglob("__init__.py")}), ids=name_of)
def test_tables_of_modules_are_up_to_date(folder: Path) -> None:
    for name in table_of(folder):
        module = folder.relative_to(UNIT) / name
        assert module in MODULES, f"{name} is gone"
        assert not (UNIT / module.parent / f"test_{module.name}.py").exists(), f"{name} has a file of its own"
