from __future__ import annotations

import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

from dynaflow._torch.nodes import (
    boxed_forward,
    has_transforms,
    is_view,
    name_complex_constants,
    overload_of,
    packet_of,
    view_base,
    view_chain,
)

aten = torch.ops.aten


def test_overloads_and_packets() -> None:
    assert packet_of(aten.add.Tensor) is aten.add and packet_of(aten.add) is aten.add and packet_of(len) is len
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    assert overload_of(graph.call_function(aten.add, (x, x))) is aten.add.Tensor
    assert overload_of(graph.call_function(aten.add, (x, 1.5))) in (aten.add.Tensor, aten.add.Scalar)
    assert overload_of(graph.call_function(aten.add, (x, "no"))) is None


@pytest.mark.parametrize(
    ("op", "view"),
    [(aten.view.default, True), (aten.unbind.int, True), (aten.add_.Tensor, False), (aten.add.Tensor, False)],
)
def test_views_by_their_schema(op: Any, view: bool) -> None:
    assert is_view(op._schema) is view


def test_views_are_looked_through() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.mul.Tensor, (x, 2))
    rows = graph.call_function(aten.unbind.int, (made,))
    row = graph.call_function(operator.getitem, (rows, 0))
    last = graph.call_function(aten.view.default, (row, [2]))
    assert list(view_chain(last)) == [last, row, made]
    assert view_base(last) is made and view_base(made) is made and view_base(3) == 3


def test_a_boxed_graph_lets_go_of_its_arguments() -> None:
    gone: list[bool] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        gone.append(held[0]() is None)
        return x

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    seen = graph.call_function(look, (graph.call_function(operator.add, (x, 1)),))
    graph.output(graph.call_function(operator.mul, (seen, y)))
    run = boxed_forward(fx.GraphModule(nn.Module(), graph))
    box = [torch.ones(2), torch.full((2,), 3.0)]
    held.append(weakref.ref(box[0]))
    torch.testing.assert_close(run(box), torch.full((2,), 6.0))
    assert box == [] and gone == [True], "after its last use, and before the end"


def test_a_boxed_graph_calls_functions_in_place_of_operators() -> None:
    gm = fx.GraphModule({}, fx.Graph())
    x = gm.graph.placeholder("x")
    gm.graph.output(gm.graph.call_function(aten.relu.default, (x,)))
    gm.recompile()
    assert boxed_forward(gm, {aten.relu.default: lambda x: x - 5})([torch.ones(1)]).item() == -4
    assert boxed_forward(gm)([torch.ones(1)]).item() == 1 == gm(torch.ones(1)).item(), "the graph is left as it was"


def test_levels_of_torch_func_are_seen() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(lambda x: torch.func.vmap(torch.sin)(x), backend=backend)(torch.ones(2, 2))
    torch.compile(lambda x: torch.sin(x), backend=backend)(torch.ones(2, 2))
    assert [has_transforms(gm) for gm in graphs] == [True, False]


def test_complex_constants_that_are_not_finite() -> None:
    name_complex_constants()
    for number in map(complex, ("nan+nanj", "inf-infj", "1+infj", "-nanj", "2-1j")):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.full, ((2,), number)))
        torch.testing.assert_close(fx.GraphModule({}, graph)(), torch.full((2,), number), equal_nan=True)
