"""Two runs of one program beside each other: values, dtypes, shapes, memory that is shared, and what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
    torch.float16: 3e-2,
    torch.bfloat16: 2e-1,
}


class Mismatch(AssertionError):
    """The scheduled run did something else than eager, or the check judged a plan wrongly."""


class Undefined(Exception):
    """Eager itself refuses the program."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run was given, by name, and what it returned."""

    memory: dict[str, torch.Tensor]
    results: Sequence[Any]


def compare(expected: Run, found: Run, loosely: float = 1.0) -> None:
    """`loosely`: by how much more values may differ than those of one operator."""
    if len(expected.results) != len(found.results):
        raise Mismatch(f"{len(found.results)} results instead of {len(expected.results)}")
    names = [*expected.memory, *(f"result {i}" for i in range(len(expected.results)))]
    ours = [*found.memory.values(), *found.results]
    theirs = [*expected.memory.values(), *expected.results]
    for name, e, f in zip(names, theirs, ours, strict=True):
        compare_values(name, e, f, loosely)
    _compare_memory(names, theirs, ours, len(expected.memory))


def compare_values(name: str, e: Any, f: Any, loosely: float = 1.0) -> None:
    if isinstance(e, (tuple, list)):
        if type(e) is not type(f) or len(e) != len(f):
            raise Mismatch(f"{name} is {f!r} instead of {e!r}")
        for place, (one, two) in enumerate(zip(e, f, strict=True)):
            compare_values(f"{name}[{place}]", one, two, loosely)
    elif not isinstance(e, torch.Tensor):
        same = type(e) is type(f) and (abs(e - f) <= 1e-9 * max(1.0, abs(e)) if isinstance(e, float) else e == f)
        if not same:
            raise Mismatch(f"{name} is {f!r} instead of {e!r}")
    else:
        _compare_tensors(name, e, f, loosely)


def used_of(results: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Those that a loss depends on: mostly all."""
    return [r for i, r in enumerate(results) if seed % 3 or seed // 3 >> i & 1] or results


def compare_gradients(expected: dict[str, Any], found: dict[str, Any], loosely: float, zeros: bool = False) -> None:
    """`zeros`: they may stand for none, and none for them."""
    for name, e in expected.items():
        f = found[name]
        if f is None and e is None:
            continue
        if zeros and (f is None or e is None):
            e, f = (torch.zeros_like(f), f) if e is None else (e, torch.zeros_like(e))
        if e is None:
            raise Mismatch(f"the gradient of {name} is no longer None, but\n{f}")
        if f is None:
            raise Mismatch(f"the gradient of {name} is missing; it is\n{e}")
        compare_values(f"the gradient of {name}", e, f, loosely)


def _compare_tensors(name: str, e: torch.Tensor, f: Any, loosely: float) -> None:
    if not isinstance(f, torch.Tensor):
        raise Mismatch(f"{name} is {f!r} instead of {e!r}")
    if (e.shape, e.dtype, e.device) != (f.shape, f.dtype, f.device):
        raise Mismatch(f"{name} is {_kind(f)} instead of {_kind(e)}")
    if e.requires_grad != f.requires_grad:
        raise Mismatch(f"{name} {'has no gradient' if e.requires_grad else 'has a gradient'}")
    if not e.numel():
        return
    e, f = e.detach().resolve_conj().resolve_neg(), f.detach().resolve_conj().resolve_neg()
    tolerance = TOLERANCE.get(e.dtype, 0.0) * loosely
    if not tolerance:
        same = torch.equal(e, f)
    else:
        most = e.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        same = torch.allclose(e, f, rtol=tolerance, atol=tolerance * max(1.0, most), equal_nan=True)
    if not same:
        rows = [tuple(i) for i in (e != f).nonzero().tolist()]
        raise Mismatch(f"{name} differs at {rows[:6]}{'...' if len(rows) > 6 else ''}:\n{f}\ninstead of\n{e}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _compare_memory(names: list[str], expected: list[Any], found: list[Any], inputs: int) -> None:
    """Which tensors share memory, and where in an input's memory a result lies."""
    for j in range(inputs, len(expected)):
        for i in range(j):
            together, so = _share(expected[i], expected[j]), _share(found[i], found[j])
            if together != so:
                word = "does not share" if together else "shares"
                raise Mismatch(f"{names[j]} {word} its memory with {names[i]}")
            if together and i < inputs and _place(expected[j]) != _place(found[j]):
                now, was = _place(found[j]), _place(expected[j])
                raise Mismatch(f"{names[j]} is another view of {names[i]}: {now}, not {was}")


def _share(one: Any, two: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)) or not one.numel() or not two.numel():
        return False
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tuple(st for s, st in zip(tensor.shape, tensor.stride(), strict=True) if s > 1)
    return tensor.storage_offset(), tuple(tensor.shape), strides


def write_to_results(run: Run) -> None:
    """As a caller may, whose they are: what is seen through other tensors afterwards shows who shares memory."""
    for number, result in enumerate(run.results):
        if isinstance(result, torch.Tensor) and result.numel() and not _overlaps_itself(result):
            result.detach().copy_(torch.full_like(result, number + 1))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
