"""tests/slow.txt names tests that are there: one that was renamed would be run by nobody, or by everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", SLOW)
def test_an_entry(entry: str) -> None:
    file, _, name = entry.partition("::")
    assert (ROOT / file).exists()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
