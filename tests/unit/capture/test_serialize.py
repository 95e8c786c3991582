"""Captured graphs, written down and read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dynaflow as df
from dynaflow import api
from dynaflow.capture.captured_graph import CapturedGraph
from dynaflow.capture.node_info import module_calls, module_stack, source_line
from dynaflow.capture.serialize import SAVED_META, dumps, has_example_args, loads, set_example_args
from dynaflow.core.fx_graphs import copy_module
from tests.helpers import Each, Stack, graph_of, plans_of, randn


def captured(model: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, bytes, list[Any]]:
    """The graph of a call, as bytes too, and the arguments that it takes."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.append((copy_module(gm), dumps(gm)))
        return lambda *taken: found.append(taken) or gm(*taken)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(*args)
    (gm, data), taken = found
    return gm, data, list(taken)


def read_for(data: bytes, args: list[Any]) -> fx.GraphModule:
    gm = loads(data)
    set_example_args(gm, args)
    return gm


@pytest.fixture
def stack() -> Stack:
    return Stack(blocks=3)


def test_it_is_the_same_graph(stack: Stack) -> None:
    gm, data, args = captured(stack, randn(6, 8))
    again = read_for(data, args)
    old, new = (list(graph.graph.nodes) for graph in (gm, again))
    assert list(map(fx.Node.format_node, new)) == list(map(fx.Node.format_node, old))
    for what in told, module_stack, module_calls, source_line:
        assert list(map(what, new)) == list(map(what, old))
    assert any(map(module_stack, new)) and any(map(source_line, new))
    first, second = CapturedGraph(gm), CapturedGraph(again)
    for one, other in zip(first.inputs, second.inputs, strict=True):
        for fact in "name", "owned", "shape", "symbol", "static_address", "pinned":
            assert getattr(one, fact) == getattr(other, fact), (one.name, fact)
    assert list(first.shapes.values()) == list(second.shapes.values())
    assert first.batch_symbols == second.batch_symbols and first.hints == second.hints


def told(node: fx.Node) -> dict[str, Any]:
    """What is not there must not be there: compilers look."""
    return {name: node.meta[name] for name in SAVED_META if name in node.meta}


def test_marks_are_kept() -> None:
    def model(x: Tensor) -> Tensor:
        with df.mark("doubled", tag="mine"):
            return x * 2

    gm, data, args = captured(model, randn(4, 2))
    again = read_for(data, args)
    assert list(map(told, again.graph.nodes)) == list(map(told, gm.graph.nodes))
    assert any("custom" in node.meta for node in again.graph.nodes)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_it_is_scheduled_and_runs_as_the_captured_one(stack: Stack, operators: str) -> None:
    x = randn(6, 8)
    gm, data, args = captured(stack, x)
    identities = []
    set_example_args(gm, args)
    for graph in gm, read_for(data, args):
        assert has_example_args(graph)
        engine = api.new_engine(None, {"scheduler": Each(split=2), "operators": operators})
        with torch.no_grad():
            (result,) = engine.backend(graph, list(args))(*args)
        torch.testing.assert_close(result, stack(x))
        identities.append(graph_of(engine).identity)
        (plan,) = plans_of(engine)
        assert len(plan.micro_batches) == 2
    assert identities[0] == identities[1], "plans that were kept on disk are found under it"


def test_another_call_may_bring_other_tensors() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return x * self.weight + y

    model = Adds()
    x = randn(6, 4)
    _, data, args = captured(model, x, x[:, :4])
    others = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
    for order in (args, others), (others, args):
        engine = api.new_engine(None, {"scheduler": Each(split=2), "operators": "eager"})
        with torch.no_grad():
            run = engine.backend(read_for(data, order[0]), list(order[0]))
            for taken in order:
                for arg in taken:
                    if isinstance(arg, Tensor) and arg.dim() == 2:
                        arg.copy_(randn(6, 4))
                seen = randn(6, 4) + (1 if taken is args else 0)
                (result,) = run(*taken)
                torch.testing.assert_close(result, (randn(6, 4) + 1) * model.weight + seen, msg="x and y may be one")
        assert all(len(plan.micro_batches) == 2 for plan in plans_of(engine))


def test_what_can_not_be_written_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("constant"))),))
    with pytest.raises(ValueError, match=r"a constant of its own: .*get_attr\[target=constant\]"):
        dumps(fx.GraphModule({"constant": randn(4)}, graph))


def test_what_another_version_wrote_is_refused() -> None:
    _, data, _ = captured(lambda x: x + 1, randn(4, 2))
    with pytest.raises(ValueError, match="another version"):
        loads(data.replace(b"dynaflow graph", b"dynaflow draft", 1))


def test_what_layers_have_in_common_is_written_once() -> None:
    def examples(blocks: int) -> int:
        _, data, _ = captured(Stack(blocks=blocks), randn(6, 8))
        return len({id(node.meta["example_value"]) for node in loads(data).graph.nodes})

    assert examples(2) == examples(9)
