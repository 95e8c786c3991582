from __future__ import annotations

from dataclasses import fields

from dynaflow.core.stats import Stats


def test_each_counter_has_a_line_and_starts_empty() -> None:
    stats = Stats(runs=3, plain_reasons=["why"])
    lines = dict(line.split(maxsplit=1) for line in str(stats).splitlines())
    assert list(lines) == [f.name for f in fields(Stats)]
    assert (lines.pop("runs"), lines.pop("plain_reasons")) == ("3", "['why']")
    assert set(lines.values()) <= {"0", "0.0", "[]"}


def test_two_models_have_lists_of_their_own() -> None:
    one, other = Stats(), Stats()
    one.compile_failures.append("x")
    assert not other.compile_failures
