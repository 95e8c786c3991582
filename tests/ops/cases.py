"""One case: an operator in a graph as Dynamo would capture it, under splits, beside eager.

The graph holds the operator alone, or between copies: then its arguments are cut and its results joined by others, even
where it runs whole itself. Symbolic sizes are read off runs for three sizes of the batch, since a symbolic run would
take most of a case's time.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dynaflow.engine.engine import Engine
from dynaflow.engine.runner import DeferredError
from dynaflow.errors import DynaFlowError
from tests.fuzz.examples import Example
from tests.helpers import Each
from tests.ops.samples import NOT_COMPARED, UNCHECKED, WAYS, Cut, Operator, Sample, fake_mode, is_plain, resized, target

FORMS = ("alone", "between")

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 5e-2,
}


_NOT_CAPTURED: dict[type[Exception], str] = {
    DynamicOutputShapeException: "the size of its result depends on data",
    DataDependentOutputException: "it looks at data",
    UnsupportedOperatorException: "torch can't tell its result's size",
    UnsupportedFakeTensorException: "torch can't trace its arguments",
}


_HELD = (torch.Tensor, bool, int, float, complex, str, types.NoneType, types.EllipsisType, slice, torch.dtype,
         torch.device, torch.layout, torch.memory_format)  # fmt: skip
"""Arguments that a graph can hold."""


class Mismatch(AssertionError):
    """The split run did something else than eager."""


class Uncallable(Exception):
    """Eager itself refuses the sample."""


class NoBatch(Exception):
    """The operator does not take another number of rows."""


class NoGraph(Exception):
    """A graph does not hold such a call: its result is no tensor, or its size depends on data."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case."""

    kind: str
    """"split"; "whole": it ran once for all rows, between operators that were split; "refused": an error says why
    nothing can be split; "plain": the graph ran as it is, unscheduled; "no graph"."""
    reason: str = ""
    independent: bool = False
    """It was not split, though by experiment each row is computed by itself."""


@dataclass(kw_only=True)
class Case:
    """A sample, a way to call the operator, and a reading of the batch."""

    sample: Sample
    cut: Cut
    way: str = "function"

    def __str__(self) -> str:
        dtype = str(self.sample.dtype).removeprefix("torch.")
        return f"{self.sample.operator.name}/{self.way}/{dtype}/{self.sample.number}/{self.cut}"

    @property
    def target(self) -> Callable[..., Any] | str:
        found = target(self.sample.operator, self.way)
        assert found is not None
        return found

    def called(self, way: str) -> Case | None:
        """The same in another way; None if the operator is not called so, or takes no other sizes then."""
        if target(self.sample.operator, way) is None:
            return None
        case = Case(sample=self.sample, cut=self.cut, way=way)
        if way == "out":
            found = self._with_out()
            if found is None:
                return None
            case = Case(sample=found[0], cut=found[1], way=way)
        try:
            case.eager(copy.deepcopy(case.sample.leaves))
            case.example  # noqa: B018
        except Exception:
            return None
        return case

    def _with_out(self) -> tuple[Sample, Cut] | None:
        """The sample with tensors for `out=`, which carry the batch wherever the results do."""
        sample = self.sample
        result = self.eager(copy.deepcopy(sample.leaves))
        outs = tensors_of(result)
        dims = [_carried(values, self.cut.rows) for values in zip(*(tensors_of(r) for r in self.runs), strict=True)]
        args, kwargs = tree_unflatten(sample.leaves, sample.spec)
        if "out" in kwargs or not outs or any(_share(o, t) for o in outs for t in tensors_of(sample.leaves)):
            return None
        blank = [torch.zeros_like(o) for o in outs]
        given = blank[0] if isinstance(result, torch.Tensor) else tuple(blank)
        leaves, spec = tree_flatten((args, {**kwargs, "out": given}))
        more = tuple((len(leaves) - len(outs) + i, d) for i, d in enumerate(dims) if d is not None)
        with_out = Sample(sample.operator, sample.dtype, sample.number, leaves, spec)
        return with_out, Cut(self.cut.rows, self.cut.dims + more, self.cut.numbers)

    # Eager

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sample's own, and others of either parity."""
        return sizes_of(self.cut.rows)

    def eager(self, leaves: list[Any]) -> Any:
        """The operator's result for these arguments."""
        called = self.target
        if isinstance(called, str):
            args, kwargs = tree_unflatten(leaves, self.sample.spec)
            torch.default_generator.manual_seed(0)
            return getattr(args[0], called)(*args[1:], **kwargs)
        return self.sample.call(called, leaves)

    @cached_property
    def runs(self) -> tuple[Any, ...]:
        """Fake results, for each of the sizes."""
        found = []
        with torch.no_grad(), fake_mode():
            for rows in reversed(self.sizes):  # others first: most candidates don't take them
                try:
                    found.append(self.eager(self.sample.at(self.cut, rows)))
                except tuple(_NOT_CAPTURED) as e:
                    raise NoGraph(_NOT_CAPTURED[type(e)]) from e
                except Exception as e:
                    raise NoBatch(f"with {rows} rows: {e}") from e
        return tuple(reversed(found))

    @cached_property
    def example(self) -> Any:
        """What Dynamo would note of the result. Raises NoBatch and NoGraph."""
        example = _example(self.runs, self.cut.rows)
        if not tree_leaves(example):
            raise NoGraph("its result is no tensor")
        return example

    # The graph

    def graph(self, form: str) -> tuple[fx.GraphModule, fx.Node]:
        """The graph, and the operator's node in it. Its inputs are the batch's size and the tensors."""
        sample, rows = self.sample, self.cut.rows
        if strange := {type(leaf).__name__ for leaf in sample.leaves if not isinstance(leaf, _HELD)}:
            raise NoGraph(f"a graph holds no {strange.pop()}")
        carriers = dict(self.cut.dims)
        graph = fx.Graph()
        number = _placeholder(graph, "rows", _symbol(rows), rows)
        nodes = list(sample.leaves)
        known: dict[int, fx.Node] = {}
        for i, leaf in enumerate(sample.leaves):
            if i in self.cut.numbers:
                nodes[i] = number
            elif isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    known[id(leaf)] = _placeholder(graph, f"t{i}", self._input(leaf, carriers.get(i)), leaf)
                nodes[i] = known[id(leaf)]
        if form == "between":
            for i in carriers:
                made = graph.call_method("clone", (nodes[i],))
                made.meta["example_value"] = nodes[i].meta["example_value"]
                nodes[i] = made
        args, kwargs = tree_unflatten(nodes, sample.spec)
        kind = "call_method" if isinstance(self.target, str) else "call_function"
        node = graph.create_node(kind, self.target, tuple(args), kwargs)
        node.meta["example_value"] = self.example
        results = list(_spread(graph, node))
        if form == "between":
            written = [nodes[i] for i in carriers] if self.writes else []
            for place, result in enumerate(results):
                results[place] = graph.call_method("clone", (result,))
                results[place].meta["example_value"] = result.meta["example_value"]
            results += written
        graph.output(tuple(results))
        return fx.GraphModule(torch.nn.Module(), graph), node

    def _input(self, leaf: torch.Tensor, dim: int | None) -> Any:
        if dim is None:
            return Example.sized(_empty(leaf), leaf.shape, leaf.stride()) if is_plain(leaf) else leaf
        layouts = [resized(leaf, dim, rows) for rows in self.sizes]
        sizes, strides = (zip(*found, strict=True) for found in zip(*layouts, strict=True))
        size = [_formula(n, self.cut.rows) for n in sizes]
        try:
            stride = [_formula(n, self.cut.rows) for n in strides]
        except NoGraph:  # its own layout is not dense
            stride = list(leaf.stride())
        return Example.sized(_empty(leaf), size, stride)

    # Under a split

    @cached_property
    def places(self) -> list[int]:
        """The arguments that are tensors, each tensor once."""
        tensors = {i: leaf for i, leaf in enumerate(self.sample.leaves) if isinstance(leaf, torch.Tensor)}
        return sorted({id(leaf): i for i, leaf in reversed(tensors.items())}.values())

    @property
    def splits(self) -> list[int | list[int]]:
        return [2, [1, self.cut.rows - 1]] if self.cut.rows > 2 else [2]

    def judge(self) -> Verdict:
        """Runs the operator under each split, and compares; raises Mismatch."""
        try:
            verdict = self._judge("between")
            if self.writes or self._is_view():
                self._judge("alone")
        except NoGraph as e:
            return Verdict("no graph", str(e))
        if verdict.kind != "split":
            verdict = Verdict(verdict.kind, verdict.reason, self.is_independent())
        return verdict

    @property
    def writes(self) -> bool:
        return self.way != "function" or bool(self.state)

    @cached_property
    def state(self) -> list[int]:
        """The arguments that are written: by experiment, since some schemas don't tell."""
        leaves = copy.deepcopy(self.sample.leaves)
        self.eager(leaves)
        pairs = enumerate(zip(self.sample.leaves, leaves, strict=True))
        return [i for i, (before, after) in pairs if is_plain(before) and not _equal(before, after)]

    def _is_view(self) -> bool:
        """Whether a result shares memory with an argument: between copies nobody would see that."""
        leaves = copy.deepcopy(self.sample.leaves)
        results = tensors_of(self.eager(leaves))
        return any(_share(result, leaf) for result in results for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _judge(self, form: str) -> Verdict:
        gm, node = self.graph(form)
        places, carriers = self.places, dict(self.cut.dims)
        leaves = self.sample.leaves
        engine = Engine(Each(), operators="eager", batch_dims={f"t{i}": carriers.get(i) for i in places})
        error: DynaFlowError | None = None
        try:
            with torch.no_grad():
                runner = engine.backend(gm, [self.cut.rows, *(leaves[i] for i in places)])
                if isinstance(runner, DeferredError):
                    raise runner.error
                for parts in self.splits:
                    engine.planner.set_scheduler(Each(split=parts))
                    given = copy.deepcopy(leaves)
                    torch.default_generator.manual_seed(0)
                    try:
                        found = runner(self.cut.rows, *(given[i] for i in places))
                    except DynaFlowError as e:
                        error = e
                    else:
                        self._compare(form, given, found)
        finally:
            engine.planner.lowerer.threads.close()
        if runner.graph.plain:
            if "changes a tensor's shape in place" not in runner.graph.plain:  # an error of our own would be hidden so
                raise Mismatch(f"ran plainly: {runner.graph.plain}")
            return Verdict("plain", runner.graph.plain)
        (graph,) = runner.graph.partitions.values()
        refusal = runner.graph.probe(graph.batch_axes).facts[node].refusals.get(0)
        refusal = refusal or next((op.refusal for op in graph.ops if op.refusal), None)
        if error is not None and form == "between":
            return Verdict("refused", refusal or str(error).splitlines()[0])
        return Verdict("split") if refusal is None else Verdict("whole", refusal)

    def _compare(self, form: str, given: list[Any], found: Sequence[torch.Tensor]) -> None:
        """The results, and the arguments, which the operator may have written."""
        leaves = copy.deepcopy(self.sample.leaves)
        carriers = [i for i, _ in self.cut.dims]
        if form == "between":
            for i in carriers:
                leaves[i] = leaves[i].clone()
        expected = tensors_of(self.eager(leaves))
        if form == "between":
            expected = [e.clone() for e in expected]
            if self.writes:
                expected += [leaves[i] for i in carriers]
            for i in carriers:  # nobody wrote to what was copied
                leaves[i] = self.sample.leaves[i]
        if len(expected) != len(found):
            raise Mismatch(f"{len(found)} results instead of {len(expected)}")
        values = self.sample.operator.info.name not in NOT_COMPARED
        for place, (e, f) in enumerate(zip(expected, found, strict=True)):
            same(f"result {place}", e, f, values)
        for i, (e, f) in enumerate(zip(leaves, given, strict=True)):
            if isinstance(e, torch.Tensor):
                same(f"argument {i}", e, f)
        inputs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place, (e, f) in enumerate(zip(expected, found, strict=True)):
            for i in inputs:
                if _share(e, leaves[i]) != _share(f, given[i]):
                    raise Mismatch(f"result {place} shares memory with argument {i} in one run and not in the other")

    def is_independent(self) -> bool:
        """Whether parts, run by themselves and joined, give the whole."""
        if self.sample.operator.info.name in UNCHECKED:
            return False
        try:
            whole = self.eager(copy.deepcopy(self.sample.leaves))
            first = self.eager(self.sample.part(self.cut, 0, 1))
            rest = self.eager(self.sample.part(self.cut, 1, self.cut.rows))
            if self.way == "function":
                pairs = zip(*(tensors_of(r) for r in (whole, self.runs[1], first, rest)), strict=True)
                return all(_joins(*tensors) for tensors in pairs)
        except Exception:
            pass
        return False


def _joins(whole: torch.Tensor, more: torch.Tensor, first: torch.Tensor, rest: torch.Tensor) -> bool:
    """`more` is the result for one more row: it tells on which dim the rows are."""
    dims = [d for d in range(whole.dim()) if whole.shape[d] != more.shape[d]]
    if len(dims) > 1 or not whole.numel():
        return False
    joined = [torch.cat([first, rest], dims[0])] if dims else [first, rest]
    try:
        for tensor in joined:
            same("", whole, tensor)
    except Mismatch:
        return False
    return True


# Sizes


def _carried(values: Sequence[torch.Tensor], rows: int) -> int | None:
    """On which dim a result has the batch's size, whatever that is."""
    sizes = zip(*(v.shape for v in values), strict=True)
    return next((d for d, n in enumerate(sizes) if n == sizes_of(rows)), None)


def sizes_of(rows: int) -> tuple[int, int, int]:
    return rows, rows + 1, rows + 4


@cache
def _symbol(rows: int) -> torch.SymInt:
    env, source = ShapeEnv(), ConstantSource("rows")
    symbol = env.create_symbol(rows, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=rows, source=source)  # type: ignore[return-value]


@cache
def _formula(values: tuple[int, ...], rows: int) -> Any:
    """The size that has these values for the sizes of the batch."""
    sizes, s = sizes_of(rows), _symbol(rows)
    if len(set(values)) == 1:
        return values[0]
    forms: list[tuple[Callable[[int], int], Callable[[], Any]]] = [
        (lambda n: n, lambda: s),
        (lambda n: n * n, lambda: s * s),
        (lambda n: n * (n - 1) // 2, lambda: s * (s - 1) // 2),
        (lambda n: n * (n + 1) // 2, lambda: s * (s + 1) // 2),
    ]
    for by in (2, 3, 4):
        for more in range(by):
            forms.append((lambda n, b=by, m=more: (n + m) // b, lambda b=by, m=more: (s + m) // b))  # type: ignore[misc]
    for base, expression in forms:
        bases = [base(n) for n in sizes]
        if bases[2] == bases[0]:
            continue
        times = (values[2] - values[0]) // (bases[2] - bases[0])
        rest = values[0] - times * bases[0]
        if times and all(times * b + rest == v for b, v in zip(bases, values, strict=True)):
            return expression() * times + rest
    raise NoGraph("the size of its result depends on data")


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty([0] * like.dim(), dtype=like.dtype)


def _example(values: tuple[Any, ...], rows: int) -> Any:
    """What Dynamo would note of a value, from what it is for the three sizes."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        if first.layout != torch.strided:
            raise NoGraph("its result is sparse")
        if len({v.dim() for v in values}) > 1:
            raise NoBatch("the number of dims depends on the batch")
        sizes = [_formula(n, rows) for n in zip(*(v.size() for v in values), strict=True)]
        strides = [_formula(n, rows) for n in zip(*(v.stride() for v in values), strict=True)]
        return Example.sized(_empty(first), sizes, strides)
    if isinstance(first, (tuple, list)):
        if len({len(v) for v in values}) > 1:
            raise NoBatch("the number of results depends on the batch")
        return tuple(_example(v, rows) for v in zip(*values, strict=True))
    raise NoGraph("its result is no tensor")


# Nodes


def _placeholder(graph: fx.Graph, name: str, example: Any, real: Any) -> fx.Node:
    """An input, with what Dynamo notes of it."""
    node = graph.placeholder(name)
    guards = types.SimpleNamespace(is_unspecialized_nn_module=lambda: False, is_specialized_nn_module=lambda: False)
    source = types.SimpleNamespace(name=f"L['{name}']", guard_source=guards)
    node.meta["example_value"] = example
    node.meta["grapharg"] = types.SimpleNamespace(source=source, example=real)
    return node


def _spread(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """A node for each tensor in a node's result."""
    example = node.meta["example_value"]
    if not isinstance(example, tuple):
        return [node]
    found = []
    for i, member in enumerate(example):
        picked = graph.call_function(operator.getitem, (node, i))
        picked.meta["example_value"] = member
        found += _spread(graph, picked)
    return found


# Comparison


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.numel() or not two.numel() or torch.strided not in (one.layout, two.layout):
        return False
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """As numbers; nan equals nan."""
    if one.shape != two.shape:
        return False
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def same(what: str, expected: torch.Tensor, found: Any, values: bool = True) -> None:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        raise Mismatch(f"{what} is {found!r} instead of {expected!r}")
    if not values:
        return
    tolerance = _TOLERANCES.get(expected.dtype, 0.0)
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)
    except AssertionError as e:
        raise Mismatch(f"{what} differs: {e}\n{found}\ninstead of\n{expected}") from None


# All cases of an operator


MOST_SAMPLES = 12
"""Of an operator; of more, as many are taken, spread evenly."""


def samples_of(operator: Operator, most: int = MOST_SAMPLES) -> Iterator[Sample]:
    """Of the first dtype, `most` spread evenly; of each other dtype, one."""
    for place, dtype in enumerate(operator.dtypes):
        if place:
            yield from islice(operator.samples(dtype), 1)
        else:
            found = list(operator.samples(dtype))
            count = min(most, len(found))
            yield from (found[i * len(found) // count] for i in range(count))


def cases_of(sample: Sample) -> Iterator[Case]:
    """Each way to call the operator, along each dim that can be a batch. Raises Uncallable."""
    try:
        Case(sample=sample, cut=Cut(0, ())).eager(copy.deepcopy(sample.leaves))
    except Exception as e:
        raise Uncallable(f"{type(e).__name__}: {e}") from e
    for cut in sample.cuts():
        case = Case(sample=sample, cut=cut)
        try:
            case.example  # noqa: B018
        except NoBatch:
            continue
        except NoGraph:
            yield case
            continue
        yield case
        for way in WAYS[1:]:
            if (other := case.called(way)) is not None:
                yield other
