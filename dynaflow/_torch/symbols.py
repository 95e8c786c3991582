"""Symbolic numbers, and environments for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch


def expression(size: Any) -> sympy.Expr:
    """The expression of a symbolic or plain integer, with unified symbols replaced. Seen on 2.11 and 2.13."""
    symbolic = number(size)
    return sympy.Integer(size) if symbolic is None else symbolic


def number(value: Any) -> sympy.Basic | None:
    """The expression of a symbolic number of any type; None for anything else."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    node = value.node
    return node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr


def hint_of(value: Any) -> Any:
    """The hint of a symbolic number: its value in the capture, if known. Anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.has_hint():
        return value.node.hint
    return value


class Symbols:
    """A new ShapeEnv and fake mode, in which one operator is compiled. Seen on 2.11 and 2.13."""

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
        """The guards that the compiler added on these symbols, as a function of their values.

        Compiled, as sympy takes a tenth of a millisecond per guard, and a model has hundreds.
        """
        from torch.utils._sympy import functions

        guards = [guard.expr for guard in self.env.guards if guard.expr.free_symbols <= set(symbols)]
        if not guards:
            return lambda *values: True
        check = sympy.lambdify(symbols, guards, modules=[vars(functions), "math"])
        return lambda *values: all(check(*values))
