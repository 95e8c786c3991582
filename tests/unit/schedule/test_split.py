"""Where a batch is cut, against the definition, by brute force."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaflow.errors import SplitError
from dynaflow.schedule.split import Requests, requests_of, split_requests, split_rows

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=24).filter(any)


def nearest(lengths: list[int], parts: int) -> list[int]:
    """After how many requests parts end: the first of those boundaries that are nearest to an equal share."""
    ends, cuts = list(accumulate(lengths)), list[int]()
    for k in range(1, parts):
        first = cuts[-1] + 1 if cuts else 1
        choices = range(first, len(lengths) - (parts - k) + 1)
        cuts.append(min(choices, key=lambda c: abs(ends[c - 1] - ends[-1] * k / parts)))
    return [*cuts, len(lengths)]


@given(LENGTHS, st.integers(1, 6))
def test_equal_shares_end_at_the_nearest_boundaries(lengths: list[int], parts: int) -> None:
    rows = sum(lengths)
    if parts > len(lengths):
        with pytest.raises(SplitError, match="leaves a micro-batch empty"):
            split_requests(parts, Requests(lengths), rows)
        return
    cuts = nearest(lengths, parts)
    ends = [sum(lengths[:cut]) for cut in cuts]
    if len({0, *ends}) <= parts:
        with pytest.raises(SplitError, match="would have no tokens"):
            split_requests(parts, Requests(lengths), rows)
        return
    found = split_requests(parts, Requests(lengths), rows)
    assert [m.requests for m in found] == list(zip([0, *cuts], cuts, strict=False))
    assert [(m.start, m.stop) for m in found] == list(zip([0, *ends], ends, strict=False))


@given(LENGTHS, st.data())
def test_sizes_count_requests_or_tokens(lengths: list[int], data: st.DataObject) -> None:
    count, rows = len(lengths), sum(lengths)
    cuts = sorted(data.draw(st.sets(st.integers(1, count), max_size=4)) | {count})
    ends = [sum(lengths[:cut]) for cut in cuts]
    counts = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    tokens = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if min(tokens) == 0:
        with pytest.raises(SplitError, match="would have no tokens"):
            split_requests(counts, Requests(lengths), rows)
        return
    found = split_requests(counts, Requests(lengths), rows)
    assert [m.size for m in found] == tokens and [m.requests for m in found] == list(
        zip([0, *cuts], cuts, strict=False)
    )
    if sum(tokens) != count:  # or they would be taken for numbers of requests
        same = split_requests(tokens, Requests(lengths), rows)
        assert [(m.start, m.stop) for m in same] == [(m.start, m.stop) for m in found]


def test_sizes_that_end_inside_of_a_request() -> None:
    with pytest.raises(SplitError, match="does not end at request boundaries"):
        split_requests([2, 5], Requests([3, 4]), 7)
    with pytest.raises(SplitError, match="adds up to 7, but the batch has 8"):
        split_requests(2, Requests([3, 4]), 8)


@given(st.integers(1, 40), st.integers(1, 8))
def test_rows_are_shared_equally(rows: int, parts: int) -> None:
    if parts > rows:
        with pytest.raises(SplitError, match="leaves a micro-batch empty"):
            split_rows(parts, rows)
        return
    found = split_rows(parts, rows)
    assert [m.start for m in found] == [0, *(m.stop for m in found)][:-1] and found[-1].stop == rows
    assert max(m.size for m in found) - min(m.size for m in found) <= 1


@pytest.mark.parametrize("tokens", [[1, -2], [1, 2.5], ["3"], "12", 5, [[1], [2]]])
def test_lengths_that_are_none(tokens: object) -> None:
    with pytest.raises(SplitError, match="num_tokens"):
        requests_of(tokens)


def test_lengths_are_judged_once() -> None:
    requests = requests_of((3, 0, 4))
    assert requests == [3, 0, 4] and requests is not None and requests.filled == 2
    assert requests_of(requests) is requests and requests_of(None) is None
