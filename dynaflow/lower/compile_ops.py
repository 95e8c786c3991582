"""Operators made callable: by Inductor, or as they are. Equal operators share one compilation."""

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
from dynaflow.capture.batch_analysis.probe import concrete
from dynaflow.capture.captured_graph import KIND, OpaqueValue, Shape
from dynaflow.capture.op_registry import direct_calls, has_opaque_ops, is_never_captured, is_opaque
from dynaflow.core import forks
from dynaflow.core.fx_graphs import canonical, copy_module
from dynaflow.errors import DynaFlowError
from dynaflow.lower.first_call import Untried
from dynaflow.lower.opaque_ops import Piece, in_turn, pieces_of

Mode = Literal["inductor", "eager"]
Sizes = dict[sympy.Symbol, int]
Condition = Callable[[Sizes], bool]
"""Whether sizes are among those that something was compiled for."""
Captured = Callable[[list[Boxed]], list[Boxed]]
"""Of the compiled pieces of a graph, in order: what is called in their places."""
_Make = Callable[[list[Any], _torch.Symbols], Untried]
"""Compiles a piece for these inputs, in that symbolic world."""
ADVICE = (
    '`dynaflow doctor` says what is missing on this machine; TORCH_LOGS="+inductor" shows the whole error; '
    'operators="eager" leaves the compiler out'
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A piece of a graph and what goes into it, in order."""

    module: fx.GraphModule
    inputs: tuple[Shape | sympy.Expr | OpaqueValue | None, ...]
    """A tensor's shape, a number in the graph's symbols, another thing, or None where nothing is known."""
    static: frozenset[int] = frozenset()
    """Inputs that stay where they are in memory."""
    tensors: bool = True
    """All its results are tensors."""
    writes: bool = True
    """It may write to memory that it is given, other than that for its results: so it can't run twice."""
    name: str = "a piece"
    """For who is told of it."""
    aliased: bool = False
    """It writes an input that others share memory with, which a compiler does not know: it runs as it is."""
    free: frozenset[sympy.Symbol]
    """Symbols of the batch: a value may be a slice, so strides that contain one of these are taken as they come."""

    @cached_property
    def used(self) -> frozenset[sympy.Symbol]:
        """The symbols in sizes, strides and numbers."""
        shapes = [e for i in self.inputs if isinstance(i, Shape) for e in (*i.size, *i.stride)]
        numbers = [i for i in self.inputs if isinstance(i, sympy.Expr)]
        return frozenset(s for e in (*shapes, *numbers) for s in e.free_symbols)

    @cached_property
    def told(self) -> frozenset[sympy.Symbol]:
        """The symbols that are a size or a number by themselves, so that compiled code finds out what they are. Of
        others it knows only what they are part of, such as the 12 * s of rows that were put together."""
        shapes = [e for i in self.inputs if isinstance(i, Shape) for e in i.size]
        return frozenset(e for e in (*shapes, *self.inputs) if isinstance(e, sympy.Symbol))


Strides = tuple[tuple[int, ...] | None, ...]
"""Of each input, as they are: None for what is no tensor."""


class CompilerFailed(Exception):
    """Something that was asked for runs uncompiled from now on: ask again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Compiled:
    untried: Boxed | Untried
    sizes: Sizes | None = None
    """What it was compiled for, if that is all that it fits."""
    strides: Strides | None = None
    symbols: tuple[sympy.Expr, ...] = ()
    """Of the graph's sizes, those that the compiler has symbols for."""
    assumed: Callable[..., bool] = lambda: True
    """Whether what the compiler assumed holds, for values of these symbols."""

    @property
    def call(self) -> Boxed:
        return self.untried.now if isinstance(self.untried, Untried) else self.untried

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
        """Of Inductor's configuration, beside what the process has."""
        self.writes_into = mode == "inductor"
        """Results are written straight into buffers. Uncompiled operators would have to copy them there."""
        self.compiled = 0
        self.shared = 0
        self.failures: list[str] = []
        """What the compiler failed on."""
        self._lock = forks.lock()
        self._forms: dict[tuple[Any, ...], object] = {}
        self._form_of: WeakKeyDictionary[fx.GraphModule, object] = WeakKeyDictionary()
        """What stands for a graph without its names, which is written down once, though every plan asks for it."""
        self._known: dict[Any, list[_Compiled]] = {}
        self._turns: dict[Any, list[tuple[Boxed, frozenset[Condition]]]] = {}
        """Graphs that are compiled in pieces."""
        self.captured: Captured | None = None
        """For an uncut graph whose pieces fit all sizes, and read nothing but the graph's inputs and each other's
        results: so a captured one finds all where it was."""
        self._uncompiled: WeakKeyDictionary[fx.GraphModule, Boxed] = WeakKeyDictionary()
        self._kernels = _torch.Kernels()

    def as_it_is(self, module: fx.GraphModule) -> Boxed:
        """A function of the graph's inputs, uncompiled."""
        if module not in self._uncompiled:
            self._uncompiled[module] = _torch.boxed_forward(module, direct_calls)
        return self._uncompiled[module]

    def get(self, source: Source, sizes: Sizes, strides: Strides | None = None) -> Boxed:
        """A function of the piece's inputs, fit for these sizes and strides (by default, those that the shapes say).

        As torch.compile does, the first size is compiled for itself, and a second one for all that may follow. To be
        called after `finish`.
        """
        if self.mode == "eager" or source.aliased:
            return self.as_it_is(source.module)
        if strides is None:
            strides = tuple(strides_of(i, sizes) if isinstance(i, Shape) else None for i in source.inputs)
        if has_opaque_ops(source.module):
            given = dict(zip(source.module.graph.find_nodes(op="placeholder"), strides, strict=True))
            return self._in_turn(source, lambda p, part: self.get(part, sizes, _strides(p, part, sizes, given)))
        key = self._key(source)
        with self._lock:
            variants = self._known.setdefault(key, [])
            found = next((v for v in variants if v.fits(sizes, strides)), None)
            if found is not None:
                self.shared += 1
                return found.call
            first = not variants

            def compiled(make: _Make) -> _Compiled:
                if not first and (made := _compile_for_all(source, sizes, make)).fits(sizes, strides):
                    return made
                return _compile_for(source, sizes, strides, make)  # also 1, or a size that the compiler singles out

            return self._made(source, variants, compiled).call

    def get_for_all(self, source: Source, sizes: Sizes, uncut: bool = False) -> tuple[Boxed, frozenset[Condition]]:
        """A function for these sizes and all that meet the conditions. To be called after `finish`."""
        if self.mode == "eager" or source.aliased:
            return self.as_it_is(source.module), frozenset()
        if has_opaque_ops(source.module):
            known = self._turns.setdefault((self._key(source), uncut), [])
            if not (fitting := [turn for turn in known if all(holds(sizes) for holds in turn[1])]):
                known += (fitting := [self._in_turn_for_all(source, sizes, self.captured if uncut else None)])
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
        """What the compiler makes of a piece; if it fails, now or later, the piece as it is, for all sizes."""
        mine: list[_Compiled] = []

        def uncompiled(error: Exception) -> _Compiled:
            self._tell(source, error)
            found = _Compiled(untried=self.as_it_is(_torch.with_own_draws(source.module)))
            variants[:] = [*(v for v in variants if v not in mine), found]
            self._turns.clear()
            return found

        def instead(error: Exception) -> Boxed:
            if source.writes:
                raise DynaFlowError(
                    f"the compiler failed on {source.name} when it was called: {_torch.reason(error)}",
                    op=source.name,
                    advice='it writes to memory that it is given, and can\'t start again: say operators="eager"',
                ) from error
            with self._lock:
                return uncompiled(error).call

        def backward(error: Exception, graph: fx.GraphModule) -> Boxed:
            self._tell(source, error)
            return _torch.boxed_forward(_torch.with_own_draws(graph))

        def make(inputs: list[Any], world: _torch.Symbols) -> Untried:
            module = copy_module(source.module)  # the compiler may change the graph that it is given
            call = _torch.compile_operator(
                module, inputs, world, static=source.static, direct=source.tensors, failed=backward
            )
            return Untried(call, instead)

        try:
            with self._kernels.later(uncompiled), _torch.inductor_settings(self.settings):
                mine.append(compiled(make))
        except Exception as e:  # a compiler may raise anything
            return uncompiled(e)
        variants += mine
        self.compiled += 1
        return mine[0]

    def _tell(self, source: Source, error: Exception) -> None:
        """Once for each piece."""
        what = f"{source.name}: {_torch.reason(error)}"
        if what not in self.failures:
            self.failures.append(what)
            warnings.warn(f"dynaflow: the compiler failed on {what}; it runs uncompiled. {ADVICE}", stacklevel=2)

    def look_for_compiler(self, devices: set[str]) -> None:
        """If there is none for these devices, nothing is compiled."""
        if self.mode == "eager" or devices != {"cpu"} or torch.cuda.is_available():
            return
        if why := _torch.no_cpp_compiler():
            self.mode, self.writes_into = "eager", False
            self.failures.append(why)
            warnings.warn(f"dynaflow: there is no C++ compiler ({why}): nothing is compiled. {ADVICE}", stacklevel=2)

    def _in_turn(
        self, source: Source, get: Callable[[Piece, Source], Boxed], captured: Captured | None = None
    ) -> Boxed:
        """The graph piece by piece, with what `get` says for those that are compiled."""
        pieces = pieces_of(source.module, is_opaque if captured is None else is_never_captured)
        parts = [_part(piece, source) for piece in pieces]
        if captured is not None and not _stay_put(pieces, parts):
            return self._in_turn(source, get)
        calls = [get(piece, part) if part else self.as_it_is(piece.module) for piece, part in zip(pieces, parts)]
        if captured is not None:
            compiled = iter(captured([call for call, part in zip(calls, parts) if part]))
            calls = [next(compiled) if part else call for call, part in zip(calls, parts)]
        return in_turn(source.module.graph, pieces, calls)

    def _in_turn_for_all(
        self, source: Source, sizes: Sizes, captured: Captured | None
    ) -> tuple[Boxed, frozenset[Condition]]:
        conditions: set[Condition] = set()

        def get(_: Piece, part: Source) -> Boxed:
            call, some = self.get_for_all(part, sizes)
            conditions.update(some)
            return call

        return self._in_turn(source, get, captured), frozenset(conditions)

    def _key(self, source: Source) -> Any:
        """Equal for sources that can share what is compiled."""
        form = self._form_of.get(source.module)
        if form is None:
            form = self._form_of[source.module] = self._forms.setdefault(nameless(source.module), object())
        devices = {i.device.type for i in source.inputs if isinstance(i, Shape)}
        device = next(iter(devices - {"cpu"}), "cpu")  # a weight that waits on the host does not count
        ambient = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device))
        if ambient[2]:
            ambient = (*ambient, torch.get_autocast_dtype(device))  # type: ignore[assignment]
        return (form, source.inputs, source.static, source.tensors, source.free, ambient)

    def finish(self) -> None:
        """Waits until all that `get` has given can be called. Raises CompilerFailed if some of it can't."""
        with self._lock:
            if not self._kernels.wait():
                raise CompilerFailed


def strides_of(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    return tuple(concrete(e, sizes) for e in shape.stride)


def _part(piece: Piece, source: Source) -> Source | None:
    """A piece to be compiled; None if it can't be."""
    kinds = dict(zip(source.module.graph.find_nodes(op="placeholder"), source.inputs, strict=True))
    inputs = tuple(kinds[node] if node in kinds else node.meta.get(KIND) for node in piece.reads)
    if piece.alone or None in inputs:
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


def _stay_put(pieces: list[Piece], parts: list[Source | None]) -> bool:
    """No piece reads what an operator between them returns, in memory that is new in each call."""
    new = {node for piece, part in zip(pieces, parts, strict=True) if part is None for node in piece.writes}
    return not any(part and new.intersection(piece.reads) for piece, part in zip(pieces, parts, strict=True))


def _strides(piece: Piece, part: Source, sizes: Sizes, given: dict[fx.Node, tuple[int, ...] | None]) -> Strides:
    """Of what a piece takes: as they were `given` for the inputs of the graph, else as the shapes say."""
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
    return _Compiled(untried=make(inputs, world), sizes={s: sizes[s] for s in source.used}, strides=strides)


def _compile_for_all(source: Source, sizes: Sizes, make: _Make) -> _Compiled:
    """For all sizes that the compiler's assumptions allow."""
    world = _torch.Symbols()
    hints = {s: max(sizes[s], 2) for s in source.used}
    larger = {s: 2 * n + 1 for s, n in hints.items()}

    def named(expr: sympy.Expr) -> sympy.Symbol:
        # A size of 1 would be taken for a constant.
        return world.new(str(expr), max(concrete(expr, hints), 2)).node.expr

    names = {s: named(s) for s in sorted(source.told, key=str)}

    def number(expr: sympy.Expr) -> Any:
        if not expr.free_symbols:
            return int(expr)
        if not expr.free_symbols <= source.told:  # a symbol of its own
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
            # Like a slice of a larger batch, or the compiler would take the layout for contiguous.
            stride = [
                world.new(f"stride_{i}_{d}", concrete(e, larger)) if e.free_symbols & source.free else number(e)
                for d, e in enumerate(given.stride)
            ]
            inputs.append(_fake(given, [number(e) for e in given.size], stride))
    call = make(inputs, world)
    return _Compiled(untried=call, symbols=tuple(names), assumed=world.assumed(list(names.values())))


def _other(given: sympy.Expr | OpaqueValue | None, number: Callable[[sympy.Expr], Any]) -> Any:
    """What stands for an input that is no tensor."""
    if isinstance(given, OpaqueValue):
        return given.value
    return 0 if given is None else number(given)


def _fake(shape: Shape, size: Any, stride: Any) -> torch.Tensor:
    fake = torch.empty_strided(size, stride, dtype=shape.dtype, device=shape.device)
    return fake.requires_grad_() if shape.requires_grad else fake


def nameless(module: fx.GraphModule) -> tuple[Any, ...]:
    """The graph without its names: equal for equal layers."""

    def target(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return None
        if node.op == "get_attr":  # a constant: equal only to itself
            return id(attrgetter(str(node.target))(module))
        return node.target if isinstance(node.target, str) else (id(node.target), str(node.target))

    return tuple(canonical(module.graph, target))
