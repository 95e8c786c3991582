from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import dynaflow as df


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("match", "path", "kind", "found"),
    [
        ("*.mlp", "layers.0.mlp", nn.Module, True),
        ("*.mlp", "mlp", nn.Module, False),
        ("*.mlp", "layers.0.mlp.0", nn.Module, False),
        ("*.MLP", "layers.0.mlp", nn.Module, False),
        (re.compile("mlp"), "layers.0.mlp.0", nn.Module, True),
        (re.compile("^mlp"), "layers.0.mlp.0", nn.Module, False),
        (nn.Linear, "anywhere", nn.Linear, True),
        (nn.Linear, "anywhere", Special, True),
        (Special, "anywhere", nn.Linear, False),
    ],
)
def test_modules_by_path_and_class(match: Any, path: str, kind: type, found: bool) -> None:
    assert df.SplitModule(match).matches(path, kind) is found


@pytest.mark.parametrize(
    ("match", "target", "found"),
    [
        (torch.ops.aten.mm, torch.ops.aten.mm.default, True),
        (torch.ops.aten.mm, torch.ops.aten.bmm.default, False),
        (F.linear, torch._C._nn.linear, True),
        (torch.relu, "relu", False),
        (torch.Tensor.relu, "relu", True),
        ("*linear*", torch._C._nn.linear, True),
        ("aten.mm", torch.ops.aten.mm.default, True),
        (re.compile("^aten::m"), torch.ops.aten.mm.default, True),
        ("collective::all_reduce", torch.ops._c10d_functional.all_reduce.default, True),
        (len, max, False),
    ],
)
def test_calls(match: Any, target: Any, found: bool) -> None:
    assert df.SplitFunc(match).matches_call(target) is found


def test_one_overload_of_an_operator_that_is_called_by_its_packet() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    node = graph.call_function(torch.ops.aten.sum, (x,))
    assert df.SplitFunc(torch.ops.aten.sum.default).matches(node)
    assert not df.SplitFunc(torch.ops.aten.sum.dim_IntList).matches(node)
    assert df.SplitFunc(torch.ops.aten.sum).matches(node)


@pytest.mark.parametrize("rule", [df.SplitModule, df.SplitFunc])
@pytest.mark.parametrize("wrong", [{"tag": 3}, {"splittable": 1}, {"optional": None}, {"splittable": "no"}])
def test_wrong_options(rule: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(df.PartitionError) as caught:
        rule("*", **wrong)
    assert __file__ in str(caught.value.line) and caught.value.advice


@pytest.mark.parametrize(("rule", "match"), [(df.SplitModule, int), (df.SplitModule, None), (df.SplitFunc, 3)])
def test_wrong_matches(rule: Any, match: Any) -> None:
    with pytest.raises(df.PartitionError, match="can't match by"):
        rule(match)


def test_rules_as_text() -> None:
    assert str(df.SplitModule("*.mlp")) == "SplitModule('*.mlp')"
    assert str(df.SplitModule(nn.Linear)) == "SplitModule(Linear)"
    assert str(df.SplitFunc(re.compile("a+"))) == "SplitFunc(re 'a+')"
