"""`python -m benchmarks --suite fast`: runs benchmarks. `python -m benchmarks --table`: writes docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    auto,
    cold_start,
    copies,
    cut_cost,
    generate,
    graph_launch,
    host,
    link,
    memory,
    plan_cost,
    published,
    sequential,
    served_step,
    simulator,
    strategies,
    trace_cost,
    training,
    vllm_serving,
    vllm_start,
)
from benchmarks.cells import BY_NAME, CELLS
from benchmarks.llama import SITUATIONS
from benchmarks.report import RESULTS, Report, machine, progress, take, write_table
from benchmarks.settings import NONE, Settings
from benchmarks.suite import Benchmark, run
from benchmarks.vllm_servers import SHAPES

ALL: tuple[Benchmark, ...] = tuple(
    module.BENCHMARK
    for module in (
        sequential,
        cut_cost,
        host,
        served_step,
        graph_launch,
        memory,
        copies,
        plan_cost,
        trace_cost,
        cold_start,
        strategies,
        link,
        simulator,
        published,
        auto,
        generate,
        training,
        vllm_serving,
        vllm_start,
    )
)


def main(argv: Sequence[str] | None = None) -> list[Report]:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if args.table is not None:
        if args.table:
            take(Path(args.table))
        write_table()
        return []
    chosen = [b for b in ALL if (b.name in args.only if args.only else args.suite in b.suites)]
    settings = Settings(
        tiny=args.tiny,
        layers=args.layers,
        situations=tuple(s for s in args.situations.split(",") if s),
        cells=tuple(c for c in args.cells.split(",") if c),
        operators=args.operators,
        rounds=args.rounds or (3 if args.tiny else None),
    )
    if unknown := [s for s in settings.situations if s not in (*SITUATIONS, NONE)]:
        raise SystemExit(f"no situation {unknown[0]!r}; there are {', '.join(SITUATIONS)}")
    cells = [*BY_NAME, *(work.name for work in generate.WORKS), *SHAPES, *training.WORKS]
    if unknown := [c for c in settings.cells if c not in cells]:
        raise SystemExit(f"no cell {unknown[0]!r}; there are {', '.join(cells)}")
    progress(", ".join(f"{k} {v}" for k, v in machine().items()))
    folder = Path(args.out) if args.out else None if args.tiny else RESULTS
    reports = run(chosen, settings, folder, argv, [BY_NAME[c] for c in settings.cells if c in BY_NAME] or CELLS)
    for report in reports:
        if report.rows:
            print(f"\n{report.result['benchmark']}: {report.result['title']}\n{report}")
    progress("done")
    return reports


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--suite", default="fast", choices=sorted({s for b in ALL for s in b.suites}))
    names = [b.name for b in ALL]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument(
        "--situations", default="", help=f"of {','.join(SITUATIONS)}; leaves out rows without one; {NONE!r}: only those"
    )
    parser.add_argument("--cells", default="", help=f"of {','.join(BY_NAME)}; and of systems and training")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmarks on any device")
    parser.add_argument("--layers", type=int, help="of the Llama, if not all 32")
    parser.add_argument("--rounds", type=int, help="of each row, if not as many as fit into four seconds")
    parser.add_argument("--operators", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--out", metavar="FOLDER", help="for the JSON; benchmarks/results unless --tiny")
    parser.add_argument(
        "--table", nargs="?", const="", metavar="FOLDER", help="writes docs/benchmarks.md; takes FOLDER's JSON in first"
    )
    return parser


if __name__ == "__main__":
    main()
