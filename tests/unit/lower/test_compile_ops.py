"""Operators made callable: what is compiled, for which sizes, and who shares it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import dynaflow as df
from dynaflow import _torch
from dynaflow.api import engine_of
from dynaflow.capture.captured_graph import Shape
from dynaflow.lower import compile_ops as lowering
from dynaflow.lower.compile_ops import Operators, Source, nameless
from tests.helpers import Scheduler, assert_equal, randn

B, T = (sympy.Symbol(name, integer=True, positive=True) for name in "BT")


def shape(*size: Any, stride: tuple[Any, ...] | None = None, **more: Any) -> Shape:
    """Contiguous, unless told otherwise."""
    if stride is None:
        stride = tuple(sympy.prod(size[d + 1 :]) for d in range(len(size)))
    expressions = (tuple(map(sympy.sympify, numbers)) for numbers in (size, stride))
    size, stride = expressions
    return Shape(size=size, stride=stride, **{"dtype": torch.float32, "device": torch.device("cpu"), **more})


def source(function: Callable[..., Any], *inputs: Any, free: frozenset[sympy.Symbol] = frozenset([B])) -> Source:
    return Source(module=fx.symbolic_trace(function), inputs=inputs, free=free)


def double(x: Tensor) -> tuple[Tensor]:
    return (x * 2,)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The inputs of every compilation. In place of the compiler, the piece runs on fake tensors, for its guards."""
    found: list[list[Any]] = []

    def compile_operator(gm: fx.GraphModule, inputs: list[Any], symbols: Any, *_: Any, **__: Any) -> Callable[..., Any]:
        found.append(inputs)
        with symbols.mode:
            gm(*inputs)
        return _torch.boxed_forward(gm)

    monkeypatch.setattr(_torch, "compile_operator", compile_operator)
    return found


def is_fixed(tensor: Tensor) -> bool:
    return all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


# --- sizes ----------------------------------------------------------------------------------------------------


def test_first_size_for_itself_and_a_second_for_all(made: list[list[Any]]) -> None:
    operators = Operators("inductor")
    piece = source(double, shape(B, 3))
    counts = []
    for size in (4, 4, 6, 7, 9):
        call = operators.get(piece, {B: size})
        counts.append((operators.compiled, operators.shared))
        assert_equal(call([torch.ones(size, 3)])[0], torch.full((size, 3), 2.0))
    assert counts == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)]
    (first,), (second,) = made
    assert is_fixed(first) and first.shape == (4, 3)
    assert not is_fixed(second) and second.shape[1] == 3


def test_first_size_again_is_the_one_made_for_it(made: list[list[Any]]) -> None:
    operators = Operators("inductor")
    piece = source(double, shape(B, 3))
    first, second = operators.get(piece, {B: 4}), operators.get(piece, {B: 6})
    assert operators.get(piece, {B: 4}) == first
    assert operators.get(piece, {B: 60}) == second


def test_size_that_breaks_an_assumption_is_compiled_apart(made: list[list[Any]]) -> None:
    def picky(x: Tensor) -> tuple[Tensor]:
        return (torch.narrow(x, 0, 0, 5),)  # at least five rows

    operators = Operators("inductor")
    piece = source(picky, shape(B, 3))
    for size in (6, 8, 9):
        operators.get(piece, {B: size})
    assert operators.compiled == 2
    with pytest.warns(UserWarning, match="a piece: RuntimeError: start"):
        call = operators.get(piece, {B: 4})
    with pytest.raises(RuntimeError, match="exceeds dimension size"):  # what the piece itself says
        call([torch.ones(4, 3)])


def test_compiler_that_singles_out_a_size(made: list[list[Any]]) -> None:
    """One that looks at the size gives guards: what they forbid is compiled for itself, once."""

    def even(x: Tensor) -> tuple[Tensor]:
        return (x.view(2, -1),)

    operators = Operators("inductor")
    piece = source(even, shape(B, 3), free=frozenset())
    for size in (4, 6, 8, 12):
        operators.get(piece, {B: size})
    assert operators.compiled == 2


@pytest.mark.parametrize("sizes", [(1, 1, 4, 5), (4, 1, 6, 1), (4, 6, 1)])
def test_single_row(made: list[list[Any]], sizes: tuple[int, ...]) -> None:
    """A size of 1 may come first, second or last: it fixes nothing for the others."""
    piece = source(double, shape(B, 3))
    operators = Operators("inductor")
    for size in sizes:
        assert_equal(operators.get(piece, {B: size})([torch.ones(size, 3)])[0], torch.full((size, 3), 2.0))
    assert operators.compiled == 2
    assert made[0][0].shape == (sizes[0], 3) and not is_fixed(made[1][0])


def test_several_symbols(made: list[list[Any]]) -> None:
    operators = Operators("inductor")
    piece = source(double, shape(B, T))
    for sizes in ({B: 4, T: 5}, {B: 4, T: 6}, {B: 7, T: 9}, {B: 4, T: 5}):
        operators.get(piece, sizes)
    assert (operators.compiled, operators.shared) == (2, 2)


def rows_put_together(n: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x + y.sum(0)) * n, y.view(-1, 2, 3)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("number", [12 * B, B, 3 * B * T])
def test_symbols_that_are_only_part_of_sizes(elastic: bool, number: sympy.Expr) -> None:
    """Compiled code reads what a symbol is off its inputs. Where rows were put together with another dim, none of them
    tells, and Inductor would fail."""
    operators = Operators("inductor")
    piece = source(rows_put_together, number, shape(12 * B, 3), shape(24 * B * T, 3), free=frozenset())
    with torch.no_grad():
        for b, t in ((2, 3), (3, 5), (5, 2), (2, 3), (1, 1)):
            sizes = {B: b, T: t}
            if elastic:
                call, conditions = operators.get_for_all(piece, sizes)
                assert all(holds(sizes) for holds in conditions) or (b, t) == (1, 1)
            else:
                call = operators.get(piece, sizes)
            operators.finish()
            n, x, y = int(number.xreplace(sizes)), randn(12 * b, 3), randn(24 * b * t, 3)
            assert_equal(tuple(call([n, x, y])), rows_put_together(n, x, y), tolerance=1e-4)
    assert not operators.failures
    assert operators.compiled <= 3, "for itself, for all, and of size 1"


@pytest.mark.parametrize("elastic", [False, True])
def test_a_model_that_puts_rows_together(elastic: bool) -> None:
    """As OPT does, whose layers work on [rows * tokens, width] from the first addition on."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 8).sin()
            return (self.b(self.a(flat).relu()) + flat).view(x.shape)

    class Uneven(df.OpSchedulerBase):
        def partition(self) -> list[Any]:
            return [df.SplitModule("a"), df.SplitModule("b")]

        def key(self, ctx: df.ScheduleContext) -> Any:
            return "all" if elastic else ctx.batch_size

        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.split(2 if elastic else [1, ctx.batch_size - 1])
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op, lane=op.name)

    Uneven.elastic = elastic
    model = Flat()
    fast = df.compile(model, Uneven())
    with torch.no_grad():
        for rows in (7, 9, 4):
            assert_equal(fast(randn(rows, 12, 8)), model(randn(rows, 12, 8)))
    assert not fast.stats.compile_failures


def test_numbers_among_the_inputs(made: list[list[Any]]) -> None:
    def scaled(n: int, x: Tensor) -> tuple[Tensor]:
        return (x * n,)

    operators = Operators("inductor")
    piece = source(scaled, B, shape(B, 3))
    assert_equal(operators.get(piece, {B: 4})([4, torch.ones(4, 3)])[0], torch.full((4, 3), 4.0))
    assert_equal(operators.get(piece, {B: 5})([5, torch.ones(5, 3)])[0], torch.full((5, 3), 5.0))
    assert made[0][0] == 4 and isinstance(made[1][0], torch.SymInt)


def test_eager_operators_are_not_compiled(made: list[list[Any]]) -> None:
    operators = Operators("eager")
    piece = source(double, shape(B, 3))
    call, box = operators.get(piece, {B: 4}), [torch.ones(4, 3)]
    assert_equal(call(box), (torch.full((4, 3), 2.0),))
    assert not box and call == operators.get(piece, {B: 6})
    assert not made and not operators.writes_into and Operators("inductor").writes_into


# --- who shares -----------------------------------------------------------------------------------------------


def compiled_for(*pieces: Source, size: int = 4) -> int:
    operators = Operators("inductor")
    for piece in pieces:
        operators.get(piece, {B: size, T: 3})
    return operators.compiled


def test_equal_pieces_share_one(made: list[list[Any]]) -> None:
    def other_names(y: Tensor) -> tuple[Tensor]:
        z = y * 2
        return (z,)

    assert compiled_for(source(double, shape(B, 3)), source(other_names, shape(B, 3))) == 1


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.scale,)


@pytest.mark.parametrize(
    "other",
    [
        source(double, shape(B, 3, dtype=torch.float64)),
        source(double, shape(B, 4)),
        source(double, shape(T, 3)),
        source(double, shape(B, 3, stride=(1, B))),
        source(double, shape(B, 3, requires_grad=True)),
        source(double, shape(B, 3), free=frozenset()),
        source(lambda x: (x * 3,), shape(B, 3)),
        source(lambda x: (x + 2,), shape(B, 3)),
        source(lambda x: (2 - x,), shape(B, 3)),
        source(lambda x: (x * 2.0,), shape(B, 3)),
        source(lambda x: (x * 2, x), shape(B, 3)),
    ],
    ids=["dtype", "size", "symbol", "transposed", "grad", "free", "constant", "function", "order", "type", "results"],
)
def test_unequal_pieces_do_not_share(made: list[list[Any]], other: Source) -> None:
    assert compiled_for(source(double, shape(B, 3)), other) == 2


def test_constant_tensors_are_equal_only_to_themselves(made: list[list[Any]]) -> None:
    one, two = Scaled(2.0), Scaled(3.0)
    pieces = [source(module, shape(B, 3)) for module in (one, one, two)]
    assert compiled_for(*pieces[:2]) == 1
    assert compiled_for(*pieces) == 2


def test_modes_do_not_share(made: list[list[Any]]) -> None:
    operators = Operators("inductor")
    piece = source(double, shape(B, 3))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        for _ in range(2):
            with mode():
                operators.get(piece, {B: 4})
    assert (operators.compiled, operators.shared) == (4, 4)


def test_layout_of_a_slice_is_compiled_for_itself_at_first(made: list[list[Any]]) -> None:
    """Rows on dim 1 of a larger batch: the strides are those of the larger one."""
    operators = Operators("inductor")
    piece = source(double, shape(3, B))
    operators.get(piece, {B: 4})
    operators.get(piece, {B: 4}, ((8, 1),))
    assert operators.compiled == 2
    assert made[0][0].stride() == (4, 1) and not isinstance(made[1][0].stride(0), int)
    assert made[1][0].stride(1) == 1, "what does not depend on the batch is known"
    operators.get(piece, {B: 5}, ((64, 1),))
    operators.get(piece, {B: 4}, ((9, 1),))
    assert operators.compiled == 2, "the second is for every stride"


def test_compiling_leaves_the_piece_as_it_is(made: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(gm: fx.GraphModule, inputs: list[Any], symbols: Any, *_: Any, **__: Any) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            node.meta["spoilt"] = True
        gm.graph.erase_node(list(gm.graph.nodes)[-1])
        return lambda x: (x,)

    monkeypatch.setattr(_torch, "compile_operator", spoil)
    piece = source(double, shape(B, 3))
    before = piece.module.code
    Operators("inductor").get(piece, {B: 4})
    assert piece.module.code == before
    assert not any("spoilt" in node.meta for node in piece.module.graph.nodes)


def test_settings_are_for_these_operators_alone() -> None:
    from torch._inductor import config

    seen = []

    class Look(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(config.max_fusion_size)

        def uuid(self) -> None:
            return None

    before = config.max_fusion_size
    piece = source(double, shape(B, 3))
    operators = Operators("inductor")
    operators.settings = {"max_fusion_size": before + 1, "post_grad_custom_post_pass": Look()}
    for get in operators.get, operators.get_for_all:
        get(piece, {B: 4})
    assert seen == [before + 1] * 2
    assert config.max_fusion_size == before
    Operators("inductor").get(piece, {B: 4})
    assert seen == [before + 1] * 2


def test_tensors_on_the_host_count_as_aligned_beside_those_of_a_device() -> None:
    """In this thread, and while it compiles. What that does for kernels is in tests/gpu."""
    from torch._inductor import graph
    from torch._subclasses import FakeTensorMode

    def aligned() -> bool:
        return bool(graph.should_assume_input_aligned(host))

    host = torch.empty(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = torch.empty(4, device="cuda")
    with _torch.inductor.assume_host_inputs_aligned([host, 7, device]), ThreadPoolExecutor(1) as another:
        assert aligned() and not another.submit(aligned).result()
    with _torch.inductor.assume_host_inputs_aligned([host, 7]):
        assert not aligned()


def test_kernels_of_a_device_lie_in_inductors_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with _torch.Symbols().mode:
        host, device = torch.empty(2), torch.empty(2, device="cuda:1")
    _torch.inductor.set_triton_cache_dir([3, host])
    assert "TRITON_CACHE_DIR" not in os.environ
    _torch.inductor.set_triton_cache_dir([3, host, device])
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton" / "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    _torch.inductor.set_triton_cache_dir([device])
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"


ASSUMED: list[Callable[[Any, Any], Any]] = [
    lambda a, b: 2048 * a <= 2**31 - 1,
    lambda a, b: a % 3 == 1,
    lambda a, b: a // 4 != b,
    lambda a, b: (a * b) % 2 == 0,
    lambda a, b: torch.sym_max(a, b) < 40,
    lambda a, b: torch.sym_min(a, 3) * b > 8,
]


@pytest.mark.parametrize("number", range(len(ASSUMED)))
def test_what_was_assumed_of_symbols_is_held_against_their_values(number: int) -> None:
    assume, world = ASSUMED[number], _torch.Symbols()
    symbols = [world.new("a", 13), world.new("b", 6)]
    as_it_was = bool(assume(*symbols))
    assert world.env.guards
    holds = world.assumed([symbol.node.expr for symbol in symbols])
    values = [(a, b) for a in (2, 13, 14, 2**20, 2**20 + 1) for b in (2, 3, 6, 39, 50)]
    expected = [bool(assume(*pair)) is as_it_was for pair in values]
    assert [holds(*pair) for pair in values] == expected and {*expected} == {True, False}
    assert world.assumed([symbols[1].node.expr])(6), "what is assumed of others as well is not its own"


def test_a_graph_is_written_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take long, and every plan asks for them."""
    written = []
    monkeypatch.setattr(lowering, "nameless", lambda module: written.append(module) or nameless(module))
    operators, piece = Operators("inductor"), source(double, shape(B, 3))
    for size in 4, 5, 6:
        operators.get_for_all(piece, {B: size})
    twin = source(double, shape(B, 3))
    operators.get_for_all(twin, {B: 4})
    assert written == [piece.module, twin.module] and operators.compiled == 1


def test_two_threads_compile_once(made: list[list[Any]]) -> None:
    operators = Operators("inductor")
    piece = source(double, shape(B, 3))
    barrier = threading.Barrier(4)

    def get() -> None:
        barrier.wait()
        operators.get(replace(piece), {B: 4})

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (operators.compiled, operators.shared, len(made)) == (1, 3, 1)


# --- by Inductor ----------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two equal layers, and a product whose result is joined."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return x, F.linear(x, self.layers[0].weight)


def layer_by_layer(ctx: df.ScheduleContext) -> None:
    """Parts of one size, so that each operator is called for one."""
    ctx.split(2 if ctx.batch_size > 1 else 1)
    for op in ctx.ops:
        for item in ctx.items(op):
            ctx.execute(item)


def test_compilations_over_many_sizes() -> None:
    model = Twice()
    fast = df.compile(model, Scheduler(layer_by_layer, [df.SplitModule("layers.*")]))
    operators = engine_of(fast).operators
    counts = []
    with torch.no_grad():
        for part in (4, 4, 6, 7, 9, 1):
            x = randn(2 * part, 8)
            assert_equal(fast(x), model(x))
            assert fast.stats.joined_bytes == 0
            counts.append(operators.compiled)
    # The layer, twice; what lies between them; and the end. Each for the first size, then for all: a single row too.
    assert counts == [3, 3, 6, 6, 6, 6]
    assert fast.stats.operators_compiled == 6


def test_slices_whose_batch_is_not_outermost() -> None:
    """The parts of a batch on dim 1 lie apart: results are written there, and read from there, as they lie."""

    def model(x: Tensor) -> Tensor:
        with df.mark("one"):
            x = torch.sin(x) * 2
        with df.mark("two"):
            x = torch.softmax(x, -1)
        return x

    fast = df.compile(model, Scheduler(layer_by_layer), batch_dims={"x": 1})
    counts = []
    with torch.no_grad():
        for part in (4, 6, 7, 1):
            x = randn(3, 2 * part, 8)
            assert_equal(fast(x), model(x))
            assert fast.stats.joined_bytes == 0
            counts.append(engine_of(fast).operators.compiled)
    assert counts == [2, 4, 4, 4]


def test_products_under_autocast() -> None:
    """The result has another dtype than the arguments: what writes it into memory must see to that itself."""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight)

    fast = df.compile(model, Scheduler(layer_by_layer), batch_dims={"x": 0})
    with torch.no_grad():
        x, weight = randn(4, 8), randn(5, 8)
        assert_equal(fast(x, weight), model(x, weight), tolerance=0.02)
    assert fast.stats.joined_bytes == 0


def sums(x: Tensor) -> tuple[Tensor, ...]:
    kept = x.sum((0, 1), keepdim=True)
    return kept, x.amax(1, keepdim=True), x.sum((1, 2), keepdim=True), kept + 1, x.sum(0), x.sum((0, 1))


def test_sums_that_are_returned_keep_their_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor would flatten them (tests/gpu has such a case): the dimensions that are kept stand in a view."""
    traced = make_fx(sums, tracing_mode="fake")(randn(4, 6, 8))
    assert not _torch.fix_reduced_shapes(traced), "the sum over rows of matrices is a matrix, without a view"
    names = [node.target for node in traced.graph.find_nodes(op="output")[0].args[0]]
    assert [name is torch.ops.aten.unsqueeze.default for name in names] == [True, True, True, False, False, False]
    x = randn(4, 6, 8)
    assert_equal(traced(x), sums(x))
    for sizes in (4,), (B,):
        monkeypatch.setattr(_torch, "TORCH", (2, 11))
        given = source(sums, shape(*sizes, 6, 8))
        operators = Operators("inductor")
        call, _ = operators.get_for_all(given, {B: 4})
        operators.finish()
        for found, expected in zip(call([x]), sums(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_sum_behind_an_expansion_that_changes_nothing() -> None:
    """Which Inductor takes for the sum itself."""

    def row(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum((0, 1)), x.sum(0, keepdim=True).expand(1, 6, 8)

    assert not _torch.fix_reduced_shapes(make_fx(row, tracing_mode="fake")(randn(4, 6, 8)))


def test_no_thread_captures_while_an_operator_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing replaces nn.Module.__call__ in all threads: a capture would trace the replacement and guard on it."""
    locked: list[bool] = []
    trace = fx.Tracer.trace

    def traced(self: fx.Tracer, *args: Any, **kwargs: Any) -> Any:
        locked.append(compile_lock._is_owned())  # type: ignore[attr-defined]
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(fx.Tracer, "trace", traced)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        fast = df.compile(model, operators="inductor")
        for rows in (2, 3):
            x = randn(rows, 4)
            assert_equal(fast(x), model(x))
    assert locked and all(locked)
