from __future__ import annotations

from dynaflow.core.bounded import BoundedDict


def test_the_oldest_goes_for_a_new_one() -> None:
    table = BoundedDict(2)
    table["a"], table["b"] = 1, 2
    table["a"] = 3  # known: it keeps its place
    assert list(table.items()) == [("a", 3), ("b", 2)]
    table["c"] = 4
    assert list(table.items()) == [("b", 2), ("c", 4)]


def test_what_goes_is_announced() -> None:
    gone: list[int] = []
    table = BoundedDict(1, lambda: gone.append(len(table)))
    table["a"] = 1
    table["a"] = 2
    assert gone == []
    table["b"] = 3
    assert gone == [0], "called when the old entry has gone, before the new one is there"
    assert table == {"b": 3}
