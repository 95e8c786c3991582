"""Random graphs in the form that Dynamo gives them: torch-level calls over placeholders, with symbolic examples."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dynaflow import SplitModule
from dynaflow.capture.annotations import MARK, mark
from tests.fuzz.builder import Builder
from tests.fuzz.dice import Dice, NotHere
from tests.fuzz.inputs import ROUNDED, WHOLE, Input, draw_inputs
from tests.fuzz.sizes import HINT, POINTS, B, Sizes, T
from tests.fuzz.steps import GENTLE, STEPS, Step
from tests.fuzz.steps.numbers import endless_slope
from tests.fuzz.steps.views import unsafe_parts
from tests.fuzz.steps.writes import write_and_read_the_other

MOST = 8
"""Rows of a batch, and what a length may be."""


@dataclass(slots=True, kw_only=True)
class RandomGraph:
    """A graph, and how to call it."""

    gm: fx.GraphModule
    inputs: list[Input]
    numbers: list[str]
    """The placeholders that stand for the batch's size; they come first."""
    lengths: list[str]
    """Those for the length, which come next."""
    batch_dims: dict[str, int | None] | None
    marks: dict[str, str] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    device: str = "cpu"

    @property
    def given(self) -> list[Input]:
        """The arguments that are tensors."""
        return [i for i in self.inputs if not i.hidden]

    @property
    def rules(self) -> list[Any]:
        """What has to be declared."""
        return [SplitModule("layers.*", splittable=True)] if self.blocks else []

    @property
    def has_batch(self) -> bool:
        return any(i.batch_dim is not None and not i.owned for i in self.given)

    def memory(self, sizes: Sizes, seed: int) -> dict[str, torch.Tensor]:
        """All tensors of a call, made on the CPU; the hidden ones as well."""
        random = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for given in self.inputs:
            made[given.name] = given.make(sizes, random, made).to(self.device)
        return made

    def tensors(self, made: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [made[i.name] for i in self.given]

    def sizes_as_args(self, sizes: Sizes) -> tuple[int, ...]:
        return (*[sizes.batch for _ in self.numbers], *[sizes.length for _ in self.lengths])

    def args(self, sizes: Sizes, seed: int) -> tuple[Any, ...]:
        return (*self.sizes_as_args(sizes), *self.tensors(self.memory(sizes, seed)))

    def draw_sizes(self, dice: Dice) -> Sizes:
        return Sizes(2 + dice.below(MOST - 1), 2 + dice.below(MOST - 1) if self.lengths else 0)

    def is_captured_anew(self, sizes: Sizes, seed: int) -> bool:
        """Whether Dynamo would capture it again for these sizes: it guards on what is a view, where that depends on
        strides (`flatten`), and on slices that exceed their dim."""
        with torch.no_grad():
            return self._looks(sizes, seed) != self._looks(POINTS[0], 0)

    def _looks(self, sizes: Sizes, seed: int) -> list[bool]:
        """Of each call, whether its result is a view of an argument; and of its slices, whether they are cut short."""
        run = _Looking(self.gm)
        run.run(*self.args(sizes, seed))
        return run.found

    def source(self, name: str = "model") -> tuple[str, dict[str, Any]]:
        """The same program as a Python function of the tensors alone, and the names that it uses."""
        names: dict[str, Any] = {"torch": torch, "mark": mark}
        lines = [f"def {name}({', '.join(i.name for i in self.given)}):"]
        lines += [f"    {n} = {self._where(length=False)}" for n in self.numbers]
        lines += [f"    {n} = {self._where(length=True)}" for n in self.lengths]
        for node in self.gm.graph.nodes:
            if node.op == "output":
                lines.append(f"    return {node.args[0]!r}")
            elif node.op != "placeholder":
                line = self._statement(node, names)
                marked = self.marks.get(node.name)
                lines += [f"    with mark({marked!r}):", f"        {line}"] if marked else [f"    {line}"]
        return "\n".join(lines) + "\n", names

    def place_of(self, length: bool) -> tuple[str, int]:
        """Which input has the size of the batch, or the length, and on which dim."""
        for given in self.given:
            for dim, size in enumerate(given.sizes):
                if size == (T if length else B):
                    return given.name, dim
        raise NotHere

    def _where(self, length: bool) -> str:
        name, dim = self.place_of(length)
        return f"{name}.shape[{dim}]"

    def _statement(self, node: fx.Node, names: dict[str, Any]) -> str:
        given = [_written(a) for a in node.args] + [f"{k}={_written(v)}" for k, v in node.kwargs.items()]
        if node.target is operator.setitem:  # Dynamo wants the statement
            return f"{given[0]}[{given[1]}] = {given[2]}"
        if node.op == "call_method":
            return f"{node.name} = {given[0]}.{node.target}({', '.join(given[1:])})"
        name = node.target.__name__  # type: ignore[union-attr]
        if node.target is torch._refs.tensor:
            short, target = "torch_tensor", torch.tensor
        else:  # operator.add and torch.add are two
            short = f"{'op' if getattr(operator, name, None) is node.target else 'torch'}_{name}"
            target = node.target  # type: ignore[assignment]
        names[short] = target
        return f"{node.name} = {short}({', '.join(given)})"

    def __str__(self) -> str:
        text, _ = self.source()
        inputs = ", ".join(map(str, self.inputs))
        blocks = f"; {', '.join(self.blocks)} treat every row by itself" if self.blocks else ""
        return f"# {inputs}; batch_dims={self.batch_dims}{blocks}\n{text}"


class _Looking(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.found: list[bool] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        given = [a for a in map(self.env.get, n.all_input_nodes) if isinstance(a, torch.Tensor)]
        memory = {a.untyped_storage()._cdata for a in given}
        self.found.append(isinstance(result, torch.Tensor) and result.untyped_storage()._cdata in memory)
        if n.target is operator.getitem and given:
            index = fx.node.map_arg(n.args[1], self.env.get)
            cuts = index if isinstance(index, tuple) else (index,)
            self.found += [
                isinstance(cut, slice) and cut.stop is not None and cut.stop > size
                for cut, size in zip(cuts, given[0].shape, strict=False)
            ]
        return result


def _written(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inner = "".join(f"{_written(v)}, " for v in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return repr(value)


def _batch_dims(b: Builder) -> dict[str, int | None] | None:
    """As the user would have to say it; nothing, sometimes, where the default finds the same."""
    free = [i for i in b.inputs if not i.owned and i.sizes and not i.hidden]
    first = [i.sizes[0].at(POINTS[0]) for i in free]
    told: dict[str, int | None] = {i.name: i.batch_dim for i in free if i.batch_dim is not None}
    clear = max(dict.fromkeys(first), key=first.count) == HINT
    if not told:  # or any first dim would be taken for one
        return {}
    if clear and b.dice.one_in(2) and all(i.batch_dim in (0, None) for i in free):
        return None
    return told


def _results(b: Builder) -> tuple[Any, ...]:
    computed = [v for v in b.vars if not v.given]
    results: list[Any] = [(computed or b.vars)[-1].node]
    numbers = [n for n, v in b.values.items() if isinstance(v[0], int)]
    for _ in range(b.dice.below(5)):
        if numbers and b.dice.one_in(10):
            results.append(b.dice.pick(numbers))
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
        if now and "nn_module_stack" not in node.meta:
            marks[node.name] = now
            node.meta["custom"] = {f"{MARK}.{now}": (now, (), None)}
    return marks


def _dtype(dice: Dice, train: bool) -> torch.dtype:
    if not dice.one_in(5):
        return torch.float64
    if train:
        return dice.pick([torch.float64, torch.float32, torch.complex128])
    return dice.pick([torch.float64, torch.complex128, *ROUNDED, *WHOLE])


def random_graph(
    dice: Dice,
    steps: int = 14,
    *,
    train: bool = False,
    gentle: bool = False,
    device: str = "cpu",
    more: Sequence[Step] = (),
) -> RandomGraph:
    """`train`: with inputs that want gradients, and are not written. `gentle`: rows are not mixed, nor inputs written.
    `more`: steps to choose from beside the usual ones."""
    known = GENTLE if gentle else [*STEPS, *more]
    if train:  # what AOTAutograd takes for copies
        known = [s for s in known if s is not unsafe_parts]
    dtype = _dtype(dice, train)
    has_batch, has_length = not dice.one_in(25), dice.one_in(4)
    if dtype in ROUNDED:  # errors grow with every step
        steps = min(steps, 6)
    b = Builder(dice, dtype=dtype, length=has_length, device=device)
    for n in range((2 if dice.one_in(4) else 1) if has_batch else 0):
        b.add_number(f"s{n}", n)
    if has_length:
        b.add_number("s2", 2)
    wanted = draw_inputs(dice, has_batch=has_batch, has_length=has_length, dtype=dtype)
    for given in wanted if train else ():
        given.grad = (given.dtype.is_floating_point or given.dtype.is_complex) and not dice.one_in(4)
    b.add_inputs(wanted)
    todo = 2 + dice.below(steps)
    favourites = [dice.pick(known) for _ in range(2)]  # a graph that does much of one thing finds more
    if not gentle and any(i.view_of for i in wanted):
        favourites.append(write_and_read_the_other)
    for _ in range(3 * todo):
        if todo <= 0:
            break
        try:
            (dice.pick(known) if not dice.one_in(3) else dice.pick(favourites))(b)
            todo -= 1
        except NotHere:
            continue
    results = _results(b)
    if train and dice.one_in(4):
        with contextlib.suppress(NotHere):
            results += (endless_slope(b).node,)
    b.graph.output(results)
    marks = _mark(b)
    return RandomGraph(
        gm=fx.GraphModule(torch.nn.Module(), b.graph),
        inputs=b.inputs,
        numbers=[n.name for n in b.numbers],
        lengths=[n.name for n in b.lengths],
        batch_dims=_batch_dims(b),
        marks=marks,
        blocks=b.blocks,
        device=device,
    )
