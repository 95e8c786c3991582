"""What torch loses in a process that was forked."""

from __future__ import annotations

import os
import sys
import threading

import torch


def _note_calls() -> None:
    """Before a fork: whether another thread is inside of a compiled function."""
    global _amid_calls
    _amid_calls = False
    mine = threading.get_ident()
    for thread, frame in sys._current_frames().items() if "torch._dynamo" in sys.modules else ():
        while frame is not None and thread != mine and not _amid_calls:
            _amid_calls = frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
            frame = frame.f_back  # type: ignore[assignment]


def _renew_compilers() -> None:
    """In a child: the threads in which Inductor compiles are the parent's. And if it was forked amid calls of other
    threads, these may have held locks of Dynamo's, which nobody will open: one for all captures, one in the guards of
    each graph. So the graphs are captured anew. Seen on 2.11 and 2.13."""
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.AsyncCompile.pool.cache_clear()
    if _amid_calls:
        torch._dynamo.convert_frame.compile_lock._at_fork_reinit()  # type: ignore[attr-defined]
        torch._dynamo.reset_code_caches()


_amid_calls = False
os.register_at_fork(before=_note_calls, after_in_child=_renew_compilers)
