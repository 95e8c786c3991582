"""Functions of a host system that we wrap: one list per system, applied when it is used and restored on request."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One function of theirs that we wrap or replace."""

    target: str
    """Where it is defined: "package.module:Class.method"."""
    function: Callable[..., Any] | None = None
    """Called in its place, with the original as first argument. None: it is hooked on single objects, see `why`."""
    why: str


class Hooks:
    """The hooks of one system. `versions`: the releases in which all targets were seen to be as we expect them."""

    def __init__(self, versions: Sequence[str], hooks: Sequence[Hook]) -> None:
        self.versions, self.hooks = tuple(versions), tuple(hooks)
        self._applied = False
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Wraps the functions of the list: all of them, or none if it raises. Calling it again does nothing."""
        if self._applied:
            return
        self._applied = True
        try:
            for hook in self.hooks:
                if hook.function is not None:
                    module, _, path = hook.target.partition(":")
                    owner, _, name = path.rpartition(".")
                    self.wrap(getattr(importlib.import_module(module), owner), name, hook.function)
        except BaseException:
            self.restore()
            raise

    def wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """`wrap`, until `restore`."""
        self._undo.append(wrap(owner, name, function))

    def restore(self) -> None:
        """Puts back all that was wrapped through this list, the latest first."""
        while self._undo:
            self._undo.pop()()
        self._applied = False


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Calls `function` in place of a method of a class or an object, with the method as first argument.

    Returns a function that restores the method.
    """
    method = getattr(owner, name)
    return replace(owner, name, functools.wraps(method)(lambda *args, **kwargs: function(method, *args, **kwargs)))


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of a class or object. Returns a function that restores it, without keeping `owner` alive."""
    before, reference = vars(owner).get(name, _ABSENT), _reference(owner)
    setattr(owner, name, value)

    def restore() -> None:
        if (found := reference()) is None:
            return
        if before is _ABSENT:
            delattr(found, name)
        else:
            setattr(found, name, before)

    return restore


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # not all classes support it
        return lambda: owner
