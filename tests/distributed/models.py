"""Small models whose layers are spread over ranks, and how their runs are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import dynaflow as df
from tests.helpers import assert_equal

STRATEGIES = ("comm_overlap", "nanoflow", "dual_batch", "token_weave", "comet")


def whole_numbers(module: nn.Module, seed: int) -> nn.Module:
    """Weights of -1, 0 and 1: then sums are exact in whatever order they are taken."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
    return module.eval().requires_grad_(False)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(torch.get_default_dtype())


def in_double(*cases: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """By name. Alone, rows are summed in another order than together: with singles that shows, on some machines."""

    def run(case: Callable[[], None]) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            case()
        finally:
            torch.set_default_dtype(torch.float32)

    return {case.__name__: partial(run, case) for case in cases}


def exchanged(x: Tensor) -> Tensor:
    """Slice i of dim 0 goes to rank i."""
    return functional.all_to_all_single(x, None, None, dist.group.WORLD)


class Experts(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside, bias=False), nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class ExpertLayer(nn.Module):
    """One expert a rank. Each token goes to the expert that the gate likes best, as one row of [rank, batch, ...]."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, dist.get_world_size(), bias=False)
        self.shared_experts = nn.Linear(width, width, bias=False)
        self.experts = Experts(width, inside)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        mask = (chosen.unsqueeze(0) == torch.arange(dist.get_world_size()).view(-1, 1, 1)).to(x.dtype).unsqueeze(-1)
        answered = exchanged(self.experts(exchanged(x * mask)))
        return x + self.shared_experts(x) + (answered * mask).sum(0)


class ExpertModel(nn.Module):
    """Gates and shared experts are the same on all ranks; the routed experts are the rank's own."""

    def __init__(self, layers: int = 2, width: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(width, inside) for _ in range(layers))
        whole_numbers(self, seed=1)
        for i, layer in enumerate(self.layers):
            whole_numbers(layer.experts, seed=10 * dist.get_rank() + i)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SequenceBlock(nn.Module):
    """Each rank holds a part of the sequence, on dim 0, between layers whose weights are spread over the ranks."""

    def __init__(self, width: int, inside: int, norm: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inside // dist.get_world_size(), bias=False)
        self.down_proj = nn.Linear(inside // dist.get_world_size(), width, bias=False)
        self.norm = nn.RMSNorm(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        world = dist.group.WORLD
        gathered = functional.all_gather_tensor(x, 0, world)
        summed = functional.reduce_scatter_tensor(self.down_proj(torch.relu(self.up_proj(gathered))), "sum", 0, world)
        return self.norm(x + summed)


class SequenceModel(nn.Module):
    def __init__(self, norm: bool, layers: int = 2, width: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SequenceBlock(width, inside, norm) for _ in range(layers))
        whole_numbers(self, seed=dist.get_rank())
        for layer in self.layers:
            if norm:
                layer.norm.weight.data.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """Column-parallel, row-parallel, sum over the ranks, and then what `after` does with sum and input."""

    def __init__(self, after: nn.Module, width: int = 8, inside: int = 16) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inside, bias=False), nn.Linear(inside, width, bias=False)
        whole_numbers(self, seed=dist.get_rank())
        self.after = after

    def forward(self, x: Tensor) -> Any:
        part = self.down_proj(torch.relu(self.up_proj(x)))
        return self.after(functional.all_reduce(part, "sum", dist.group.WORLD), x)


class AddNorm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        x = x + summed
        return x + self.norm(x)


def tensor_parallel(blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(AddNorm()) for _ in range(blocks))).eval().requires_grad_(False)


def compare(
    model: Callable[..., Any],
    fast: df.CompiledModel,
    *args: Any,
    exact: bool = False,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> df.Plan:
    """Runs both, wants equal results, and gives the plan."""
    with torch.no_grad():
        expected = tree_map_only(functional.AsyncCollectiveTensor, _waited, model(*args, **kwargs))
        found = fast(*args, **kwargs)
        if exact:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        else:
            assert_equal(found, expected, tolerance)
        plan = fast.plan(*args, **kwargs)
    assert not fast.stats.plain_graphs, fast.stats.plain_reasons
    assert not fast.stats.graph_breaks
    return plan


def _waited(result: Any) -> Tensor:
    """What eager torch hands out before it is there."""
    return result.wait()


def lanes_of(plan: df.Plan, tagged: str) -> set[str]:
    """The lanes of the tasks whose operators have this in their names."""
    return {task.lane for task in plan.tasks for item in task.items if tagged in item.op}


def is_split(plan: df.Plan, part: str) -> bool:
    """All operators with this in their names run a micro-batch at a time."""
    found = [item.micro_batches for task in plan.tasks for item in task.items if part in item.op]
    assert found, f"no operator {part}: {plan}"
    return all(len(parts) == 1 for parts in found)


def is_merged(plan: df.Plan, part: str) -> bool:
    found = [item.micro_batches for task in plan.tasks for item in task.items if part in item.op]
    assert found, f"no operator {part}: {plan}"
    return all(len(parts) == len(plan.micro_batches) > 1 for parts in found)
