"""Dataclasses to plain data and back; what is of another kind is refused with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from dynaflow.core.json_codec import decode, encode


@dataclass(frozen=True)
class Inner:
    name: str
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["a", "b"] = "a"
    many: tuple[Inner, ...] = ()
    pair: tuple[int, float] | None = None
    uses: Mapping[str, float] = field(default_factory=dict)
    flag: bool = False


WHOLE = Outer(Inner("x", 1.0), "b", (Inner("y"), Inner("z")), (3, 4.0), {"sms": 0.25}, True)


@pytest.mark.parametrize("value", [WHOLE, Outer(Inner("x"))])
def test_there_and_back(value: Outer) -> None:
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


def test_defaults_are_left_out_and_unknown_keys_ignored() -> None:
    assert encode(Outer(Inner("x"))) == {"inner": {"name": "x"}}
    assert decode(Outer, {"inner": {"name": "x", "more": 1}, "other": 2}) == Outer(Inner("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, "inner: expected an object, found 3"),
        ({"inner": {}}, "inner.name: missing"),
        ({"inner": {"name": 3}}, "inner.name: expected a string, found 3"),
        ({"many": [{"name": "y"}, {"name": "z", "share": "1"}]}, "many[1].share: expected a number, found '1'"),
        ({"many": {}}, "many: expected a list, found {}"),
        ({"kind": "c"}, "kind: expected one of a, b, found 'c'"),
        ({"pair": [1]}, "pair: expected a list of 2, found [1]"),
        ({"pair": [1.5, 1]}, "pair[0]: expected an integer, found 1.5"),
        ({"pair": [True, 1]}, "pair[0]: expected an integer, found True"),
        ({"pair": [1, 10**400]}, "pair[1]: expected a number"),
        ({"uses": {"sms": None}}, "uses.sms: expected a number, found None"),
        ({"flag": 1}, "flag: expected true or false, found 1"),
    ],
)
def test_what_is_of_another_kind(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        decode(Outer, {"inner": {"name": "x"}, **change})


def test_not_even_an_object() -> None:
    with pytest.raises(ValueError, match=r"^expected an object, found \[\]"):
        decode(Outer, [])
