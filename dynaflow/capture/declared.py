"""Custom operators of which somebody who knows them says what can't be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.alignment import Call, Dims, Refusal
from dynaflow.errors import PartitionError, user_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """How an operator makes ranks meet: see `collective`."""

    group: str
    dim: str | int | None
    named: Callable[[Any], str]


_globs: dict[str, frozenset[str]] = {}
"""Names of operators -> which of their arguments must be complete for earlier rows, too."""
_collectives: dict[str, Collective] = {}
_left_alone: set[str] = set()
_capturable: set[str] = set()


def by_rows(*operators: Any, follows: Sequence[str] = ()) -> None:
    """Declares that custom operators, given a part of the rows (dim 0), give or write that part of their results.

    Each is an operator (`torch.ops.mine.gather`) or a glob on names ("mine::*"). A rule with `splittable=True` says
    the same of single calls, and cuts the graph there; this leaves the graph uncut.

    `follows`: names of arguments that stand for something which the operator needs of all earlier rows as well, such as
    a cache that another operator fills: what makes them runs for all earlier micro-batches before.
    """
    for name in _names("by_rows", operators):
        _globs[name] = frozenset(follows)


def collective(*operators: Any, group: str, dim: str | int | None = None, named: Callable[[Any], str] = str) -> None:
    """Declares that custom operators make the ranks of a process group meet, as torch's own collectives do. So they
    keep one order on all ranks, and strategies give them the lane of the link.

    Each is an operator (`torch.ops.mine.all_reduce`) or a glob on names ("mine::*").
    group: the argument that names the group. A call without it counts as a meeting in every group.
    dim: along which ranks exchange slices, or the argument that says so. None: the result is like what was given,
        element by element.
    named: gives torch's name of the group (`ProcessGroup.group_name`) for that argument, where the library has names of
        its own.
    """
    for name in _names("collective", operators):
        _collectives[name] = Collective(group=group, dim=dim, named=named)


def left_alone(*operators: Any, capturable: bool = False) -> None:
    """Declares that custom operators are called as they are, between pieces of compiled code.

    Each is an operator (`torch.ops.mine.read_cache`) or a glob on names ("mine::*").
    capturable: they may be captured in a CUDA graph with the code around them, since what they look at outside of it is
        the same in all calls of a size.
    """
    names = _names("left_alone", operators)
    _left_alone.update(names)
    if capturable:
        _capturable.update(names)


def _names(who: str, operators: Sequence[Any]) -> list[str]:
    names = []
    for operator in operators:
        if not isinstance(operator, (str, _torch.OpOverload, _torch.OpOverloadPacket)):
            raise PartitionError(
                f"{who}: {operator!r} is no operator",
                line=user_line(),
                advice='pass an operator of torch.ops, or a glob such as "mine::*"',
            )
        names.append(operator if isinstance(operator, str) else _torch.packet_of(operator)._qualified_op_name)
    return names


def is_by_rows(func: _torch.OpOverload) -> bool:
    return any(fnmatchcase(func.overloadpacket._qualified_op_name, glob) for glob in _globs)


def collective_of(target: Any) -> Collective | None:
    """What was said of a call's target, if it was said to be a collective."""
    packet = _torch.packet_of(target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return None
    return next((how for glob, how in _collectives.items() if fnmatchcase(packet._qualified_op_name, glob)), None)


def is_left_alone(node: fx.Node) -> bool:
    return _is_among(node, _left_alone)


def is_never_captured(node: fx.Node) -> bool:
    """It is left alone, and may not be in a CUDA graph with the code around it."""
    return is_left_alone(node) and not _is_among(node, _capturable)


def _is_among(node: fx.Node, globs: Set[str]) -> bool:
    packet = _torch.packet_of(node.target)
    return isinstance(packet, _torch.OpOverloadPacket) and any(
        fnmatchcase(packet._qualified_op_name, glob) for glob in globs
    )


def leaves_some_alone(gm: fx.GraphModule) -> bool:
    return any(is_left_alone(node) for node in gm.graph.nodes)


def followed(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call that must be complete for earlier rows, too."""
    packet = _torch.packet_of(node.target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return []
    found = (args for glob, args in _globs.items() if fnmatchcase(packet._qualified_op_name, glob))
    wanted = frozenset[str]().union(*found)
    if not wanted:
        return []
    return [given for name, given in arguments(node).items() if name in wanted and isinstance(given, fx.Node)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """What an operator is called with, by name."""
    packet = _torch.packet_of(node.target)
    schema = getattr(packet, packet.overloads()[0])._schema
    return {a.name: given for a, given in zip(schema.arguments, node.args, strict=False)} | node.kwargs


def rule(call: Call) -> Dims | Refusal:
    if any(call.dim_of(tensor) not in (0, None) for tensor in call.inputs()):
        return call.refuse("is declared to work by rows, but does not get them on dim 0")
    return [0 if out.ndim and out.shape[0] and out.shape[0] % call.rows == 0 else None for out in call.outs]
