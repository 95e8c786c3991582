"""The same with gradients, through `dynaflow.compile`: Dynamo captures the call, and AOTAutograd makes both passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch._dynamo.exc import TorchRuntimeError

import dynaflow as df
from tests.helpers import Each
from tests.ops.cases import Case, Mismatch, same


def differentiable(case: Case) -> bool:
    """Whether there are gradients to compare. Those of what is drawn at random would be of other numbers: a compiler
    draws in its own way."""
    sample = case.sample
    if case.way != "function" or not sample.operator.info.supports_autograd or not sample.dtype.is_floating_point:
        return False
    results = []
    for seed in (0, 1):
        try:
            with redirect_stderr(StringIO()):  # torch.fx prints where a graph fails
                results.append(_gradients(_model(case), case, seed))
        except Exception:
            return False
    (first, other) = results
    return any(g is not None for g in first) and all(
        a is b is None or (a is not None and b is not None and torch.allclose(a, b, equal_nan=True))
        for a, b in zip(first, other, strict=True)
    )


def train(case: Case) -> None:
    """Compares gradients under a split, uneven if it can be; raises Mismatch.

    Some of eager's formulas look at data: `prod` divides by its input if there is no zero in it. AOTAutograd traces the
    other formula, which differs for nan and inf. Some of eager's kernels use numbers with fewer digits than their
    decompositions do (`hardsigmoid`). So gradients that are not eager's must be those that torch.compile gives.
    """
    torch._dynamo.reset()
    model, carriers = _model(case), dict(case.cut.dims)
    expected = _gradients(model, case)
    dims = {f"t{i}": carriers.get(i) for i in case.places}
    fast = df.compile(model, Each(split=case.splits[-1]), operators="eager", batch_dims=dims)
    try:
        found = _gradients(fast, case)
    except df.SplitError as e:
        # Dynamo leaves out what the operator does not use, and the batch where the operator fixes it.
        if "can be split" in str(e) or "no batch to split" in str(e) or "the graph has no such input" in str(e):
            return
        raise
    except TorchRuntimeError:
        # Dynamo can't trace some calls with a symbolic number, such as a stride for `max_pool2d_with_indices_backward`.
        torch._dynamo.reset()
        try:
            _gradients(torch.compile(model, backend="eager", dynamic=True), case)
        except TorchRuntimeError:
            return
        raise
    try:
        _compare(case, expected, found)
    except Mismatch:
        torch._dynamo.reset()
        theirs = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=True)
        _compare(case, _gradients(theirs, case), found)


def _compare(case: Case, expected: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
    for place, e, f in zip(case.places, expected, found, strict=True):
        if (e is None) != (f is None):
            raise Mismatch(f"the gradient of argument {place} is {f} instead of {e}")
        if e is not None:
            same(f"the gradient of argument {place}", e, f)


def _model(case: Case) -> Callable[..., Any]:
    """The operator as a function of the tensors alone."""
    gm, _ = case.graph("alone")
    (place, dim), *_ = case.cut.dims
    names = ", ".join(f"t{i}" for i in case.places)
    source = f"def model({names}):\n    return graph(t{place}.shape[{dim}], {names})"
    namespace: dict[str, Any] = {"graph": gm}
    exec(compile(source, "<ops>", "exec"), namespace)
    return namespace["model"]


def _gradients(function: Callable[..., Any], case: Case, seed: int = 0) -> list[torch.Tensor | None]:
    """Of a loss in which each element of each result counts differently."""
    given = [case.sample.leaves[i].detach().clone() for i in case.places]
    state = {case.places.index(i) for i in case.state}
    for place, tensor in enumerate(given):
        tensor.requires_grad_(place not in state and (tensor.is_floating_point() or tensor.is_complex()))
    torch.default_generator.manual_seed(seed)
    results = [r for r in function(*given) if r.requires_grad]
    random = torch.Generator().manual_seed(3)
    terms = [(r.abs() if r.is_complex() else r) for r in results]
    loss = sum((t * torch.rand(t.shape, generator=random, dtype=t.dtype)).sum() for t in terms)
    wanted = [t for t in given if t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if results else [None] * len(wanted))  # type: ignore[arg-type]
    return [next(found) if t.requires_grad else None for t in given]
