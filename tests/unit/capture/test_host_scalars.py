from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from dynaflow.capture.host_scalars import HostScalars
from tests.helpers import Each, compiled, randn


def traced(function: object, **values: object) -> fx.GraphModule:
    """A graph whose nodes know what they are worth, as Dynamo's do."""
    gm = fx.symbolic_trace(function)  # type: ignore[arg-type]
    known: dict[fx.Node, object] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            known[node] = values[node.name]
        elif node.op == "call_function":
            args = fx.map_arg(node.args, lambda n: known[n])
            known[node] = node.target(*args)  # type: ignore[operator]
        node.meta["example_value"] = known.get(node)
    return gm


def test_numbers_made_of_numbers_are_taken_out() -> None:
    gm = traced(lambda x, n: (n + 1, x * n, (n + 1) * 2), x=torch.ones(2), n=3)
    numbers = HostScalars(gm)
    assert numbers.positions == [0, 2]
    args = [torch.ones(2), 5]
    (product,) = gm(*args)
    assert list(numbers.made(args)) == [6, 12]
    complete = numbers.put_back(numbers.made(args), [product])
    assert complete[0] == 6 and complete[2] == 12 and torch.equal(complete[1], torch.full((2,), 5.0))
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == [product_name(gm)], "nothing else is left"


def product_name(gm: fx.GraphModule) -> str:
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0][0].name


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(3)])
def test_numbers_made_of_tensors_stay(value: Tensor) -> None:
    gm = traced(lambda x: (x * 2, x + 1), x=value)
    code = gm.code
    assert HostScalars(gm).positions == [] and gm.code == code


def test_counting_on_asks_for_no_other_plan() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    model = Counts()
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True), torch.no_grad():
        scheduler = Each(split=2)
        fast = compiled(model, scheduler)
        for _ in range(4):
            fast(randn(6, 8))
    assert model.calls == 4 and scheduler.calls <= 2
