"""Exact rules for operators that move elements without computing: views, joins, cuts, fills, indexing.

`RULES` maps an ATen operator's name to its rule: a function of a `Call` that returns a signature (for `propagate`), the
answer itself, or a refusal. `SIZES` names the arguments in which a batch size is a size, which is recomputed for a part
of the batch. In other arguments it is a value.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from dynaflow.capture.batch_analysis.signatures import (
    ENDLESS,
    MIXED,
    Call,
    Dims,
    Label,
    Labels,
    Operand,
    Refusal,
    Signature,
    batch_dim_at,
    broadcast_labels,
    by_name,
    dim_labels,
    wrap_dim,
    wrap_dims,
)

Rule = Callable[[Call], Signature | Dims | Refusal]


def _moved(call: Call, out: Labels, mixed: set[int] | None = None) -> Signature:
    """`self` with labels 0, 1, 2, ..., some mixed, becomes each output with the labels `out`."""
    tensor = call["self"]
    return Signature([Operand(tensor, dim_labels(tensor.ndim, mixed or ()))], [out])


def _filled(call: Call) -> Dims:
    """Outputs that are equal for all rows carry the batch on the dim of its size."""
    return [next(iter(call.batch_dims(out)), None) for out in call.outs]


def view(call: Call) -> Dims | Refusal:
    """Another shape of the same memory; or another dtype, which regroups the last dim."""
    tensor, out = call["self"], call.outs[0]
    dim, there = call.dim_of(tensor), call.batch_dims(out)
    if dim is None or not there:
        return [None]
    # Flat positions are (outer * rows + row) * inner + rest on both sides. So rows are preserved if the size of the
    # dims before them is equal, whether they are dims of their own or merged with the rows.
    before, outside = prod(tensor.shape[:dim]) * call.outer(tensor), prod(out.shape[: there[0]])
    if before % outside or out.shape[there[0]] % (before // outside * call.rows):
        shapes = " to ".join(_shown(shape, call.rows) for shape in (tensor.shape, out.shape))
        return call.refuse(f"from {shapes} does not keep the rows of the batch apart")
    return [batch_dim_at(there[0], before // outside)]


def _shown(shape: torch.Size, rows: int) -> str:
    """A shape for the user, with `rows` in place of the probe's batch size."""
    names = ("rows" if n == rows else f"{n // rows}*rows" if n and n % rows == 0 else str(n) for n in shape)
    return f"({', '.join(names)})"


def _expand(call: Call) -> Signature | Dims:
    if call.dim_of(call["self"]) is None:
        return _filled(call)
    tensor, out = call["self"], call.outs[0]
    return Signature([Operand(tensor, broadcast_labels(tensor.ndim))], [broadcast_labels(out.ndim)])


def _repeat(call: Call) -> Signature | Dims:
    if call.dim_of(call["self"]) is None:  # a row may get a tile of its own
        return _filled(call)
    tensor, repeats = call["self"], call["repeats"]
    extra = len(repeats) - tensor.ndim
    mixed = {dim for dim in range(tensor.ndim) if repeats[dim + extra] != 1}
    return _moved(call, (MIXED,) * extra + dim_labels(tensor.ndim, mixed), mixed)


def _permute(call: Call) -> Signature:
    ndim = call["self"].ndim
    return _moved(call, tuple(wrap_dim(dim, ndim) for dim in call["dims"]))


def _transpose(call: Call) -> Signature:
    ndim = call["self"].ndim
    order = list(range(ndim))
    first, second = wrap_dim(call.bound.get("dim0", 0), ndim), wrap_dim(call.bound.get("dim1", -1), ndim)
    if ndim > 1:
        order[first], order[second] = order[second], order[first]
    return _moved(call, tuple(order))


def _unsqueeze(call: Call) -> Signature:
    labels: list[Label] = list(range(call["self"].ndim))
    labels.insert(wrap_dim(call["dim"], len(labels) + 1), MIXED)
    return _moved(call, tuple(labels))


def _squeeze(call: Call) -> Signature | Refusal:
    tensor = call["self"]
    dims = wrap_dims(call.bound.get("dim", range(tensor.ndim)), tensor.ndim)
    dim = call.dim_of(tensor)
    if dim in dims and tensor.shape[dim] == call.rows:
        return call.refuse(f"would drop the batch dimension (dim {dim}) of a single row; name others")
    return _moved(call, tuple(d for d in range(tensor.ndim) if d not in dims or tensor.shape[d] != 1))


def _select(call: Call) -> Signature:
    ndim = call["self"].ndim
    dim = wrap_dim(call["dim"], ndim)
    return _moved(call, tuple(d for d in range(ndim) if d != dim), {dim})


def _cut(call: Call) -> Signature | Refusal:
    """slice and the splits: along the batch, only the whole dim is legal."""
    tensor = call["self"]
    dim = wrap_dim(call["dim"], tensor.ndim)
    bounds = [call.bound.get(name) for name in ("end", "split_size", "split_sizes")]
    flat = [b for bound in bounds for b in (bound if isinstance(bound, list | tuple) else [bound])]
    if call.dim_of(tensor) != dim:
        if any(call.is_batch(bound) for bound in flat):
            return call.refuse(f"cuts dimension {dim} at the batch size")
    elif call.bound.get("start") or any(b not in (None, tensor.shape[dim]) and b < ENDLESS for b in flat):
        return call.refuse(f"cuts the batch dimension (dim {dim})")
    return _moved(call, dim_labels(tensor.ndim))


def _unfold(call: Call) -> Signature:
    ndim = call["self"].ndim
    dim = wrap_dim(call["dimension"], ndim)
    return _moved(call, (*dim_labels(ndim, {dim}), MIXED), {dim})


def _diagonal(call: Call) -> Signature:
    ndim = call["self"].ndim
    mixed = wrap_dims((call["dim1"], call["dim2"]), ndim)
    return _moved(call, (*(d for d in range(ndim) if d not in mixed), MIXED), mixed)


def _diag_embed(call: Call) -> Signature:
    ndim = call["self"].ndim
    rest = iter(range(ndim - 1))
    added = wrap_dims((call["dim1"], call["dim2"]), ndim + 1)
    return _moved(call, tuple(MIXED if d in added else next(rest) for d in range(ndim + 1)), {ndim - 1})


def _roll(call: Call) -> Signature:
    ndim = call["self"].ndim
    mixed = wrap_dims(call["dims"], ndim) or set(range(ndim))  # without dims it rolls the flattened tensor
    return _moved(call, dim_labels(ndim, mixed), mixed)


def _pad(call: Call) -> Signature:
    ndim, pad = call["self"].ndim, call["pad"]
    mixed = {ndim - 1 - i // 2 for i, width in enumerate(pad) if width}
    return _moved(call, dim_labels(ndim, mixed), mixed)


def _cat(call: Call) -> Signature:
    # ATen allows empty one-dimensional tensors in any cat.
    tensors = [t for t in call["tensors"] if tuple(t.shape) != (0,)]
    ndim = call.outs[0].ndim
    labels = dim_labels(ndim, {wrap_dim(call["dim"], ndim)} if len(tensors) > 1 else ())
    return Signature([Operand(t, labels) for t in tensors], [labels])


def _stack(call: Call) -> Signature:
    tensors = call["tensors"]
    labels: list[Label] = list(range(tensors[0].ndim))
    whole = tuple(labels)
    labels.insert(wrap_dim(call["dim"], len(labels) + 1), MIXED)
    return Signature([Operand(t, whole) for t in tensors], [tuple(labels)])


def _gather(call: Call) -> Signature:
    """The result has the index's shape, and is aligned with `self` except on `dim`."""
    tensor, index = call["self"], call["index"]
    dim = wrap_dim(call["dim"], max(tensor.ndim, 1))
    picked = tuple("index" if d == dim else d for d in range(index.ndim))
    return Signature([Operand(tensor, dim_labels(tensor.ndim, {dim})), Operand(index, picked)], [picked])


def _scatter(call: Call) -> Signature:
    tensor = call["self"]
    labels = dim_labels(tensor.ndim, {wrap_dim(call["dim"], max(tensor.ndim, 1))})
    given = [call.bound.get(name) for name in ("self", "index", "src")]
    return Signature([Operand(t, labels) for t in given if isinstance(t, torch.Tensor)], [labels])


def _index_add(call: Call) -> Signature:
    """index_add and the like: an index shared by all rows says where along `dim` the source goes."""
    tensor = call["self"]
    labels = dim_labels(tensor.ndim, {wrap_dim(call["dim"], max(tensor.ndim, 1))})
    source = call.bound.get("source")
    operands = [Operand(tensor, labels)]
    return Signature(operands + ([Operand(source, labels)] if source is not None else []), [labels])


def _part(call: Call) -> Signature:
    """slice_scatter and select_scatter write a whole `src` at one place along `dim`."""
    tensor, src = call["self"], call["src"]
    dim = wrap_dim(call["dim"], tensor.ndim)
    labels = dim_labels(tensor.ndim, {dim})
    part = labels if src.ndim == tensor.ndim else labels[:dim] + labels[dim + 1 :]
    return Signature([Operand(tensor, labels), Operand(src, part)], [labels])


def _index_select(call: Call) -> Signature:
    tensor, index = call["self"], call["index"]
    dim = wrap_dim(call["dim"], max(tensor.ndim, 1))
    picked = tuple(("index" if index.ndim else MIXED) if d == dim else d for d in range(tensor.ndim))
    operands = [Operand(tensor, dim_labels(tensor.ndim, {dim})), Operand(index, ("index",) * index.ndim)]
    return Signature(operands, [picked])


def _indexed(call: Call) -> tuple[list[Operand], Labels, Labels] | None:
    """Operands, labels of `self`, and labels of self[indices]; None if an index is a mask."""
    tensor, indices = call["self"], list(call["indices"])
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return None
    dims = [dim for dim, i in enumerate(indices) if i is not None]
    labels = dim_labels(tensor.ndim, dims)
    block: Labels = broadcast_labels(max((i.ndim for i in given), default=0))
    # The block of adjacent indices stays in their place; that of others comes first.
    first = dims[0] if dims and dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest = [d for d in range(tensor.ndim) if d not in dims]
    picked = (*(d for d in rest if d < first), *block, *(d for d in rest if d >= first))
    operands = [Operand(tensor, labels), *(Operand(i, broadcast_labels(i.ndim), stretches=True) for i in given)]
    return operands, labels, picked


def _index(call: Call) -> Signature | Refusal:
    found = _indexed(call)
    if found is None:
        return call.refuse("by a mask: how much it picks depends on the data of all rows")
    operands, _, picked = found
    return Signature(operands, [picked])


def _index_put(call: Call) -> Signature | Refusal:
    tensor, values = call["self"], call["values"]
    found = _indexed(call)
    if found is not None:
        operands, labels, picked = found
        extra = len(picked) - values.ndim
        aligned = picked[extra:] if extra >= 0 else (MIXED,) * values.ndim
        return Signature([*operands, Operand(values, aligned, stretches=True)], [labels])
    given = [(dim, i) for dim, i in enumerate(call["indices"]) if i is not None]
    if len(given) > 1 or values.numel() != 1:
        return call.refuse("by a mask takes its values in the order of all rows")
    # A single value written by a mask is a pointwise fill.
    (dim, mask), labels = given[0], dim_labels(tensor.ndim)
    return Signature([Operand(tensor, labels), Operand(mask, labels[dim : dim + mask.ndim])], [labels])


_FILLS = """zeros ones full empty empty_strided empty_permuted new_zeros new_ones new_full new_empty
    new_empty_strided"""

RULES: dict[str, Rule] = by_name(
    {
        "view _unsafe_view reshape _reshape_alias": view,
        "expand": _expand,
        "repeat": _repeat,
        "permute": _permute,
        "transpose t": _transpose,
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        "select unbind": _select,
        "slice split split_with_sizes unsafe_split unsafe_split_with_sizes": _cut,
        "unfold": _unfold,
        "diagonal": _diagonal,
        "diag_embed": _diag_embed,
        "roll": _roll,
        "constant_pad_nd": _pad,
        "cat": _cat,
        "stack": _stack,
        "gather": _gather,
        "scatter scatter_add scatter_reduce": _scatter,
        "index_add index_copy index_reduce index_fill": _index_add,
        "slice_scatter select_scatter": _part,
        "index_select": _index_select,
        "index _unsafe_index": _index,
        "index_put _unsafe_index_put _index_put_impl": _index_put,
        _FILLS: _filled,
    }
)

# Operators whose outputs may carry the batch though no argument does.
GROWING = {*_FILLS.split(), "expand", "repeat"}

SIZES: dict[str, tuple[str, ...]] = by_name(
    {
        _FILLS: ("size", "stride"),
        "view _unsafe_view reshape _reshape_alias expand": ("size", "stride"),
        "repeat": ("repeats",),
        "slice": ("end",),
        "split unsafe_split": ("split_size",),
        "split_with_sizes unsafe_split_with_sizes": ("split_sizes",),
        "native_group_norm": ("N",),
        "affine_grid_generator": ("size",),
    }
)
