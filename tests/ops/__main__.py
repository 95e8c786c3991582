"""`python -m tests.ops`: every operator of torch's database under splits; exit code 1 on any finding."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.ops.cases import MOST_SAMPLES
from tests.ops.report import page, read, summary
from tests.ops.run import case_named, quiet, run
from tests.ops.samples import operators
from tests.ops.training import differentiable, train


def show(name: str) -> int:
    """One case, in full; with gradients, if it has some."""
    case = case_named(name)
    if case is None:
        print(f"there is no case {name}")
        return 2
    for i, leaf in enumerate(case.sample.leaves):
        print(f"argument {i}: {leaf!r}")
    for form in ("alone", "between"):
        print(case.graph(form)[0].code)
    print(case.judge())
    if differentiable(case):
        train(case)
        print("its gradients are eager's")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("operators", nargs="*", help="by default, all")
    parser.add_argument("--case", help="show and run one case, as a finding or --results names it: "
                        "operator/way/dtype/sample/argument.dim+argument.dim")  # fmt: skip
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=MOST_SAMPLES, help="of an operator, at most")
    parser.add_argument("--results", type=Path, help="write what became of each operator here, as lines of JSON; "
                        "those that are there without a finding are not run again")  # fmt: skip
    parser.add_argument("--page", type=Path, help="write the page of the docs here")
    options = parser.parse_args()
    with quiet():
        return show(options.case) if options.case else run_all(parser, options)


def run_all(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The operators that the options name; the page is written if nothing is wrong."""
    names = options.operators or list(operators())
    if unknown := [name for name in names if name not in operators()]:
        parser.error(f"no such operator: {', '.join(unknown)}")
    kept: Path | None = options.results
    found = read(kept.read_text(encoding="utf-8").splitlines()) if kept and kept.exists() else {}
    found = {name: found[name] for name in names if name in found and not found[name].findings}
    with kept.open("a", encoding="utf-8") if kept else nullcontext() as file:
        for name, told in run([name for name in names if name not in found], options.processes, options.samples):
            found[name] = told
            if file:
                print(told.written(name), file=file, flush=True)
    found = {name: found[name] for name in names}
    print(summary(found))
    if any(f.findings for f in found.values()):
        return 1
    if options.page:
        options.page.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
