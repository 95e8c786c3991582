"""Custom operators of which somebody who knows them says what can't be seen."""

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
    """How an operator makes ranks meet: see `collective`."""

    group: str
    dim: str | int | None
    named: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRows:
    """How operators work by rows: see `by_rows`."""

    follows: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()
    flat: bool = False


_globs: dict[str, ByRows] = {}
_collectives: dict[str, Collective] = {}
_left_alone: set[str] = set()
_capturable: set[str] = set()
direct_calls: dict[_torch.OpOverload, Callable[..., Any]] = {}
"""See `call_directly`."""


def by_rows(*operators: Any, follows: Sequence[str] = (), state: Sequence[str] = (), flat: bool = False) -> None:
    """Declares that custom operators, given a part of the rows (dim 0), give or write that part of their results.

    Each is an operator (`torch.ops.mine.gather`) or a glob on names ("mine::*"). A rule with `splittable=True` says
    the same of single calls, and cuts the graph there; this leaves the graph uncut.

    `follows`: names of arguments that stand for something which the operator needs of all earlier rows as well, such as
    a cache that another operator fills: what makes them runs for all earlier micro-batches before.

    `state`: names of arguments that name a state which the operator reads and writes, and which no tensor among its
    arguments shows, such as that of a recurrent layer: all calls on one state run for all earlier micro-batches before.
    But calls that get an argument in `follows` only read, and those that make it only write: one does not wait for
    another of its kind.

    `flat`: dims of size 1 before the rows make no difference to the operators.
    """
    advice = 'list the names of arguments: follows=["cache"]'
    how = ByRows(
        follows=frozenset(validate.names(follows, "by_rows(follows)", advice, PartitionError)),
        state=frozenset(validate.names(state, "by_rows(state)", advice, PartitionError)),
        flat=flat,
    )
    _globs.update(dict.fromkeys(_names("by_rows", operators), how))


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
    if not isinstance(group, str) or not callable(named):
        raise PartitionError(
            f"collective(group={shown(group)}, named={shown(named)})",
            line=user_line(),
            advice="pass the name of the argument that names the group, and a function that gives torch's name of it",
        )
    if dim is not None and not isinstance(dim, str):
        dim = validate.integer(dim, "collective(dim)", "pass a dim, or the argument that says it", error=PartitionError)
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


def call_directly(operator: _torch.OpOverload, function: Callable[..., Any]) -> None:
    """Where a graph runs uncompiled, this function is called in place of the operator: past torch's dispatcher."""
    direct_calls[operator] = function


@contextlib.contextmanager
def declarations_restored() -> Iterator[None]:
    """Undoes at the end what is declared inside: for tests."""
    tables: tuple[Any, ...] = (_globs, _collectives, _left_alone, _capturable)
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
                f"{who}: {shown(operator)} is no operator",
                line=user_line(),
                advice='pass an operator of torch.ops, or a glob such as "mine::*"',
            )
        names.append(operator if isinstance(operator, str) else _torch.packet_of(operator)._qualified_op_name)
    return names


def by_rows_of(target: Any) -> ByRows | None:
    """What was said of a call's target, if it was said to work by rows; of what several globs say, all holds."""
    packet = _torch.packet_of(target)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return None
    found = [how for glob, how in _globs.items() if fnmatchcase(packet._qualified_op_name, glob)]
    if not found:
        return None
    return ByRows(
        follows=frozenset().union(*(how.follows for how in found)),
        state=frozenset().union(*(how.state for how in found)),
        flat=any(how.flat for how in found),
    )


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


def followed(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Of each call that needs something of earlier rows: the calls that must have run for these."""
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
    # Who reads what another leaves waits for that one alone; of the others nobody knows what they read and write.
    both = states.keys() - found.keys() - {maker for makers in found.values() for maker in makers}
    for node, named in states.items():
        others = [n for n in (states if node in both else both) if named & states[n]]
        if others:
            found[node] = [*found.get(node, ()), *others]
    return found


def arguments(node: fx.Node) -> dict[str, Any]:
    """What an operator is called with, by name."""
    packet = _torch.packet_of(node.target)
    schema = getattr(packet, packet.overloads()[0])._schema
    return {a.name: given for a, given in zip(schema.arguments, node.args, strict=False)} | node.kwargs
