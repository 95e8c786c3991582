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
from tests.helpers import Each, compiled, randn


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
