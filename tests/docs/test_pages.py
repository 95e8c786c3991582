"""The pages are all there, and their figures are those that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dynaflow as df
from dynaflow.strategies import CLASSES
from tests.docs.pages import PAGES, ROOT, name_of

DOCS = ROOT / "docs"
BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"(?<![\d.])\d\.\d{3,4}(?![\d.])")
WITH_FIGURES = [DOCS / "limits.md", *sorted((DOCS / "strategies").glob("*.md"))]


@pytest.mark.parametrize("page", WITH_FIGURES, ids=name_of)
def test_figures_are_in_the_benchmarks(page: Path) -> None:
    known = set(FIGURE.findall(BENCHMARKS))
    assert set(FIGURE.findall(page.read_text(encoding="utf-8"))) <= known


@pytest.mark.parametrize("name", CLASSES)
def test_strategy_has_a_page(name: str) -> None:
    text = (DOCS / "strategies" / f"{name}.md").read_text(encoding="utf-8")
    assert "## When it helps" in text and "## When it hurts" in text
    assert name == "auto" or f"](../pictures/{name}.svg)" in text
    assert f"](strategies/{name}.md)" in (DOCS / "strategies.md").read_text(encoding="utf-8")


def test_reference_has_all_public_names() -> None:
    found = re.findall(r"^::: dynaflow\.(\w+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(found) == sorted(df.__all__)


def test_limits_name_the_rows_that_miss_theirs() -> None:
    limits = (DOCS / "limits.md").read_text(encoding="utf-8")
    for line in BENCHMARKS.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 7 and cells[7] == "no":
            assert f"{cells[1]}, {cells[2]} | {cells[4]} | {cells[6]} |" in limits, line


def test_invariants_name_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / "invariants.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and anchors; `make docs` checks those inside of docs/ once more."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
