"""Symbolic numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch


def expression(size: Any) -> sympy.Expr:
    """The symbolic expression behind a number, with the symbols that Dynamo unified replaced."""
    symbolic = number(size)
    return sympy.Integer(size) if symbolic is None else symbolic


def number(value: Any) -> sympy.Basic | None:
    """The same of a symbolic number of any type; None for anything else."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    node = value.node
    return node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr


def hinted(value: Any) -> Any:
    """A symbolic number as the number it was at capture, if that is known; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.has_hint():
        return value.node.hint
    return value


class Symbols:
    """A fresh symbolic world (ShapeEnv and fake mode) in which one operator is compiled."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def new(self, name: str, value: int) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self.env.create_symintnode(symbol, hint=value, source=source)  # type: ignore[return-value]

    def assumed(self, symbols: Sequence[sympy.Symbol]) -> Callable[..., bool]:
        """Whether what the compiler assumed about these symbols on the way holds, as a function of their values.

        sympy would take a tenth of a millisecond for each assumption, and there are hundreds in a model.
        """
        from torch.utils._sympy import functions

        guards = [guard.expr for guard in self.env.guards if guard.expr.free_symbols <= set(symbols)]
        if not guards:
            return lambda *values: True
        check = sympy.lambdify(symbols, guards, modules=[vars(functions), "math"])
        return lambda *values: all(check(*values))
