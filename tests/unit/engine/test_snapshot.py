from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynaflow.engine.snapshot import NoRoom, Snapshot, copied
from tests.helpers import Each, assert_equal, compiled, graph_of, randn

X = randn(6, 8)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Counter(nn.Module):
    """Writes one of its inputs."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.add_(1)
        return x + state


def test_what_is_written_is_put_back() -> None:
    fast = compiled(Counter(), Each(split=None))
    state, x = torch.zeros(6, 8), X.clone()
    fast.plan(x, state)
    graph = graph_of(fast)
    args = [x if i.name == "x" else state if i.name == "state" else 6 for i in graph.graph.inputs]
    snapshot = Snapshot(graph, args)
    for _ in range(2):
        state.fill_(7)
        x.fill_(5)
        snapshot.restore()
        assert_equal(state, torch.zeros(6, 8))
        assert_equal(x, torch.full((6, 8), 5.0))  # is only read: no copy of it


def test_copies_of_arguments() -> None:
    kept, other = randn(2), randn(3)
    found: tuple[Any, ...] = copied([kept, other, 6], keep=frozenset({0}))
    assert found[0] is kept and found[2] == 6
    assert torch.equal(found[1], other) and found[1].data_ptr() != other.data_ptr()


def test_no_copies_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40, 80))
    copied([torch.empty(5)], keep=frozenset())
    copied([torch.empty(6)], keep=frozenset({0}))
    with pytest.raises(NoRoom, match="not enough memory for copies"):
        copied([torch.empty(6)], keep=frozenset())
