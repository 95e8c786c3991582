"""Some cases of torch's operator database; `make test-ops` runs all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations")  # it needs expecttest and numpy

from tests.ops.report import (
    GROUPS,
    MIXING,
    PAGE,
    PARTLY,
    PLAIN,
    REFUSED,
    SPLIT,
    WHOLE,
    Found,
    page,
    read,
    read_page,
    summary,
)
from tests.ops.run import case_named, judged, quiet
from tests.ops.samples import operators

EVERY = 8
"""Of so many operators, one is tested here."""
CASES = 3
"""Of each, from its first samples."""
TRAINED = 50
"""Of so many operators, one with gradients."""
CHUNKS = 3
"""Tests, for several processes."""

_PAGE = PAGE.read_text(encoding="utf-8")
_KINDS = ("split", "whole", "refused", "plain", "no graph")
_BEST = {SPLIT: 0, PARTLY: 0, WHOLE: 1, MIXING: 1, REFUSED: 2, PLAIN: 3}
"""Of what may become of a case of an operator in a group of the page, the first."""


def _pages_torch() -> bool:
    """Whether the page was written with the torch at hand."""
    version = re.search(r"torch (\d+\.\d+\.\d+)", _PAGE)
    return version is not None and torch.__version__.startswith(version[1])


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_do_under_splits_what_eager_does(chunk: int) -> None:
    known, cases = read_page(_PAGE), 0
    for number, (name, operator) in list(enumerate(operators().items()))[chunk * EVERY :: EVERY * CHUNKS]:
        samples = islice(operator.samples(operator.dtypes[0]), 6) if operator.dtypes else ()
        found = judged(samples, most=CASES, trains=number % TRAINED == 0)
        assert not found.findings, "\n".join(found.findings)
        cases += len(found.verdicts)
        if _pages_torch():
            possible = _KINDS[_BEST.get(known[name], len(_KINDS)) :]
            assert {v.kind for v in found.verdicts.values()} <= set(possible), name
    assert cases > 50


def test_page_has_all_operators() -> None:
    known = read_page(_PAGE)
    if _pages_torch():
        assert sorted(known) == sorted(operators())
    counted = {group: int(n) for n, group in re.findall(r"^\| (\d+) \| (.+) \|$", _PAGE, re.MULTILINE)}
    assert counted.pop("in all") == len(known)
    assert counted == {group: n for group in GROUPS if (n := sum(g == group for g in known.values()))}


def test_page_and_summary_are_made_of_what_was_found() -> None:
    found = {name: judged(operators()[name].samples(torch.float64), most=4, trains=False) for name in ("sin", "mm")}
    found |= {"broken": Found(uncallable=["why"])}
    assert read_page(page(found)) == {"sin": SPLIT, "mm": SPLIT, "broken": GROUPS[-1]}
    assert "no mismatch" in summary(found)
    assert read(f.written(name) for name, f in found.items()) == found
    case = next(case for case, v in found["sin"].verdicts.items() if v.kind == "split")
    assert str(case_named(case)) == case


def test_what_is_given_as_out_is_written_though_fake_tensors_are_not() -> None:
    """The result of `linalg.matrix_rank` is `out`, but on fake tensors another tensor."""
    case = case_named("linalg.matrix_rank.hermitian/out/float64/4/0.0+2.0")
    if case is None:
        pytest.skip("this torch has other samples")
    assert case.judge().kind == "whole"
