"""Locks and callbacks that survive a fork.

A child process copies all memory, but only the thread that forked. A lock that another thread held stays locked there,
and worker threads are gone, so waiting for either would deadlock. All locks of this package are created here and are
reset in a child. Owners of threads, or of other state of a process, register an `after_fork` method.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""


_locks: WeakSet[Any] = WeakSet()
_owners: WeakSet[Forkable] = WeakSet()


def lock() -> threading.Lock:
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> Any:
    made = threading.RLock()
    _locks.add(made)
    return made


def register(owner: Forkable) -> None:
    """Registers `owner.after_fork` for each child process, for as long as the owner lives."""
    _owners.add(owner)


def _after_fork() -> None:
    for made in _locks:
        if not (hasattr(made, "_is_owned") and made._is_owned()):  # held by the thread that forked, which releases it
            made._at_fork_reinit()
    for owner in _owners:
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
