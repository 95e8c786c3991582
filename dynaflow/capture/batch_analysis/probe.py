"""The probe: one run of a captured graph on fake tensors, to learn what each node does to memory and to the batch.

*Contract.* Consumes a captured graph and its batch axes. Returns a Probe: for each node the storages that it reads and
writes, whether its result is a view, the dim on which the result carries the batch, and why the node can't be split
along it, if so. Does not change the graph, but for `graph.merged`. Raises Unschedulable for a graph that must run
uncut, and ProbeFailed if no probe size works.

Each batch axis gets a size that occurs nowhere else in the model: twice a large prime. So a dim whose size is a
multiple of that prime carries the batch. Which row an element belongs to is decided by position alone. So after a node
that mixes rows, and runs for the whole batch, its result may be cut again along the dim that has the batch's size.

1. reject: inputs with overlapping windows, and sizes that depend on data.
2. choose: primes that divide no other size of the graph, the likeliest to work first.
3. run:    the graph with these sizes (`fake_run`). If the model bounds its batch, repeat with smaller primes.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.batch_analysis.batch_sizes import BatchNumbers
from dynaflow.capture.batch_analysis.fake_run import FakeRun, ProbeFailed
from dynaflow.capture.batch_analysis.node_facts import NodeFacts, Probe
from dynaflow.capture.captured_graph import CapturedGraph, Shape, concrete

BatchAxes = tuple[frozenset[sympy.Symbol], ...]

PRIMES = (1009, 1013, 10007, 10037, 101, 103, 11, 13)
"""In pairs, one for each axis: rare among sizes, and small enough for products of several."""


class Unschedulable(Exception):
    """The graph does something that no partition of it would do, so it must run uncut."""


def probe(graph: CapturedGraph, batch_axes: BatchAxes) -> Probe:
    """Analyzes the graph for these batch axes."""
    # 1. reject
    for given in graph.inputs:
        if given.shape is not None and _has_windows(given.shape):
            raise Unschedulable(f"the input {given.name!r} is made of windows that overlap; pass a copy of it")
    known = graph.hints.keys() | frozenset().union(*batch_axes)
    for node, shape in graph.shapes.items():
        if any(size.free_symbols - known for size in (*shape.size, *shape.stride)):
            raise Unschedulable(f"the size of {node.name} depends on a floating-point number, or on data")
    # 2. choose
    failure: ProbeFailed | None = None
    for first in range(0, len(PRIMES), 2):
        primes = PRIMES[first : first + len(batch_axes)]
        values = dict(graph.hints)
        values |= {s: 2 * p for p, axis in zip(primes, batch_axes, strict=True) for s in axis}
        if _clashes(graph, values, primes, batch_axes):
            continue
        # 3. run
        try:
            facts = _run(graph, values, primes, batch_axes)
        except ProbeFailed as e:
            failure = e
            continue
        found = Probe(facts=facts, batch_axes=batch_axes, rows=tuple(2 * p for p in primes))
        graph.merged[batch_axes] = {n.name: found.dims(n) for n in found.facts if found.is_merged(n)}
        return found
    raise ProbeFailed(str(failure))


def _clashes(
    graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...], batch_axes: BatchAxes
) -> bool:
    """Whether a prime divides a size other than the batch's."""
    batch = frozenset().union(*batch_axes)
    sizes = {
        concrete(size, values)
        for shape in graph.shapes.values()
        for size in shape.size
        if not size.free_symbols & batch
    }
    return any(size and size % p == 0 for size in sizes for p in primes)


def _has_windows(shape: Shape) -> bool:
    """Whether a dynamic dim has the stride of another dim, as in overlapping windows. Which of them is outermost in a
    result depends on their sizes, so a part of the rows may get another layout than all rows."""
    known: dict[sympy.Expr, list[sympy.Expr]] = {}
    for size, stride in zip(shape.size, shape.stride, strict=True):
        if size not in (0, 1) and stride != 0:
            known.setdefault(stride, []).append(size)
    return any(len(sizes) > 1 and any(size.free_symbols for size in sizes) for sizes in known.values())


def _run(
    graph: CapturedGraph, values: dict[sympy.Symbol, int], primes: tuple[int, ...], batch_axes: BatchAxes
) -> dict[fx.Node, NodeFacts]:
    grad = torch.is_grad_enabled()
    try:
        # Inference mode would not decompose calls: it keeps reshape for view, and linear for addmm.
        with torch.inference_mode(False), _torch.concrete_fake_mode() as mode, torch.no_grad():
            saved = graph.forward.merged.get(batch_axes, {}) if graph.forward is not None else {}
            run = FakeRun(graph, values, primes, BatchNumbers(batch_axes, values, primes), mode, saved)
            try:
                run.run(*run.inputs())
            except ProbeFailed:
                if run.reshaped is None:
                    raise
            except Exception as e:  # an unusual tensor, on which the analysis itself fails
                raise ProbeFailed(f"{run.node.format_node()}: {type(e).__name__}: {e}") from e
            if run.reshaped is not None:
                raise Unschedulable(run.reshaped)
            return run.facts
    finally:
        torch.set_grad_enabled(grad)  # the graph may contain nodes that switch it
