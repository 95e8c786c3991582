"""Row rules for collectives, and for custom operators declared by `by_rows`."""

from __future__ import annotations

from math import prod

from dynaflow import _torch
from dynaflow.capture.batch_analysis.signatures import Call, Dims, Operand, Refusal, Signature, dim_labels, wrap_dim
from dynaflow.capture.collectives import ELEMENTWISE, EXCHANGING
from dynaflow.capture.op_registry import by_rows_of, collective_of


def collective_rule(call: Call) -> Signature | Refusal:
    """All ranks call with the same rows, so collectives that work per element, or along other dims, keep them."""
    name = _torch.op_name(call.func).removesuffix("_coalesced")
    tensors = call.inputs()
    if (declared := collective_of(call.func)) is not None:
        along = call[declared.dim] if isinstance(declared.dim, str) else declared.dim
    elif name in ELEMENTWISE or name in EXCHANGING:
        along = 0 if name in EXCHANGING else None
    else:
        return call.refuse("is a collective without a row rule")
    mixed = {id(t): () if along is None else (wrap_dim(along, t.ndim),) for t in tensors}
    if any(call.dim_of(t) in mixed[id(t)] for t in tensors):
        return call.refuse("moves rows of the batch between ranks")
    if len({t.ndim for t in tensors}) != 1:
        return call.refuse("is a collective without a row rule")
    labels = [dim_labels(t.ndim, mixed[id(t)]) for t in tensors]
    return Signature([Operand(t, at) for t, at in zip(tensors, labels, strict=True)], [labels[0]])


def declared_rule(call: Call) -> Dims | Refusal:
    how = by_rows_of(call.func)
    flat = how is not None and how.flat
    for tensor in call.inputs():
        dim = call.dim_of(tensor)
        if dim and not (flat and prod(tensor.shape[:dim]) == 1):
            return call.refuse("is declared to work by rows, but does not get them on dim 0")
    dims: Dims = []
    for out in call.outs:
        dim = next((d for d, size in enumerate(out.shape) if size != 1), 0) if flat else 0
        dims.append(dim if out.ndim and out.shape[dim] and out.shape[dim] % call.rows == 0 else None)
    return dims
