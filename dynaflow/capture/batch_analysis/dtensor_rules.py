"""DTensor's sharding rules, for operators without a row rule.

*Contract.* Takes a call whose arguments are labelled. Returns the dim of the batch in each output, or a refusal, also
if DTensor has no rule or fails. Neither reads nor changes the user's distributed state: the mesh has no process group,
and the rules run on a copy of DTensor's tables. Answers are cached, as equal layers ask the same.

Splitting the batch in two is sharding it over two devices: if DTensor would run the call on the shards without moving
or reducing anything, the rows are independent.
"""

from __future__ import annotations

from typing import Any

import torch

from dynaflow import _torch
from dynaflow.capture.batch_analysis.signatures import Call, Dims, Refusal, leaves
from dynaflow.core import forks

answers: dict[Any, Dims | Refusal] = {}
_lock = forks.lock()
_MAX_ANSWERS = 4096


def ask(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims | Refusal:
    """The dim on which each output carries the batch, or a refusal."""
    key = (call.func, call.rows, _key(call, args), _key(call, kwargs), _key(call, call.outs))
    with _lock:
        if key not in answers:
            if len(answers) >= _MAX_ANSWERS:
                answers.clear()
            answers[key] = _ask(call, args, kwargs)
        answer = answers[key]
    return answer if isinstance(answer, Refusal) else list(answer)


def _key(call: Call, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, call.dim_of(value)
    if isinstance(value, list | tuple):
        return tuple(_key(call, member) for member in value)
    if isinstance(value, dict):
        return tuple((name, _key(call, member)) for name, member in value.items())
    return type(value), repr(value)  # 1, 1.0 and True are different arguments


def _ask(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims | Refusal:
    # DTensor's rules use the placements of positional arguments only.
    if any(call.dim_of(tensor) is not None for tensor in leaves(list(kwargs.values()))):
        return _no_rule(call, "it takes the batch as a keyword argument")
    try:
        result = _torch.propagate_sharding(call.func, args, kwargs, call.dim_of)
    except ImportError:
        return _no_rule(call, "torch.distributed is not available")
    except Exception as error:  # any failure of a rule means that there is no answer
        message = str(error).partition("\n")[0].rstrip(".")
        return _no_rule(call, f"{type(error).__name__}: {message}")
    for before, after in result.changes:
        if not (_is_shape(before) and _is_shape(after) and _halved(call, before, after)):
            return call.refuse("mixes the rows of the batch")
    if len(result.shards) != len(call.outs):
        return _no_rule(call, "DTensor knows other outputs of it")
    dims: Dims = []
    for out, shard in zip(call.outs, result.shards, strict=True):
        if shard is None and out.numel():
            return call.refuse("combines all rows of the batch")
        dims.append(shard)
    return dims


def _no_rule(call: Call, why: str) -> Refusal:
    return Refusal(f"no rule for {call}: {why}. If it works row by row, declare it with splittable=True")


def _is_shape(value: Any) -> bool:
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(number, int) for number in numbers)


def _halved(call: Call, before: Any, after: Any) -> bool:
    """Whether DTensor changed a size, or shape, only by halving the batch."""
    if isinstance(before, int) and isinstance(after, int):
        return after == before or (before % call.rows == 0 and 2 * after == before)
    return (
        not isinstance(before, int)
        and not isinstance(after, int)
        and len(before) == len(after)
        and all(_halved(call, b, a) for b, a in zip(before, after, strict=True))
    )
