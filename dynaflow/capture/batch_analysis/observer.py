"""Observes the aten calls of a fake run: their memory accesses, and where their results carry the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from dynaflow import _torch
from dynaflow.capture.batch_analysis import higher_order_rules
from dynaflow.capture.batch_analysis.aten_calls import RNG, dims_of, label, op_name, tensors_in, written_tensors
from dynaflow.capture.batch_analysis.node_facts import NodeFacts, OutVariant
from dynaflow.capture.batch_analysis.row_rules import follow_rows
from dynaflow.capture.batch_analysis.signatures import BatchDim, Refusal

_RESHAPES = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapdims_", "swapaxes_"}
"""In-place calls that give a tensor the shape of the view of the same name."""
_LOOPS = {"_to_copy", "embedding", "index", "_softmax", "mean", "sum", "native_layer_norm",
          "max_pool2d_with_indices", "avg_pool2d"}  # fmt: skip
_MATMULS = {"linear", "mm", "addmm", "bmm"}
_COPIES = {"clone", "_to_copy", "copy", "copy_", "contiguous", "_reshape_copy", "lift_fresh_copy", "alias_copy"}


class Run(Protocol):
    """What the observer needs of the run (`fake_run.FakeRun`)."""

    primes: tuple[int, ...]

    def number(self, tensor: torch.Tensor) -> int: ...
    def note_reshape(self, name: str) -> None: ...
    def is_argument(self, tensor: torch.Tensor) -> bool: ...


class Observer(_torch.TorchDispatchMode):
    """Adds what each aten call does to the `facts` of the current node, and labels its results."""

    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.facts = NodeFacts()
        self._run = run
        self._inside = False
        """Inside a call that is observed as a whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        return self.observe(func, args, kwargs, lambda: func(*args, **kwargs))

    def observe(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Makes the call and records what it does."""
        if _torch.op_name(func) in _RESHAPES and not self._run.is_argument(args[0]):
            return self._reshape(func, args, kwargs)
        self._inside = True
        try:
            out = call()
        finally:
            self._inside = False
        if getattr(func, "namespace", "") == "prim":  # it reads a tensor's metadata
            return out
        outs = tensors_in(out)
        given = tensors_in((args, kwargs))
        schema = _torch.schema_of(func)
        if schema is None:
            self._access(given, [] if higher_order_rules.is_known(func) else given)
            self._label(outs, lambda rows, dim_of: higher_order_rules.follow(func, args, outs, dim_of))
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.facts.writes.add(RNG)
        if torch.Tag.inplace_view in func.tags and op_name(func) != "detach_":
            self._run.note_reshape(op_name(func))
        written = written_tensors(schema, args, kwargs)
        if not (_torch.is_view(schema) or (not written and self._only_views(outs, given))):
            self.facts.out_variant, self.facts.copied = _out_variant(func), op_name(func) in _COPIES
            self._access(given, written)
        self._label(outs, partial(follow_rows, func, args, kwargs, outs, merged=True))
        return out

    def _reshape(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Reshapes a temporary in place, as `quantile` does: its rows are where a view would have them."""
        with self:
            view = getattr(torch.ops.aten, _torch.op_name(func).removesuffix("_"))(*args, **kwargs)
        out = func(*args, **kwargs)
        label(out, dims_of(view))
        return out

    def _label(self, outs: list[torch.Tensor], follow: Callable[..., list[BatchDim] | Refusal]) -> None:
        """Labels each result with the dims that carry the batch, as `follow(rows, batch_dim_of)` says."""
        dims: list[list[BatchDim]] = [[None] * len(self._run.primes) for _ in outs]
        for axis, prime in enumerate(self._run.primes):
            found = follow(2 * prime, partial(_dim_of, axis=axis))
            if isinstance(found, Refusal):
                self.facts.refusals.setdefault(axis, found.reason)
                # A tensor that was written in place keeps its rows where they were.
                found = [first_multiple(t, prime) if (p := _dim_of(t, axis)) is None else p for t in outs]
            for i, dim in enumerate(found):
                dims[i][axis] = dim
        for tensor, d in zip(outs, dims, strict=True):
            label(tensor, tuple(d))

    def _only_views(self, outs: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
        """Whether the results are views, whatever the schema says: `unsafe_split` and the like hide it from
        autograd."""
        memory = {self._run.number(t) for t in given}
        return bool(outs) and all(self._run.number(t) in memory for t in outs)

    def _access(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self.facts.reads |= {self._run.number(t) for t in read}
        self.facts.writes |= {self._run.number(t) for t in written}


def first_multiple(tensor: torch.Tensor, prime: int) -> int | None:
    """The first dim whose size is a multiple of a prime."""
    return next((d for d, size in enumerate(tensor.shape) if size and size % prime == 0), None)


def _dim_of(tensor: torch.Tensor, axis: int) -> BatchDim:
    dims = dims_of(tensor)
    return dims[axis] if dims else None


def _out_variant(func: Any) -> OutVariant | None:
    name = op_name(func)
    if name in _MATMULS:
        return "matmul"
    return "pointwise" if torch.Tag.pointwise in func.tags or name in _LOOPS else None
