"""May a call of an ATen operator be split along the batch, and where do its outputs carry it?

*Contract.* `follow_rows` takes one call of a fake run, in which the batch has `rows` rows: twice a prime that divides
no other size. Returns a dim for each output (None: it is the same for all rows), or a `Refusal`. Changes nothing. In
doubt, it refuses.

A split is legal if for every range of rows, the call on that range of its arguments returns that range of its outputs.
Which row an element belongs to is decided by position alone. Sizes that follow from the batch are recomputed for the
range.

Rules are tried in this order: the pointwise tag; exact rules for operators that move elements; a table for operators
that compute; declarations of custom operators; DTensor's sharding rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture import collectives, op_registry
from dynaflow.capture.batch_analysis import compute_rules, custom_op_rules, dtensor_rules, module_rules, view_rules
from dynaflow.capture.batch_analysis.signatures import (
    ENDLESS,
    BatchDim,
    Call,
    Dims,
    MergedDim,
    Refusal,
    Signature,
    dim_in,
    propagate,
)

__all__ = ["Refusal", "follow_rows"]

# Arguments that turn off an operator's randomness, or running statistics, if they are false or zero.
_SWITCHES = ("dropout_p", "train", "training")

# Operators whose values depend on their position in the result.
_POSITIONS = {"arange", "range", "eye", "linspace", "logspace", "tril_indices", "triu_indices"}

# Operators that return no tensor and read metadata only.
_SILENT = {
    "prim.device",
    "prim.layout",
    "aten._assert_tensor_metadata",
    "aten.is_same_size",
    "aten.is_pinned",
}


def follow_rows(
    func: _torch.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: list[torch.Tensor],
    rows: int,
    batch_dim_of: Callable[[torch.Tensor], BatchDim],
    *,
    merged: bool = False,
) -> Dims | Refusal:
    """The dim on which each output carries the batch, or why the call can't be split along it.

    `merged`: an output may have the rows merged with a dim before them.
    """
    call = Call.bind(func, args, kwargs, outs, rows, batch_dim_of)
    name, rule = _rule(func)
    carries = call.carries()
    refusal = _refused_without_rule(call, name, carries)
    if refusal is not None:
        return refusal
    if not carries:
        whole: Dims = [None] * len(outs)
        return _checked(call, rule(call) if rule is not None and name in view_rules.GROWING else whole)
    if not outs and not call.written():
        return [] if str(call) in _SILENT else call.refuse("makes no tensor, but a value of all rows")
    answer = rule(call) if rule is not None else dtensor_rules.ask(call, args, kwargs)
    if isinstance(answer, list) and rule is not view_rules.view and any(call.outer(t) > 1 for t in call.inputs()):
        return call.refuse("takes a tensor in which the rows of the batch are merged into another dimension")
    dims = _checked(call, answer)
    if not merged and isinstance(dims, list) and any(isinstance(place, MergedDim) for place in dims):
        return call.refuse("makes a tensor in which the rows of the batch are merged into another dimension")
    return dims


def _rule(func: _torch.OpOverload) -> tuple[str, view_rules.Rule | None]:
    """The operator's name in the tables, and its rule."""
    namespace, name = str(func.overloadpacket).split(".")
    if torch.Tag.pointwise in func.tags:
        return name, compute_rules.pointwise
    if namespace in collectives.NAMESPACES or (namespace != "aten" and op_registry.collective_of(func) is not None):
        return name, custom_op_rules.collective_rule
    if namespace == "dynaflow" and name in module_rules.RULES:
        return name, module_rules.RULES[name]
    if namespace != "aten":
        return name, custom_op_rules.declared_rule if op_registry.by_rows_of(func) else None
    # In-place operators, and copying variants of views, have the rule of the plain operator.
    for known in (name, name.removesuffix("_"), name.removesuffix("_copy")):
        rule = view_rules.RULES.get(known) or compute_rules.RULES.get(known)
        if rule is not None:
            return known, rule
    namesake = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if namesake is not None and any(
        torch.Tag.pointwise in getattr(namesake, overload).tags for overload in namesake.overloads()
    ):
        return name, compute_rules.pointwise
    return name, None


def _refused_without_rule(call: Call, name: str, carries: bool) -> Refusal | None:
    """Refusals that don't depend on the operator's rule."""
    quiet = any(call.bound.get(switch) is not None and not call[switch] for switch in _SWITCHES)
    if torch.Tag.nondeterministic_seeded in call.func.tags and not quiet:
        return call.refuse("draws random numbers")
    if carries and torch.Tag.inplace_view in call.func.tags:
        return call.refuse("changes the shape of a tensor that carries the batch in place")
    for tensor in call.inputs():
        dim, found, shape = call.dim_of(tensor), call.batch_dims(tensor), tuple(tensor.shape)
        if found and (found != [dim] or shape[found[0]] % call.rows):
            return call.refuse(f"takes a tensor of shape {shape}, in which the rows can't be distinguished")
        if dim is not None and not found:
            return call.refuse(f"takes a tensor of shape {shape} that has lost its rows")
    sizes = view_rules.SIZES.get(name, ()) if carries or name in view_rules.GROWING else ()
    for argument, number in _numbers(call):
        if argument in sizes and number % call.rows == 0:
            continue
        if name in _POSITIONS:
            return call.refuse("makes values that depend on the position in the batch")
        return call.refuse(f"uses the size of the batch as a number ({argument})")
    if not carries:
        return None
    if any(call.dim_of(tensor) is None for tensor in call.written()):
        return call.refuse("writes state shared by all rows")
    # Some kernels write to `out=` as if it were contiguous. A part of its rows is, only if they are outermost.
    if torch.Tag.pointwise not in call.func.tags and any(
        prod(tensor.shape[: call.dim_of(tensor)]) * call.outer(tensor) != 1 for tensor in call.given_out()
    ):
        return call.refuse("is given an out= of which the rows are not in one piece; leave out= away")
    return None


def _numbers(call: Call) -> Iterator[tuple[str, int]]:
    """Numbers among the arguments that come from the batch size, also as floats and reciprocals."""
    for argument, value in call.bound.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and 1 / ENDLESS < abs(number) < 1:
                number = 1 / number
                number = round(number) if abs(number - round(number)) < 1e-9 * abs(number) else 0
            elif isinstance(number, float) and number.is_integer():
                number = int(number)
            if not isinstance(number, bool) and call.is_batch(number):
                yield argument, number


def _checked(call: Call, answer: Signature | Dims | Refusal) -> Dims | Refusal:
    """The answer, if each output has the batch size exactly on the dim that carries the batch; else a refusal."""
    dims = propagate(call, answer) if isinstance(answer, Signature) else answer
    if isinstance(dims, Refusal):
        return dims
    for out, place in zip(call.outs, dims, strict=True):
        dim, shape, found = dim_in(place), tuple(out.shape), call.batch_dims(out)
        if found != ([] if dim is None else [dim]) or any(shape[d] % call.rows for d in found):
            return call.refuse(f"makes a tensor of shape {shape}, in which the rows can't be distinguished")
    for place, tensor in zip(dims, call.returned(), strict=False):
        if tensor is not None and place != call.batch_dim_of(tensor):
            return call.refuse("writes its result to a tensor that carries the batch elsewhere")
    return dims
