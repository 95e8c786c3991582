"""Compiles operators with Inductor, or runs them eagerly. Equal operators share one compilation.

Contract
    `Operators.get` takes a graph with its inputs (`Source`), sizes and strides. Returns a function of a list of inputs,
    which it may empty. The given graph is unchanged.
    Call `finish` before any such function: it waits for the compiler, and raises CompilerFailed if something that was
    returned runs uncompiled after all; then call `get` again.
    When the compiler fails, the operator runs uncompiled, with a warning and a line in `failures`. If it fails only at
    the first call of an operator that writes to its inputs, that raises a DynaFlowError: it can't be called again.

Steps of `get`
    1. In eager mode, return the graph's own forward.
    2. Split a graph with opaque operators, and compile its subgraphs (see `opaque_ops`).
    3. Return what was compiled for an equal graph before, if it fits the sizes and strides.
    4. Compile: the first size for itself, a second one for all sizes, as torch.compile does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow._torch import Boxed
from dynaflow.capture.captured_graph import KIND, OpaqueValue, Shape, concrete
from dynaflow.capture.op_registry import direct_calls, has_opaque_ops, is_never_captured, is_opaque
from dynaflow.core import forks
from dynaflow.core.fx_graphs import canonical, copy_module
from dynaflow.errors import DynaFlowError
from dynaflow.lower.first_call import FirstCall
from dynaflow.lower.opaque_ops import Subgraph, run_in_order, split_at_opaque

Mode = Literal["inductor", "eager"]
Sizes = dict[sympy.Symbol, int]
Condition = Callable[[Sizes], bool]
"""Whether an operator was compiled for these sizes."""
Captured = Callable[[list[Boxed]], list[Boxed]]
"""Takes the compiled subgraphs of a graph, in order; returns what is called in their place."""
_Make = Callable[[list[Any], _torch.Symbols], FirstCall]
"""Compiles a graph for fake inputs whose sizes are these symbols."""
ADVICE = (
    '`dynaflow doctor` says what is missing on this machine; TORCH_LOGS="+inductor" shows the whole error; '
    'operators="eager" turns the compiler off'
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A graph to be compiled, and its inputs, in order."""

    module: fx.GraphModule
    inputs: tuple[Shape | sympy.Expr | OpaqueValue | None, ...]
    """A tensor's shape, a number as an expression, an opaque value, or None if nothing is known."""
    static: frozenset[int] = frozenset()
    """Positions of inputs with a static address."""
    tensors: bool = True
    """All its results are tensors."""
    writes: bool = True
    """It may write to its inputs, other than output buffers: so a call can't be repeated."""
    name: str = "a piece"
    """For messages."""
    aliased: bool = False
    """It writes an input that shares memory with another input. A compiler can't know that, so it is not compiled."""
    free: frozenset[sympy.Symbol]
    """Symbols of the batch. A value may be a slice of a batch, so strides that contain one of these are dynamic."""

    @cached_property
    def used(self) -> frozenset[sympy.Symbol]:
        """The symbols in sizes, strides and numbers."""
        shapes = [e for i in self.inputs if isinstance(i, Shape) for e in (*i.size, *i.stride)]
        numbers = [i for i in self.inputs if isinstance(i, sympy.Expr)]
        return frozenset(s for e in (*shapes, *numbers) for s in e.free_symbols)

    @cached_property
    def plain_symbols(self) -> frozenset[sympy.Symbol]:
        """The symbols that are a size or a number by themselves, so that compiled code can read their values. Others
        only occur inside expressions, such as the 12 * s of merged rows."""
        shapes = [e for i in self.inputs if isinstance(i, Shape) for e in i.size]
        return frozenset(e for e in (*shapes, *self.inputs) if isinstance(e, sympy.Symbol))


Strides = tuple[tuple[int, ...] | None, ...]
"""The strides of each input; None for inputs that are not tensors."""


class CompilerFailed(Exception):
    """An operator that was returned before runs uncompiled from now on: call `get` again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Compiled:
    entry: Boxed | FirstCall
    sizes: Sizes | None = None
    """The only sizes that it fits; None if it was compiled for all."""
    strides: Strides | None = None
    symbols: tuple[sympy.Expr, ...] = ()
    """The sizes that are symbols to the compiler."""
    assumed: Callable[..., bool] = lambda: True
    """Whether the compiler's assumptions hold for values of these symbols."""

    @property
    def call(self) -> Boxed:
        return self.entry.now if isinstance(self.entry, FirstCall) else self.entry

    def fits(self, sizes: Sizes, strides: Strides) -> bool:
        if self.sizes is not None:
            return self.strides == strides and all(sizes[s] == n for s, n in self.sizes.items())
        return self.holds(sizes)

    def holds(self, sizes: Sizes) -> bool:
        return self.assumed(*[sizes[e] if e.is_Symbol else concrete(e, sizes) for e in self.symbols])


class Operators:
    """The compiled operators of one model. Shared by all its plans and schedulers."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.settings: Mapping[str, Any] = {}
        """Additional Inductor configuration."""
        self.writes_into = mode == "inductor"
        """Results are written into given buffers. Uncompiled operators would have to copy."""
        self.compiled = 0
        self.shared = 0
        self.failures: list[str] = []
        """The operators on which the compiler failed, with the reason."""
        self._lock = forks.lock()
        self._forms: dict[tuple[Any, ...], object] = {}
        self._form_of: WeakKeyDictionary[fx.GraphModule, object] = WeakKeyDictionary()
        """Caches the canonical form of a graph (see `nameless`), which every plan needs."""
        self._known: dict[Any, list[_Compiled]] = {}
        self._sequences: dict[Any, list[tuple[Boxed, frozenset[Condition]]]] = {}
        """By key: graphs with opaque operators."""
        self.captured: Captured | None = None
        """For an uncut graph whose subgraphs fit all sizes and read only the graph's inputs and each other's results:
        their addresses stay the same, so they can be captured."""
        self._uncompiled: WeakKeyDictionary[fx.GraphModule, Boxed] = WeakKeyDictionary()
        self._kernels = _torch.Kernels()

    def as_it_is(self, module: fx.GraphModule) -> Boxed:
        """A function of the graph's inputs, uncompiled."""
        if module not in self._uncompiled:
            self._uncompiled[module] = _torch.boxed_forward(module, direct_calls)
        return self._uncompiled[module]

    def get(self, source: Source, sizes: Sizes, strides: Strides | None = None) -> Boxed:
        """A function of the inputs for these sizes and strides (by default, those of the shapes).

        As with torch.compile, the first size is static, and a second one is dynamic. Call it after `finish`.
        """
        # 1.
        if self.mode == "eager" or source.aliased:
            return self.as_it_is(source.module)
        if strides is None:
            strides = tuple(strides_of(i, sizes) if isinstance(i, Shape) else None for i in source.inputs)
        # 2.
        if has_opaque_ops(source.module):
            given = dict(zip(source.module.graph.find_nodes(op="placeholder"), strides, strict=True))
            return self._in_order(source, lambda p, part: self.get(part, sizes, _strides(p, part, sizes, given)))
        # 3.
        key = self._key(source)
        with self._lock:
            variants = self._known.setdefault(key, [])
            found = next((v for v in variants if v.fits(sizes, strides)), None)
            if found is not None:
                self.shared += 1
                return found.call
            # 4.
            first = not variants

            def compiled(make: _Make) -> _Compiled:
                if not first and (made := _compile_for_all(source, sizes, make)).fits(sizes, strides):
                    return made
                return _compile_for(source, sizes, strides, make)  # also for 1, or a size that is specialised on

            return self._made(source, variants, compiled).call

    def get_for_all(self, source: Source, sizes: Sizes, uncut: bool = False) -> tuple[Boxed, frozenset[Condition]]:
        """A function for these sizes and all that meet the conditions. Call it after `finish`."""
        if self.mode == "eager" or source.aliased:
            return self.as_it_is(source.module), frozenset()
        if has_opaque_ops(source.module):
            known = self._sequences.setdefault((self._key(source), uncut), [])
            if not (fitting := [turn for turn in known if all(holds(sizes) for holds in turn[1])]):
                known += (fitting := [self._in_order_for_all(source, sizes, self.captured if uncut else None)])
            return fitting[0]
        with self._lock:
            variants = self._known.setdefault(self._key(source), [])
            found = next((v for v in variants if v.sizes is None and v.holds(sizes)), None)
            if found is None:
                found = self._made(source, variants, lambda make: _compile_for_all(source, sizes, make))
            else:
                self.shared += 1
            return found.call, frozenset([found.holds])

    def _made(
        self, source: Source, variants: list[_Compiled], compiled: Callable[[_Make], _Compiled]
    ) -> _Compiled:
        """Compiles a graph. If the compiler fails, now or later, the graph runs uncompiled for all sizes."""
        mine: list[_Compiled] = []

        def uncompiled(error: Exception) -> _Compiled:
            self._report(source, error)
            found = _Compiled(entry=self.as_it_is(_torch.with_compiled_draws(source.module)))
            variants[:] = [*(v for v in variants if v not in mine), found]
            self._sequences.clear()
            return found

        def instead(error: Exception) -> Boxed:
            if source.writes:
                raise DynaFlowError(
                    f"the compiler failed on {source.name} when it was called: {_torch.compiler_message(error)}",
                    op=source.name,
                    advice='it writes to its inputs, so it can\'t be repeated uncompiled: pass operators="eager"',
                ) from error
            with self._lock:
                return uncompiled(error).call

        def backward(error: Exception, graph: fx.GraphModule) -> Boxed:
            self._report(source, error)
            return _torch.boxed_forward(_torch.with_compiled_draws(graph))

        def make(inputs: list[Any], world: _torch.Symbols) -> FirstCall:
            module = copy_module(source.module)  # the compiler may change its graph
            call = _torch.compile_operator(
                module, inputs, world, static=source.static, direct=source.tensors, failed=backward
            )
            return FirstCall(call, instead)

        try:
            with self._kernels.later(uncompiled), _torch.inductor_settings(self.settings):
                mine.append(compiled(make))
        except Exception as e:  # a compiler may raise anything
            return uncompiled(e)
        variants += mine
        self.compiled += 1
        return mine[0]

    def _report(self, source: Source, error: Exception) -> None:
        """Warns once for each operator."""
        what = f"{source.name}: {_torch.compiler_message(error)}"
        if what not in self.failures:
            self.failures.append(what)
            warnings.warn(f"dynaflow: the compiler failed on {what}; it runs uncompiled. {ADVICE}", stacklevel=2)

    def look_for_compiler(self, devices: set[str]) -> None:
        """Turns compilation off if there is no compiler for these devices."""
        if self.mode == "eager" or devices != {"cpu"} or torch.cuda.is_available():
            return
        if why := _torch.no_cpp_compiler():
            self.mode, self.writes_into = "eager", False
            self.failures.append(why)
            warnings.warn(f"dynaflow: there is no C++ compiler ({why}): nothing is compiled. {ADVICE}", stacklevel=2)

    def _in_order(
        self, source: Source, get: Callable[[Subgraph, Source], Boxed], captured: Captured | None = None
    ) -> Boxed:
        """The graph as a sequence of subgraphs. `get` compiles those that are not opaque."""
        pieces = split_at_opaque(source.module, is_opaque if captured is None else is_never_captured)
        parts = [_part(piece, source) for piece in pieces]
        if captured is not None and not _stay_put(pieces, parts):
            return self._in_order(source, get)
        calls = [get(piece, part) if part else self.as_it_is(piece.module) for piece, part in zip(pieces, parts)]
        if captured is not None:
            compiled = iter(captured([call for call, part in zip(calls, parts) if part]))
            calls = [next(compiled) if part else call for call, part in zip(calls, parts)]
        return run_in_order(source.module.graph, pieces, calls)

    def _in_order_for_all(
        self, source: Source, sizes: Sizes, captured: Captured | None
    ) -> tuple[Boxed, frozenset[Condition]]:
        conditions: set[Condition] = set()

        def get(_: Subgraph, part: Source) -> Boxed:
            call, some = self.get_for_all(part, sizes)
            conditions.update(some)
            return call

        return self._in_order(source, get, captured), frozenset(conditions)

    def _key(self, source: Source) -> Any:
        """Equal for sources that can share one compilation."""
        form = self._form_of.get(source.module)
        if form is None:
            form = self._form_of[source.module] = self._forms.setdefault(nameless(source.module), object())
        devices = {i.device.type for i in source.inputs if isinstance(i, Shape)}
        device = next(iter(devices - {"cpu"}), "cpu")  # ignore weights that are offloaded to the host
        ambient = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device))
        if ambient[2]:
            ambient = (*ambient, torch.get_autocast_dtype(device))  # type: ignore[assignment]
        return (form, source.inputs, source.static, source.tensors, source.free, ambient)

    def finish(self) -> None:
        """Waits until all functions that `get` returned can be called. Raises CompilerFailed if one can't."""
        with self._lock:
            if not self._kernels.wait():
                raise CompilerFailed


def strides_of(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    return tuple(concrete(e, sizes) for e in shape.stride)


def _part(piece: Subgraph, source: Source) -> Source | None:
    """A subgraph as a Source; None if it can't be compiled."""
    kinds = dict(zip(source.module.graph.find_nodes(op="placeholder"), source.inputs, strict=True))
    inputs = tuple(kinds[node] if node in kinds else node.meta.get(KIND) for node in piece.reads)
    if piece.opaque or None in inputs:
        return None
    static = {node for i, node in enumerate(kinds) if i in source.static}
    return Source(
        module=piece.module,
        inputs=inputs,
        static=frozenset(i for i, node in enumerate(piece.reads) if node in static),
        tensors=all(isinstance(node.meta.get(KIND), Shape) for node in piece.writes),
        writes=source.writes,
        name=f"a part of {source.name}",
        free=source.free,
    )


def _stay_put(pieces: list[Subgraph], parts: list[Source | None]) -> bool:
    """Whether no compiled subgraph reads a result of an uncompiled one, whose address is new in each call."""
    new = {node for piece, part in zip(pieces, parts, strict=True) if part is None for node in piece.writes}
    return not any(part and new.intersection(piece.reads) for piece, part in zip(pieces, parts, strict=True))


def _strides(piece: Subgraph, part: Source, sizes: Sizes, given: dict[fx.Node, tuple[int, ...] | None]) -> Strides:
    """The strides of a subgraph's inputs: as `given` for inputs of the graph, else those of the shapes."""
    shapes = zip(piece.reads, part.inputs, strict=True)
    return tuple(given[n] if n in given else strides_of(i, sizes) if isinstance(i, Shape) else None for n, i in shapes)


def _compile_for(source: Source, sizes: Sizes, strides: Strides, make: _Make) -> _Compiled:
    """For these sizes and strides alone."""
    world = _torch.Symbols()
    inputs: list[Any] = []
    with world.mode:
        for given, stride in zip(source.inputs, strides, strict=True):
            if isinstance(given, Shape):
                inputs.append(_fake(given, [concrete(e, sizes) for e in given.size], stride))
            else:
                inputs.append(_other(given, lambda e: concrete(e, sizes)))
    return _Compiled(entry=make(inputs, world), sizes={s: sizes[s] for s in source.used}, strides=strides)


def _compile_for_all(source: Source, sizes: Sizes, make: _Make) -> _Compiled:
    """For all sizes that the compiler's assumptions allow."""
    world = _torch.Symbols()
    hints = {s: max(sizes[s], 2) for s in source.used}
    larger = {s: 2 * n + 1 for s, n in hints.items()}

    def named(expr: sympy.Expr) -> sympy.Symbol:
        # A size of 1 would be specialised on.
        return world.new(str(expr), max(concrete(expr, hints), 2)).node.expr

    names = {s: named(s) for s in sorted(source.plain_symbols, key=str)}

    def number(expr: sympy.Expr) -> Any:
        if not expr.free_symbols:
            return int(expr)
        if not expr.free_symbols <= source.plain_symbols:  # a symbol of its own
            if expr not in names:
                names[expr] = named(expr)
            expr, hint = names[expr], max(concrete(expr, hints), 2)
        else:
            expr, hint = expr.xreplace(names), concrete(expr, hints)
        return world.env.create_symintnode(expr, hint=hint)

    inputs: list[Any] = []
    with world.mode:
        for i, given in enumerate(source.inputs):
            if not isinstance(given, Shape):
                inputs.append(_other(given, number))
                continue
            # As for a slice of a larger batch, or the compiler would assume a contiguous layout.
            stride = [
                world.new(f"stride_{i}_{d}", concrete(e, larger)) if e.free_symbols & source.free else number(e)
                for d, e in enumerate(given.stride)
            ]
            inputs.append(_fake(given, [number(e) for e in given.size], stride))
    call = make(inputs, world)
    return _Compiled(entry=call, symbols=tuple(names), assumed=world.assumed(list(names.values())))


def _other(given: sympy.Expr | OpaqueValue | None, number: Callable[[sympy.Expr], Any]) -> Any:
    """The example value of an input that is not a tensor."""
    if isinstance(given, OpaqueValue):
        return given.value
    return 0 if given is None else number(given)


def _fake(shape: Shape, size: Any, stride: Any) -> torch.Tensor:
    fake = torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)
    return fake.requires_grad_() if shape.requires_grad else fake


def nameless(module: fx.GraphModule) -> tuple[Any, ...]:
    """The canonical form of a graph, without names: equal for equal layers."""

    def target(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return None
        if node.op == "get_attr":  # a constant: equal only to itself
            return id(attrgetter(str(node.target))(module))
        return node.target if isinstance(node.target, str) else (id(node.target), str(node.target))

    return tuple(canonical(module.graph, target))
