"""Texts cached on disk between processes.

The cache is best effort: any problem with the disk is a miss, and one warning per process. The folder is
DYNAFLOW_CACHE_DIR, by default `dynaflow` in the user's cache folder; DYNAFLOW_CACHE=0 turns the cache off. Its content
decides how models run, so it is created for the user alone, and ignored if others can write to it.
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
"""Limits per kind. Beyond them, the oldest files are deleted."""
TRIM_EVERY = 64
"""Number of writes between two checks of the limits. The first write of a cache checks too."""
STALE_SECONDS = 3600
"""A temporary file older than this was left by a process that died."""

failures = itertools.count()  # counting with next() needs no lock


class DiskCache:
    """Texts by key, in one folder per kind. Safe to share between processes and threads."""

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
                check_private(place)
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
                make_private(folder)
            _write(path, _encoded(self.kind, key, text))
            if next(self._writes) % TRIM_EVERY == 0:
                _trim(path.parent)
        except (OSError, ValueError, RuntimeError) as e:
            _warn("written", e)

    def _path(self, key: str) -> Path:
        return (self._root or default_root()) / self.kind / hashlib.sha256(_bytes(key)).hexdigest()


def make_private(folder: Path) -> None:
    """Creates the folder for the user alone. Raises OSError if that fails, or if others can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Raises PermissionError if others own the path or can write to it: their files would be trusted as the user's."""
    info = path.stat()
    mine = getattr(os, "geteuid", lambda: info.st_uid)()
    if info.st_uid != mine:
        raise PermissionError(f"{path} belongs to user {info.st_uid}, not to {mine}: it is not used")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}, so it is not used; chmod go-w {path}")


def enabled() -> bool:
    return os.environ.get("DYNAFLOW_CACHE") != "0"


def default_root() -> Path:
    if own := os.environ.get("DYNAFLOW_CACHE_DIR"):
        return Path(own).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG standard says to ignore it
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
    raise ValueError("a file's content does not match its name")


def _write(path: Path, data: bytes) -> None:
    """Writes atomically for readers. A crash of the machine may still leave half a file, which the checksum detects."""
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
    """Deletes the oldest files. Other processes may do the same, so missing files are ignored."""
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
    """Warns once per process."""
    if next(failures) == 0:
        advice = "DYNAFLOW_CACHE_DIR names another folder, DYNAFLOW_CACHE=0 turns it off"
        logging.getLogger("dynaflow").warning("the cache could not be %s: %s; %s", what, error, advice)
