"""How a batch is cut into micro-batches: anywhere, or between its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow.core import validate
from dynaflow.core.plan import MicroBatch
from dynaflow.errors import SplitError, shown, user_line


def parts_of(parts: Any, what: str) -> int | list[int]:
    """Into how many parts, or into which sizes."""
    alone, told = validate.is_integer(parts), f"{what}({shown(parts)})"
    advice = f"{what}(2) cuts into two parts, {what}([5, 3]) into these sizes"
    sizes = [parts] if alone else validate.several(parts, what, advice, SplitError)
    if not all(map(validate.is_integer, sizes)):
        raise SplitError(f"{told}: not all of them are whole numbers", line=user_line(), advice=advice)
    sizes = [int(size) for size in sizes]
    if not sizes or min(sizes) < 1:
        raise SplitError(f"{told}: a micro-batch can't be empty", line=user_line(), advice="pass positive numbers")
    return sizes[0] if alone else sizes


def request_lengths(tokens: Any) -> list[int] | None:
    """What `facts["num_tokens"]` says of a ragged batch: the tokens of each request; None if it is not there."""
    if tokens is None:
        return None
    what, advice = 'facts["num_tokens"]', "give the length of every request in the batch: [5, 3, 8]"
    return [validate.integer(n, what, advice, least=0, error=SplitError)
            for n in validate.several(tokens, what, advice, SplitError)]  # fmt: skip


def request_count(tokens: Any) -> int:
    """In each call: the lengths themselves are judged where the batch is cut."""
    if tokens is None or isinstance(tokens, (list, tuple)):
        return len(tokens or ())
    return len(request_lengths(tokens) or ())


def split_rows(parts: int | Sequence[int], rows: int) -> tuple[MicroBatch, ...]:
    """Cuts a batch of `rows` rows: into `parts` of about equal size, or into the sizes given."""
    if isinstance(parts, int):
        if parts > rows:
            raise SplitError(
                f"split({parts}) of a batch of {rows} leaves a micro-batch empty",
                line=user_line(),
                advice=f"split into at most {rows}",
            )
        sizes = [rows // parts + (i < rows % parts) for i in range(parts)]
    else:
        sizes = list(parts)
        if sum(sizes) != rows:
            raise SplitError(
                f"split({sizes}) adds up to {sum(sizes)}, but the batch has {rows} rows",
                line=user_line(),
                advice="give sizes that add up to ctx.batch_size",
            )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(MicroBatch(index=i, start=a, stop=a + n) for i, (a, n) in enumerate(zip(starts, sizes, strict=True)))


def split_requests(parts: int | Sequence[int], tokens: list[int], rows: int) -> tuple[MicroBatch, ...]:
    """Cuts a batch of `rows` tokens between its requests, whose lengths are `tokens`."""
    line = user_line()
    if sum(tokens) != rows:
        raise SplitError(
            f'facts["num_tokens"] adds up to {sum(tokens)}, but the batch has {rows} tokens',
            line=line,
            advice="give the length of every request in the batch",
        )
    ends = [sum(tokens[: i + 1]) for i in range(len(tokens))]
    if isinstance(parts, int):
        if parts > len(tokens):
            raise SplitError(
                f"split({parts}) of {len(tokens)} requests leaves a micro-batch empty",
                line=line,
                advice=f"split into at most {len(tokens)}",
            )
        cuts, first = [], 1
        for k in range(1, parts):  # the boundary nearest to an equal share that leaves enough for the rest
            choices = range(first, len(tokens) - (parts - k) + 1)
            cut = min(choices, key=lambda c: abs(ends[c - 1] - rows * k / parts))
            cuts.append(cut)
            first = cut + 1
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    elif sum(parts) == len(tokens):
        counts = list(parts)
    else:
        totals = [sum(parts[: i + 1]) for i in range(len(parts))]
        if totals[-1] != rows or not all(t in ends for t in totals):
            raise SplitError(
                f"split({list(parts)}) does not end at request boundaries",
                line=line,
                advice=f"sizes count requests ({len(tokens)} in all), or tokens up to one of {ends}",
            )
        counts = [ends.index(b) - (ends.index(a) if a else -1) for a, b in zip([0, *totals], totals, strict=False)]
        counts[-1] += len(tokens) - sum(counts)  # requests without tokens at the end
    result, request, row = [], 0, 0
    for i, count in enumerate(counts):
        held = sum(tokens[request : request + count])
        if not held:
            raise SplitError(
                f"micro-batch {i} would hold no token", line=line, advice="leave out requests without tokens"
            )
        result.append(MicroBatch(index=i, start=row, stop=row + held, requests=(request, request + count)))
        request, row = request + count, row + held
    return tuple(result)
