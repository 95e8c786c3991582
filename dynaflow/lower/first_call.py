"""Compiled code at its first call, where a compiler may still fail: kernels for a GPU are chosen and loaded then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dynaflow import _torch
from dynaflow._torch import Boxed

Place = Callable[[Boxed], None]
"""Puts a function where the untried one is."""


_GONE = object()


def _held(value: Any) -> Callable[[], Any]:
    """Gives a value back, if it is a tensor then only while others hold it."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    found = weakref.ref(value)
    return lambda: _GONE if (tensor := found()) is None else tensor


class Untried:
    """Called like the code that it holds. If the compiler fails at the first call, what `instead` gives is called with
    the same arguments. After that call it takes itself out of the way: no later one pays for it."""

    def __init__(self, call: Boxed, instead: Callable[[Exception], Boxed]) -> None:
        self._call, self._instead = call, instead
        self._places: list[Place] | None = []

    def __call__(self, args: list[Any]) -> Any:
        # The call empties its list, so that what it needs no more is gone: that must not be held here.
        given, call = [_held(a) for a in args], self._call
        try:
            results = call(args)
        except Exception as e:
            again = [get() for get in given]
            if not _torch.is_compiler_error(e) or any(a is _GONE for a in again):
                raise
            if self._call is call:  # else another lane has seen it, too
                self._call = self._instead(e)
            results = self._call(again)
        places, self._places = self._places, None
        for place in places or ():
            place(self._call)
        return results

    @property
    def now(self) -> Boxed:
        """What to call: itself, or what it holds once that has run."""
        return self._call if self._places is None else self

    def then(self, place: Place) -> None:
        """Calls it once it is known what is to be called."""
        if self._places is None:
            place(self._call)
        else:
            self._places.append(place)
