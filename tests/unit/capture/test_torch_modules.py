"""torch's own modules that take the batch in unusual places: they are split, with the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import Each, assert_equal, compiled, randn, uneven, whole

IDS = torch.arange(7 * 5).view(7, 5) % 11


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.sin())


class Attention(nn.Module):
    def __init__(self, *, first: bool, weights: bool) -> None:
        super().__init__()
        self.layer, self.first, self.weights = nn.MultiheadAttention(4, 2, batch_first=first), first, weights

    def forward(self, x: Tensor) -> Any:
        x = (x if self.first else x.transpose(0, 1)).sin()
        y, weights = self.layer(x, x, x, need_weights=self.weights)
        return (y if self.first else y.transpose(0, 1)), weights


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(11, 4, mode=mode)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(ids) * 2


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x.sin(), x.cos(), tgt_mask=mask)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "LSTM": (lambda: Recurrent(nn.LSTM, num_layers=2), randn(7, 5, 4)),
    "GRU both ways": (lambda: Recurrent(nn.GRU, bidirectional=True), randn(7, 5, 4)),
    "RNN": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), randn(7, 5, 4)),
    "attention": (lambda: Attention(first=True, weights=False), randn(7, 5, 4)),
    "attention with weights": (lambda: Attention(first=True, weights=True), randn(7, 5, 4)),
    "attention, sequence first": (lambda: Attention(first=False, weights=True), randn(7, 5, 4)),
    "bag": (lambda: Bag("sum"), IDS),
    "bag of largest": (lambda: Bag("max"), IDS),
    "transformer": (Translator, randn(7, 5, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_torch_s_own_modules_are_split(name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    fast = compiled(model, Each(split=uneven))
    with torch.no_grad():
        assert_equal(fast(x), model(x))
        split = [op for op in fast.plan(x).tasks if len(op.items[0].micro_batches) == 1]
        assert split and not [op for op in whole(fast.plan(x)) if "layer" in op and "mask" not in op]
    assert not fast.stats.plain_reasons


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for r in result if r is not None for t in tensors(r)]


@pytest.mark.parametrize("name", ["LSTM", "GRU both ways", "attention, sequence first", "bag", "transformer"])
def test_gradients_of_torch_s_own_modules(name: str) -> None:
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x = x.double() if x.is_floating_point() else x
    fast = compiled(model, Each(split=uneven))

    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        given = x.clone().requires_grad_(x.is_floating_point())
        loss = sum((n + 1) * t.square().sum() for n, t in enumerate(tensors(call(given))))
        return list(torch.autograd.grad(loss, [*model.parameters(), *([given] if given.requires_grad else [])]))

    assert_equal(gradients(fast), gradients(model), 1e-9)
