"""A graph in the making: each node runs at once on real tensors, and the shapes found decide what may come next."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tests.fuzz.dice import Dice, NotHere
from tests.fuzz.examples import Example, example_of
from tests.fuzz.inputs import EXACT, WHOLE, Input
from tests.fuzz.sizes import BATCHES, HINT, POINTS, SYMBOLS, formula, of_batch

EVERYTHING = slice(None, None, None)

SHAPE_CHANGES = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "set_"}
"""Calls that change a tensor's own shape. (Dynamo breaks the graph at `resize_`.)"""


@dataclass(slots=True)
class Var:
    """A tensor of the graph in the making."""

    node: fx.Node
    values: tuple[torch.Tensor, ...]
    """For each of the points."""
    writable: bool

    @property
    def value(self) -> torch.Tensor:
        return self.values[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return self.value.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def storage(self) -> int:
        return self.value.untyped_storage()._cdata

    @property
    def given(self) -> bool:
        return self.node.op == "placeholder"

    @property
    def dense(self) -> bool:
        """No two elements share memory, so it may be written."""
        reach = 0
        for stride, size in sorted(zip(self.value.stride(), self.value.shape, strict=True)):
            if size > 1 and stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    def sizes(self, dim: int) -> tuple[int, ...]:
        """For each of the points."""
        return tuple(v.shape[dim] for v in self.values)

    def batch_dim(self) -> int | None:
        return next((d for d, s in enumerate(self.shape) if of_batch(s)), None)

    def other_dims(self) -> list[int]:
        return [d for d, s in enumerate(self.shape) if not of_batch(s)]


class Builder:
    def __init__(self, dice: Dice, *, dtype: torch.dtype, length: bool = False, device: str = "cpu") -> None:
        self.dice, self.dtype, self.device = dice, dtype, device
        self.points = POINTS if length else POINTS[:BATCHES]
        self.graph = fx.Graph()
        self.values: dict[fx.Node, tuple[Any, ...]] = {}
        """What a node gives, for each of the points."""
        self.vars: list[Var] = []
        self.inputs: list[Input] = []
        self.numbers: list[fx.Node] = []
        """The placeholders that stand for the size of the batch."""
        self.lengths: list[fx.Node] = []
        """And for the length."""
        self.blocks: list[str] = []
        """Paths of modules that treat every row by itself."""
        self._module: dict[str, Any] = {}

    @property
    def exact(self) -> bool:
        """Whether a comparison may be made without fear of rounding."""
        return self.dtype in EXACT or self.dtype in WHOLE

    # Inputs

    def add_number(self, name: str, symbol: int) -> None:
        node = self.graph.placeholder(name)
        self.values[node] = tuple(p.length if symbol == 2 else p.batch for p in self.points)
        self._give(node, SYMBOLS[symbol], name, owned=False, example=self.values[node][0])
        (self.lengths if symbol == 2 else self.numbers).append(node)

    def add_inputs(self, wanted: list[Input]) -> None:
        made: list[dict[str, torch.Tensor]] = [{} for _ in self.points]
        symbol: dict[str, int] = {}
        for number, given in enumerate(wanted):
            for tensors, sizes in zip(made, self.points, strict=True):
                random = torch.Generator().manual_seed(number)
                tensors[given.name] = given.make(sizes, random, tensors).to(self.device)
            self.inputs.append(given)
            # What nobody declares is found by its first dim alone, so a second name for the batch stands only there.
            free = number > 0 and given.batch_dim == 0 and not given.hidden
            named = self.dice.below(len(self.numbers)) if free else 0
            symbol[given.name] = symbol[given.view_of] if given.view_of else named
            if given.hidden:
                continue
            node = self.graph.placeholder(given.name)
            values = self.values[node] = tuple(tensors[given.name] for tensors in made)
            self.vars.append(Var(node, values, given.writable and not given.grad))
            example = Example.of(values, symbol[given.name])
            if given.grad:
                example.requires_grad_()
            self._give(node, example, given.name, given.owned, values[0])
        if len(self.numbers) > 1 and 1 not in symbol.values():  # Dynamo passes no size that no input has
            del self.values[self.numbers[-1]]
            self.graph.erase_node(self.numbers.pop())

    def _give(self, node: fx.Node, value: Any, name: str, owned: bool, example: Any) -> None:
        node.meta["example_value"] = value
        guards = types.SimpleNamespace(is_unspecialized_nn_module=lambda: owned, is_specialized_nn_module=lambda: False)
        source = types.SimpleNamespace(name=f"L['{name}']", guard_source=guards)
        node.meta["grapharg"] = types.SimpleNamespace(source=source, example=example)

    # Calls

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Adds a node (a method when `function` is a name) and runs it; the result as a Var, a tuple of them, ..."""
        nodes, named = fx.node.map_aggregate((args, kwargs), lambda a: a.node if isinstance(a, Var) else a)  # type: ignore[misc]
        kind = "call_method" if isinstance(function, str) else "call_function"
        node = self.graph.create_node(kind, function, nodes, named)
        try:
            if function in SHAPE_CHANGES:  # first on tensors of their own: a failure must change nothing
                example_of(self._results(function, nodes, named, torch.Tensor.detach))
            results = self._results(function, nodes, named)
            node.meta["example_value"] = self._example(function, nodes, named, results)
        except (NotHere, RuntimeError, IndexError, ValueError, TypeError, OverflowError, ZeroDivisionError) as e:
            self.graph.erase_node(node)  # no such call on these shapes
            raise NotHere(str(e)) from e
        self.values[node] = results
        if function in SHAPE_CHANGES:
            self._tell_of_new_shapes(results)
        node.meta["source_fn_stack"] = [(node.name, function)]
        node.meta["stack_trace"] = f'  File "fuzz.py", line {len(self.values)}, in model\n    {node.name}\n'
        if self._module:
            node.meta["nn_module_stack"] = dict(self._module)
        if isinstance(results[0], torch.Tensor):
            var = Var(node, results, True)
            self.vars.append(var)
            return var
        if isinstance(results[0], (tuple, list)):
            return tuple(self.call(operator.getitem, node, i) for i in range(len(results[0])) if self._wanted(i))
        return node

    def factory(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of what makes a tensor of nothing."""
        return self.call(function, *args, **kwargs, **({} if self.device == "cpu" else {"device": self.device}))

    def _results(
        self, function: Any, args: Any, kwargs: Any, put: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[Any, ...]:
        return tuple(self._run(function, args, kwargs, i, put) for i in range(len(self.points)))

    def _run(self, function: Any, args: Any, kwargs: Any, which: int, put: Any) -> Any:
        def value(node: fx.Node) -> Any:
            found = self.values[node][which]
            return put(found) if put is not None and isinstance(found, torch.Tensor) else found

        given, keywords = fx.map_arg((args, kwargs), value)
        if isinstance(function, str):
            return getattr(given[0], function)(*given[1:], **keywords)
        return function(*given, **keywords)

    def _example(self, function: Any, args: Any, kwargs: Any, results: tuple[Any, ...]) -> Any:
        if isinstance(results[0], (int, float)) and not isinstance(function, str):  # made of numbers: so is the symbol
            given, named = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
            if not any(isinstance(a, (torch.Tensor, tuple)) for a in given):
                return function(*given, **named)
        return example_of(results)

    def _tell_of_new_shapes(self, changed: tuple[torch.Tensor, ...]) -> None:
        """Dynamo's examples are the tensors of its fake run, which change with it."""
        for node, values in self.values.items():
            if values[0] is changed[0]:
                node.meta["example_value"] = Example.of(values)

    def _wanted(self, place: int) -> bool:
        return place == 0 or not self.dice.one_in(3)

    def inside_a_block(self, make: Callable[[], Var]) -> Var:
        """What is called by `make` is called by a module of its own; nothing but its result is seen from outside."""
        vars_before, nodes_before = list(self.vars), len(self.graph.nodes)
        number = len(self.blocks)
        path = f"L['self']._modules['layers']._modules['{number}']"
        self._module = {f"L['self'].layers.{number}": (path, torch.nn.Module)}
        try:
            result = make()
        except NotHere:
            for node in reversed(list(self.graph.nodes)[nodes_before:]):
                self.graph.erase_node(node)
                del self.values[node]
            self.vars = vars_before
            raise
        finally:
            self._module = {}
        self.blocks.append(f"layers.{number}")
        self.vars = [*vars_before, result]
        return result

    # Choices

    def some(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        """One of the tensors that fit, the latest more likely than others."""
        found = [v for v in self.vars if wanted(v) and (v.value.numel() != 0 or v.given)]
        if not found:
            raise NotHere
        found = found[::-1]
        if not self.dice.one_in(4):  # what carries the batch is of more interest
            found = [v for v in found if v.batch_dim() is not None] or found
        return self.dice.pick(found[:3] if self.dice.one_in(2) else found)

    def main(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        """A tensor of the graph's main dtype."""
        return self.some(lambda v: v.dtype == self.dtype and wanted(v))

    def ordered(self, wanted: Callable[[Var], bool] = lambda v: True) -> Var:
        """One whose elements may be compared, without fear of rounding."""
        if not self.exact:
            raise NotHere
        return self.main(wanted)

    def like(self, shape: tuple[int, ...], exact: bool = False) -> Var:
        """A tensor of the main dtype that broadcasts to `shape`."""

        def fits(v: Var) -> bool:
            if exact:
                return v.shape == shape
            return v.ndim <= len(shape) and all(s in (1, t) for s, t in zip(v.shape[::-1], shape[::-1], strict=False))

        return self.main(fits)

    def constant(self) -> float | int:
        return self.dice.pick([1, 2, 3] if self.dtype in WHOLE else [0.5, -0.25, 0.75])

    def batch(self) -> fx.Node:
        if not self.numbers:
            raise NotHere
        return self.dice.pick(self.numbers)

    def varying(self) -> fx.Node:
        """The size of the batch, or the length."""
        found = [*self.numbers, *self.lengths]
        if not found:
            raise NotHere
        return self.dice.pick(found)

    def size_node(self, sizes: tuple[int, ...]) -> Any:
        """A size, given for each of the points, as the graph would say it: a number, the batch, or a product."""
        found = formula(sizes)
        if not found.f and not found.g:
            return found.rest
        if found.rest or found.f > 1 or found.g > 1 or found.times > 100:
            raise NotHere
        said = [self.batch()] if found.f else []
        said += [self.lengths[0]] if found.g else []
        said += [found.times] if found.times != 1 else []
        node = said[0]
        for other in said[1:]:
            node = self.call(operator.mul, node, other)
        return node

    def size_nodes(self, x: Var) -> list[Any]:
        return [self.size_node(x.sizes(d)) for d in range(x.ndim)]

    def is_whole_batch(self, x: Var, dim: int) -> bool:
        return x.shape[dim] == HINT
