"""Private torch APIs are used in `dynaflow/_torch` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import dynaflow

ROOT = Path(dynaflow.__file__).parent
PRIVATE_PACKAGES = ("torch.fx.experimental", "torch.fx.passes")
"""Without an underscore, and private all the same."""


def private_attributes() -> frozenset[str]:
    """What instances of torch's classes have under a private name."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output((node,))
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    values = (module.weight, torch.zeros(1), torch.zeros(1).untyped_storage(), torch.Generator(), module, optimizer,
              graph, node, fx.GraphModule({}, graph), torch.ops.aten.mm, torch.ops.aten.mm.default,
              torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph, torch.SymInt)  # fmt: skip
    names = {name for value in values for name in dir(value)}
    return frozenset(name for name in names if is_private(name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


ATTRIBUTES = private_attributes()


class Uses(ast.NodeVisitor):
    """Collects (line, text) of each private use. An attribute of `self` or `cls` is the module's own. What follows
    `torch.ops` is the name of an operator."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.names: dict[str, str] = {}
        """What a name that was imported from torch stands for."""

    def note(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.found.append((node.lineno, what))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported(node, alias.name)
            if alias.name.split(".")[0] == "torch":
                self.names[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            self.imported(node, path)
            if path.split(".")[0] == "torch":
                self.names[alias.asname or alias.name] = path

    def imported(self, node: ast.stmt, path: str) -> None:
        if is_private_path(path):
            self.note(node, path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path_of(node)
        if path is not None:
            if is_private_path(path):
                self.note(node, path)
            return
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own and is_private_attribute(node.attr):
            self.note(node, f".{node.attr}")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """`getattr(x, "_schema", None)` and the like."""
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant) and is_private_attribute(str(name.value)):
                    self.note(node, f"{node.func.id} {name.value}")
        self.generic_visit(node)

    def path_of(self, node: ast.expr) -> str | None:
        """`torch.x.y` of an expression that starts at a name imported from torch; else None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        value = self.path_of(node.value)
        return None if value is None else f"{value}.{node.attr}"


def is_private_path(path: str) -> bool:
    if path.split(".")[0] != "torch" or path.startswith("torch.ops."):
        return False
    return any(map(is_private, path.split("."))) or f"{path}.".startswith(tuple(f"{p}." for p in PRIVATE_PACKAGES))


def is_private_attribute(name: str) -> bool:
    return name in ATTRIBUTES or name.startswith("_dynamo_")


def private_uses(source: str) -> list[tuple[int, str]]:
    uses = Uses()
    uses.visit(ast.parse(source))
    return sorted(uses.found)


def modules() -> Iterator[Path]:
    return (path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "_torch")


def test_only_underscore_torch_uses_private_apis() -> None:
    found = [f"{p.relative_to(ROOT)}:{line}: {what}" for p in modules() for line, what in private_uses(p.read_text())]
    assert not found, "move these to dynaflow/_torch, each into one small function:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch._ops import OpOverload",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.functional import _canonical_mask",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "import torch.fx.experimental.symbolic_shapes",
        "import torch\ntorch._dynamo.reset()",
        "import torch\ntorch.cuda._sleep(1)",
        "from torch import fx\nfx.experimental.proxy_tensor",
        "from torch import nn\nnn.functional._canonical_mask",
        "import torch as t\nt._foreach_copy_(a, b)",
        "func._schema.name",
        "self.func._opname",
        "getattr(func, '_schema', None)",
        "tensor._version",
        "module._parameters['weight']",
        "tensor._dynamo_static_input_type",
        "storage._cdata",
    ],
)  # fmt: skip
def test_each_kind_of_use_is_found(source: str) -> None:
    assert len(private_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._unsafe_view.default",
        "self._parameters, self._base(x)",
        "from dynaflow import _torch\n_torch.schema_of(func)",
        "'torch._dynamo' in text",
        "plan._own_name",
        "torch.__version__",
    ],
)
def test_other_uses_are_not(source: str) -> None:
    assert not private_uses(source)
