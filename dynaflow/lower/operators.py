"""Operators made callable: by Inductor, or as they are. Equal operators share one compilation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.graph import Shape
from dynaflow.capture.probe import concrete

Mode = Literal["inductor", "eager"]
Sizes = dict[sympy.Symbol, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A piece of a graph and what goes into it: numbers first, then values."""

    module: fx.GraphModule
    symbols: tuple[sympy.Expr, ...]
    shapes: tuple[Shape | None, ...]
    free: frozenset[sympy.Symbol]
    """Symbols of the batch: a value may be a slice, so strides that contain one of these are taken as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    call: Callable[..., Any]
    names: dict[sympy.Symbol, sympy.Symbol]
    """The graph's symbols, as the compiler knew them."""
    guards: tuple[sympy.Basic, ...]

    def fits(self, sizes: Sizes) -> bool:
        """Does what the compiler assumed hold for these sizes?"""
        known = {mine: sympy.Integer(sizes[s]) for s, mine in self.names.items() if s in sizes}
        return all(guard.xreplace(known) is not sympy.false for guard in self.guards)


class Operators:
    """The compiled operators of one model. Shared by all its plans and schedulers."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.compiled = 0
        self.shared = 0
        self._lock = threading.Lock()
        self._known: dict[Any, list[_Compiled]] = {}

    def get(self, source: Source, sizes: Sizes) -> Callable[..., Any]:
        """A function of the piece's inputs, fit for inputs of these sizes."""
        if self.mode == "eager":
            return source.module.forward
        key = _key(source)
        with self._lock:
            variants = self._known.setdefault(key, [])
            found = next((v for v in variants if v.fits(sizes)), None)
            if found is not None:
                self.shared += 1
                return found.call
            made = _compile(source, sizes)
            if not made.fits(sizes):  # a size of 1, or one that the compiler singled out
                made = _compile(source, sizes, dynamic=False)
            variants.append(made)
            self.compiled += 1
            return made.call


def _compile(source: Source, sizes: Sizes, dynamic: bool = True) -> _Compiled:
    symbols = _torch.Symbols()
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    used = {s for e in source.symbols for s in e.free_symbols}
    used |= {s for shape in source.shapes if shape for e in (*shape.size, *shape.stride) for s in e.free_symbols}
    hints = {s: max(sizes[s], 2) for s in used}  # 1 would be taken for a constant
    if dynamic:
        names = {s: symbols.new(str(s), hints[s]).node.expr for s in sorted(used, key=str)}

    def number(expr: sympy.Expr) -> Any:
        if not dynamic or not expr.free_symbols:
            return concrete(expr, sizes)
        return symbols.env.create_symintnode(expr.xreplace(names), hint=concrete(expr, hints))

    inputs: list[Any] = [number(e) for e in source.symbols]
    with symbols.mode:
        for i, shape in enumerate(source.shapes):
            if shape is None:
                inputs.append(0)
                continue
            stride = []
            for d, expr in enumerate(shape.stride):
                if dynamic and expr.free_symbols & source.free:
                    # Like a slice of a larger batch, or the compiler would take the layout for contiguous.
                    larger = {s: 2 * n + 1 for s, n in hints.items()}
                    stride.append(symbols.new(f"stride_{i}_{d}", concrete(expr, larger)))
                else:
                    stride.append(number(expr))
            fake = torch.empty_strided([number(e) for e in shape.size], stride, dtype=shape.dtype, device=shape.device)
            inputs.append(fake.requires_grad_() if shape.requires_grad else fake)
    call = _torch.compile_operator(_copy(source.module), inputs, symbols)
    guards = [g for g in symbols.guards() if g.free_symbols <= set(names.values())]
    exact = [sympy.Eq(s, sizes[s]) for s in used] if not dynamic else []
    return _Compiled(call=call, names=names or {s: s for s in used}, guards=(*guards, *exact))


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """The compiler may change the graph that it is given."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _key(source: Source) -> Any:
    device = next((s.device.type for s in source.shapes if s is not None), "cpu")
    ambient = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device))
    if ambient[2]:
        ambient = (*ambient, torch.get_autocast_dtype(device))  # type: ignore[assignment]
    return (_text(source.module), source.symbols, source.shapes, source.free, ambient)


def _text(module: fx.GraphModule) -> tuple[Any, ...]:
    """The graph without its names: equal for equal layers."""
    number = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}

    def show(arg: Any) -> Any:
        return fx.map_arg(arg, lambda n: _Name(number[n]))

    lines: list[Any] = []
    for node in module.graph.nodes:
        target: Any = node.target
        if node.op == "placeholder":
            target = None
        elif node.op == "get_attr":  # a constant: equal only to itself
            target = id(attrgetter(str(node.target))(module))
        elif not isinstance(target, str):
            target = (id(target), str(target))
        lines.append((node.op, target, repr(show(node.args)), repr(show(node.kwargs))))
    return tuple(lines)


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
