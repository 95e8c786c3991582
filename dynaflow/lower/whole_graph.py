"""Captures a lowered plan as one CUDA graph: a decorator of executables.

Contract
    Takes an Executable, and which inputs a graph copies or uses in place. Returns an Executable with the same results,
    which captures at its first warm call and replays afterwards. The given one is unchanged.
    Where the capture fails, nothing of the plan has run. The plan is then captured in pieces, without the operator that
    failed; if that operator is not known, it runs without a graph. A warning names it. Errors of the plan itself are
    raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dynaflow._torch import Boxed
from dynaflow.core.stats import Stats
from dynaflow.lower.executable import Entry, Executable, Recordable
from dynaflow.lower.timing import Branches, MarkAside
from dynaflow.runtime.arena import BlockPool
from dynaflow.runtime.cuda_graphs import CaptureError, GraphedFunction, GraphPool
from dynaflow.runtime.cuda_lanes import CaptureStreams

Pieces = Callable[[frozenset[str]], Executable]
"""The same plan captured in pieces, with these operators outside."""


def as_one_graph(
    executable: Executable,
    pool: GraphPool,
    blocks: BlockPool,
    *,
    copied: list[int],
    static: list[int],
    warm: bool,
    pieces: Pieces,
    remade: Callable[[bool, bool], Executable],
) -> Executable:
    """`copied`, `static`: positions of the inputs that the graph copies in, and of those that it uses in place.
    `warm`: its kernels have run before. `remade`: gets `row` and `warm`, and makes the variant that takes marks.
    """
    device = executable.graph.graph.device
    run = executable.entry.call if executable.marks is None else _with_own_marks(executable, pool.streams)
    graphed = GraphedFunction(run, device, pool, copied=copied, static=static, warm=warm)
    whole = _WholeGraph(executable, run, graphed, pool, blocks, pieces)
    if executable.marks is None:
        return replace(executable, entry=Entry(whole), recordable=Recordable(whole.recordable(remade)))
    marks = replace(executable.marks, own=True)
    return replace(executable, entry=Entry(_with_graphs_marks(graphed, whole, pool)), marks=marks)


class _WholeGraph:
    """Runs a plan as one graph, or as what replaces it after a failed capture."""

    def __init__(
        self,
        plain: Executable,
        run: Boxed,
        graphed: GraphedFunction,
        pool: GraphPool,
        blocks: BlockPool,
        pieces: Pieces,
    ) -> None:
        self._plain, self._run, self._graphed, self._pool, self._blocks = plain, run, graphed, pool, blocks
        self._make_pieces = pieces
        self._pieces: Executable | None = None
        self._instead: Boxed | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._instead is not None:
            return self._instead(args)
        stats: Stats = self._pool.stats
        try:
            captures = stats.captures
            results = self._graphed(args)
            if stats.captures > captures:  # the graph has memory of its own: free the blocks of the first call
                self._blocks.clear(self._plain.graph.graph.device)
            return results
        except CaptureError as e:
            self._instead = self._without(e)
        return self._instead(args)

    def _without(self, error: CaptureError) -> Boxed:
        plain, cause = self._plain, error.__cause__ or error
        indices = plain.code.tasks_of(cause) if plain.code else None
        self._pool.failed(plain.tasks_of(cause) or ("the plan" if plain.code else "the uncut graph"), error)
        if not indices or plain.marks is not None:  # a recording needs its marks where they are
            return self._run
        culprits = frozenset(item.op for i in indices for item in plain.plan.tasks[i].items)
        self._pieces = self._make_pieces(culprits)
        return self._pieces

    def recordable(self, remade: Callable[[bool, bool], Executable]) -> Callable[[bool], Executable]:
        me = weakref.ref(self)  # alive, since the executable refers to it

        def make(row: bool) -> Executable:
            whole = me()
            assert whole is not None
            return remade(row, whole._graphed.warm) if whole._pieces is None else whole._pieces.marked(row)

        return make


def _with_graphs_marks(graphed: GraphedFunction, run: Boxed, pool: GraphPool) -> Boxed:
    """A graph records the events that it was captured with. This puts them into the list of marks."""
    known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def run_marked(args: list[Any]) -> Any:
        marks = args[-1]
        with pool.lock:
            captures = pool.stats.captures
            results = run(args)
            if pool.stats.captures > captures:
                known[graphed.last] = list(marks)
            elif not marks:
                marks += known[graphed.last]
            return results

    return run_marked


def _with_own_marks(executable: Executable, streams: CaptureStreams) -> Boxed:
    """Makes new marks for each capture, and puts them into the list of marks."""
    marks, entry = executable.marks, executable.entry
    assert marks is not None

    def run_marked(args: list[Any]) -> Any:
        given = args.pop()
        if not marks.cuda:  # in tests that simulate graphs
            given[:] = [0.0] * marks.count
            return entry.call([*args, given])
        branches = Branches(streams)
        aside = [MarkAside(branches) for _ in range(marks.count)]
        results = entry.call([*args, aside])
        branches.join(torch.cuda.current_stream(marks.device))
        given[:] = [mark.event for mark in aside]
        return results

    return run_marked
