"""How a batch is cut into micro-batches: anywhere, or between its requests.

Contract
    `split_rows` and `split_requests` take a number of parts, or sizes, and the batch. They return consecutive,
    non-empty micro-batches that cover the batch. They change nothing.
    Errors with SplitError, at the user's line, when that is not possible: too many parts, sizes that don't add up, or
    sizes that don't end between requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from dynaflow.core import validate
from dynaflow.core.plan import MicroBatch
from dynaflow.errors import SplitError, shown, user_line

LENGTHS, GIVE_LENGTHS = 'facts["num_tokens"]', "give the length of every request in the batch: [5, 3, 8]"


def parts_of(parts: Any, what: str) -> int | list[int]:
    """Validates the argument of `split`: a number of parts, or a list of sizes."""
    single, call = validate.is_integer(parts), f"{what}({shown(parts)})"
    advice = f"{what}(2) cuts into two parts, {what}([5, 3]) into these sizes"
    sizes = [parts] if single else validate.sequence(parts, what, advice, SplitError)
    if not all(map(validate.is_integer, sizes)):
        raise SplitError(f"{call}: not all of them are integers", line=user_line(), advice=advice)
    sizes = [int(size) for size in sizes]
    if not sizes or min(sizes) < 1:
        raise SplitError(f"{call}: a micro-batch can't be empty", line=user_line(), advice="pass positive numbers")
    return sizes[0] if single else sizes


class Requests(list[int]):
    """The requests of a ragged batch: the number of tokens of each."""

    @cached_property
    def ends(self) -> list[int]:
        """Cumulative numbers of tokens."""
        return list(accumulate(self))

    @cached_property
    def filled(self) -> int:
        """The number of requests that have tokens."""
        return len(self) - self.count(0)


def requests_of(tokens: Any) -> Requests | None:
    """Validates `facts["num_tokens"]`: the number of tokens of each request; None if the batch is not ragged."""
    if tokens is None or type(tokens) is Requests:
        return tokens
    several = validate.sequence(tokens, LENGTHS, GIVE_LENGTHS, SplitError)
    return Requests(validate.integer(n, LENGTHS, GIVE_LENGTHS, least=0, error=SplitError) for n in several)


def request_count(tokens: Any) -> int:
    """The number of requests. Called in each call, so lengths are validated only when the batch is cut."""
    if tokens is None or isinstance(tokens, (list, tuple)):
        return len(tokens or ())
    return len(validate.sequence(tokens, LENGTHS, GIVE_LENGTHS, SplitError))


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
    cuts = enumerate(zip(accumulate(sizes), sizes, strict=True))
    return tuple(MicroBatch(index=i, start=end - n, stop=end) for i, (end, n) in cuts)


def split_requests(parts: int | Sequence[int], requests: Requests, rows: int) -> tuple[MicroBatch, ...]:
    """Cuts a batch of `rows` tokens between its requests."""
    ends = requests.ends
    if (ends[-1] if ends else 0) != rows:
        raise SplitError(
            f'facts["num_tokens"] adds up to {sum(requests)}, but the batch has {rows} tokens',
            line=user_line(),
            advice="give the length of every request in the batch",
        )
    cuts = _equal_shares(parts, ends) if isinstance(parts, int) else _given_shares(parts, ends)
    result, request, row = [], 0, 0
    for i, cut in enumerate((*cuts, len(ends))):
        if (end := ends[cut - 1]) == row:
            raise SplitError(
                f"micro-batch {i} would have no tokens", line=user_line(), advice="leave out requests without tokens"
            )
        result.append(MicroBatch(index=i, start=row, stop=end, requests=(request, cut)))
        request, row = cut, end
    return tuple(result)


def _equal_shares(parts: int, ends: list[int]) -> list[int]:
    """After how many requests each micro-batch but the last ends: as close as possible to an equal share, with at least
    one request for each of the others."""
    if parts > len(ends):
        raise SplitError(
            f"split({parts}) of {len(ends)} requests leaves a micro-batch empty",
            line=user_line(),
            advice=f"split into at most {len(ends)}",
        )
    cuts, first = list[int](), 0
    for k in range(1, parts):
        share, last = ends[-1] * k / parts, len(ends) - (parts - k) - 1
        after = bisect_left(ends, share, first, last)  # at most the last possible end
        before = bisect_left(ends, ends[after - 1], first, after) if after > first else after
        first = (before if share - ends[before] <= abs(ends[after] - share) else after) + 1
        cuts.append(first)
    return cuts


def _given_shares(sizes: Sequence[int], ends: list[int]) -> list[int]:
    """The same for sizes in requests, or in tokens."""
    totals = list(accumulate(sizes))
    if totals[-1] == len(ends):
        return totals[:-1]
    if not ends or totals[-1] != ends[-1] or not set(totals).issubset(ends):
        raise SplitError(
            f"split({list(sizes)}) does not end at request boundaries",
            line=user_line(),
            advice=f"sizes count requests ({len(ends)} in all), or tokens up to one of {ends}",
        )
    return [bisect_left(ends, total) + 1 for total in totals[:-1]]
