"""Two ranks that are threads of one process; real ones are in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow import _torch
from dynaflow.schedule import rank_consensus
from dynaflow.schedule.rank_consensus import RankConsensus
from tests.helpers import Each, compiled, graph_of


@torch.library.custom_op("dynaflow_tests::consensus_sum", mutates_args=())
def team_sum(x: Tensor, team: str) -> Tensor:
    return x.clone()


@team_sum.register_fake
def _(x: Tensor, team: str) -> Tensor:
    return torch.empty_like(x)


class Summing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return team_sum(team_sum(x * 2, "red") + 1, "red") - 1


@pytest.fixture(scope="module")
def planned() -> tuple[df.Plan, Any]:
    from dynaflow.capture.op_registry import declarations_restored

    with declarations_restored(), torch.no_grad():
        df.collective("dynaflow_tests::consensus_sum", group="team")
        fast = compiled(Summing(), Each([df.SplitFunc("collective::*")], split=2))
        return fast.plan(torch.randn(4, 3)), graph_of(fast)


@pytest.fixture
def meet(planned: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What each of two ranks comes to when they have made these plans; None: a rank has made none."""
    monkeypatch.setattr(_torch, "ranks_of", lambda groups: (0, 1))
    monkeypatch.setattr(rank_consensus, "PATIENCE", timedelta(seconds=1))

    def agree(rank: int, plan: df.Plan, exchange: Callable[[str], dict[int, str]]) -> str:
        monkeypatch.setattr(_torch, "rank", lambda: rank)
        monkeypatch.setattr(_torch, "exchange_texts", lambda prefix, mine, ranks, said, patience: exchange(said))
        try:
            RankConsensus().verify(plan, planned[1])
        except df.PlanError as e:
            return str(e)
        return "agreed"

    def meet(*plans: df.Plan | None) -> list[str]:
        said: dict[int, str] = {}
        for rank, plan in enumerate(plans):
            if plan is not None:
                agree(rank, plan, lambda text, rank=rank: dict.fromkeys((0, 1), said.setdefault(rank, text)))
        return [agree(rank, plan, lambda _: said) for rank, plan in enumerate(plans) if plan is not None]

    return meet


def in_other_order(plan: df.Plan) -> df.Plan:
    return replace(plan, tasks=tuple(reversed(plan.tasks)))


def test_the_same_plan(planned: Any, meet: Callable[..., list[str]]) -> None:
    assert meet(planned[0], planned[0]) == ["agreed", "agreed"]


def test_another_order(planned: Any, meet: Callable[..., list[str]]) -> None:
    first, second = meet(planned[0], in_other_order(planned[0]))
    assert "ranks 0 and 1 have planned to meet in different orders" in first
    assert "ranks 1 and 0 have planned to meet in different orders" in second


def test_other_sizes(planned: Any, meet: Callable[..., list[str]]) -> None:
    """An all-reduce adds rows to rows: there have to be as many."""
    plan = planned[0]
    one, other = (replace(m, start=a, stop=b) for m, (a, b) in zip(plan.micro_batches, [(0, 1), (1, 4)], strict=True))
    assert "different orders" in meet(plan, replace(plan, micro_batches=(one, other)))[0]


def test_a_rank_that_has_planned_nothing(planned: Any, meet: Callable[..., list[str]]) -> None:
    (first,) = meet(planned[0], None)
    assert "rank 1 has planned nothing to meet with rank 0 in 1 s" in first


def test_a_plan_without_collectives_asks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("asked")

    fast = compiled(nn.ReLU(), Each(split=2))
    with torch.no_grad():
        plan = fast.plan(torch.randn(4, 3))
    monkeypatch.setattr(_torch, "ranks_of", never)
    monkeypatch.setattr(_torch, "exchange_texts", never)
    RankConsensus().verify(plan, graph_of(fast))


def test_texts_are_exchanged_in_the_process_groups_store() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with ThreadPoolExecutor(1) as pool:
            patience = timedelta(seconds=20)
            heard = pool.submit(_torch.exchange_texts, "consensus", 0, (0, 1), "mine", patience)
            assert _torch.exchange_texts("consensus", 1, (0, 1), "theirs", patience) == {0: "mine", 1: "theirs"}
            assert heard.result() == {0: "mine", 1: "theirs"}
        alone = _torch.exchange_texts("again", 0, (0, 7), "mine", timedelta(milliseconds=50))
        assert alone == {0: "mine"}, "7 is silent"
        assert _torch.ranks_of([torch.distributed.group.WORLD.group_name]) == (0,) and _torch.rank() == 0
    finally:
        torch.distributed.destroy_process_group()
