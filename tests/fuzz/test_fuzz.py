"""Random graphs under random legal schedules do what eager does; the check refuses illegal plans and no others.

DYNAFLOW_FUZZ_CASES sets the number of cases; `python -m tests.fuzz --cases N` runs many, without hypothesis.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.fuzz.cases import Tally, draw_case, judge_mutants, run_case, run_door, run_training
from tests.fuzz.graphs import Dice, random_graph

CASES = int(os.environ.get("DYNAFLOW_FUZZ_CASES", "500"))
DOOR_CASES = max(1, CASES // 20)
FOUND = (1093, 1278)
"""Cases that were wrong once."""

thrown = st.randoms(note_method_calls=False, use_true_random=False)


def _settings(cases: int) -> settings:
    return settings(
        max_examples=cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@_settings(CASES)
@given(thrown)
def test_legal_schedules_compute_what_eager_does(random: Random) -> None:
    dice = Dice(random)
    case = draw_case(dice)
    note(str(case.graph))
    try:
        run_case(case, dice, Tally())
    except BaseException:
        note(str(case))
        raise
    finally:
        case.close()


def test_check_catches_illegal_plans(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()

    @_settings(CASES)
    @given(thrown)
    def judge(random: Random) -> None:
        dice = Dice(random)
        case = draw_case(dice)
        note(str(case))
        try:
            if run_case(case, dice, Tally()):
                judge_mutants(case, dice, tally, each=2)
        finally:
            case.close()

    judge()
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.killed.total() == tally.mutants.total() - tally.redundant.total()


@pytest.mark.parametrize("run", [run_door, run_training])
def test_the_front_door_agrees(run: Callable[..., None]) -> None:
    """The same programs as Python source, captured by Dynamo; and with gradients."""
    tally = Tally()
    for seed in (*range(DOOR_CASES), *FOUND):
        dice = Dice(Random(seed))
        graph = random_graph(dice)
        try:
            run(graph, dice, tally)
        except Exception as e:
            e.add_note(f"case {seed}:\n{graph}")
            raise
    assert tally.cases >= 0.6 * DOOR_CASES
