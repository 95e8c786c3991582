"""The first call of compiled code, at which a compiler may still fail: GPU kernels are autotuned and loaded then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dynaflow import _torch
from dynaflow._torch import Boxed

Place = Callable[[Boxed], None]
"""Replaces the FirstCall by the function that it settled on."""


_GONE = object()


def _weakly(value: Any) -> Callable[[], Any]:
    """A weak reference to a tensor, which returns _GONE once it is freed; any other value is returned."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    found = weakref.ref(value)
    return lambda: _GONE if (tensor := found()) is None else tensor


class FirstCall:
    """Wraps compiled code until its first call. If the compiler fails in that call, `instead` makes a function that is
    called with the same arguments. Then the wrapper replaces itself at all its places, so later calls don't pay."""

    def __init__(self, call: Boxed, instead: Callable[[Exception], Boxed]) -> None:
        self._call, self._instead = call, instead
        self._places: list[Place] | None = []

    def __call__(self, args: list[Any]) -> Any:
        # The call empties its list, to free arguments after their last use: keep only weak references.
        given, call = [_weakly(a) for a in args], self._call
        try:
            results = call(args)
        except Exception as e:
            again = [get() for get in given]
            if not _torch.is_compiler_error(e) or any(a is _GONE for a in again):
                raise
            if self._call is call:  # else another lane has replaced it
                self._call = self._instead(e)
            results = self._call(again)
        places, self._places = self._places, None
        for place in places or ():
            place(self._call)
        return results

    @property
    def now(self) -> Boxed:
        """What to call: itself, or after the first call the code."""
        return self._call if self._places is None else self

    def then(self, place: Place) -> None:
        """Registers a place at which to replace the wrapper after the first call."""
        if self._places is None:
            place(self._call)
        else:
            self._places.append(place)
