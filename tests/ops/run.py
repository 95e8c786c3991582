"""Runs the cases of operators, some operators in each process."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch._inductor.config

from tests.ops.cases import MOST_SAMPLES, Case, Uncallable, cases_of, samples_of
from tests.ops.report import Found
from tests.ops.samples import Sample, operators
from tests.ops.training import differentiable, train

HANGS = 600
"""Seconds after which an operator counts as hanging."""


CHUNK = 20
"""Operators for one process: its first case takes seconds, and torch.fx keeps the source of every graph."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, on one thread; also in processes that are forked inside."""
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # torch logs each call that fails on fake tensors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)


def judged(samples: Iterable[Sample], most: int | None = None, trains: bool = True) -> Found:
    """The cases of an operator, `most` of them; with gradients, too, one that is split and one that runs whole."""
    found, started = Found(), time.process_time()
    trained: set[str] = set()
    for case in islice(_cases(samples, found), most):
        try:
            verdict = found.verdicts[str(case)] = case.judge()
            kind = verdict.kind
            if trains and kind in ("split", "whole") and kind not in trained and differentiable(case):
                trained.add(kind)
                train(case)
        except Exception:
            again = f"python -m tests.ops --case {case}"
            found.findings.append(f"{again}\n{traceback.format_exc(chain=False, limit=-4)}")
    found.trained, found.seconds = len(trained), time.process_time() - started
    return found


def _cases(samples: Iterable[Sample], found: Found) -> Iterator[Case]:
    """Those of all samples; notes which samples eager refuses."""
    for sample in samples:
        try:
            yield from cases_of(sample)
        except Uncallable as e:
            found.uncallable.append(str(e))


def case_named(name: str) -> Case | None:
    """As `str(case)` says it."""
    operator, _, dtype, number, _ = name.split("/")
    if operator not in operators():
        return None
    samples = operators()[operator].samples(getattr(torch, dtype))
    sample = next((s for s in samples if s.number == int(number)), None)
    return None if sample is None else next((c for c in cases_of(sample) if str(c) == name), None)


def _judge(names: Sequence[str], samples: int, to: Connection) -> None:
    for name in names:
        to.send(judged(samples_of(operators()[name], samples)))


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    names: list[str]
    """Those that it has not told of yet."""
    since: float


def run(names: Sequence[str], processes: int, samples: int = MOST_SAMPLES) -> Iterator[tuple[str, Found]]:
    """What becomes of each operator, `processes` at a time, as it comes; findings are printed."""
    # A first case takes seconds; after one here, not again in each process. Nothing is compiled: no workers for that.
    torch._inductor.config.compile_threads = 1
    judged(operators()["sin"].samples(torch.float64), most=1)
    gc.set_threshold(50_000, 10, 10)
    gc.freeze()
    context = multiprocessing.get_context("fork")
    chunks = max(processes, -(-len(names) // CHUNK))
    waiting = [chunk for i in range(chunks) if (chunk := list(names[i::chunks]))]
    told_of = 0
    running: dict[Connection, _Worker] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            chunk = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_judge, args=(chunk, samples, there))
            process.start()
            there.close()
            running[here] = _Worker(process, chunk, time.monotonic())
        ready = wait(list(running), timeout=1)
        for here, worker in list(running.items()):
            if here in ready:
                try:
                    told = here.recv()
                except EOFError:
                    worker.process.join()
                    told = Found(findings=[f"{worker.names[0]} crashed, exit code {worker.process.exitcode}"])
            elif time.monotonic() - worker.since > HANGS:
                worker.process.kill()
                worker.process.join()
                told = Found(findings=[f"{worker.names[0]} took more than {HANGS} s"])
            else:
                continue
            name, told_of = worker.names.pop(0), told_of + 1
            worker.since = time.monotonic()
            progress = f"{told_of}/{len(names)} {name}: {len(told.verdicts)} cases, {told.seconds:.1f} s"
            print(progress, *told.findings, sep="\n", file=sys.stderr, flush=True)
            yield name, told
            if not worker.names or worker.process.exitcode is not None:
                worker.process.join()
                del running[here]
                if worker.names:
                    waiting.append(worker.names)
