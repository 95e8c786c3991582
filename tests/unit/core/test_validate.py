from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dynaflow as df
from dynaflow.core import validate

INTEGERS = [3, np.int64(3), np.array(3), torch.tensor(3)]
NO_INTEGERS = [True, np.bool_(True), torch.tensor(True), 3.0, "3", None, torch.tensor(3.0), torch.ones(2, dtype=int)]


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_integers(value: Any) -> None:
    found = validate.integer(value, "count", "pass a number", least=3, most=3)
    assert validate.is_integer(value) and type(found) is int and found == 3


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer(value: Any) -> None:
    assert not validate.is_integer(value)
    with pytest.raises(df.DynaFlowError, match="count="):
        validate.integer(value, "count", "pass a number")


@pytest.mark.parametrize("value", [2, 5])
def test_limits(value: int) -> None:
    with pytest.raises(df.DynaFlowError, match=f"count={value}"):
        validate.integer(value, "count", "pass 3 or 4", least=3, most=4)


@pytest.mark.parametrize("value", [[1, 2], (1, 2), {1, 2}, {1: 0, 2: 0}.keys(), np.array([1, 2]), iter([1, 2])])
def test_members(value: Any) -> None:
    assert validate.sequence(value, "parts", "pass a list") == [1, 2]


@pytest.mark.parametrize("value", ["12", b"12", {1: 2}, 12, None, torch.tensor(12)], ids=repr)
def test_what_has_no_members(value: Any) -> None:
    assert validate.members(value) is None
    with pytest.raises(df.DynaFlowError, match="parts="):
        validate.sequence(value, "parts", "pass a list")


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validate.flag, [True, False], [1, 0, None, "yes", np.bool_(True)]),
        (lambda v, what, **e: validate.names(v, what, "", **e), [["a", "b"], (), {"a"}], ["ab", [1], None]),
        (lambda v, what, **e: validate.mapping(v, what, "", **e), [{}, {"a": 1}], [{1: 2}, [("a", 1)], None]),
        (lambda v, what, **e: validate.function(v, what, "", **e), [len, lambda: 0, int], ["len", None]),
    ],
    ids=["flag", "names", "mapping", "function"],
)
def test_kinds(check: Callable[..., Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert check(value, "it") in (value, list(value) if isinstance(value, (set, tuple)) else value)
    for value in bad:
        with pytest.raises(df.ScheduleError, match=r"^it="):
            check(value, "it", error=df.ScheduleError)


def test_an_error_names_the_callers_line_and_what_to_pass() -> None:
    error = validate.invalid("width", "wide", "pass a number")
    assert str(error).startswith("width='wide'") and error.advice == "pass a number"
    assert Path(__file__).name in str(error.line)
