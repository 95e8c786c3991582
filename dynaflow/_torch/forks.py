"""Repairs torch in a forked process."""

from __future__ import annotations

import os
import sys
import threading

import torch


def _note_calls() -> None:
    """Before a fork: records whether another thread is inside a compiled function, or compiles an operator."""
    global _amid_calls
    _amid_calls = False
    mine = threading.get_ident()
    for thread, frame in sys._current_frames().items() if "torch._dynamo" in sys.modules else ():
        while frame is not None and thread != mine and not _amid_calls:
            _amid_calls = frame.f_globals.get("__name__") in ("torch._dynamo.eval_frame", _COMPILER)
            frame = frame.f_back  # type: ignore[assignment]


def _renew_compilers() -> None:
    """In a child: drops Inductor's pool of compile threads, which exists in the parent only. If other threads were
    inside compiled functions, they may have held Dynamo's locks (one for captures, one in each graph's guards), so the
    locks are reset and the graphs are captured again. Seen on 2.11 and 2.13."""
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.AsyncCompile.pool.cache_clear()
    if _amid_calls:
        torch._dynamo.convert_frame.compile_lock._at_fork_reinit()  # type: ignore[attr-defined]
        torch._dynamo.reset_code_caches()


_amid_calls = False
_COMPILER = "dynaflow._torch.inductor"
"""Holds Dynamo's lock as well."""
os.register_at_fork(before=_note_calls, after_in_child=_renew_compilers)
