"""Compares the first run of a plan with the plain model: every output and every written input must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dynaflow import _torch
from dynaflow._torch import Boxed
from dynaflow.capture.batch_analysis.aten_calls import RNG
from dynaflow.errors import VerifyError
from dynaflow.lower.executable import Executable
from dynaflow.partition.op_graph import Op, OpGraph

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference allowed, relative to the largest magnitude: kernels for other shapes sum in other orders."""


def verified_run(lowered: Executable, args: Sequence[Any], whole: Callable[[], Boxed]) -> Any:
    """Runs the plan and returns its results; raises VerifyError if those of the plain model differ.

    `whole` makes a function of the uncut graph, compiled like the operators. It replaces a plain model that draws
    random numbers, since compiled code draws other ones than torch.
    """
    if keeps := next((op for op in lowered.graph.ops if op.has_hidden_state), None):
        raise VerifyError(
            f"{keeps.name} has state that a second run continues from: it can't be compared with the plain model",
            op=keeps.name,
            line=keeps.line,
            advice="leave out verify=True, and compare with the plain model's results yourself, from the same state",
        )
    graph = lowered.graph.graph
    plain_args, spare_args = _copy(args), _copy(args)
    plain = whole() if any(_draws(op) for op in lowered.graph.ops) else lambda box: graph.gm(*box)
    devices = [graph.device] if graph.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        expected = plain(list(plain_args))
    result = lowered(list(args))
    expected, found = _torch.tree_leaves(expected), _torch.tree_leaves(result)
    pairs = [(f"result {i}", e, r) for i, (e, r) in enumerate(zip(expected, found, strict=True))]
    pairs += [
        (f"input {given.name!r} after the call", e, a)
        for given, e, a in zip(graph.inputs, plain_args, args, strict=True)
        if given.shape is not None
    ]
    for what, e, r in pairs:
        if (problem := difference(e, r)) is not None:
            raise _explain(lowered, spare_args, what, problem)
    return result


def difference(expected: Any, found: Any) -> str | None:
    """How two results differ, as text; None if they agree."""
    if expected is found:
        return None
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return None if expected == found else f"{found!r} instead of {expected!r}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    e, f = _real(expected.detach()), _real(found.detach())
    if not e.is_floating_point():
        return None if torch.equal(e, f) else f"{int((e != f).sum())} of {e.numel()} elements differ"
    bad = (e.isnan() != f.isnan()) | ((e != f) & (e.isinf() | f.isinf()))
    if bad.any():
        return f"{int(bad.sum())} of {e.numel()} elements are infinite or NaN in one and not in the other"
    finite = e.isfinite()
    if not finite.any():
        return None
    gap = (e - f)[finite].abs().max().item()
    scale = max(1.0, e[finite].abs().max().item())
    return None if gap <= TOLERANCE.get(e.dtype, 1e-4) * scale else f"off by up to {gap:.3g} (values up to {scale:.3g})"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def _explain(lowered: Executable, args: Sequence[Any], what: str, problem: str) -> VerifyError:
    """Finds the first operator whose result differs, by running the operators one after the other."""
    advice = "if one of its rules says splittable=True, or a replace_func replaces it, check that first"
    if lowered.all_values is not None:
        found = lowered.all_values(list(_copy(args)))
        expected = _plain_values(lowered.graph, args, found)
        for op in lowered.graph.ops:
            for v in op.writes:
                if v in found and (gap := difference(expected[v], found[v])) is not None:
                    return VerifyError(
                        f"{what} differs from the plain model's ({problem}); the first operator that differs is "
                        f"{op.name}: its {lowered.graph.values[v].name!r} is {gap}",
                        op=op.name,
                        line=op.line,
                        advice=advice,
                    )
        advice = "no operator alone differs: lanes share state that the graph does not know of"
    return VerifyError(f"{what} differs from the plain model's: {problem}", advice=advice)


def _draws(op: Op) -> bool:
    """Whether it draws random numbers, from the generator or from a seed that was drawn before."""
    return any(storage == RNG for storage, _ in op.accesses) or _torch.draws_from_seeds(op.module)


def _plain_values(graph: OpGraph, args: Sequence[Any], given: Mapping[int, Any]) -> dict[int, Any]:
    """Every value between operators, from a run of the uncut graph. Random values are those `given`."""
    wanted = {v.name: v.index for v in graph.values if v.input is None}
    drawn = {v for op in graph.ops if _draws(op) for v in op.writes if v in given}
    found: dict[int, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            v = wanted.get(n.name)
            result = given[v] if v in drawn else super().run_node(n)
            if v is not None:
                found[v] = result
            return result

    with torch.no_grad():
        Recorder(graph.graph.gm).run(*args)
    return found


def _copy(args: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of all tensors; those that share memory still do. Subclasses (DTensor) are not copied."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for arg in args:
        if type(arg) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            copies.append(arg)
            continue
        key = _torch.storage_id(arg)
        if key not in storages:
            storages[key] = arg.untyped_storage().clone()
        copies.append(_torch.view_at(arg, storages[key], arg.storage_offset()))
    return tuple(copies)
