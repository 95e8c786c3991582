"""What of CUDA graphs needs no CUDA: which are kept, what is copied in, and that the option has no effect on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dynaflow as df
from dynaflow.core.stats import Stats
from dynaflow.runtime import cuda_graphs
from dynaflow.runtime.cuda_graphs import GraphPool, without_repeats
from tests.helpers import Each, assert_equal, compiled, pretend_graphs, randn


class Captured:
    def __init__(self) -> None:
        self.forgotten = False

    def forget(self) -> None:
        self.forgotten = True


def test_what_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
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
    assert not pool.graphs


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
    moving = Moving(monkeypatch, cuda_graphs.MAX_PLACES + 1)
    every = range(cuda_graphs.MAX_PLACES)
    assert moving(*every) == cuda_graphs.MAX_PLACES
    assert moving(*every, *reversed(every)) == cuda_graphs.MAX_PLACES
    assert moving(cuda_graphs.MAX_PLACES) == cuda_graphs.MAX_PLACES + 1  # the least recently used one is gone
    assert moving(*every[:-1]) == cuda_graphs.MAX_PLACES + 1
    assert moving(cuda_graphs.MAX_PLACES - 1) == cuda_graphs.MAX_PLACES + 2


def test_captures_go_on_while_they_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 2 * cuda_graphs.MAX_CAPTURES
    moving = Moving(monkeypatch, many)
    for place in range(many):
        assert moving(*[place] * cuda_graphs.MIN_REPLAYS) == place + 1
    assert not moving.fast.stats.capture_failures
    moving(*range(cuda_graphs.MAX_CAPTURES))
    assert not moving.fast.stats.capture_failures
    with pytest.warns(UserWarning, match="elsewhere in memory too often"):
        moving(many - 5)
    stats = moving.fast.stats
    assert stats.captures == many + cuda_graphs.MAX_CAPTURES and len(stats.capture_failures) == 1


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1)])
def test_expanded_inputs_are_copied_once(shape: tuple[int, int]) -> None:
    given = randn(*shape).expand(3, 4)
    buffer = torch.empty_strided(given.size(), given.stride())
    without_repeats(buffer).copy_(without_repeats(given))
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


@pytest.mark.parametrize("copy", [False, True])
def test_results_share_memory_as_they_do_in_the_graph(copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        made = torch.arange(24.0).reshape(4, 6)
        complex = torch.view_as_complex(made.unflatten(1, (3, 2)))
        of_input = torch.view_as_real(x)[2:], x[1:].conj(), x[:, 1]
        return made[1:, 2:], made.t()[3], complex, made[0:0], torch.ones(3).expand(2, 3), *of_input, 7

    monkeypatch.setattr(cuda_graphs, "record_graph", lambda graph, function, args, stream, pool: function(args))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    one, other = (torch.complex(randn(9, 4), randn(4, 9).t())[i : i + 5] for i in (1, 3))
    graph = cuda_graphs.GraphCapture(function, [one], [0], [], None, None, [])  # type: ignore[arg-type]
    expected, found = function([other]), graph.results([other], copy)
    assert_equal(found, expected)
    for results in (expected, found):
        assert [t.data_ptr() == results[0].data_ptr() - 32 for t in results[2:3]] == [True]
        assert results[0].untyped_storage().data_ptr() == results[1].untyped_storage().data_ptr()
    assert [t.data_ptr() for t in found[5:8]] == [t.data_ptr() for t in expected[5:8]]
    again = graph.results([other], copy)
    assert (again[0].data_ptr() == found[0].data_ptr()) is not copy
    assert all(t is not u for t, u in zip(found[:3], again[:3], strict=True))


def test_a_result_that_comes_twice_is_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(args: list[Any]) -> tuple[Any, ...]:
        y = args[0] + 1
        return y, y

    monkeypatch.setattr(cuda_graphs, "record_graph", lambda graph, function, args, stream, pool: function(args))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    graph = cuda_graphs.GraphCapture(function, [randn(3)], [0], [], None, None, [])  # type: ignore[arg-type]
    for copy in (False, True):
        one, other = graph.results([randn(3)], copy)
        assert one is other
