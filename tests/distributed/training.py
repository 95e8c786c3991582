"""Cases for two ranks that train: tensor parallel and data parallel, gradients beside plain autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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


def data_parallel() -> None:
    """Gradients are summed by DDP while backward runs; torch cuts the graph where its buckets end."""
    torch.manual_seed(0)
    model = Stack()
    spread = DistributedDataParallel(model)
    x = numbers(6, 8, seed=dist.get_rank())
    expected = {n: g.clone() for n, g in _gradients(model, spread, x=x).items()}
    fast = df.compile(spread, Each([df.SplitModule(r.match, tag=r.tag, optional=True) for r in STACK_RULES], split=2))
    for _ in range(2):
        _same(_gradients(model, fast, x=x), expected)


CASES: dict[str, Callable[[], None]] = {"tensor_parallel": tensor_parallel, "data_parallel": data_parallel}
