"""`mark` by itself; the operators that it makes are in partition/test_partition.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynaflow as df
from dynaflow.capture.annotations import marks_of, tag_tuple


@pytest.mark.parametrize(
    ("tag", "tags"), [("a", ("a",)), (("a", "b"), ("a", "b")), (["a"], ("a",)), ({"a"}, ("a",)), ((), ())]
)
def test_tags(tag: Any, tags: tuple[str, ...]) -> None:
    assert tag_tuple(tag) == tags


@pytest.mark.parametrize("wrong", [3, None, ("a", 3), b"a"])
def test_what_is_no_tag(wrong: Any) -> None:
    with pytest.raises(df.PartitionError, match="tag="):
        tag_tuple(wrong)


@pytest.mark.parametrize(("name", "splittable"), [(3, None), ("a", 1), (None, None)])
def test_what_is_no_mark(name: Any, splittable: Any) -> None:
    with pytest.raises(df.PartitionError, match=r"mark\(") as caught:
        df.mark(name, splittable=splittable)
    assert __file__ in str(caught.value.line)


def test_an_error_in_a_region_gets_out() -> None:
    with pytest.raises(ZeroDivisionError), df.mark("region"):
        _ = 1 / 0


def test_nodes_know_the_regions_around_them() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    @df.mark("inner", tag="t", splittable=True)
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def model(x: Tensor) -> Tensor:
        with df.mark("outer"):
            x = inner(x).cos()
        with df.mark("outer"):
            return x.tan()

    torch.compile(model, backend=backend)(torch.ones(2))
    (gm,) = graphs
    found = {str(n.target): marks_of(n) for n in gm.graph.nodes if n.op == "call_method"}
    notes = {name: [note for _, note in marks] for name, marks in found.items()}
    outer = ("outer", (), None)
    assert notes == {"sin": [outer, ("inner", ("t",), True)], "cos": [outer], "tan": [outer]}
    assert found["sin"][0] == found["cos"][0] != found["tan"][0], "each entry of a region is one of its own"
