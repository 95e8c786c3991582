"""Where the graph may be cut: rules on module paths and functions, and marks inside model code."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import fx, nn

from dynaflow import _torch
from dynaflow.capture.collectives import is_collective
from dynaflow.errors import PartitionError, shown, user_line

MARK = "dynaflow"
ORIGIN = "dynaflow_origin"
"""Of a node in a pass of training: the name of the call in the model that it is a part of, and what that calls."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """Each call of a matching module becomes one operator, named by the module's path.

    `match` is a glob on the path ("*.self_attn"), a compiled regular expression, or a module class.
    `splittable` overrules the analysis: True when the module treats every row of the batch by itself though
    dynaflow can't see it (sorted expert tokens, custom kernels), False to keep it whole. A rule that matches nothing
    in a model is an error, unless it is `optional`.
    """

    match: str | re.Pattern[str] | type[nn.Module]
    tag: str | tuple[str, ...] = ()
    splittable: bool | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", tag_tuple(self.tag))
        _check_flags(self)
        is_class = isinstance(self.match, type) and issubclass(self.match, nn.Module)
        if not (is_class or isinstance(self.match, (str, re.Pattern))):
            raise PartitionError(
                f"SplitModule can't match by {shown(self.match)}",
                line=user_line(),
                advice="pass a glob on the module path, re.compile(...), or a subclass of torch.nn.Module",
            )

    def matches(self, path: str, kind: type) -> bool:
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(path, self.match)
        if isinstance(self.match, re.Pattern):
            return self.match.search(path) is not None
        return isinstance(kind, type) and issubclass(kind, self.match)

    def __str__(self) -> str:
        return f"SplitModule({_show(self.match)})"


@dataclass(frozen=True, slots=True)
class SplitFunc:
    """Each matching call becomes one operator.

    Calls of a Python function that torch.compile inlines are told apart by where they are made: a loop that calls
    it from one line makes one operator, unless other operators lie between. `mark` tells those apart as well.
    `match` is an operator (`torch.ops.aten.mm`, any overload or one), a Python function
    (`torch.nn.functional.linear`), or a glob on the name of the call's target ("*attention*"). Collectives, torch's own
    and those that were declared, are also called "collective::NAME". One of torch's and the wait for its result are one
    call.
    """

    match: Any
    tag: str | tuple[str, ...] = ()
    splittable: bool | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", tag_tuple(self.tag))
        _check_flags(self)
        if not (isinstance(self.match, (str, re.Pattern)) or callable(self.match)):
            raise PartitionError(
                f"SplitFunc can't match by {shown(self.match)}",
                line=user_line(),
                advice="pass an operator of torch.ops, a function, or a pattern on the target's name",
            )

    def matches(self, node: fx.Node) -> bool:
        if isinstance(self.match, _torch.OpOverload) and self.match.overloadpacket is node.target:
            return _torch.overload_of(node) is self.match
        return self.matches_call(node.target)

    def matches_call(self, target: Any) -> bool:
        if isinstance(self.match, str):
            return any(fnmatch.fnmatchcase(name, self.match) for name in names_of(target))
        if isinstance(self.match, re.Pattern):
            return any(self.match.search(name) for name in names_of(target))
        return target is self.match or _same_operator(target, self.match)

    def __str__(self) -> str:
        return f"SplitFunc({_show(self.match)})"


Rule = SplitModule | SplitFunc


def _check_flags(rule: Rule) -> None:
    if not isinstance(rule.splittable, (bool, NoneType)) or not isinstance(rule.optional, bool):
        raise PartitionError(
            f"{rule}: splittable={shown(rule.splittable)}, optional={shown(rule.optional)}",
            line=user_line(),
            advice="pass True or False; splittable=None leaves it to the analysis",
        )


@_torch.never_a_frame  # by itself, where a graph breaks inside of a region: what it returns is for a trace alone
def mark(name: str, *, tag: str | tuple[str, ...] = (), splittable: bool | None = None) -> Any:
    """Marks a region of model code as one operator: `with mark("router"):`, or `@mark("router")` on a function.

    It leaves the graph whole under torch.compile and does nothing in eager mode.
    """
    if not isinstance(name, str) or not isinstance(splittable, (bool, NoneType)):
        raise PartitionError(
            f"mark({shown(name)}, splittable={shown(splittable)})",
            line=user_line(),
            advice='pass a name, mark("router"), and True, False or None',
        )
    note = (name, tag_tuple(tag), splittable)
    if torch.compiler.is_compiling():
        # Annotations of one key replace one another. With a key of its own each entry of a region stays
        # apart from the next, and from the regions around it.
        return _torch.annotate({f"{MARK}.{_next_entry()}": note})
    return _Mark(note)


@_torch.constant_in_trace
def _next_entry() -> int:
    return next(_entries)


_entries = itertools.count()


def marks_of(node: fx.Node) -> list[tuple[str, tuple[str, tuple[str, ...], bool | None]]]:
    """The marked regions around a node, outermost first: (entry, (name, tags, splittable))."""
    return [(k, note) for k, note in (node.meta.get("custom") or {}).items() if str(k).startswith(f"{MARK}.")]


class _Mark:
    """What `mark` gives outside of a trace: a context manager that does nothing, and a decorator."""

    def __init__(self, note: tuple[str, tuple[str, ...], bool | None]) -> None:
        self.note = note

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name, tag, splittable = self.note

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with mark(name, tag=tag, splittable=splittable):
                return function(*args, **kwargs)

        return marked


def tag_tuple(tag: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(tag, str):
        return (tag,)
    if not isinstance(tag, (tuple, list, set, frozenset)) or not all(isinstance(t, str) for t in tag):
        advice = 'pass a text, or several: tag=("mlp", "memory")'
        raise PartitionError(f"tag={shown(tag)}", line=user_line(), advice=advice)
    return tuple(tag)


def target_names(node: fx.Node) -> list[str]:
    return names_of(node.target)


def addresses_memory(node: fx.Node) -> bool:
    """Whether it counts from the start of a tensor's storage, with strides of its own."""
    return "as_strided" in target_names(node)[0]


def names_of(target: Any) -> list[str]:
    """The names under which a call may be asked for: short, and with its module or namespace."""
    if isinstance(target, str):
        return [target]
    if isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket)):
        namespace, name = _torch.packet_of(target)._qualified_op_name.split("::")
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
    """For each module of the stack, what tells this call of it from its other calls."""
    return list(node.meta.get("nn_module_stack") or {})


def source_line(node: fx.Node) -> str | None:
    """The line of the model that a node comes from."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f"{found[-1][0]}:{found[-1][1]}" if found else None


def _normalise(path: str) -> str:
    """Dynamo's spelling of a module path -> the path below the root: L['self']._modules['layers'][0] -> layers.0"""
    path = unwrapped(path.replace(".__dict__['_modules']", "").replace("._modules", ""))
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    path = re.sub(r"^[LG]\.[^.]*", "", path)
    return re.sub(r"^(\.__closure__\.\d+\.cell_contents|\.__\w+__)+", "", path).strip(".")


def unwrapped(path: str) -> str:
    """The path, less the steps from a compiled module (torch.compile's or ours) to the model behind it."""
    return re.sub(r"\.(_orig_mod|_df_model)\b", "", path)


def _same_operator(target: Any, wanted: Any) -> bool:
    """torch.ops.aten.mm stands for all its overloads; F.linear for torch._C._nn.linear, and the like."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None and packet is wanted:
        return True
    if isinstance(target, str):  # a method call: torch.Tensor.view, or torch.relu for x.relu()
        return getattr(wanted, "__name__", None) == target and getattr(torch.Tensor, target, None) is wanted
    name = getattr(wanted, "__name__", None)
    return name is not None and getattr(target, "__name__", None) == name and _is_torch(target) and _is_torch(wanted)


def _is_torch(function: Any) -> bool:
    """Torch's own, and not an operator of another library, which lives in torch._ops as well."""
    module = getattr(function, "__module__", None) or "torch"
    return module.split(".")[0] == "torch" and (not module.startswith("torch._ops.") or module == "torch._ops.aten")


def _show(match: Any) -> str:
    if isinstance(match, str):
        return repr(match)
    if isinstance(match, re.Pattern):
        return f"re {match.pattern!r}"
    return getattr(match, "__qualname__", None) or str(match)
