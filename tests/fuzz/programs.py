"""Programs for the door: Python functions and modules, with the inputs of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.fuzz.dice import Dice
from tests.fuzz.graphs import MOST, RandomGraph, random_graph
from tests.fuzz.inputs import Input
from tests.fuzz.library import draw_entry
from tests.fuzz.sizes import Sizes
from tests.fuzz.steps.called import CALLED

STEPS = 5


@dataclass(slots=True, kw_only=True)
class Program:
    """A model and how to call it."""

    model: Callable[..., Any]
    inputs: list[Input]
    """All but what the model owns; the hidden ones as well."""
    batch_dims: dict[str, int | None] | None
    rules: list[Any] = field(default_factory=list)
    text: str = ""
    trains: bool = False

    @property
    def given(self) -> list[Input]:
        return [i for i in self.inputs if not i.hidden]

    @property
    def has_length(self) -> bool:
        return any(i.length_dims for i in self.given)

    def memory(self, sizes: Sizes, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for given in self.inputs:
            made[given.name] = given.make(sizes, random, made)
        return made

    def draw_sizes(self, dice: Dice) -> Sizes:
        batch = dice.pick([1, 0]) if dice.one_in(10) else 2 + dice.below(MOST - 1)
        length = 0 if not self.has_length else 1 if dice.one_in(10) else 2 + dice.below(MOST - 1)
        return Sizes(batch, length)

    def __str__(self) -> str:
        return f"# {', '.join(map(str, self.inputs))}; batch_dims={self.batch_dims}\n{self.text}"


class Wrapped(nn.Module):
    """A module around a function: what it owns are parameters and buffers, and a number is an attribute."""

    def __init__(self, owned: dict[str, torch.Tensor], grads: set[str]) -> None:
        super().__init__()
        for name, tensor in owned.items():
            if name in grads:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.scale = 1.0
        self.shift = 0


def draw_program(dice: Dice) -> Program:
    if dice.one_in(4):
        entry = draw_entry(dice)
        return Program(
            model=entry.model,
            inputs=entry.inputs,
            batch_dims=entry.batch_dims,
            rules=entry.rules,
            text=f"{entry.model}, training: {entry.model.training}",
            trains=any(i.grad for i in entry.inputs) and dice.one_in(2),
        )
    trains = dice.one_in(3)
    graph = random_graph(dice, STEPS, train=trains, more=CALLED * 3)
    text, names = graph.source("function")
    if not dice.one_in(2):
        exec(compile(text, "<fuzz>", "exec"), names)
        return Program(
            model=names["function"], inputs=graph.inputs, batch_dims=graph.batch_dims, text=text, trains=trains
        )
    return _as_module(graph, text, names, trains, counts=dice.one_in(3))


def _as_module(graph: RandomGraph, text: str, names: dict[str, Any], trains: bool, counts: bool) -> Program:
    free = [i.name for i in graph.given if not i.owned]
    given = ", ".join(f"self.{i.name}" if i.owned else i.name for i in graph.given)
    text += (
        f"class Model(Wrapped):\n    def forward(self, {', '.join(free)}):\n"
        f"{'        self.calls += 1' if counts else ''}\n"
        f"        first, *rest = function({given})\n"
        f"        return (first * self.scale + self.shift{' + self.calls' if counts else ''}, *rest)\n"
    )
    names["Wrapped"] = Wrapped
    exec(compile(text, "<fuzz>", "exec"), names)
    random = torch.Generator().manual_seed(7)
    owned = {i.name: i.make(Sizes(2, 2), random, {}) for i in graph.given if i.owned}
    grads = {i.name for i in graph.given if i.owned and i.grad}
    if counts:
        owned["calls"] = torch.zeros((), dtype=torch.float64)
    return Program(
        model=names["Model"](owned, grads),
        inputs=[i for i in graph.inputs if not i.owned],
        batch_dims=graph.batch_dims,
        text=text,
        trains=trains,
    )


def copied_model(model: Any) -> Any:
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model
