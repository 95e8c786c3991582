from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from dynaflow.capture.node_info import addresses_memory, module_calls, module_stack, names_of, source_line, unwrapped


def node(target: object = torch.relu, **meta: object) -> fx.Node:
    made = fx.Graph()
    found = made.call_function(target, (made.placeholder("x"),))  # type: ignore[arg-type]
    found.meta.update(meta)
    return found


def test_names_of_operators_functions_and_methods() -> None:
    mm = torch.ops.aten.mm
    assert names_of(mm) == ["mm", "aten.mm", "aten::mm"]
    assert names_of(mm.default) == ["mm", "aten.mm.default", "aten.mm", "aten::mm"]
    assert names_of("view") == ["view"]
    assert names_of(test_names_of_operators_functions_and_methods)[0] == "test_names_of_operators_functions_and_methods"
    assert "collective::all_reduce" in names_of(torch.ops._c10d_functional.all_reduce.default)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers[0].experts['a']", "layers.0.experts.a"),
        ("L['self']._orig_mod.head", "head"),
        ("L['fn'].__closure__[0].cell_contents.head", "head"),
    ],
)
def test_paths_below_the_root(path: str, found: str) -> None:
    one = node(nn_module_stack={"call_1": (path, nn.Linear)})
    assert module_stack(one) == [(found, nn.Linear)] and module_calls(one) == ["call_1"]


def test_outside_of_any_module() -> None:
    assert module_stack(node()) == [] and module_calls(node()) == [] and source_line(node()) is None


def test_the_innermost_line_is_the_models() -> None:
    trace = '  File "outer.py", line 3, in forward\n    a\n  File "inner.py", line 5, in forward\n    b\n'
    assert source_line(node(stack_trace=trace)) == "inner.py:5"


def test_steps_from_a_compiled_module_to_its_model() -> None:
    assert unwrapped("self._orig_mod.a._df_model.b") == "self.a.b" and unwrapped("self._original") == "self._original"


def test_what_counts_from_the_start_of_the_storage() -> None:
    assert addresses_memory(node(torch.ops.aten.as_strided.default)) and addresses_memory(node(torch.as_strided))
    assert not addresses_memory(node(torch.ops.aten.view.default))
