from __future__ import annotations

import random

import pytest

from dynaflow.cost.contention import Needs, share


@pytest.mark.parametrize(
    ("needs", "rates"),
    [
        ([{0: 0.5}, {0: 0.5}], [1.0, 1.0]),
        ([{0: 1.0}, {0: 1.0}], [0.5, 0.5]),
        ([{0: 1.0}, {1: 1.0}], [1.0, 1.0]),
        ([{0: 0.2}, {0: 1.0}], [1.0, 0.8]),  # a small user is not held up by a large one
        ([{0: 0.2}, {0: 1.0}, {0: 1.0}], [1.0, 0.4, 0.4]),
        ([{0: 1.0, 1: 1.0}, {0: 1.0}, {1: 0.5}], [0.5, 0.5, 1.0]),
        ([{}, {0: 1.0}], [1.0, 1.0]),
        ([], []),
    ],
)
def test_equals_share_what_there_is_too_little_of(needs: list[Needs], rates: list[float]) -> None:
    found, used = share(needs, [0] * len(needs))
    assert found == pytest.approx(rates)
    for r, use in used.items():
        assert use == pytest.approx(sum(need.get(r, 0.0) * rate for need, rate in zip(needs, found, strict=True)))


def test_the_more_urgent_comes_first() -> None:
    assert share([{0: 0.75}, {0: 1.0}], [1, 0])[0] == pytest.approx([0.0, 1.0])
    assert share([{0: 0.75}, {0: 1.0}], [0, 1])[0] == pytest.approx([1.0, 0.25])


def test_what_is_left_of_one_resource_goes_to_who_can_use_it() -> None:
    """The first two halve resource 0; the second then leaves half of resource 1 to the third."""
    rates, _ = share([{0: 1.0}, {0: 1.0, 1: 1.0}, {1: 1.0}], [0, 0, 0])
    assert rates == pytest.approx([0.5, 0.5, 0.5])


def test_nothing_is_used_twice_and_nothing_useful_is_left() -> None:
    dice = random.Random(0)
    for _ in range(500):
        count = dice.randrange(1, 6)
        needs = [{r: dice.choice([0.2, 0.5, 1.0]) for r in range(3) if dice.random() < 0.6} for _ in range(count)]
        priorities = [dice.randrange(2) for _ in needs]
        rates, used = share(needs, priorities)
        for r in range(3):
            total = sum(need.get(r, 0.0) * rate for need, rate in zip(needs, rates, strict=True))
            assert total <= 1 + 1e-6 and used.get(r, 0.0) == pytest.approx(min(1.0, total), abs=1e-6)
        for need, rate in zip(needs, rates, strict=True):
            assert 0.0 <= rate <= 1 + 1e-9
            assert rate > 1 - 1e-6 or any(used[r] > 1 - 1e-6 for r in need), "held up by something that is full"
