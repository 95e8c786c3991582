"""Declarations about custom operators, of properties that their schemas don't show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from dynaflow import _torch
from dynaflow.core import validate
from dynaflow.errors import PartitionError, shown, user_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A declaration by `collective`."""

    group: str
    dim: str | int | None
    named: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWise:
    """A declaration by `by_rows`."""

    follows: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()
    flat: bool = False


_globs: dict[str, RowWise] = {}
_collectives: dict[str, Collective] = {}
_opaque: set[str] = set()
_capturable: set[str] = set()
direct_calls: dict[_torch.OpOverload, Callable[..., Any]] = {}
"""See `call_directly`."""


def by_rows(*operators: Any, follows: Sequence[str] = (), state: Sequence[str] = (), flat: bool = False) -> None:
    """Declares that custom operators, given a part of the rows (dim 0), return or write that part of their results.

    Each is an operator (`torch.ops.mine.gather`) or a glob on names ("mine::*"). A rule with `splittable=True` says
    the same of single calls, and cuts the graph there; this declaration does not cut it.

    `follows`: names of arguments of which the operator needs all earlier rows too, such as a cache that another
    operator fills. The operators that make them run for all earlier micro-batches first.

    `state`: names of arguments that identify hidden state, which the operator reads and writes and no tensor argument
    shows, such as that of a recurrent layer. All calls on one state run for all earlier micro-batches first. But calls
    that take an argument in `follows` only read the state, and calls that make it only write: two readers, or two
    writers, don't wait for one another.

    `flat`: the operators accept dims of size 1 before the rows.
    """
    advice = 'list the names of arguments: follows=["cache"]'
    how = RowWise(
        follows=frozenset(validate.names(follows, "by_rows(follows)", advice, PartitionError)),
        state=frozenset(validate.names(state, "by_rows(state)", advice, PartitionError)),
        flat=flat,
    )
    _globs.update(dict.fromkeys(_names("by_rows", operators), how))


def collective(*operators: Any, group: str, dim: str | int | None = None, named: Callable[[Any], str] = str) -> None:
    """Declares custom operators to be collectives of a process group, like torch's own. So they run in one order on all
    ranks, and strategies place them on the communication lane.

    Each is an operator (`torch.ops.mine.all_reduce`) or a glob on names ("mine::*").
    group: the argument that names the group. A call without it counts as a collective of all groups.
    dim: the dim along which ranks exchange slices, or the argument that holds it. None: the result has the shape of the
        input, element by element.
    named: maps that argument to torch's name of the group (`ProcessGroup.group_name`), if the library has names of its
        own.
    """
    if not isinstance(group, str) or not callable(named):
        raise PartitionError(
            f"collective(group={shown(group)}, named={shown(named)})",
            line=user_line(),
            advice="pass the name of the argument that names the group, and a function that returns torch's name of it",
        )
    if dim is not None and not isinstance(dim, str):
        dim = validate.integer(dim, "collective(dim)", "pass a dim, or the argument with it", error=PartitionError)
    for name in _names("collective", operators):
        _collectives[name] = Collective(group=group, dim=dim, named=named)


def opaque_ops(*operators: Any, capturable: bool = False) -> None:
    """Declares custom operators opaque: they are called directly, between pieces of compiled code.

    Each is an operator (`torch.ops.mine.read_cache`) or a glob on names ("mine::*").
    capturable: they may be captured in a CUDA graph with the code around them, because the state that they read outside
        of the graph is the same in all calls of a size.
    """
    names = _names("opaque_ops", operators)
    _opaque.update(names)
    if capturable:
        _capturable.update(names)


def call_directly(operator: _torch.OpOverload, function: Callable[..., Any]) -> None:
    """In uncompiled graphs, calls this function in place of the operator, which skips torch's dispatcher."""
    direct_calls[operator] = function


@contextlib.contextmanager
def declarations_restored() -> Iterator[None]:
    """Undoes at the end what is declared inside: for tests."""
    tables: tuple[Any, ...] = (_globs, _collectives, _opaque, _capturable)
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, known in zip(tables, before, strict=True):
            table.clear()
            table.update(known)


def _names(who: str, operators: Sequence[Any]) -> list[str]:
    names = []
    for operator in operators:
        if not isinstance(operator, (str, _torch.OpOverload, _torch.OpOverloadPacket)):
            raise PartitionError(
                f"{who}: {shown(operator)} is not an operator",
                line=user_line(),
                advice='pass an operator of torch.ops, or a glob such as "mine::*"',
            )
        names.append(operator if isinstance(operator, str) else _torch.qualified_name(operator))
    return names


def by_rows_of(target: Any) -> RowWise | None:
    """The `by_rows` declarations of a call's target, combined; None if there are none."""
    packet = _torch.packet_of(target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return None
    found = [how for glob, how in _globs.items() if fnmatchcase(_torch.qualified_name(packet), glob)]
    if not found:
        return None
    return RowWise(
        follows=frozenset().union(*(how.follows for how in found)),
        state=frozenset().union(*(how.state for how in found)),
        flat=any(how.flat for how in found),
    )


def collective_of(target: Any) -> Collective | None:
    """The `collective` declaration of a call's target, if there is one."""
    packet = _torch.packet_of(target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return None
    return next((how for glob, how in _collectives.items() if fnmatchcase(_torch.qualified_name(packet), glob)), None)


def is_opaque(node: fx.Node) -> bool:
    return _is_among(node, _opaque)


def is_never_captured(node: fx.Node) -> bool:
    """Whether the node calls an opaque operator that may not be captured in a CUDA graph."""
    return is_opaque(node) and not _is_among(node, _capturable)


def _is_among(node: fx.Node, globs: Set[str]) -> bool:
    packet = _torch.packet_of(node.target)
    return isinstance(packet, _torch.OpOverloadPacket) and any(
        fnmatchcase(_torch.qualified_name(packet), glob) for glob in globs
    )


def has_opaque_ops(gm: fx.GraphModule) -> bool:
    return any(is_opaque(node) for node in gm.graph.nodes)


def serial_calls(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each call that depends on earlier rows: the calls that must run for these first."""
    found: dict[fx.Node, list[fx.Node]] = {}
    states: dict[fx.Node, set[Any]] = {}
    for node in graph.nodes:
        how = by_rows_of(node.target) if node.op == "call_function" else None
        if how is None or not how.follows | how.state:
            continue
        given = arguments(node)
        if makers := [given[name] for name in how.follows if isinstance(given.get(name), fx.Node)]:
            found[node] = makers
        if named := {given[name] for name in how.state if given.get(name) is not None}:
            states[node] = named
    # A reader waits for the writers only. Calls that are neither may read and write, and wait for all.
    both = states.keys() - found.keys() - {maker for makers in found.values() for maker in makers}
    for node, named in states.items():
        others = [n for n in (states if node in both else both) if named & states[n]]
        if others:
            found[node] = [*found.get(node, ()), *others]
    return found


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator, by name."""
    packet = _torch.packet_of(node.target)
    schema = _torch.schema_of(getattr(packet, packet.overloads()[0]))
    return {a.name: given for a, given in zip(schema.arguments, node.args, strict=False)} | node.kwargs
