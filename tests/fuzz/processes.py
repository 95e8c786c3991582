"""Many cases over several processes, chunk by chunk, until they are through or the time is up."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dynaflow.errors import FallbackWarning
from tests.fuzz.groups import SHARE
from tests.fuzz.shrink import kind_of
from tests.fuzz.tally import Tally

CHUNK = 100 * SHARE
"""Cases for one process: torch.fx keeps the source of every graph that it ever made."""

HANGS = {"inductor": 600}
"""Seconds after which a case counts as hanging, where that is not HANGS_ELSE."""
HANGS_ELSE = 120

GRACE = 30
"""Seconds that cases have to end when the time is up."""

SHOWN = 3
"""Findings of one kind that are shown in full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    way: str
    first: int
    last: int


@dataclass(slots=True)
class Outcome:
    """Of all processes together."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    """Cases drawn, by way."""
    findings: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By way and kind: the numbers of the cases."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Of processors, by way."""

    @property
    def found(self) -> int:
        return sum(map(len, self.findings.values()))

    def summary(self) -> str:
        lines = []
        for way, tally in self.tallies.items():
            rate = self.done[way] / max(self.seconds[way], 1e-9)
            took = f"{self.seconds[way]:.0f} s of one core, {rate:.1f}/s"
            lines.append(f"{way}: {self.done[way]} drawn in {took}; {tally}")
        for (way, kind), numbers in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            some = ", ".join(map(str, numbers[:5]))
            lines.append(f"{len(numbers):>6} {way}: {kind}  (cases {some}{', ...' if len(numbers) > 5 else ''})")
        lines.append("no mismatch" if not self.found else f"{self.found} findings")
        return "\n".join(lines)


def chunks_of(counts: dict[str, int], start: int, jobs: int = 1) -> deque[Chunk]:
    """The ways in turn, each as far along as the others."""
    made = []
    for way, count in counts.items():
        step = min(CHUNK, -(-count // jobs // SHARE) * SHARE or SHARE)
        for first in range(0, count, step):
            made.append(((first + step) / count, Chunk(way, start + first, start + min(first + step, count))))
    return deque(chunk for _, chunk in sorted(made, key=lambda pair: pair[0]))


def run_all(
    chunks: deque[Chunk],
    make: Callable[[str], Any],
    *,
    jobs: int = 1,
    seconds: float | None = None,
    again: str = "python -m tests.fuzz",
    method: str = "fork",
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> Outcome:
    """`make`: gives the way to run a case, by name. `again`: the command that does so, to be shown with findings."""
    outcome = Outcome()
    started = time.monotonic()
    deadline = None if seconds is None else started + seconds
    context: Any = multiprocessing.get_context(method)
    workers: dict[Connection, _Worker] = {}
    told = started
    while chunks or workers:
        late = deadline is not None and time.monotonic() > deadline
        while chunks and len(workers) < jobs and not late:
            worker = _Worker(context, chunks.popleft(), make, deadline)
            workers[worker.inbox] = worker
        if late:
            chunks.clear()
        if deadline is not None and time.monotonic() > deadline + GRACE:
            for worker in workers.values():
                worker.stop()
            say(f"{len(workers)} cases were not through when the time was up")
            break
        for inbox in wait(list(workers), timeout=1.0):
            worker = workers[inbox]  # type: ignore[index]
            left = worker.listen(outcome, lambda way, number, text: _tell(outcome, way, number, text, again, say))
            if left is not None:
                del workers[worker.inbox]
                chunks.extendleft([left] if left.first < left.last else [])
        if time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"{outcome.done.total()} cases, {outcome.found} findings, {told - started:.0f} s")
    return outcome


def _tell(outcome: Outcome, way: str, number: int, text: str, again: str, say: Callable[[str], None]) -> None:
    known = outcome.findings.setdefault((way, kind_of(text)), [])
    known.append(number)
    if len(known) <= SHOWN:
        say(f"case {number} (again: {again} --way {way} --case {number}):\n{text}")


class _Worker:
    """One process with one chunk."""

    def __init__(self, context: Any, chunk: Chunk, make: Callable[[str], Any], deadline: float | None) -> None:
        self.chunk, self._at = chunk, chunk.first
        self.inbox, outbox = context.Pipe(duplex=False)
        self._process = context.Process(target=work, args=(chunk, make, deadline, outbox), daemon=True)
        self._process.start()
        outbox.close()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    def listen(self, outcome: Outcome, found: Callable[[str, int, str], None]) -> Chunk | None:
        """Takes what came in; when the process has ended, returns what it has left undone."""
        way = self.chunk.way
        try:
            kind, *rest = self.inbox.recv()
        except EOFError:  # it crashed or hung
            self._process.join()
            found(way, self._at, f"Crash: exit code {self._process.exitcode}")
            outcome.done[way] += 1
            return Chunk(way, self._at + 1, self.chunk.last)
        if kind == "at":
            self._at = rest[0]
        elif kind == "finding":
            found(way, *rest)
        elif kind == "tally":  # from time to time, so that a crash takes little with it
            tally, done, seconds = rest
            outcome.tallies.setdefault(way, Tally()).add(tally)
            outcome.done[way] += done
            outcome.seconds[way] += seconds
        else:
            self._process.join()
            return Chunk(way, self.chunk.last, self.chunk.last)
        return None


def quiet() -> None:
    """torch logs what it fails at, though somebody catches it."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    warn_of_failures()


def warn_of_failures() -> None:
    """What dynaflow failed at is a finding; what torch.compile's tracer failed at is left to Python."""
    warnings.simplefilter("error", FallbackWarning)
    warnings.filterwarnings("ignore", ".*torch.compile's tracer failed", FallbackWarning)


def work(chunk: Chunk, make: Callable[[str], Any], deadline: float | None, outbox: Connection) -> None:
    quiet()
    way, tally, done, before = make(chunk.way), Tally(), 0, time.process_time()

    def tell() -> None:
        nonlocal tally, done, before
        now = time.process_time()
        outbox.send(("tally", tally, done, now - before))
        tally, done, before = Tally(), 0, now

    for number in range(chunk.first, chunk.last):
        if deadline is not None and time.monotonic() > deadline:
            break
        faulthandler.dump_traceback_later(HANGS.get(chunk.way, HANGS_ELSE), exit=True, file=sys.__stderr__)
        outbox.send(("at", number))
        with contextlib.redirect_stderr(io.StringIO()):  # torch.fx prints where eager refuses a program
            problem = way.run(number, tally)
        done += 1
        if problem:
            outbox.send(("finding", number, problem))
        if done >= 20:
            tell()
    faulthandler.cancel_dump_traceback_later()
    tell()
    outbox.send(("done",))
    outbox.close()
    os._exit(0)  # threads of lanes may still be about
