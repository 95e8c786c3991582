"""Names of a node's call, and its origin in the model."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.collectives import is_collective

ORIGIN = "dynaflow_origin"
"""Key in the `meta` of a node of a training pass: (name, target) of the call in the model that it is a part of."""


def target_names(node: fx.Node) -> list[str]:
    return names_of(node.target)


def addresses_memory(node: fx.Node) -> bool:
    """Whether the call addresses a tensor's storage with strides of its own."""
    return "as_strided" in target_names(node)[0]


def names_of(target: Any) -> list[str]:
    """The names by which a rule may match a call: short, and with its module or namespace."""
    if isinstance(target, str):
        return [target]
    if isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket)):
        namespace, name = _torch.qualified_name(target).split("::")
        exact = [str(target)] if isinstance(target, _torch.OpOverload) else []
        general = [f"collective::{name}"] if is_collective(target) else []
        return [name, *exact, f"{namespace}.{name}", f"{namespace}::{name}", *general]
    name = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", None)
    return [name, f"{module}.{name}"] if module else [name]


def module_stack(node: fx.Node) -> list[tuple[str, type]]:
    """The modules around a node, outermost first, as (path below the root, class)."""
    return [(_normalise(path), kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]


def module_calls(node: fx.Node) -> list[str]:
    """For each module of the stack, a key of this call of the module."""
    return list(node.meta.get("nn_module_stack") or {})


def source_line(node: fx.Node) -> str | None:
    """The line of the model that a node comes from."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f"{found[-1][0]}:{found[-1][1]}" if found else None


def _normalise(path: str) -> str:
    """Dynamo's module path as a path below the root: L['self']._modules['layers'][0] -> layers.0"""
    path = unwrapped(path.replace(".__dict__['_modules']", "").replace("._modules", ""))
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    path = re.sub(r"^[LG]\.[^.]*", "", path)
    return re.sub(r"^(\.__closure__\.\d+\.cell_contents|\.__\w+__)+", "", path).strip(".")


def unwrapped(path: str) -> str:
    """The path without the steps from a compiled module (torch.compile's or ours) to its model."""
    return re.sub(r"\.(_orig_mod|_df_model)\b", "", path)
