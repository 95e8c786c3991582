"""What a child process has to make anew after a fork.

A child gets a copy of all memory, but of the threads only the one that forked. A lock that another thread held stays
closed there, and workers are gone, so whoever waited for either would wait for ever. All locks of this package are made
here, and are open in a child; what owns threads, or else depends on the process, is told by its `after_fork`.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork(self) -> None:
        """In the child, before anything else runs there."""


_locks: WeakSet[Any] = WeakSet()
_told: WeakSet[Forkable] = WeakSet()


def lock() -> threading.Lock:
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> Any:
    made = threading.RLock()
    _locks.add(made)
    return made


def tell(owner: Forkable) -> None:
    """Has its `after_fork` called in each child, as long as it lives."""
    _told.add(owner)


def _after_fork() -> None:
    for made in _locks:
        if not (hasattr(made, "_is_owned") and made._is_owned()):  # by the thread that forked, which will release it
            made._at_fork_reinit()
    for owner in _told:
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
