"""Modules as people write them, of random sizes, each with inputs and what has to be declared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynaflow import SplitModule
from tests.fuzz.dice import Dice
from tests.fuzz.inputs import Input
from tests.fuzz.sizes import B, Size, T

WIDTH = 4


@dataclass(slots=True, kw_only=True)
class Entry:
    model: nn.Module
    inputs: list[Input]
    batch_dims: dict[str, int | None]
    rules: list[Any] = field(default_factory=list)


class Mlp(nn.Module):
    def __init__(self, width: int, flat: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if self.flat:
            y = y.reshape(-1, y.shape[-1])
        return torch.tanh(self.fc2(F.gelu(self.fc1(y)))).view(x.shape)


class Residual(nn.Module):
    """Values of [s, b, h], as in Megatron."""

    def __init__(self, width: int, flat: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width, flat) for _ in range(2))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(width, width, **options)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:
        y, _ = self.rnn(x)
        return torch.tanh(y) * self.scale


class Attention(nn.Module):
    def __init__(self, width: int, first: bool, weights: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=first)
        self.weights = weights
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:
        y, weights = self.attn(x, x, x, need_weights=self.weights)
        return (y * self.scale, weights) if self.weights else y * self.scale


class Standardised(nn.Module):
    """Rows less their mean, by the batch's own spread."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("seen", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        n = x.shape[0]
        spread = ((x - x.mean(0)) ** 2).sum(0) / (n - 1)
        return torch.tanh(x / (n + 1)) * self.weight * self.scale + spread.sqrt()


class Remembering(nn.Module):
    """Which keeps something of its last calls, outside of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("seen", torch.zeros(()))
        self.last = deque[Tensor](maxlen=2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.seen.add_(1)
        self.last.append(y.detach().sum())
        return y * self.scale - sum(self.last) / len(self.last)


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.transpose(1, 2)))).mean(-1) * self.scale


class Bagged(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag, self.table = nn.EmbeddingBag(4, width), nn.Embedding(4, width)
        self.scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids) * self.scale + self.table(ids).sum(1)


def _layer(dice: Dice) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=dice.one_in(2))


def draw_entry(dice: Dice) -> Entry:
    """One of them, with float64 weights that depend on the dice alone."""
    makers: list[Callable[[Dice], Entry]] = [
        _residual,
        _recurrent,
        _attention,
        _standardised,
        _convolved,
        _remembering,
        _bagged,
        _encoder,
    ]
    made = dice.pick(makers)(dice)
    random = torch.Generator().manual_seed(dice.below(1000))
    made.model = made.model.double().train(dice.one_in(3))
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=random, dtype=torch.float64) - 0.5)
    return made


def _sequence(batch_dim: int, name: str = "x", grad: bool = True) -> list[Input]:
    sizes = (B, T, Size(WIDTH)) if batch_dim == 0 else (T, B, Size(WIDTH))
    return [Input(name=name, sizes=sizes, grad=grad)]


def _residual(dice: Dice) -> Entry:
    dim = dice.below(2)
    rules = [SplitModule("layers.*", splittable=True)] if dice.one_in(2) else [SplitModule("layers.*")]
    return Entry(model=Residual(WIDTH, dice.one_in(2)), inputs=_sequence(dim), batch_dims={"x": dim}, rules=rules)


def _recurrent(dice: Dice) -> Entry:
    kind = dice.pick([nn.GRU, nn.LSTM, nn.RNN])
    dim = dice.below(2)
    model = Recurrent(kind, WIDTH, batch_first=dim == 0, bidirectional=dice.one_in(4))
    return Entry(model=model, inputs=_sequence(dim), batch_dims={"x": dim})


def _attention(dice: Dice) -> Entry:
    dim = dice.below(2)
    model = Attention(WIDTH, dim == 0, dice.one_in(2))
    return Entry(model=model, inputs=_sequence(dim), batch_dims={"x": dim})


def _encoder(dice: Dice) -> Entry:
    model = _layer(dice)
    dim = 0 if model.self_attn.batch_first else 1  # type: ignore[union-attr]
    return Entry(model=model, inputs=_sequence(dim, "src"), batch_dims={"src": dim})


def _standardised(dice: Dice) -> Entry:
    inputs = [Input(name="x", sizes=(B, Size(WIDTH)), grad=True)]
    return Entry(model=Standardised(WIDTH), inputs=inputs, batch_dims={"x": 0})


def _remembering(dice: Dice) -> Entry:
    inputs = [Input(name="x", sizes=(B, Size(WIDTH)), grad=True)]
    return Entry(model=Remembering(WIDTH), inputs=inputs, batch_dims={"x": 0})


def _convolved(dice: Dice) -> Entry:
    return Entry(model=Convolved(WIDTH), inputs=_sequence(0), batch_dims={"x": 0})


def _bagged(dice: Dice) -> Entry:
    inputs = [Input(name="ids", sizes=(B, Size(3)), dtype=torch.int64)]
    return Entry(model=Bagged(WIDTH), inputs=inputs, batch_dims={"ids": 0})
