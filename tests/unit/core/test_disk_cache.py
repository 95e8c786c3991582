"""Texts kept on disk: found again by any process, and never in the way when the disk is."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from dynaflow.core import disk_cache
from dynaflow.core.disk_cache import DiskCache

KEY, TEXT = "key \n\u00e9 \U0001f600 \ud800", '{"plan": "\u00fc\\n \ud83d\ude00"}'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside, and no warning given yet."""
    for name in ("DYNAFLOW_CACHE", "DYNAFLOW_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_cache, "failures", itertools.count())


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_found_again(tmp_path: Path) -> None:
    one = DiskCache("plans", tmp_path)
    assert one.get(KEY) is None
    one.put(KEY, TEXT)
    assert DiskCache("plans", tmp_path).get(KEY) == TEXT
    assert one.get(KEY + " ") is None
    one.put(KEY, "other")
    assert one.get(KEY) == "other"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("key", ["", "/", "../../up", "\0", "k" * 100_000])
def test_any_key_and_text(tmp_path: Path, key: str) -> None:
    for text in ("", "\0\n", "t" * 1_000_000):
        DiskCache("plans", tmp_path).put(key, text)
        assert DiskCache("plans", tmp_path).get(key) == text
    assert files(tmp_path) == [tmp_path / "plans" / hashlib.sha256(key.encode()).hexdigest()]


def test_kinds_are_apart(tmp_path: Path) -> None:
    DiskCache("plans", tmp_path).put(KEY, TEXT)
    assert DiskCache("choices", tmp_path).get(KEY) is None


# --- where ------------------------------------------------------------------------------------------------


def test_the_folder_is_read_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = DiskCache("plans")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert disk_cache.default_root() == tmp_path / "home/.cache/dynaflow"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert disk_cache.default_root() == tmp_path / "home/.cache/dynaflow"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.default_root() == tmp_path / "xdg/dynaflow"
    kept.put(KEY, TEXT)
    assert files(tmp_path)[0].parent == tmp_path / "xdg/dynaflow/plans"
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", "~/own")
    assert disk_cache.default_root() == tmp_path / "home/own"
    assert kept.get(KEY) is None


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = DiskCache("plans", tmp_path)
    kept.put(KEY, TEXT)
    monkeypatch.setenv("DYNAFLOW_CACHE", "0")
    assert kept.get(KEY) is None
    kept.put("another", TEXT)
    monkeypatch.setenv("DYNAFLOW_CACHE", "1")
    assert kept.get(KEY) == TEXT
    assert kept.get("another") is None


# --- damage -----------------------------------------------------------------------------------------------


def signed(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize(
    "harm",
    [
        *(lambda data, n=n: data[:n] for n in (0, 1, 63, 64, 65, 66, 80, -2, -1)),
        lambda data: data + b" ",
        lambda data: bytes(len(data)),
        lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
        lambda data: b"\xff\xfe garbage",
        lambda data: b"\n" * 100,
        lambda data: signed(b""),
        lambda data: signed(b"\xff"),
        lambda data: signed(b"{}"),
        lambda data: signed(b"[" * 100_000),
        lambda data: signed(json.dumps(["plans", "another key", TEXT]).encode()),
        lambda data: signed(json.dumps(["choices", "key", TEXT]).encode()),
        lambda data: signed(json.dumps(["plans", "key", 5]).encode()),
        lambda data: signed(json.dumps(["plans", "key"]).encode()),
    ],
)
def test_a_damaged_file_is_not_there(tmp_path: Path, harm: object, caplog: pytest.LogCaptureFixture) -> None:
    kept = DiskCache("plans", tmp_path)
    kept.put("key", TEXT)
    (path,) = files(tmp_path)
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    assert kept.get("key") is None
    assert kept.get("key") is None
    assert len(caplog.records) == 1
    kept.put("key", TEXT)
    assert kept.get("key") == TEXT
    assert files(tmp_path) == [path]


# --- a disk that does not want -----------------------------------------------------------------------------


def useless(kept: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is kept, nothing is raised, and one warning is all."""
    for _ in range(3):
        kept.put(KEY, TEXT)
        assert kept.get(KEY) is None
    assert [(r.name, r.levelno) for r in caplog.records] == [("dynaflow", logging.WARNING)]


def test_a_folder_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = DiskCache("plans", tmp_path)
    kept.put(KEY, TEXT)
    (path,) = files(tmp_path)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    useless(kept, caplog)
    assert not files(tmp_path)


def test_a_pipe_in_its_place(tmp_path: Path) -> None:
    kept = DiskCache("plans", tmp_path)
    kept.put(KEY, TEXT)
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert kept.get(KEY) is None
    kept.put(KEY, TEXT)
    assert kept.get(KEY) == TEXT


@pytest.mark.parametrize("root", [".", "plans", "below/it"])
def test_the_path_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, root: str) -> None:
    (tmp_path / "plans").write_text("")
    (tmp_path / "below").write_text("")
    useless(DiskCache("plans", tmp_path / root), caplog)


def test_impossible_paths(caplog: pytest.LogCaptureFixture) -> None:
    useless(DiskCache("plans", Path("/proc/nothing\0here")), caplog)


def test_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    useless(DiskCache("plans"), caplog)


def test_a_read_only_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write anywhere")
    useless(DiskCache("plans", tmp_path), caplog)


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.replace", "os.fdopen", "pathlib.Path.mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_writes_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(call, fails)
    useless(DiskCache("plans", tmp_path), caplog)
    assert not files(tmp_path)


def test_reads_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "read_bytes", fails)
    useless(DiskCache("plans", tmp_path), caplog)


# --- bounds -----------------------------------------------------------------------------------------------


def age(root: Path, key: str, seconds: int) -> None:
    path = root / "plans" / hashlib.sha256(key.encode()).hexdigest()
    os.utime(path, ns=(path.stat().st_mtime_ns - seconds * 10**9,) * 2)


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_FILES", 10)
    monkeypatch.setattr(disk_cache, "TRIM_EVERY", 8)
    kept = DiskCache("plans", tmp_path)
    for i in range(100):
        kept.put(str(i), TEXT)
        age(tmp_path, str(i), 1000 - i)
        assert len(files(tmp_path)) <= 10 + 8
    DiskCache("plans", tmp_path).put("100", TEXT)  # a new process looks at its first write
    assert {i for i in range(101) if kept.get(str(i))} == set(range(91, 101))


def test_large_files_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_BYTES", 5000)
    monkeypatch.setattr(disk_cache, "TRIM_EVERY", 1)
    kept = DiskCache("plans", tmp_path)
    for i in range(10):
        kept.put(str(i), "x" * 1000)
        age(tmp_path, str(i), 1000 - i)
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 5000
    assert kept.get("9") is not None


def test_leftovers_go_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    (folder / "a folder").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "nowhere")
    (folder / "old.tmp").write_text("of a process that died")
    os.utime(folder / "old.tmp", (0, 0))
    (folder / "new.tmp").write_text("of a process at work")
    DiskCache("plans", tmp_path).put(KEY, TEXT)
    assert not (folder / "old.tmp").exists()
    assert (folder / "new.tmp").exists() and (folder / "a folder").exists()


# --- together ---------------------------------------------------------------------------------------------

WORKER = textwrap.dedent("""
    import importlib.util, random, sys, threading

    spec = importlib.util.spec_from_file_location("disk_cache", sys.argv[1])
    disk_cache = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(disk_cache)
    assert "torch" not in sys.modules
    disk_cache.MAX_FILES, disk_cache.TRIM_EVERY = 6, 3
    kept, bad, found = disk_cache.DiskCache("plans", __import__("pathlib").Path(sys.argv[2])), [], []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(150):
            key = str(chance.randrange(8))
            kept.put(key, (key + "|") * chance.randrange(1, 20_000))
            text = kept.get(key)
            found.append(text is not None)
            if text is not None and set(text.split("|")) != {key, ""}:
                bad.append(text[:50])

    threads = [threading.Thread(target=work, args=(int(sys.argv[3]) * 10 + i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(len(bad), sum(found) > 100, next(disk_cache.failures))
""")


def test_processes_and_threads_at_once(tmp_path: Path) -> None:
    """All write, read and trim the same few keys: what is found is always whole, and nothing goes wrong."""
    command = [sys.executable, "-c", WORKER, str(disk_cache.__file__), str(tmp_path)]
    workers = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(4)]
    assert [w.communicate(timeout=120)[0].split() for w in workers] == [["0", "True", "0"]] * 4
    assert not list(tmp_path.rglob("*.tmp"))
    assert 1 <= len(files(tmp_path)) <= 8


def test_a_killed_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER.replace("150", "10**9"), str(disk_cache.__file__), str(tmp_path), "0"]
    worker = subprocess.Popen(command)
    kept = DiskCache("plans", tmp_path)
    while not files(tmp_path):
        assert worker.poll() is None
    worker.kill()
    worker.wait()
    for key in map(str, range(8)):
        text = kept.get(key)
        assert text is None or set(text.split("|")) == {key, ""}
        kept.put(key, TEXT)
        assert kept.get(key) == TEXT


def test_one_warning_from_many_threads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("")
    threads = [threading.Thread(target=DiskCache("plans", tmp_path).put, args=(str(i), TEXT)) for i in range(16)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(caplog.records) == 1
