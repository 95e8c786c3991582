"""The user's rules: which modules and functions become operators."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import fx, nn

from dynaflow import _torch
from dynaflow.capture.annotations import tag_tuple
from dynaflow.capture.node_info import names_of
from dynaflow.errors import PartitionError, shown, user_line


@dataclass(frozen=True, slots=True)
class SplitModule:
    """Each call of a matching module becomes one operator, named by the module's path.

    `match` is a glob on the path ("*.self_attn"), a compiled regular expression, or a module class. `splittable`
    overrides the analysis: True if the module treats the rows of the batch independently in a way that the analysis
    can't see (sorted expert tokens, custom kernels), False to keep it whole. A rule that matches nothing in a model is
    an error, unless it is `optional`.
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

    Calls of a Python function that torch.compile inlines are distinguished by their line: a loop that calls it from one
    line makes one operator, unless other operators come in between. `mark` distinguishes these calls too. `match` is an
    operator (`torch.ops.aten.mm`, any overload or one), a Python function (`torch.nn.functional.linear`), or a glob on
    the name of the call's target ("*attention*"). Collectives, torch's and declared ones, also match
    "collective::NAME". A functional collective and the wait for its result are one call.
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
            advice="pass True or False; splittable=None leaves the decision to the analysis",
        )


def _same_operator(target: Any, wanted: Any) -> bool:
    """torch.ops.aten.mm matches all its overloads; F.linear matches torch._C._nn.linear, and so on."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None and packet is wanted:
        return True
    if isinstance(target, str):  # a method call: torch.Tensor.view, or torch.relu for x.relu()
        return getattr(wanted, "__name__", None) == target and getattr(torch.Tensor, target, None) is wanted
    name = getattr(wanted, "__name__", None)
    if name is None or getattr(target, "__name__", None) != name:
        return False
    return _torch.is_torchs_own(target) and _torch.is_torchs_own(wanted)


def _show(match: Any) -> str:
    if isinstance(match, str):
        return repr(match)
    if isinstance(match, re.Pattern):
        return f"re {match.pattern!r}"
    return getattr(match, "__qualname__", None) or str(match)
