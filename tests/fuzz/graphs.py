"""Random graphs in the form that Dynamo gives them: torch-level calls over placeholders, with symbolic examples.

Every decision is one throw of `Dice`, and throw 0 is the simplest choice, so that hypothesis shrinks well. A graph
is made node by node, each run at once on real tensors: the shapes found decide what may come next. It runs for
three sizes of the batch, and the symbolic sizes are read off those: that takes a hundredth of the time of a run on
symbolic fake tensors, which would be most of a case's.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dynaflow.capture.rules import MARK, mark

T = TypeVar("T")

HINT = 22
"""The batch at capture. Neither it nor its half is a multiple of any other size, so a size tells what it is."""

BATCHES = (HINT, 26, 25)
"""Batch sizes for which a graph runs while it is made: enough to tell a size's formula."""

STATIC = (4, 3, 2, 6)
FLOAT = torch.float64  # rounding must not flip a comparison: then 1e-9 is a meaningful tolerance
EVERYTHING = slice(None, None, None)


class Dice:
    """All the randomness of a case. 0 is always the simplest outcome."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def below(self, n: int) -> int:
        return self.random.randrange(n) if n > 1 else 0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def one_in(self, n: int) -> bool:
        return self.below(n) == n - 1


class NotHere(Exception):
    """The step can't be made with the tensors at hand."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size among the inputs: `times` the batch, or a plain number when `times` is 0."""

    number: int
    batch: bool = False

    def at(self, batch: int) -> int:
        return self.number * batch if self.batch else self.number


@dataclass(slots=True, kw_only=True)
class Input:
    name: str
    sizes: tuple[Size, ...]
    dtype: torch.dtype = FLOAT
    owned: bool = False
    transposed: bool = False
    """Laid out with the last two dims swapped in memory."""
    view_of: str | None = None
    """Shares the memory of this input: everything but its first column."""
    writable: bool = True

    @property
    def batch_dim(self) -> int | None:
        return next((d for d, s in enumerate(self.sizes) if s.batch), None)

    def make(self, batch: int, random: torch.Generator, made: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.view_of is not None:
            base = made[self.view_of]
            return base[:, 1:]
        size = [s.at(batch) for s in self.sizes]
        if self.dtype == torch.int64:
            return torch.randint(0, 2, size, generator=random)
        stored = size[:-2] + size[-2:][::-1] if self.transposed else size
        tensor = torch.rand(stored, generator=random, dtype=self.dtype) * 2 - 1
        return tensor.transpose(-1, -2) if self.transposed else tensor


@dataclass(slots=True, kw_only=True)
class RandomGraph:
    """A graph, and how to call it."""

    gm: fx.GraphModule
    inputs: list[Input]
    numbers: list[str]
    """The placeholders that stand for the batch's size; they come first."""
    batch_dims: dict[str, int | None] | None
    marks: dict[str, str] = field(default_factory=dict)

    def tensors(self, batch: int, seed: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for given in self.inputs:
            made[given.name] = given.make(batch, random, made)
        return list(made.values())

    def args(self, batch: int, seed: int) -> tuple[Any, ...]:
        return (*[batch for _ in self.numbers], *self.tensors(batch, seed))

    def source(self) -> tuple[str, dict[str, Any]]:
        """The same program as a Python function of the tensors alone, and the names that it uses."""
        names: dict[str, Any] = {"torch": torch, "mark": mark}
        first = next(i for i in self.inputs if i.batch_dim is not None)
        lines = [f"def model({', '.join(i.name for i in self.inputs)}):"]
        lines += [f"    {n} = {first.name}.shape[{first.batch_dim}]" for n in self.numbers]
        for node in self.gm.graph.nodes:
            if node.op == "output":
                lines.append(f"    return {node.args[0]!r}")
            elif node.op != "placeholder":
                given = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
                if node.op == "call_method":
                    call = f"{given[0]}.{node.target}({', '.join(given[1:])})"
                else:
                    name = node.target.__name__  # operator.add and torch.add are two
                    short = f"{'op' if getattr(operator, name, None) is node.target else 'torch'}_{name}"
                    names[short] = node.target
                    call = f"{short}({', '.join(given)})"
                if node.target is operator.setitem:  # Dynamo wants the statement
                    line = f"{given[0]}[{given[1]}] = {given[2]}"
                else:
                    line = f"{node.name} = {call}"
                marked = self.marks.get(node.name)
                lines += [f"    with mark({marked!r}):", f"        {line}"] if marked else [f"    {line}"]
        return "\n".join(lines) + "\n", names

    def __str__(self) -> str:
        text, _ = self.source()
        shapes = ", ".join(
            f"{i.name}: {['B' * s.batch + ('' if s.batch and s.number == 1 else str(s.number)) for s in i.sizes]}"
            f"{' owned' * i.owned}{' transposed' * i.transposed}{f' view of {i.view_of}' if i.view_of else ''}"
            for i in self.inputs
        )
        return f"# {shapes}; batch_dims={self.batch_dims}\n{text}"


def _symbols() -> tuple[torch.SymInt, ...]:
    """Two names for the size of the batch, as when nothing in a model ties two inputs together."""
    env, made = ShapeEnv(), []
    for name in ("s0", "s1"):
        source = ConstantSource(name)
        symbol = env.create_symbol(HINT, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        made.append(env.create_symintnode(symbol, hint=HINT, source=source))
    return tuple(made)  # type: ignore[arg-type]


SYMBOLS = _symbols()


@cache
def formula(values: tuple[int, ...], symbol: int = 0) -> Any:
    """The size that has these values for BATCHES."""
    s = SYMBOLS[symbol]
    first = values[0]
    if len(set(values)) == 1:
        return first
    for base, expr in (
        (lambda n: n, lambda: s),
        (lambda n: n // 2, lambda: s // 2),
        (lambda n: (n + 1) // 2, lambda: (s + 1) // 2),
        (lambda n: n * n, lambda: s * s),
        (lambda n: n * (n // 2), lambda: s * (s // 2)),
        (lambda n: n * ((n + 1) // 2), lambda: s * ((s + 1) // 2)),
    ):
        one, two = base(BATCHES[0]), base(BATCHES[1])
        times = (values[1] - first) // (two - one)
        rest = first - times * one
        if all(times * base(n) + rest == v for n, v in zip(BATCHES, values, strict=True)):
            return expr() * times + rest
    raise NotHere(f"no formula for {values}")


class Example(torch.Tensor):
    """Stands for a symbolic fake tensor: its sizes and strides are symbolic."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]

    @staticmethod
    def of(values: Sequence[torch.Tensor], symbol: int = 0) -> Example:
        sizes = tuple(formula(s, symbol) for s in zip(*(v.size() for v in values), strict=True))
        strides = tuple(formula(s, symbol) for s in zip(*(v.stride() for v in values), strict=True))
        made = values[0].as_subclass(Example)
        made.sizes, made.strides = sizes, strides
        return made

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.sizes if dim is None else self.sizes[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.strides if dim is None else self.strides[dim]

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes


@dataclass(slots=True)
class Var:
    """A tensor of the graph in the making."""

    node: fx.Node
    value: torch.Tensor
    """For the first of BATCHES."""
    writable: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return self.value.dim()

    @property
    def floating(self) -> bool:
        return self.value.dtype == FLOAT

    @property
    def storage(self) -> int:
        return self.value.untyped_storage()._cdata

    @property
    def dense(self) -> bool:
        """No two elements share memory, so it may be written."""
        return all(st != 0 or s <= 1 for s, st in zip(self.value.shape, self.value.stride(), strict=True))

    def batch_dim(self) -> int | None:
        return next((d for d, s in enumerate(self.shape) if _of_batch(s)), None)

    def other_dims(self) -> list[int]:
        return [d for d, s in enumerate(self.shape) if not _of_batch(s)]


def _of_batch(size: int) -> bool:
    return size >= HINT // 2 - 1 and (size % (HINT // 2) == 0 or size in (HINT - 1, HINT // 2 - 1))


class Builder:
    def __init__(self, dice: Dice) -> None:
        self.dice = dice
        self.graph = fx.Graph()
        self.values: dict[fx.Node, tuple[Any, ...]] = {}
        """What a node gives, for each of BATCHES."""
        self.vars: list[Var] = []
        self.inputs: list[Input] = []
        self.numbers: list[fx.Node] = []

    # Inputs

    def add_number(self, name: str) -> None:
        node = self.graph.placeholder(name)
        self.values[node] = BATCHES
        self._give(node, SYMBOLS[len(self.numbers)], name, owned=False, example=HINT)
        self.numbers.append(node)

    def add_inputs(self, wanted: list[Input]) -> None:
        made: list[dict[str, torch.Tensor]] = [{} for _ in BATCHES]
        symbol: dict[str, int] = {}
        for number, given in enumerate(wanted):
            for tensors, batch in zip(made, BATCHES, strict=True):
                random = torch.Generator().manual_seed(number)
                tensors[given.name] = given.make(batch, random, tensors)
            values = tuple(tensors[given.name] for tensors in made)
            # What nobody declares is found by its first dim alone, so a second name for the batch stands only there.
            free = number > 0 and given.batch_dim == 0
            named = self.dice.below(len(self.numbers)) if free else 0
            symbol[given.name] = symbol[given.view_of] if given.view_of else named
            node = self.graph.placeholder(given.name)
            self.values[node] = values
            self.inputs.append(given)
            self.vars.append(Var(node, values[0], given.writable))
            self._give(node, Example.of(values, symbol[given.name]), given.name, given.owned, values[0])
        if len(self.numbers) > 1 and 1 not in symbol.values():  # Dynamo passes no size that no input has
            self.graph.erase_node(self.numbers.pop())

    def _give(self, node: fx.Node, value: Any, name: str, owned: bool, example: Any) -> None:
        node.meta["example_value"] = value
        guards = types.SimpleNamespace(
            is_unspecialized_nn_module=lambda: owned, is_specialized_nn_module=lambda: False
        )
        source = types.SimpleNamespace(name=f"L['{name}']", guard_source=guards)
        node.meta["grapharg"] = types.SimpleNamespace(source=source, example=example)

    # Calls

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Adds a node (a method when `function` is a name) and runs it; the result as a Var, a tuple of them, ..."""
        nodes, named = fx.node.map_aggregate((args, kwargs), lambda a: a.node if isinstance(a, Var) else a)  # type: ignore[misc]
        kind = "call_method" if isinstance(function, str) else "call_function"
        node = self.graph.create_node(kind, function, nodes, named)
        try:
            results = tuple(self._run(function, nodes, named, i) for i in range(len(BATCHES)))
            node.meta["example_value"] = _example(results)
        except (NotHere, RuntimeError, IndexError, ValueError, TypeError) as e:  # no such call on these shapes
            self.graph.erase_node(node)
            raise NotHere(str(e)) from e
        self.values[node] = results
        node.meta["stack_trace"] = f'  File "fuzz.py", line {len(self.values)}, in model\n    {node.name}\n'
        if isinstance(results[0], torch.Tensor):
            var = Var(node, results[0], True)
            self.vars.append(var)
            return var
        if isinstance(results[0], (tuple, list)):
            return tuple(self.call(operator.getitem, node, i) for i in range(len(results[0])) if self._wanted(i))
        return node

    def _run(self, function: Callable[..., Any] | str, args: Any, kwargs: Any, which: int) -> Any:
        given, keywords = fx.map_arg((args, kwargs), lambda n: self.values[n][which])
        if isinstance(function, str):
            return getattr(given[0], function)(*given[1:], **keywords)
        return function(*given, **keywords)

    def _wanted(self, place: int) -> bool:
        return place == 0 or not self.dice.one_in(3)

    # Choices

    def some(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        """One of the tensors that fit, the latest more likely than others."""
        found = [v for v in self.vars if v.value.numel() != 0 and wanted(v)]
        if not found:
            raise NotHere
        found = found[::-1]
        if not self.dice.one_in(4):  # what carries the batch is of more interest
            found = [v for v in found if v.batch_dim() is not None] or found
        return self.dice.pick(found[:3] if self.dice.one_in(2) else found)

    def float(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        return self.some(lambda v: v.floating and wanted(v))

    def like(self, shape: tuple[int, ...], exact: bool = False) -> Var:
        """A float tensor that broadcasts to `shape`."""

        def fits(v: Var) -> bool:
            if exact:
                return v.shape == shape
            return v.ndim <= len(shape) and all(
                s in (1, t) for s, t in zip(v.shape[::-1], shape[::-1], strict=False)
            )

        return self.float(fits)

    def batch(self) -> fx.Node:
        return self.dice.pick(self.numbers)

    def size_node(self, size: int) -> Any:
        """A size as the graph would say it: a number, the batch, or a product."""
        if not _of_batch(size):
            return size
        times = size // HINT
        if size % HINT or times > 100:
            raise NotHere
        return self.batch() if times == 1 else self.call(operator.mul, self.batch(), times)


def _example(values: tuple[Any, ...]) -> Any:
    """What Dynamo would note as the node's example."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return Example.of(values)
    if isinstance(first, (tuple, list)):
        if len({len(v) for v in values}) > 1:
            raise NotHere("the number of results depends on the batch")
        return tuple(_example(v) for v in zip(*values, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return formula(values)
    return first


Step = Callable[[Builder], Any]
STEPS: list[Step] = []


def step(weight: int = 1) -> Callable[[Step], Step]:
    def register(function: Step) -> Step:
        STEPS.extend([function] * weight)
        return function

    return register


# Row by row


@step(4)
def pointwise(b: Builder) -> Any:
    x = b.float()
    function = b.dice.pick([torch.tanh, torch.sigmoid, torch.neg, torch.sin, "relu", "abs", "clone", "contiguous"])
    return b.call(function, x)


@step(4)
def binary(b: Builder) -> Any:
    x = b.float()
    y = b.like(x.shape)
    function = b.dice.pick([operator.add, operator.sub, torch.add, torch.maximum, operator.mul])
    made = b.call(function, x, y)
    return b.call(torch.tanh, made) if function is operator.mul else made


@step()
def scaled(b: Builder) -> Any:
    return b.call(b.dice.pick([operator.mul, operator.add]), b.float(), b.dice.pick([0.5, -0.25, 0.75]))


@step(2)
def linear(b: Builder) -> Any:
    x = b.float(lambda v: v.ndim > 0 and not _of_batch(v.shape[-1]))
    w = b.float(lambda v: v.ndim == 2 and v.shape[-1] == x.shape[-1] and not _of_batch(v.shape[0]))
    return b.call(F.linear, x, w)


@step(2)
def along_another_dim(b: Builder) -> Any:
    x = b.float(lambda v: bool(v.other_dims()))
    d = b.dice.pick(x.other_dims())
    kind = b.dice.below(6)
    if kind == 0:
        return b.call(torch.softmax, x, d)
    if kind == 1:
        return b.call("sum", x, d)
    if kind == 2:
        return b.call("mean", x, d, keepdim=True)
    if kind == 3:
        return b.call(torch.cumsum, x, d)
    if kind == 4:
        return b.call("flip", x, d)
    return b.call("amax", x, d)


@step()
def layer_norm(b: Builder) -> Any:
    x = b.float(lambda v: v.ndim > 1 and not _of_batch(v.shape[-1]))
    return b.call(F.layer_norm, x, (x.shape[-1],))


@step()
def several_results(b: Builder) -> Any:
    x = b.float(lambda v: any(s > 1 and not _of_batch(s) for s in v.shape))
    d = b.dice.pick([d for d in x.other_dims() if x.shape[d] > 1])
    kind = b.dice.below(4)
    if kind == 0:
        return b.call("topk", x, 2, d)
    if kind == 1:
        return b.call("max", x, d)
    if kind == 2:
        return b.call("sort", x, d)
    return b.call(torch.var_mean, x, d)


@step()
def attention(b: Builder) -> Any:
    q = b.float(lambda v: v.ndim in (3, 4) and not _of_batch(v.shape[-1]) and not _of_batch(v.shape[-2]))
    k = b.like(q.shape, exact=True)
    return b.call(F.scaled_dot_product_attention, q, k, q)


@step()
def bmm(b: Builder) -> Any:
    x = b.float(lambda v: v.ndim == 3)
    y = b.like(x.shape, exact=True)
    made = b.call(torch.matmul, x, b.call("transpose", y, -1, -2))
    return b.call(torch.tanh, made)


@step()
def joined(b: Builder) -> Any:
    x = b.float(lambda v: v.ndim > 0)
    y = b.like(x.shape, exact=True)
    d = b.dice.pick(x.other_dims()) if x.other_dims() and not b.dice.one_in(4) else b.dice.below(x.ndim)
    return b.call(b.dice.pick([torch.cat, torch.stack]), [x, y], d)


@step()
def chosen(b: Builder) -> Any:
    x = b.float()
    y = b.like(x.shape)
    return b.call(torch.where, b.call(operator.gt, x, b.dice.pick([0.0, 0.1])), x, y)


@step()
def picked(b: Builder) -> Any:
    index = b.some(lambda v: v.value.dtype == torch.int64 and v.ndim > 0)
    kind = b.dice.below(3)
    if kind == 0:
        weight = b.float(lambda v: v.ndim == 2 and not _of_batch(v.shape[0]) and v.shape[0] > 2)
        return b.call(F.embedding, b.call("clamp", index, 0, 1), weight)
    if kind == 1:
        x = b.float(lambda v: v.ndim == index.ndim and len(v.other_dims()) > 0)
        d = b.dice.pick(x.other_dims())
        return b.call(torch.gather, x, d, b.call("clamp", index, 0, x.shape[d] - 1))
    return b.call("to", index, FLOAT)


# Views


@step(5)
def view(b: Builder) -> Any:
    x = b.some(lambda v: v.ndim > 0)
    kind = b.dice.below(9)
    others = x.other_dims()
    if kind == 0:
        return b.call("transpose", x, b.dice.below(x.ndim), b.dice.below(x.ndim))
    if kind == 1:
        return b.call("unsqueeze", x, b.dice.below(x.ndim + 1))
    if kind == 2:
        ones = [d for d in others if x.shape[d] == 1]
        return b.call("squeeze", x, b.dice.pick(ones)) if ones else None
    if kind == 3:
        ones = [d for d in others if x.shape[d] == 1]
        if not ones:
            raise NotHere
        grown = b.dice.pick(ones)
        return b.call("expand", x, *[3 if d == grown else -1 for d in range(x.ndim)])
    if kind == 4:
        return b.call("permute", x, *reversed(range(x.ndim)))
    if not others:
        raise NotHere
    d = b.dice.pick(others)
    n = x.shape[d]
    before = (EVERYTHING,) * d
    if kind == 5:
        return b.call(operator.getitem, x, (*before, b.dice.below(n)))
    if kind == 6:
        return b.call(operator.getitem, x, (*before, slice(b.dice.below(n), None, b.dice.pick([None, 2]))))
    if kind == 7:
        return b.call("narrow", x, d, b.dice.below(n), 1)
    return b.call("chunk" if b.dice.one_in(2) else "unbind", x, *([2, d] if b.dice.one_in(2) else [d]))


@step(3)
def reshaped(b: Builder) -> Any:
    x = b.some(lambda v: v.ndim > 0)
    kind = b.dice.below(5)
    if kind == 0:
        return b.call("reshape", x, b.size_node(x.shape[0]), -1)
    if kind == 1:
        if x.ndim < 2:
            raise NotHere
        return b.call("flatten", x, 0, 1)
    if kind == 2:
        if x.ndim < 2:
            raise NotHere
        d = b.dice.below(x.ndim - 1)
        merged = b.size_node(x.shape[d] * x.shape[d + 1])
        rest = [b.size_node(s) for s in x.shape]
        return b.call(b.dice.pick(["reshape", "view"]), x, *rest[:d], merged, *rest[d + 2 :])
    if kind == 3:
        d = b.dice.below(x.ndim)
        for n in (3, 2):
            if x.shape[d] % n == 0 and (x.shape[d] % HINT == 0) <= (x.shape[d] // n % HINT == 0):
                return b.call("unflatten", x, d, (-1, n) if b.dice.one_in(2) else (b.size_node(x.shape[d] // n), n))
        raise NotHere
    return b.call("view", x, -1)


@step()
def along_the_batch(b: Builder) -> Any:
    """Views that cut or pick along the batch."""
    x = b.some(lambda v: v.batch_dim() is not None)
    d = x.batch_dim()
    assert d is not None
    before = (EVERYTHING,) * d
    kind = b.dice.below(5)
    if kind == 0:
        return b.call(operator.getitem, x, (*before, 0))
    if kind == 1:
        return b.call(operator.getitem, x, (*before, slice(1, None, None)))
    if kind == 2:
        return b.call(operator.getitem, x, (*before, slice(None, b.batch(), None)))
    if kind == 3:
        half = b.call(operator.floordiv, b.batch(), 2)
        return b.call(operator.getitem, x, (*before, slice(None, half, None)))
    return b.call("chunk", x, 2, d)


# Rows mixed


@step(2)
def mixing(b: Builder) -> Any:
    x = b.float(lambda v: v.batch_dim() is not None)
    d = x.batch_dim()
    assert d is not None
    kind = b.dice.below(10)
    if kind == 0:
        return b.call(torch.softmax, x, d)
    if kind == 1:
        return b.call("mean", x, d)
    if kind == 2:
        return b.call(torch.cumsum, x, d)
    if kind == 3:
        return b.call("flip", x, d)
    if kind == 4:
        return b.call("sort", x, d)
    if kind == 5:
        return b.call(operator.sub, x, b.call("mean", x, d, keepdim=True))
    if kind == 6:
        y = b.float(lambda v: v.ndim == 2 and _of_batch(v.shape[0]))
        return b.call(torch.tanh, b.call(torch.matmul, y, b.call("t", y)))
    if kind == 7:
        return b.call("roll", x, 1, d)
    if kind == 8:
        return b.call(b.dice.pick(["mean", "sum", "max"]), x)
    index = b.call(torch.arange, b.batch())
    return b.call("index_select", x, d, index) if x.shape[d] == HINT else None


@step(2)
def factory(b: Builder) -> Any:
    kind = b.dice.below(8)
    size = b.dice.pick(STATIC)
    if kind == 0:
        return b.call(torch.zeros, b.batch(), size, dtype=FLOAT)
    if kind == 1:
        return b.call(torch.arange, b.batch(), dtype=b.dice.pick([FLOAT, torch.int64]))
    if kind == 2:
        return b.call(torch.full, (b.batch(),), 0.5, dtype=FLOAT)
    if kind == 3:
        return b.call("new_ones", b.float(), b.batch(), size)
    if kind == 4:
        return b.call(torch.ones, size, dtype=FLOAT)
    if kind == 5:
        return b.call(torch.zeros_like, b.float())
    if kind == 6:
        return b.call(torch.full, (size,), b.batch(), dtype=FLOAT)
    return b.call("expand", b.call("unsqueeze", b.float(lambda v: v.batch_dim() is None), 0), b.batch(), *[-1] * 9)


@step()
def size_as_number(b: Builder) -> Any:
    x = b.float()
    kind = b.dice.below(4)
    if kind == 0:
        return b.call(operator.truediv, x, b.batch())
    if kind == 1:
        return b.call(operator.mul, x, b.call(operator.truediv, 1.0, b.batch()))
    if kind == 2:
        return b.call(torch.tanh, b.call(operator.add, x, b.call(operator.sub, b.batch(), 1)))
    return b.call(torch.add, x, x, alpha=b.call(operator.truediv, 0.5, b.batch()))


# Writes


def _apart(x: Var, y: Var) -> bool:
    """Writing one can't change the other while it is read."""
    return x.node is y.node or x.storage != y.storage


def _target(b: Builder) -> Var:
    owners = {v.storage for v in b.vars if not v.writable}
    return b.float(lambda v: v.dense and v.storage not in owners)


def _source(b: Builder, x: Var, shape: tuple[int, ...]) -> Var:
    y = b.like(shape)
    if not _apart(x, y):
        y = b.call("clone", y)
    return y


@step(4)
def write(b: Builder) -> Any:
    x = _target(b)
    kind = b.dice.below(6)
    if kind == 0:
        return b.call("add_", x, _source(b, x, x.shape))
    if kind == 1:
        return b.call("mul_", x, 0.5)
    if kind == 2:
        return b.call("copy_", x, _source(b, x, x.shape))
    if kind == 3:
        return b.call("tanh_", b.call("mul_", x, _source(b, x, x.shape)))
    if kind == 4:
        return b.call(b.dice.pick(["zero_", "sigmoid_", "neg_"]), x)
    return b.call("add_", x, 1.0)


@step(2)
def write_part(b: Builder) -> Any:
    x = _target(b)
    if not x.ndim:
        raise NotHere
    others = x.other_dims()
    d = b.dice.pick(others) if others and not b.dice.one_in(5) else b.dice.below(x.ndim)
    kind = b.dice.below(5)
    n = 2 if _of_batch(x.shape[d]) else x.shape[d]
    before = (EVERYTHING,) * d
    if kind == 0:
        rest = x.shape[:d] + x.shape[d + 1 :]
        value: Any = 0.25 if b.dice.one_in(3) else _source(b, x, rest)
        return b.call(operator.setitem, x, (*before, b.dice.below(n)), value)
    if kind == 1:
        return b.call(operator.setitem, x, (*before, slice(b.dice.below(n), None, None)), 0.5)
    if kind == 2:
        index = b.call(torch.arange, 1, 2 if n > 1 else 1)
        part = (*x.shape[:d], index.shape[0], *x.shape[d + 1 :])
        if not index.shape[0]:
            raise NotHere
        source = b.like(part, exact=True)
        return b.call("index_copy_", x, d, index, source if _apart(x, source) else b.call("clone", source))
    if kind == 3:
        halves = b.call("chunk", x, 2, d)
        return b.call("add_", halves[0], halves[-1]) if len(halves) > 1 else None
    part_of = b.call(operator.getitem, x, (*before, b.dice.below(n)))
    return b.call("add_", part_of, _source(b, x, part_of.shape))


@step()
def write_to_copy_or_view(b: Builder) -> Any:
    """Which of the two it is depends on the strides, and may be another for a few rows than for all."""
    x = _target(b)
    if x.ndim and b.dice.one_in(2):
        x = b.call("transpose", x, 0, b.dice.below(x.ndim))
    kind = b.dice.below(3)
    if kind == 0:
        y = b.call("contiguous", x)
    elif kind == 1 and x.ndim > 1:
        y = b.call("flatten", x, 0, 1)
    else:
        y = b.call("reshape", x, b.size_node(x.shape[0]) if x.ndim else 1, -1)
    return b.call("add_", b.dice.pick([y, x]), 1.0)


@step()
def count(b: Builder) -> Any:
    counter = b.some(lambda v: v.writable and v.ndim == 0 and v.node.op == "placeholder")
    return b.call("add_", counter, 1)


@step()
def running_mean(b: Builder) -> Any:
    x = b.float(lambda v: v.batch_dim() == 0 and v.ndim == 2)
    state = b.float(lambda v: v.node.op == "placeholder" and v.writable and v.shape == (x.shape[1],))
    return b.call("add_", b.call("mul_", state, 0.5), b.call("mean", x, 0))


# A whole graph


def _inputs(b: Builder) -> None:
    dice = b.dice
    for n in range(2 if dice.one_in(4) else 1):
        b.add_number(f"s{n}")
    batch, rows = Size(1, True), dice.pick(STATIC)
    width = dice.pick(STATIC)
    wanted = [Input(name="x0", sizes=(batch, Size(width)))]
    for n in range(dice.below(3)):
        shape = dice.pick([(batch, Size(width)), (batch, Size(rows), Size(width)), (batch,), (Size(rows), batch)])
        wanted.append(Input(name=f"x{n + 1}", sizes=shape, transposed=len(shape) > 1 and dice.one_in(4)))
    if dice.one_in(2):
        wanted.append(Input(name="cache", sizes=(batch, Size(6), Size(width))))
    if dice.one_in(3):
        wanted.append(Input(name="cache_t", sizes=(Size(6), batch, Size(width))))
    if dice.one_in(2):
        wanted.append(Input(name="w", sizes=(Size(width), Size(width)), owned=True, writable=False))
    if dice.one_in(3):
        wanted.append(Input(name="shared", sizes=(Size(rows), Size(width))))
    if dice.one_in(3):
        wanted.append(Input(name="counter", sizes=(), owned=not dice.one_in(2)))
    if dice.one_in(3):
        wanted.append(Input(name="mean", sizes=(Size(width),), owned=True))
    if dice.one_in(3):
        wanted.append(Input(name="ids", sizes=(batch, Size(2)), dtype=torch.int64, writable=False))
    bases = [i for i in wanted if len(i.sizes) > 1 and not i.sizes[1].batch and i.sizes[1].number > 1 and not i.owned]
    if dice.one_in(8):
        base = dice.pick([i for i in bases if i.sizes[0].batch])
        rest = (base.sizes[0], Size(base.sizes[1].number - 1), *base.sizes[2:])
        wanted.append(Input(name="part", sizes=rest, view_of=base.name, transposed=base.transposed, dtype=base.dtype))
    b.add_inputs(wanted)


def _batch_dims(b: Builder) -> dict[str, int | None] | None:
    """As the user would have to say it; nothing, sometimes, where the default finds the same."""
    free = [i for i in b.inputs if not i.owned and i.sizes]
    first = [i.sizes[0].at(HINT) for i in free]
    told = {i.name: i.batch_dim for i in free if i.batch_dim is not None}
    clear = max(dict.fromkeys(first), key=first.count) == HINT
    if clear and b.dice.one_in(2) and all(i.batch_dim in (0, None) for i in free):
        return None
    return told  # type: ignore[return-value]


def _results(b: Builder) -> tuple[Any, ...]:
    computed = [v for v in b.vars if v.node.op != "placeholder"]
    results: list[Any] = [(computed or b.vars)[-1].node]
    for _ in range(b.dice.below(5)):
        if b.dice.one_in(12):
            results.append(b.batch())
        else:
            results.append(b.some().node)
    return tuple(results)


def _mark(b: Builder) -> dict[str, str]:
    """Claims in runs, or scattered over the graph so that they interleave."""
    names = ["a", "b", "c", "d"][: b.dice.below(5)]
    nodes = [n for n in b.graph.nodes if n.op.startswith("call")]
    marks: dict[str, str] = {}
    if not names:
        return marks
    scattered = b.dice.one_in(2)
    now = ""
    for node in nodes:
        if scattered or b.dice.one_in(3):
            now = b.dice.pick(["", *names])
        if now:
            marks[node.name] = now
            node.meta["custom"] = {f"{MARK}.{now}": (now, (), None)}
    return marks


def random_graph(dice: Dice, steps: int = 20) -> RandomGraph:
    b = Builder(dice)
    _inputs(b)
    wanted = 2 + dice.below(steps)
    for _ in range(3 * wanted):
        if wanted <= 0:
            break
        try:
            dice.pick(STEPS)(b)
            wanted -= 1
        except NotHere:
            continue
    b.graph.output(_results(b))
    marks = _mark(b)
    gm = fx.GraphModule(torch.nn.Module(), b.graph)
    return RandomGraph(
        gm=gm,
        inputs=b.inputs,
        numbers=[n.name for n in b.numbers],
        batch_dims=_batch_dims(b),
        marks=marks,
    )


