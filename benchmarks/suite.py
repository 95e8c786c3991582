"""Which benchmarks there are, and how they are run: a failing one never takes others along."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.llama import SITUATIONS, build, case, label
from benchmarks.measure import Trial, once, raising
from benchmarks.report import Report, make_row, progress
from benchmarks.settings import NONE, Settings
from benchmarks.variants import Variants

if TYPE_CHECKING:
    from benchmarks.cells import Cell


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    name: str
    title: str
    suites: tuple[str, ...]
    trials: Callable[[Settings], Iterable[Trial]] | None = None
    """Rows that need no Llama of this process."""
    in_situation: Callable[[Variants], Iterable[Trial]] | None = None
    """Rows for a Llama in one situation."""
    situations: tuple[str, ...] = ()
    """Those it is measured in unless others are asked for."""
    possible: tuple[str, ...] = tuple(SITUATIONS)
    """Those it makes sense in."""
    in_cell: Callable[[Cell, Variants], Iterable[Trial]] | None = None
    """Rows for a cell of the strategies' suite."""
    fits: Callable[[Cell], bool] = lambda cell: True
    """Whether it has any there."""

    def chosen(self, settings: Settings) -> list[str]:
        if not self.in_situation:
            return []
        return [s for s in self.possible if s in (settings.situations or self.situations)]


def run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    folder: Path | None,
    argv: Sequence[str] = (),
    cells: Sequence[Cell] = (),
) -> list[Report]:
    """Runs them all. Situations and cells come first and the benchmarks within, so that compiled forms are shared."""
    reports = {b.name: Report(b.name, b.title, folder, argv) for b in benchmarks}
    wanted = {name for b in benchmarks for name in b.chosen(settings)}
    with torch.no_grad():
        if wanted and settings.can_hold_llama:
            _in_situations(benchmarks, settings, reports, [name for name in SITUATIONS if name in wanted])
        elif wanted:
            progress(f"no Llama: {', '.join(sorted(wanted))} need a GPU, or --tiny")
        for cell in cells if settings.can_hold_llama else ():
            if fitting := [b for b in benchmarks if b.in_cell and b.fits(cell)]:
                _in_cell(fitting, cell, settings, reports)
        for b in benchmarks:
            if b.trials and not (settings.situations not in ((), (NONE,)) and b.in_situation):  # situations alone
                _measure(reports[b.name], partial(b.trials, settings), b.name)
    return list(reports.values())


def _in_situations(
    benchmarks: Sequence[Benchmark], settings: Settings, reports: dict[str, Report], names: Sequence[str]
) -> None:
    progress("making the Llama")
    model = once(lambda: build(settings))
    for name in names:
        _in_situation([b for b in benchmarks if name in b.chosen(settings)], model, name, settings, reports)


def _in_situation(
    benchmarks: Sequence[Benchmark],
    model: Callable[[], nn.Module],
    name: str,
    settings: Settings,
    reports: dict[str, Report],
) -> None:
    variants = once(lambda: Variants(case(model(), SITUATIONS[name], settings), settings))
    where = label(name, settings)
    for b in benchmarks:
        _measure(reports[b.name], lambda b=b: b.in_situation(variants()), b.name, where)
    with contextlib.suppress(Exception):  # never made: its rows tell why
        variants().close()


def _in_cell(benchmarks: Sequence[Benchmark], cell: Cell, settings: Settings, reports: dict[str, Report]) -> None:
    try:
        variants = Variants(cell.make(settings), settings)
    except Exception as e:
        lacking = isinstance(e, ImportError)
        trial = Trial(
            what="setting up", baseline="", situation=cell.name, skip=str(e) if lacking else "", run=raising(e)
        )
        for b in benchmarks:
            _measure(reports[b.name], lambda: [trial], b.name, cell.name)
        return
    for b in benchmarks:
        _measure(reports[b.name], lambda b=b: b.in_cell(cell, variants), b.name, cell.name)
    variants.close()


def _measure(report: Report, trials: Callable[[], Iterable[Trial]], name: str, situation: str = "") -> None:
    """Each trial in turn, its row kept at once."""
    title = f"{name}, {situation}" if situation else name
    progress(title)
    for trial in _caught(trials, situation):
        found, error = None, ""
        if not trial.skip:
            try:
                assert trial.run is not None, "nothing to run"
                found = trial.run()
            except Exception as e:
                error = _message(e)
                traceback.print_exc()
        row = make_row(trial, found, error)
        report.add(row)
        shown = error or (f"skipped, {trial.skip}" if trial.skip else f"{row['value']:.4g} {trial.unit}")
        progress(f"{title}: {trial.what} / {trial.baseline or 'absolute'}: {shown}")


def _caught(trials: Callable[[], Iterable[Trial]], situation: str) -> Iterator[Trial]:
    """The trials; if listing them fails, that is a row too."""
    try:
        yield from trials()
    except Exception as e:
        yield Trial(what="setting up", baseline="", situation=situation, run=raising(e))


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:300].replace("\n", " ")
