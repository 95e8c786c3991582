"""Custom operators that treat each row of the batch by itself, as somebody who knows them says."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.capture.alignment import Call, Dims, Refusal
from dynaflow.errors import PartitionError, user_line

_globs: dict[str, frozenset[str]] = {}
"""Names of operators -> which of their arguments must be complete for earlier rows, too."""


def by_rows(*operators: Any, follows: Sequence[str] = ()) -> None:
    """Declares that custom operators, given a part of the rows (dim 0), give or write that part of their results.

    Each is an operator (`torch.ops.mine.gather`) or a glob on names ("mine::*"). A rule with `splittable=True` says
    the same of single calls, and cuts the graph there; this leaves the graph uncut.

    `follows`: names of arguments that stand for something which the operator needs of all earlier rows as well, such as
    a cache that another operator fills: what makes them runs for all earlier micro-batches before.
    """
    for operator in operators:
        if isinstance(operator, str):
            _globs[operator] = frozenset(follows)
        elif isinstance(operator, (_torch.OpOverload, _torch.OpOverloadPacket)):
            _globs[_torch.packet_of(operator)._qualified_op_name] = frozenset(follows)
        else:
            raise PartitionError(
                f"by_rows: {operator!r} is no operator",
                line=user_line(),
                advice='pass an operator of torch.ops, or a glob such as "mine::*"',
            )


def is_by_rows(func: _torch.OpOverload) -> bool:
    return any(fnmatchcase(func.overloadpacket._qualified_op_name, glob) for glob in _globs)


def followed(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call that must be complete for earlier rows, too."""
    packet = _torch.packet_of(node.target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return []
    found = (args for glob, args in _globs.items() if fnmatchcase(packet._qualified_op_name, glob))
    wanted = frozenset[str]().union(*found)
    if not wanted:
        return []
    schema = getattr(packet, packet.overloads()[0])._schema
    named = {a.name: given for a, given in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    return [given for name, given in named.items() if name in wanted and isinstance(given, fx.Node)]


def rule(call: Call) -> Dims | Refusal:
    if any(call.dim_of(tensor) not in (0, None) for tensor in call.inputs()):
        return call.refuse("is declared to work by rows, but does not get them on dim 0")
    return [0 if out.ndim and out.shape[0] and out.shape[0] % call.rows == 0 else None for out in call.outs]
