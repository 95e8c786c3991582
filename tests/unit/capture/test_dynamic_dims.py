from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynaflow.capture import dynamic_dims
from dynaflow.capture.dynamic_dims import mark_arguments


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The tensors that are marked at the moment, and on which dims."""
    found: list[tuple[int, list[int]]] = []

    def mark(tensor: torch.Tensor, dims: list[int]) -> Any:
        found.append((id(tensor), list(dims)))
        return found.pop

    monkeypatch.setattr(dynamic_dims._torch, "mark_dynamic", mark)
    return found


def mark(*args: Any, declared: Any = None, dynamic: Any = None, **kwargs: Any) -> list[Any]:
    names = ("x", "y", "z")
    return list(mark_arguments(args, kwargs, names, declared, 0, dynamic or {}))


X, Y, OTHER = torch.empty(6, 4), torch.empty(6), torch.empty(4, 6)


def test_the_first_dim_that_inputs_share_is_the_batch(marked: Any) -> None:
    mark(X, Y)
    assert marked == [(id(X), [0]), (id(Y), [0])]


def test_marks_are_taken_back(marked: Any) -> None:
    for undo in reversed(mark(X, Y)):
        undo()
    assert marked == []


def test_what_was_declared(marked: Any) -> None:
    mark(X, OTHER, declared={"y": 1})
    assert marked == [(id(OTHER), [1])]


def test_other_dims_that_vary(marked: Any) -> None:
    mark(X, y=Y, dynamic={"x": [1]})
    assert marked == [(id(X), [0, 1]), (id(Y), [0])]


def test_tensors_are_found_inside_of_arguments(marked: Any) -> None:
    inside = {"a": [X], "b": SimpleNamespace(c=(Y,)), "text": "abc", "module": torch.nn.Linear(6, 6)}
    mark(inside)
    assert sorted(marked) == sorted([(id(X), [0]), (id(Y), [0])])


def test_neither_parameters_nor_what_lies_too_deep(marked: Any) -> None:
    deep: Any = X
    for _ in range(dynamic_dims.DEPTH + 1):
        deep = [deep]
    mark(deep, torch.nn.Parameter(torch.empty(6, 2)))
    assert marked == []
