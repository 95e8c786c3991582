"""Functions of other systems: wrapped from one list, and put back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from dynaflow.integrations.hooks import Hook, Hooks, replace, wrap


class Thing:
    def method(self, number: int) -> int:
        return number


class Heir(Thing):
    pass


def plus_one(method: Any, thing: Thing, number: int) -> int:
    return method(thing, number) + 1


def test_a_method_is_wrapped_and_restored() -> None:
    thing, before = Thing(), Thing.method
    of_class = wrap(Thing, "method", plus_one)
    of_object = wrap(thing, "method", lambda method, number: method(number) * 10)
    assert thing.method(1) == 20 and Thing().method(1) == 2
    assert Thing.method.__name__ == "method"
    of_object()
    assert thing.method(1) == 2 and "method" not in vars(thing)
    of_class()
    assert Thing.method is before


def test_an_inherited_method_is_restored_by_deleting_ours() -> None:
    restore = wrap(Heir, "method", plus_one)
    assert Heir().method(1) == 2 and Thing().method(1) == 1
    restore()
    assert "method" not in vars(Heir)


def test_a_list_is_applied_once_and_restored() -> None:
    before, thing = Thing.method, Thing()
    hooks = Hooks(
        ("1.0",),
        (
            Hook(target=f"{__name__}:Thing.method", function=plus_one, why="a test"),
            Hook(target=f"{__name__}:Heir.method", why="on single objects"),
        ),
    )
    assert Thing.method is before, "nothing is wrapped before it is used"
    hooks.apply()
    hooks.apply()
    assert thing.method(1) == 2 and "method" not in vars(Heir)
    hooks.wrap(thing, "method", lambda method, number: method(number) * 10)
    assert thing.method(1) == 20
    hooks.restore()
    assert thing.method(1) == 1 and Thing.method is before
    hooks.apply()
    assert thing.method(1) == 2
    hooks.restore()


def test_an_object_is_not_held() -> None:
    thing = Thing()
    restore, reference = replace(thing, "method", None), weakref.ref(thing)
    del thing
    gc.collect()
    assert reference() is None
    restore()


def test_an_attribute_that_was_there_comes_back() -> None:
    thing: Any = Thing()
    thing.method = print
    replace(thing, "method", len)()
    assert thing.method is print


def test_a_list_that_fails_wraps_nothing() -> None:
    before = Thing.method
    hooks = Hooks(
        ("1.0",),
        (
            Hook(target=f"{__name__}:Thing.method", function=plus_one, why="a test"),
            Hook(target=f"{__name__}:Thing.gone", function=plus_one, why="not in this version"),
        ),
    )
    for _ in range(2):  # the second call does not pass over it
        with pytest.raises(AttributeError, match="gone"):
            hooks.apply()
        assert Thing.method is before
