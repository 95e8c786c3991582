"""Texts kept on disk, so that a new process finds what an earlier one worked out.

A store is a help and never a duty: whatever goes wrong with the disk means "not there", and one warning.
The folder is DYNAFLOW_CACHE_DIR, or else dynaflow in the user's cache folder; DYNAFLOW_CACHE=0 turns it off. It is
made for the user alone. What is in it decides how models run, so one in which others can write is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

MAX_FILES = 4096
MAX_BYTES = 256 << 20
"""Of each kind; beyond, the oldest go."""
TRIM_EVERY = 64
"""Writes between two looks at how many files there are. The first write of a store looks too."""
STALE_SECONDS = 3600
"""A temporary file of this age was left by a process that died."""

failures = itertools.count()  # counting with next() needs no lock


class Store:
    """Texts by key, in one folder per kind. Processes and threads may share it."""

    def __init__(self, kind: str, root: Path | None = None) -> None:
        self.kind, self._root = kind, root
        self._writes = itertools.count()

    def get(self, key: str) -> str | None:
        if not enabled():
            return None
        try:
            path = self._path(key)
            if not path.is_file():  # a pipe in its place would block
                return None
            for place in (path.parent.parent, path.parent, path):
                only_mine(place)
            return _decoded(path.read_bytes(), self.kind, key)
        except FileNotFoundError:  # removed in between
            return None
        except (OSError, ValueError, RuntimeError) as e:
            _warn("read", e)
            return None

    def put(self, key: str, text: str) -> None:
        if not enabled():
            return
        try:
            path = self._path(key)
            for folder in (path.parent.parent, path.parent):
                made(folder)
            _write(path, _encoded(self.kind, key, text))
            if next(self._writes) % TRIM_EVERY == 0:
                _trim(path.parent)
        except (OSError, ValueError, RuntimeError) as e:
            _warn("written", e)

    def _path(self, key: str) -> Path:
        return (self._root or default_root()) / self.kind / hashlib.sha256(_bytes(key)).hexdigest()


def made(folder: Path) -> None:
    """The folder is there, for the user alone. Raises OSError if it can't be, or if others can write in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    only_mine(folder)


def only_mine(path: Path) -> None:
    """Raises PermissionError if others can write there: what they leave would be taken for the user's own."""
    info = path.stat()
    mine = getattr(os, "geteuid", lambda: info.st_uid)()
    if info.st_uid != mine:
        raise PermissionError(f"{path} belongs to user {info.st_uid}, not to {mine}: nothing is read from it")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}, so nothing is read from it; chmod go-w {path}")


def enabled() -> bool:
    return os.environ.get("DYNAFLOW_CACHE") != "0"


def default_root() -> Path:
    if own := os.environ.get("DYNAFLOW_CACHE_DIR"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the standard says to ignore it then
        base = Path.home() / ".cache"
    return base / "dynaflow"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _encoded(kind: str, key: str, text: str) -> bytes:
    body = _bytes(json.dumps([kind, key, text], ensure_ascii=False))
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decoded(data: bytes, kind: str, key: str) -> str:
    checksum, _, body = data.partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("a file is damaged")
    match json.loads(body.decode("utf-8", "surrogatepass")):
        case [str(a), str(b), str(text)] if (a, b) == (kind, key):
            return text
    raise ValueError("a file holds something else than its name says")


def _write(path: Path, data: bytes) -> None:
    """All or nothing for readers. A crash of the machine may still leave half a file: the checksum tells."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _trim(folder: Path) -> None:
    """Lets the oldest files go. Others may be doing the same, so a file that is gone is no surprise."""
    files: list[tuple[int, int, str]] = []
    stale = (time.time() - STALE_SECONDS) * 1e9
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not entry.is_file(follow_symlinks=False):
                continue
            if not entry.name.endswith(".tmp"):
                files.append((info.st_mtime_ns, info.st_size, entry.path))
            elif info.st_mtime_ns < stale:
                Path(entry.path).unlink(missing_ok=True)
    room = MAX_BYTES
    for n, (_, size, path) in enumerate(sorted(files, reverse=True)):
        room -= size
        if n >= MAX_FILES or room < 0:
            Path(path).unlink(missing_ok=True)


def _warn(what: str, error: Exception) -> None:
    """Once per process: a cache that does not work is worth knowing of, not worth a line per plan."""
    if next(failures) == 0:
        advice = "DYNAFLOW_CACHE_DIR names another folder, DYNAFLOW_CACHE=0 turns it off"
        logging.getLogger("dynaflow").warning("the cache could not be %s: %s; %s", what, error, advice)
