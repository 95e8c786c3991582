"""A library with collectives of its own, and with names of its own for process groups, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dynaflow as df
from tests.distributed.models import AddNorm, whole_numbers

TEAMS: dict[Any, dist.ProcessGroup] = {}
"""By name, and by handle."""


@torch.library.custom_op("dynaflow_teams::sum", mutates_args=())
def team_sum(x: Tensor, team: str) -> Tensor:
    summed = x.clone()
    dist.all_reduce(summed, group=TEAMS[team])
    return summed


@team_sum.register_fake
def _(x: Tensor, team: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaflow_teams::sum_", mutates_args=("x",))
def team_sum_in_place(handle: int, x: Tensor) -> None:
    dist.all_reduce(x, group=TEAMS[handle])


@team_sum_in_place.register_fake
def _(handle: int, x: Tensor) -> None:
    return None


@torch.library.custom_op("dynaflow_teams::gather", mutates_args=())
def team_gather(x: Tensor, dim: int, team: str) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(TEAMS[team].size())]
    dist.all_gather(parts, x.contiguous(), group=TEAMS[team])
    return torch.cat(parts, dim)


@team_gather.register_fake
def _(x: Tensor, dim: int, team: str) -> Tensor:
    shape = [*x.shape]
    shape[dim] *= TEAMS[team].size()
    return x.new_empty(shape)


def declare() -> str:
    """Torch's name of the team of all."""
    if not TEAMS:
        TEAMS["all:0"] = TEAMS[7] = dist.new_group(range(dist.get_world_size()))
        named: Callable[[Any], str] = lambda team: TEAMS[team].group_name  # noqa: E731
        df.collective(team_sum._opoverload, group="team", named=named)
        df.collective("dynaflow_teams::sum_", group="handle", named=named)
        df.collective("dynaflow_teams::gat*", group="team", dim="dim", named=named)
    return TEAMS[7].group_name


class TeamBlock(nn.Module):
    def __init__(self, in_place: bool, width: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inside, bias=False), nn.Linear(inside, width, bias=False)
        whole_numbers(self, seed=dist.get_rank())
        self.after, self.in_place = AddNorm(width), in_place

    def forward(self, x: Tensor) -> Tensor:
        part = self.down_proj(torch.relu(self.up_proj(x)))
        if self.in_place:
            team_sum_in_place(7, part)
        else:
            part = team_sum(part, "all:0")
        return self.after(part, x)


def team_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(TeamBlock(False), TeamBlock(True)).eval().requires_grad_(False)
