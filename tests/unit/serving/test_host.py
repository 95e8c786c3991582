"""A system in small that serves requests, and keeps what it knows of a batch in a global."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynaflow as df
from dynaflow import _torch, api
from dynaflow.capture import op_registry
from dynaflow.serving.host import ROW_AWARE, HostedGraph, RaggedBatch, SerializableGraph, inject_row_ranges
from dynaflow.serving.scheduler import Serving, serving
from dynaflow.strategies.auto import Auto
from tests.helpers import Each, count_elastic, graph_of, notes_of

MOST = 3


class System:
    """What its operators look at: a number for each row."""

    numbers: Tensor
    batch: Step


@torch.library.custom_op("dynaflow_tests::system_scale", mutates_args=())
def scale(x: Tensor, layer_name: str) -> Tensor:
    assert len(System.numbers) == len(x)
    return x * System.numbers[:, None]


@scale.register_fake
def _(x: Tensor, layer_name: str) -> Tensor:
    return torch.empty_like(x)


class Step(RaggedBatch):
    """Requests of some lengths, and how many numbers were cut for parts of them."""

    def __init__(self, rows: int, lengths: Sequence[int], why_whole: str = "") -> None:
        super().__init__(rows, lengths, chunk=8, max_parts=MOST, why_whole=why_whole)
        self.numbers = System.numbers

    def part(self, start: int, stop: int) -> Tensor:
        return self.numbers[start:stop]

    @contextlib.contextmanager
    def enter(self, part: Tensor) -> Iterator[None]:
        System.numbers = part
        try:
            yield
        finally:
            System.numbers = self.numbers


def within(start: int, stop: int) -> Any:
    return System.batch.within(start, stop)


def model(x: Tensor) -> Tensor:
    return scale(torch.relu(scale(x + 1, "first")), "second") - 1


class Graph(SerializableGraph):
    def scheduled(self, gm: fx.GraphModule, inputs: list[Any]) -> HostedGraph:
        server: Server = self.host
        options = {"scheduler": server.scheduler, "operators": server.operators}
        source = inject_row_ranges(gm, inputs, server.asks, within)
        assert source is not None
        engine = api.new_engine(None, {**options, "facts": lambda: System.batch.facts, "batch_dims": source.dims})
        server.hosted.append(HostedGraph(engine.backend(gm, inputs), source, engine))
        return server.hosted[-1]


class Server:
    """A model in the system, under a scheduler."""

    def __init__(
        self,
        scheduler: df.OpSchedulerBase,
        operators: str = "eager",
        model: Callable[[Tensor], Tensor] = model,
        lead: int = 0,
    ) -> None:
        self.lengths: list[int] = []
        self.why_whole = ""
        self.hosted: list[HostedGraph] = []
        self.scheduler, self.operators, self.lead = scheduler, operators, lead
        self.model = model
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.compiled: Any = torch.compile(model, backend=self.captured, dynamic=True)

    def asks(self, op: _torch.OpOverload, given: Mapping[str, Any]) -> bool:
        self.asked.append((op._opname, dict(given)))
        return op._opname.startswith("system")

    def captured(self, gm: fx.GraphModule, _: Any) -> SerializableGraph:
        return Graph.captured(gm, self)

    def keep(self, path: Path) -> None:
        """Captures it for a system that writes it to disk."""
        with torch._dynamo.config.patch(enable_aot_compile=True), torch.no_grad():
            whole = torch.compile(self.model, backend=self.captured, dynamic=True, fullgraph=True)
            self.compiled = whole.aot_compile(((torch.randn(6, 4),), {}))  # type: ignore[attr-defined]
        self.compiled.save_compiled_function(str(path))

    def find(self, path: Path) -> None:
        with path.open("rb") as file:
            self.compiled = torch.compiler.load_compiled_function(file, f_globals=globals())
        self.compiled._artifacts.compiled_fn.finalize_loading(self)

    def serve(self, lengths: Sequence[int], padding: int = 0, why_whole: str = "") -> list[int]:
        """Compares what comes of it, and returns the rows of the parts that it was run in."""
        rows = sum(lengths) + padding
        x, System.numbers = torch.randn((1,) * self.lead + (rows, 4)), torch.randn(rows)
        System.batch = Step(rows, lengths, why_whole)
        with torch.no_grad():
            torch.testing.assert_close(self.compiled(x), self.model(x))
        return [stop - start for start, stop in sorted(System.batch.parts)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    System.numbers, System.batch = torch.zeros(0), None  # type: ignore[assignment]
    System.batch = Step(2, [1, 1])
    with op_registry.declarations_restored():
        yield


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_operators_find_what_belongs_to_their_rows(operators: str) -> None:
    server = Server(serving(Each(split=2), MOST), operators)
    assert server.serve([3, 3]) == [3, 3]
    assert server.serve([1, 5, 2, 4]) == [6, 6]
    assert server.serve([1, 1, 1, 1], padding=4) == [3, 5]
    assert server.serve([40]) == [16, 24]  # between pieces
    assert server.serve([3, 4], why_whole="because") == []
    (hosted,) = server.hosted
    assert hosted in HostedGraph.alive
    assert hosted.stats.runs == 5 and len(hosted.plans) >= 3
    told = getattr(torch.ops, ROW_AWARE)
    assert all(op_registry.by_rows_of(getattr(told, name).default) is not None for name in told)


def beside(x: Tensor) -> Tensor:
    """The rows are on dim 1, as in a model that takes batches of one sequence."""
    return (scale(torch.relu(x + 1).view(-1, 4), "only").view(x.shape) * 2).transpose(1, 2)


def test_rows_may_be_on_another_dim() -> None:
    server = Server(serving(Each(split=2), MOST), model=beside, lead=1)
    assert server.serve([3, 3]) == [3, 3]
    assert server.serve([1, 5, 2, 4]) == [6, 6]
    (hosted,) = server.hosted
    graph = graph_of(hosted.engine)
    assert not hosted.stats.plain_graphs and all(op.splittable for op in graph.ops)


@torch.library.custom_op("dynaflow_tests::system_pick", mutates_args=())
def pick(table: Tensor, x: Tensor) -> Tensor:
    """Asks as well; the first tensor that it gets has no rows."""
    return x * table.sum() * System.numbers[:, None]


@pick.register_fake
def _(table: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


TABLE = torch.ones(7, 2)


def test_rows_are_those_of_an_input_that_varies() -> None:
    server = Server(serving(Each(split=2), MOST), model=lambda x: pick(TABLE, x + 1) - 1)
    assert server.serve([3, 3]) == [3, 3] and server.serve([4, 4]) == [4, 4]


def test_who_asks_is_judged_by_what_it_is_given() -> None:
    server = Server(serving(Each(split=2), MOST), model=lambda x: scale(x, "first"))
    server.serve([3, 3])
    ((name, given),) = server.asked
    assert name == "system_scale" and given["layer_name"] == "first" and isinstance(given["x"], Tensor)


@pytest.mark.parametrize("operators", ["eager", "inductor"])
def test_a_graph_is_kept_on_disk(tmp_path: Path, operators: str) -> None:
    """By torch; another process has a scheduler of its own for it."""
    first = Server(serving(Each(split=2), MOST), operators)
    first.keep(tmp_path / "kept")
    assert first.serve([3, 3]) == [3, 3]
    second = Server(serving(Each(split=3), MOST), operators)
    second.find(tmp_path / "kept")
    assert second.serve([3, 3, 3]) == [3, 3, 3]
    assert second.serve([1, 1, 1, 1, 1, 1], padding=4) == [3, 2, 5]
    assert second.serve([3, 4], why_whole="because") == []
    (one,), (other,) = first.hosted, second.hosted
    assert len(other.plans) == 3 and not other.stats.plain_graphs
    assert (one.stats.operators_compiled > 0) == (other.stats.operators_compiled > 0) == (operators == "inductor")


def test_what_can_not_be_kept_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gm: fx.GraphModule) -> bytes:
        raise ValueError("it can't be written")

    monkeypatch.setattr("dynaflow.serving.host.dumps", refuse)
    server = Server(serving(Each(split=2), MOST))
    with pytest.raises(ValueError, match="it can't be written"):
        server.keep(tmp_path / "kept")
    assert server.serve([3, 3]) == [3, 3]


def test_torch_reads_each_source_of_a_kept_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.package import SourceInfo

    read = []

    def add_code(sources: Any, code: Any) -> None:
        read.append(code)
        sources.inlined_sources.add(code.co_name)

    monkeypatch.setattr(SourceInfo, "add_code", add_code)
    _torch.cache_traced_sources()
    _torch.cache_traced_sources()
    first, second = SourceInfo(set()), SourceInfo(set())
    for code in (model.__code__, within.__code__, model.__code__, model.__code__):
        first.add_code(code)
    second.add_code(model.__code__)
    assert read == [model.__code__, within.__code__]
    assert (first.inlined_sources, second.inlined_sources) == ({"model", "within"}, {"model"})


def test_one_plan_serves_all_batches_of_about_the_same_size() -> None:
    server = Server(serving(Each(split=2), MOST))
    for lengths in ([9, 9, 3, 3], [4, 5, 6, 7], [2, 20, 2, 4], [7, 7, 7, 3]):
        assert len(server.serve(lengths)) == 2
    (hosted,) = server.hosted
    assert hosted.stats.scheduler_calls == 1
    server.serve([1, 1, 1, 1])  # another phase
    server.serve([9, 9, 3, 3], why_whole="because")
    server.serve([4, 9, 3, 3], why_whole="because")
    assert hosted.stats.scheduler_calls == 3


def test_compiled_code_serves_batches_of_all_sizes() -> None:
    server = Server(serving(df.Sequential(), MOST), "inductor")
    server.serve([9, 9, 3, 3])
    (hosted,) = server.hosted
    compiled = hosted.stats.operators_compiled
    for lengths in ([4, 5, 6, 7], [2, 2], [60, 7]):
        assert server.serve(lengths) == []
    server.serve([5, 6], why_whole="because")
    assert hosted.stats.operators_compiled == compiled == 3, "what is before, between and after those that are told"


def test_what_requests_will_want_is_compiled_when_the_system_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a batch that has none, and of which nothing but the whole is run."""
    made = count_elastic(monkeypatch)
    server = Server(serving(Each(split=2), MOST), "inductor")
    assert server.serve([], padding=64, why_whole="a profile run") == []
    (hosted,) = server.hosted
    assert hosted.stats.runs == hosted.stats.sequential_runs == 1
    compiled = hosted.stats.operators_compiled
    assert len(made) == 2
    assert server.serve([3, 3]) == [3, 3] and server.serve([1, 1, 1, 1]) == [2, 2] and server.serve([40]) == [16, 24]
    assert server.serve([3, 4], why_whole="because") == []
    assert len(made) == 2 and hosted.stats.operators_compiled == compiled


def test_a_scheduler_that_fails_does_so_when_the_system_starts() -> None:
    server = Server(serving(Each(split=17), MOST))
    with pytest.raises(df.SplitError, match="split"):
        server.serve([], padding=64, why_whole="a profile run")


def test_who_chooses_is_not_asked_before_there_are_requests() -> None:
    class Chooses(Each):
        def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
            assert System.batch.requests
            return self

    server = Server(serving(Chooses(split=2), MOST))
    assert server.serve([], padding=64, why_whole="a profile run") == []
    assert server.serve([3, 3]) == [3, 3]


def test_a_part_is_made_once_and_others_are_refused() -> None:
    server = Server(serving(Each(split=2), MOST))
    server.serve([2, 3, 4, 1])
    batch = System.batch
    made = batch.parts.copy()
    with batch.within(0, 5):
        assert System.numbers is made[0, 5]
        with pytest.raises(df.DynaFlowError, match="can't be cut into tokens 0 to 3: requests end at"):
            within(0, 3).__enter__()
    with batch.within(0, 2), pytest.raises(df.DynaFlowError, match=f"more than {MOST} parts"):
        within(2, 5).__enter__()
    with batch.within(0, 10):
        assert System.numbers is batch.numbers


def test_whoever_chooses_may_choose_itself() -> None:
    class ByLength(Each):
        def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
            return self if len(ctx.facts["num_tokens"]) > 2 else df.Sequential()

    server = Server(serving(ByLength(split=3), MOST))
    assert server.serve([2, 3, 4]) == [2, 3, 4]
    assert server.serve([2, 3]) == []
    assert server.serve([2, 3, 4], why_whole="because") == []


def test_functions_of_ones_own_take_turns_too() -> None:
    """One that no other process could find by its name."""
    calls = []

    class Replacing(df.OpSchedulerBase):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            def own(x: Tensor, *numbers: Tensor) -> Tensor:
                calls.append(len(x))
                return x * 0

            ctx.split(2)
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op, lane=f"lane{op.micro_batch.index}", replace_func=own)

    server = Server(serving(Replacing(), MOST, in_turns=True))
    System.numbers, System.batch = torch.ones(6), Step(6, [3, 3])
    with torch.no_grad():
        assert not server.compiled(torch.randn(6, 4)).any()
    assert calls == [3, 3]


def test_auto_decides_once_for_about_as_many_parts() -> None:
    asked = []

    class Noted(Auto):
        def decide(self, ctx: df.ScheduleContext, wrap: Any = None) -> df.OpSchedulerBase:
            asked.append(ctx.max_parts)
            return super().decide(ctx, wrap)

    server = Server(serving(Noted(seconds=0.0, among=[Each(split=2)]), MOST, in_turns=True))
    for lengths in ([3, 3, 3], [4, 5], [2, 7], [9]):
        server.serve(lengths)
    assert len(asked) == 2, "two parts or three, and one"


def test_auto_does_not_guess_what_a_systems_operators_do() -> None:
    server = Server(serving(Auto(seconds=0.0), MOST))
    assert server.serve([3, 3, 3]) == []
    (hosted,) = server.hosted
    (note,) = notes_of(hosted.engine)
    assert note.chosen == "sequential" and "can't be predicted" in str(note)
    assert hosted.stats.scheduler_calls == 1, "no candidate was asked for a plan"


def test_auto_tries_what_would_serve() -> None:
    tried = []

    class Noted(Auto):
        def decide(self, ctx: df.ScheduleContext, wrap: Any = None) -> df.OpSchedulerBase:
            tried.append(wrap(Each(split=2)))
            return super().decide(ctx, wrap)

    server = Server(serving(Noted(seconds=0.1, when="background", among=[Each(split=2)]), MOST, in_turns=True))
    server.serve([2, 3, 4])
    for lengths in ([3, 3, 3], [2, 5, 5], [4, 4, 2]):  # nothing is made anew, whichever is faster
        before = server.hosted[0].stats.plans
        server.serve(lengths)
        assert server.hosted[0].stats.plans == before
    server.serve([2, 3, 4], why_whole="because")
    (candidate,) = tried
    assert isinstance(candidate, Serving) and candidate.max_parts == MOST and candidate.in_turns
    (hosted,) = server.hosted
    assert {lane.name for plan in hosted.plans for lane in plan.lanes} <= {"main"}


def test_tasks_take_turns_where_kernels_share_memory() -> None:
    server = Server(serving(Each(split=2, lanes=2), MOST, in_turns=True))
    assert server.serve([3, 3]) == [3, 3]
    (plan,) = server.hosted[0].plans
    assert [lane.name for lane in plan.lanes] == ["main"] and not any(task.after for task in plan.tasks)


def test_a_graph_in_which_no_operator_asks_is_left_alone() -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    before = str(gm.graph)
    assert inject_row_ranges(gm, [], lambda op, given: True, within) is None
    assert str(gm.graph) == before
