"""Modules that treat every row by itself, and are declared to: what is inside may have the batch in any place."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz.builder import Builder, Var
from tests.fuzz.dice import NotHere
from tests.fuzz.sizes import HINT, of_batch
from tests.fuzz.steps.register import step


def _merged(b: Builder, x: Var, w: Var) -> Any:
    """[.., b, .., h] as rows of h, wherever the batch is among them."""
    flat = b.call("reshape", x, -1, b.size_node(x.sizes(-1)))
    made = b.call(torch.tanh, b.call(torch.matmul, flat, b.call("t", w)))
    return b.call("reshape", made, *b.size_nodes(x))


def _pairwise(b: Builder, x: Var, w: Var) -> Any:
    flat = b.call("flatten", x, 0, -2)
    gate = b.call(torch.sigmoid, b.call(F.linear, flat, w))
    return b.call("view", b.call(operator.mul, flat, gate), *b.size_nodes(x))


def _reordered(b: Builder, x: Var, w: Var) -> Any:
    """Rows are put in another order and back: nothing that an analysis could see."""
    flat = b.call("flip", b.call("flatten", x, 0, -2), 0)
    made = b.call(torch.tanh, b.call(F.linear, flat, w))
    return b.call("view", b.call("flip", made, 0), *b.size_nodes(x))


@step()
def declared_block(b: Builder) -> Any:
    def fits(v: Var) -> bool:
        """The batch once, by itself, and not as the last dim."""
        batches = [s for s in v.shape if of_batch(s)]
        return v.ndim > 1 and batches == [HINT] and not of_batch(v.shape[-1]) and v.value.numel() > 0

    if len(b.blocks) > 2:
        raise NotHere
    x = b.main(fits)
    w = b.main(lambda v: v.shape == (x.shape[-1], x.shape[-1]) and v.batch_dim() is None)
    rule = b.dice.pick([_merged, _pairwise, _reordered])
    return b.inside_a_block(lambda: rule(b, x, w))
