"""`python -m tests.fuzz --cases 20000`: many cases, each reproducible by its number; exit code 1 on any finding."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from random import Random
from typing import Any

import torch

from tests.fuzz.cases import Tally, draw_case, judge_mutants, run_case, run_door, run_training
from tests.fuzz.graphs import Dice, random_graph

CHUNK = 500
"""Cases for one process: torch.fx keeps the source of every graph that it ever made."""

HANGS = 60
"""Seconds after which a case counts as hanging."""


def run_one(number: int, tally: Tally) -> str | None:
    """Runs a case; returns what is wrong."""
    dice = Dice(Random(number))
    case = None
    try:
        case = draw_case(dice)
        if run_case(case, dice, tally):
            judge_mutants(case, dice, tally)
        return None
    except Exception:
        return traceback.format_exc(chain=False)
    finally:
        if case is not None:
            case.close()


def door_one(number: int, tally: Tally, run: Callable[..., None] = run_door) -> str | None:
    """Runs a case through `dynaflow.compile`."""
    dice = Dice(Random(number))
    try:
        run(random_graph(dice), dice, tally)
        return None
    except Exception:
        return traceback.format_exc(chain=False)


WAYS: dict[str, Callable[[int, Tally], str | None]] = {
    "engine": run_one,
    "door": door_one,
    "train": partial(door_one, run=run_training),
}


def _chunk(first: int, last: int, way: str, findings: SimpleQueue[Any]) -> None:
    torch.set_num_threads(1)
    tally = Tally()
    for number in range(first, last):
        faulthandler.dump_traceback_later(HANGS, exit=True)
        findings.put(("at", number))
        with contextlib.redirect_stderr(io.StringIO()):  # torch.fx prints where eager refuses a program
            problem = WAYS[way](number, tally)
        if problem:
            findings.put(("finding", number, problem))
    faulthandler.cancel_dump_traceback_later()
    findings.put(("done", tally))


def show(number: int, way: str) -> int:
    """One case in full."""
    tally = Tally()
    if way != "engine":
        print(random_graph(Dice(Random(number))))
        problem = WAYS[way](number, tally)
    else:
        case = draw_case(Dice(Random(number)))
        print(case, f"\n{found.plan.code}" if (found := case.lowered()) else "")
        case.close()
        problem = run_one(number, tally)
    print(problem or "no problem")
    return 1 if problem else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="show and run this case alone")
    parser.add_argument("--way", choices=list(WAYS), default="engine",
                        help="door: through dynaflow.compile (slow); train: that, with gradients")  # fmt: skip
    options = parser.parse_args()
    if options.case is not None:
        return show(options.case, options.way)
    tally, findings = Tally(), 0
    started = time.perf_counter()
    again = f"python -m tests.fuzz --way {options.way}"
    end = options.start + options.cases
    context = multiprocessing.get_context("fork")
    for first in range(options.start, end, CHUNK):
        queue = context.SimpleQueue()
        worker = context.Process(target=_chunk, args=(first, min(first + CHUNK, end), options.way, queue))
        worker.start()
        at, done = first, False
        while not done and (worker.is_alive() or not queue.empty()):
            if queue.empty():
                time.sleep(0.02)
                continue
            kind, *rest = queue.get()
            if kind == "at":
                at = rest[0]
            elif kind == "finding":
                findings += 1
                print(f"case {rest[0]} (again: {again} --case {rest[0]}):\n{rest[1]}", flush=True)
            else:
                done = True
                tally.add(rest[0])
        worker.join()
        if not done:
            findings += 1
            print(f"case {at} crashed or hung, exit code {worker.exitcode} (again: {again} --case {at})", flush=True)
        seconds = time.perf_counter() - started
        print(f"{tally.cases} cases, {findings} findings, {seconds:.0f} s", flush=True)
    print(tally)
    print("no mismatch" if not findings else f"{findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
