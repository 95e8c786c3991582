"""Row rules for higher-order operators: flex_attention. All others run whole."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from dynaflow.capture.batch_analysis.aten_calls import tensors_in
from dynaflow.capture.batch_analysis.signatures import BatchDim, Dims, Refusal
from dynaflow.capture.higher_order import ATTENTION, captured_arguments

BatchDimOf = Callable[[torch.Tensor], BatchDim]
_LOOK_UPS = (operator.getitem, torch.ops.aten.index, torch.ops.aten.index.Tensor)


class _Attention(NamedTuple):
    """The arguments of `flex_attention`, or of its backward pass."""

    heads: Sequence[Any]
    """Queries, keys, values, and tensors of their shape."""
    score_mods: Sequence[Any]
    blocks: Sequence[Any]
    mask_mod: Any
    buffers: Sequence[Any]
    """Captured by the score functions."""
    mask_buffers: Sequence[Any]


def _attention(func: Any, args: Sequence[Any]) -> _Attention:
    mods, mask = ATTENTION[func]
    *blocks, mask_mod = args[mask]
    return _Attention(args[:mods], args[mods:mask], blocks, mask_mod, *args[-2:])


def is_known(func: Any) -> bool:
    return func in ATTENTION


def follow(func: Any, args: Sequence[Any], outs: list[torch.Tensor], batch_dim_of: BatchDimOf) -> Dims | Refusal:
    """The dim on which each result carries the batch, or why the call can't be split along it."""
    if not is_known(func):
        return Refusal(f"{func} is a higher-order operator, which has no rule")
    found = _attention(func, args)
    given, captured = tensors_in((found.heads, found.blocks)), tensors_in((found.buffers, found.mask_buffers))
    if all(batch_dim_of(tensor) is None for tensor in (*given, *captured)):
        return [None for _ in outs]
    size = next((t.shape[0] for t in given if batch_dim_of(t) == 0), 0)
    for tensor in given:
        whole = batch_dim_of(tensor) is None and tensor.shape[0] == 1
        if not whole and (batch_dim_of(tensor), tensor.shape[0]) != (0, size):
            return Refusal(f"{func} takes a tensor of shape {tuple(tensor.shape)} that does not line up with the batch")
    scores = all(_looks_up_its_row(mod, 1, found.buffers, batch_dim_of) for mod in found.score_mods)
    if not scores or not _looks_up_its_row(found.mask_mod, 0, found.mask_buffers, batch_dim_of):
        return Refusal(f"{func} calls a function that depends on the position in the batch")
    if any(t.shape[:1] != (size,) for t in outs if t.numel()):
        return Refusal(f"{func} sums gradients over all rows")
    return [0 if t.numel() else None for t in outs]


def _looks_up_its_row(mod: fx.GraphModule, place: int, captured: Sequence[Any], batch_dim_of: BatchDimOf) -> bool:
    """Whether a function of a score's position uses its row, the argument at `place`, only to index the rows of tensors
    that carry the batch, and indexes these by nothing else."""
    row = mod.graph.find_nodes(op="placeholder")[place]
    given = zip(captured_arguments(mod, captured), captured, strict=True)
    dims = {node: batch_dim_of(value) for node, value in given if isinstance(value, torch.Tensor)}
    users = [user for node in (row, *dims) if node is row or dims[node] is not None for user in node.users]
    return all(user.target in _LOOK_UPS and _picks(user.args[0], user.args[1], row, dims) for user in users)


def _picks(tensor: Any, indices: Any, row: fx.Node, dims: dict[fx.Node, BatchDim]) -> bool:
    """Whether an index picks this row of a tensor that carries the batch."""
    picked = indices if isinstance(indices, list | tuple) else (indices,)
    at = [dim for dim, index in enumerate(picked) if index is row]
    return all(isinstance(index, fx.Node) for index in picked) and len(at) == 1 and dims.get(tensor) == at[0]
