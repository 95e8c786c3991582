"""Cases for ranks that train: tensor parallel and data parallel, gradients beside plain autograd's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynaflow as df
from tests.distributed import pretrained
from tests.distributed.models import is_split, lanes_of, numbers
from tests.helpers import STACK_RULES, Each, Stack


def _gradients(model: nn.Module, call: Callable[..., Any], **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    result = call(**inputs)
    result = result if isinstance(result, Tensor) else result.logits
    result.square().mean().backward()
    local = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_local() if hasattr(g, "to_local") else g for name, g in local.items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def tensor_parallel() -> None:
    """Sums of both passes are split, and on the lane of the link."""
    model = pretrained.llama().requires_grad_(True)
    inputs = {"input_ids": pretrained.tokens(6)}
    expected = _gradients(model, model, **inputs)
    plans: list[tuple[str, df.Plan]] = []

    class Noting(df.strategies.CommOverlap):  # type: ignore[misc, name-defined]
        def schedule(self, ctx: df.ScheduleContext) -> Any:
            super().schedule(ctx)
            plans.append((ctx.phase, ctx.finish()))
            return plans[-1][1]

    fast = df.compile(model, Noting(), operators="eager")
    _same(_gradients(model, fast, **inputs), expected)
    assert [phase for phase, _ in plans] == ["forward", "backward"]
    for _, plan in plans:
        assert lanes_of(plan, "all_reduce") == {"network"}, plan
        assert is_split(plan, "all_reduce"), plan


class Gathered(torch.autograd.Function):
    """A weight of which each rank has some rows, as FSDP has it: whole in the forward pass, summed in the backward."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return functional.all_gather_tensor(shard, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(gradient, "sum", 0, dist.group.WORLD)


class Summed(torch.autograd.Function):
    """A bucket of weights whose gradients are summed over the ranks at once, as DDP does it."""

    @staticmethod
    def forward(ctx: Any, *bucket: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.clone() for weight in bucket)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        flat = functional.all_reduce(torch.cat([g.flatten() for g in gradients]), "sum", dist.group.WORLD)
        parts = flat.split([g.numel() for g in gradients])
        return tuple(part.view_as(g) for part, g in zip(parts, gradients, strict=True))


class Spread(nn.Module):
    """Layers whose weights are in shards, or whose gradients are summed."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded, ranks = sharded, dist.get_world_size()
        torch.manual_seed(0)
        whole = [torch.randn(8, 8) / 8 for _ in range(6)]
        mine = [w.chunk(ranks)[dist.get_rank()].clone() if sharded else w for w in whole]
        self.weights = nn.ParameterList(mine)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            both = (Gathered.apply(first), Gathered.apply(second)) if self.sharded else Summed.apply(first, second)
            x = x + torch.tanh(x @ both[0]) @ both[1]
        return x


def collectives_in_the_graph(sharded: bool) -> None:
    """What FSDP and DDP do, where it is part of the graph: on the lane of the link, in the pass that it belongs to."""
    model, x = Spread(sharded), numbers(6, 8, seed=dist.get_rank())
    expected = {n: g.clone() for n, g in _gradients(model, model, x=x).items()}
    plans: dict[str, df.Plan] = {}

    class Noting(df.strategies.CommOverlap):  # type: ignore[misc, name-defined]
        def schedule(self, ctx: df.ScheduleContext) -> Any:
            plans[ctx.phase] = super().schedule(ctx) or ctx.finish()
            return plans[ctx.phase]

    fast = df.compile(model, Noting(), operators="eager", fullgraph=True)
    for _ in range(2):
        _same(_gradients(model, fast, x=x), expected)
    forward, backward = ("all_gather", "reduce_scatter") if sharded else (None, "all_reduce")
    if forward:
        assert lanes_of(plans["forward"], forward) == {"network"}, plans["forward"]
    assert lanes_of(plans["backward"], backward) == {"network"}, plans["backward"]
    assert len(plans["backward"].lanes) == 2


def data_parallel(operators: Any = "inductor") -> None:
    """Gradients are summed by DDP while backward runs; torch cuts the graph where its buckets end."""
    torch.manual_seed(0)
    model = Stack()
    spread = DistributedDataParallel(model)
    x = numbers(6, 8, seed=dist.get_rank())
    expected = {n: g.clone() for n, g in _gradients(model, spread, x=x).items()}
    rules = [df.SplitModule(r.match, tag=r.tag, optional=True) for r in STACK_RULES]
    fast = df.compile(spread, Each(rules, split=2), operators=operators)
    for _ in range(2):
        _same(_gradients(model, fast, x=x), expected)


CASES: dict[str, Callable[[], None]] = {
    "tensor_parallel": tensor_parallel,
    "data_parallel": data_parallel,
    "sharded": partial(collectives_in_the_graph, True),
    "summed": partial(collectives_in_the_graph, False),
}
