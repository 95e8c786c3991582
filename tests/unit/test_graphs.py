"""What of CUDA graphs needs no CUDA: which are kept, what is copied in, and that the option has no effect on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.run import graphs
from dynaflow.run.graphs import GraphPool, _once
from dynaflow.stats import Stats
from tests.helpers import Each, compiled, pretend_graphs, randn


class Captured:
    def __init__(self) -> None:
        self.forgotten = False

    def forget(self) -> None:
        self.forgotten = True


def test_what_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GRAPHS_KEPT", 2)
    pool = GraphPool(Stats())
    one, two, three = Captured(), Captured(), Captured()
    for graphed in (one, two, one, three):
        pool.used(graphed)  # type: ignore[arg-type]
    assert (one.forgotten, two.forgotten, three.forgotten) == (False, True, False)


def test_a_plan_that_is_gone_keeps_no_graph() -> None:
    pool = GraphPool(Stats())
    graphed = Captured()
    pool.used(graphed)  # type: ignore[arg-type]
    del graphed
    assert not list(pool._kept)


class Moving:
    """A compiled function whose input is promised to stay, and does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: int) -> None:
        pretend_graphs(monkeypatch)
        self.fast = compiled(nn.ReLU(), df.Sequential(), cudagraph="plan", static_inputs=["input"])
        self.places = [i * randn(4, 4) for i in range(places)]
        self(0)  # warms up

    def __call__(self, *places: int) -> int:
        """Calls it with inputs there, and gives the number of captures so far."""
        with torch.no_grad():
            for place in places:
                assert torch.equal(self.fast(self.places[place]), torch.relu(self.places[place]))
        return self.fast.stats.captures


def test_graphs_of_a_few_places_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = Moving(monkeypatch, graphs.PLACES + 1)
    every = range(graphs.PLACES)
    assert moving(*every) == graphs.PLACES
    assert moving(*every, *reversed(every)) == graphs.PLACES
    assert moving(graphs.PLACES) == graphs.PLACES + 1  # now the one that was not used for longest is gone
    assert moving(*every[:-1]) == graphs.PLACES + 1
    assert moving(graphs.PLACES - 1) == graphs.PLACES + 2


def test_captures_go_on_while_they_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 2 * graphs.CAPTURES
    moving = Moving(monkeypatch, many)
    for place in range(many):
        assert moving(*[place] * graphs.USEFUL) == place + 1
    assert not moving.fast.stats.capture_failures
    moving(*range(graphs.CAPTURES))
    assert not moving.fast.stats.capture_failures
    with pytest.warns(UserWarning, match="elsewhere in memory too often"):
        moving(many - 5)
    assert moving.fast.stats.captures == many + graphs.CAPTURES and len(moving.fast.stats.capture_failures) == 1


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1)])
def test_expanded_inputs_are_copied_once(shape: tuple[int, int]) -> None:
    given = randn(*shape).expand(3, 4)
    buffer = torch.empty_strided(given.size(), given.stride())
    _once(buffer).copy_(_once(given))
    torch.testing.assert_close(buffer, given)


@pytest.mark.parametrize("mode", ["plan", "pieces"])
def test_no_effect_on_a_cpu(mode: Any) -> None:
    model = nn.Linear(4, 4)
    fast = compiled(model, Each([df.SplitModule("*")]), cudagraph=mode, static_inputs=["input"])
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(randn(4, 4)), model(randn(4, 4)))
    assert not fast.stats.captures and not fast.stats.capture_failures


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(df.DynaFlowError, match="cudagraph='always'"):
        df.compile(nn.Linear(4, 4), cudagraph="always")  # type: ignore[arg-type]
