"""`python -m tests.fuzz --cases 20000`: many cases, each reproducible by its number; exit code 1 on any finding."""

from __future__ import annotations

import argparse
import os
import sys

from tests.fuzz.processes import chunks_of, quiet, run_all
from tests.fuzz.seeds import first_case
from tests.fuzz.ways import WAYS, make_way, show

SHARES = {"engine": 20, "train": 10, "door": 1}
"""How many cases of each there are in "all"."""


def counts_of(way: str, cases: int) -> dict[str, int]:
    if way != "all":
        return {way: cases}
    total = sum(SHARES.values())
    return {name: max(1, cases * share // total) for name, share in SHARES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="how many; by default 20000, or as many as --seconds allows")
    parser.add_argument("--seconds", type=float, help="stop after that")
    parser.add_argument("--start", type=int, help="number of the first case; by default a fresh one")
    parser.add_argument("--case", type=int, help="show and run this case alone")
    parser.add_argument("--small", action="store_true", help="with --case: look for a smaller one that fails alike")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: one for each core")
    parser.add_argument("--way", choices=[*WAYS, "all"], default="engine",
                        help="train: forward and backward; door: through dynaflow.compile (slow)")  # fmt: skip
    options = parser.parse_args()
    if options.case is not None:
        quiet()
        return show(make_way, options.way, options.case, options.small)
    start = first_case() if options.start is None else options.start
    cases = options.cases if options.cases is not None else 20000 if options.seconds is None else 10_000_000
    jobs = options.jobs or os.cpu_count() or 1
    print(f"from case {start} on", flush=True)
    outcome = run_all(
        chunks_of(counts_of(options.way, cases), start, jobs), make_way, jobs=jobs, seconds=options.seconds
    )
    print(outcome.summary())
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main())
