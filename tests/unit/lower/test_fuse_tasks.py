"""Which tasks become one call, which calls one CUDA graph, and that neither changes what is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.lower.compile_ops import Operators
from dynaflow.lower.emit import Code, emit, event_count
from dynaflow.lower.fuse_tasks import Unit, make_units
from dynaflow.lower.ir import Program, Replace, Step, Var
from dynaflow.lower.passes import make_program
from dynaflow.lower.segments import Segment, make_segments
from dynaflow.runtime.arena import Arena, BlockPool
from tests.helpers import (
    STACK_RULES,
    Each,
    Scheduler,
    Stack,
    assert_equal,
    compiled,
    graph_of,
    randn,
    run_rest,
    write_results,
)

X = randn(6, 8)


class Row(nn.Module):
    """A layer that treats each row by itself; with `scan`, one whose result can't be written into given memory."""

    def __init__(self, shift: float, scan: bool = False) -> None:
        super().__init__()
        self.shift, self.scan = shift, scan

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for other in more:
            x = x * other
        return torch.cumsum(x, -1) if self.scan else torch.sin(x) + self.shift


class Diamond(nn.Module):
    """b and c both use what a makes; d uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Row(n / 4) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.d(self.b(x), self.c(x))


class Line(Diamond):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class Scan(Line):
    def __init__(self) -> None:
        super().__init__()
        self.c = Row(0, scan=True)


ROWS = [df.SplitModule(Row)]


def fast_of(model: Callable[..., Any], scheduler: df.OpSchedulerBase, **options: Any) -> df.CompiledModel:
    """Uncompiled operators, but written into buffers as compiled ones are."""
    fast = compiled(model, scheduler, **options)
    write_results(fast)
    return fast


def replaced(*given: Tensor) -> Tensor:
    return torch.sin(torch.sin(given[0]) + 0.25) + 0.5


def follow(text: str, parts: int | Sequence[int]) -> Scheduler:
    """A schedule as text: `a0` is operator a for micro-batch 0, `a01` merged, `a0:x` on lane x, `b0+c0` a fusion."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(parts)
        for word in text.split():
            what, _, lane = word.partition(":")
            items = [item for w in what.split("+") for item in ctx.items(w[0]) if str(item.micro_batch) in w[1:]]
            ctx.execute(items, lane=lane or "main", replace_func=replaced if "+" in what else None)

    return Scheduler(schedule, ROWS)


@cache
def made(model: type[nn.Module]) -> nn.Module:
    return model()


@cache
def captured(model: type[nn.Module]) -> df.CompiledModel:
    return fast_of(made(model), Each(ROWS))


def plan_of(model: type[nn.Module], text: str, parts: int | Sequence[int] = 2) -> tuple[df.Plan, Any]:
    fast = captured(model)
    fast.set_scheduler(follow(text, parts))
    with torch.no_grad():
        plan = fast.plan(X)
        assert_equal(fast(X), made(model)(X))  # whatever becomes one call: the results are the model's
    return plan, graph_of(fast)


def units_of(model: type[nn.Module], text: str, parts: int = 2, **options: Any) -> list[Unit]:
    plan, graph = plan_of(model, text, parts)
    return make_units(plan, graph, **{"chains": True, **options})


def show(units: list[Unit]) -> str:
    """As the schedule is written: calls are parted by bars."""
    return " | ".join(" ".join(op.name + "".join(map(str, unit.parts)) for op in unit.ops) for unit in units)


# --- which tasks become one call ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a0 b0 c0 d0 a1 b1 c1 d1", "a0 b0 c0 d0 | a1 b1 c1 d1"),
        ("a0 b0 a1 b1 c0 d0 c1 d1", "a0 b0 | a1 b1 | c0 d0 | c1 d1"),
        ("a0 a1 b0 b1 c0 c1 d0 d1", "a0 | a1 | b0 | b1 | c0 | c1 | d0 | d1"),
        # Interleaved by issue, not by lane: each lane is one call.
        ("a0:x a1:y b0:x b1:y c0:x c1:y d0:x d1:y", "a0 b0 c0 d0 | a1 b1 c1 d1"),
        ("a01 b01 c01 d01", "a01 b01 c01 d01"),
        # Merged here and apart there.
        ("a0 a1 b01 c01 d0 d1", "a0 | a1 | b01 c01 | d0 | d1"),
        # Every second operator on another lane: each one waits.
        ("a0:x b0:y c0:x d0:y a1:x b1:y c1:x d1:y", "a0 | b0 | c0 | d0 | a1 | b1 | c1 | d1"),
        ("a0:x b0:x c0:y d0:y a1:x b1:x c1:y d1:y", "a0 b0 | c0 d0 | a1 b1 | c1 d1"),
    ],
)
def test_chains(text: str, calls: str) -> None:
    assert show(units_of(Line, text)) == calls


def test_chain_ends_where_another_lane_waits_for_it() -> None:
    """c waits for a: were b in one call with a, c would wait for b as well."""
    assert show(units_of(Diamond, "a0:x b0:x c0:y d0:y a1:x b1:x c1:x d1:x")) == "a0 | b0 | c0 | d0 | a1 b1 c1 d1"


def test_chain_ends_where_it_waits() -> None:
    """d waits for c, on the other lane; what comes before it must not wait as well."""
    units = units_of(Diamond, "a0:x c0:y b0:x d0:x a1:x b1:x c1:x d1:x")
    assert show(units) == "a0 | c0 | b0 | d0 | a1 b1 c1 d1"


def test_awaited_last_task_may_end_a_chain() -> None:
    units = units_of(Line, "a0:x b0:x c0:y d0:y a1:y b1:y c1:y d1:y")
    assert show(units) == "a0 b0 | c0 d0 | a1 b1 c1 d1"
    assert units[0].tasks == (0, 1) and units[1].tasks == (2, 3)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a02 a1 b02 b1 c02 d02 c1 d1", "a02 | a1 | b02 | b1 | c02 | d02 | c1 d1"),
        ("a02 b02 c02 d02 a1 b1 c1 d1", "a02 | b02 | c02 | d02 | a1 b1 c1 d1"),
        ("a01 b01 c01 d01 a2 b2 c2 d2", "a01 b01 c01 d01 | a2 b2 c2 d2"),
        ("a12 b12 c12 d12 a0 b0 c0 d0", "a12 b12 c12 d12 | a0 b0 c0 d0"),
        ("a012 b012 c02 c1 d02 d1", "a012 b012 | c02 | c1 | d02 | d1"),
    ],
)
def test_merged_micro_batches_that_are_not_neighbours_stay_by_themselves(text: str, calls: str) -> None:
    assert show(units_of(Line, text, 3)) == calls


def test_fusions_stay_by_themselves() -> None:
    units = units_of(Line, "a0 b0+c0 d0 a1 b1 c1 d1")
    assert show(units) == "a0 | b0 c0 | d0 | a1 b1 c1 d1"
    assert [unit.fused for unit in units] == [False, True, False, False]


def test_operators_to_be_left_apart() -> None:
    text = "a0 b0 c0 d0 a1 b1 c1 d1"
    assert show(units_of(Line, text, apart=frozenset("c"))) == "a0 b0 | c0 | d0 | a1 b1 | c1 | d1"
    assert show(units_of(Line, text, apart=frozenset("a"))) == "a0 | b0 c0 d0 | a1 | b1 c1 d1"


def test_no_chains_when_each_task_is_watched() -> None:
    text = "a0 b0 c0 d0 a1 b1 c1 d1"
    assert show(units_of(Line, text, chains=False)) == " | ".join(text.split())
    seen: list[str] = []
    fast = fast_of(Line(), follow(text, 2), on_task=lambda task, moment: seen.append(f"{task} {moment}"))
    with torch.no_grad():
        fast(X)
        tasks = fast.plan(X).tasks
    assert seen == [f"{task} {moment}" for task in tasks for moment in ("start", "stop")]


def test_call_returns_what_others_need_and_nothing_else() -> None:
    plan, graph = plan_of(Diamond, "a0 b0 c0 d0 a1 b1 c1:y d1")
    units = make_units(plan, graph, chains=True)
    assert show(units) == "a0 b0 c0 d0 | a1 | b1 | c1 | d1"
    name = {v: op.name for op in graph.ops for v in op.writes}
    assert [[name[v] for v in unit.writes] for unit in units] == [["d"], ["a"], ["b"], ["c"], ["d"]]
    plan, graph = plan_of(Diamond, "a01 b01 c0 c1 d01")
    units = make_units(plan, graph, chains=True)
    assert show(units) == "a01 b01 | c0 | c1 | d01"
    assert [[name[v] for v in unit.writes] for unit in units] == [["a", "b"], ["c"], ["c"], ["d"]]
    assert len(units[0].reads) == 1, "b reads what a makes inside the call"


def test_golden_comments_name_every_task_of_a_call() -> None:
    plan, _ = plan_of(Line, "a0 b0 c0 d0 a1 b1 c1:y d1:y")
    comments = [line.strip() for line in plan.code.splitlines() if re.match(r"\s*# \d", line)]
    assert comments == [
        "# 0, 1, 2, 3: a[0], then b[0], then c[0], then d[0]",
        "# 4, 5: a[1], then b[1]",
        "# 6, 7: c[1], then d[1]",
    ]


# --- what a chain computes ------------------------------------------------------------------------------------


def in_sequence(ctx: df.ScheduleContext) -> None:
    """One lane, one micro-batch after the other."""
    for m in ctx.split(3):
        for op in ctx.ops:
            ctx.execute(ctx.items(op)[m])


def lane_each(ctx: df.ScheduleContext) -> None:
    ctx.split(3)
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, lane=f"lane{op.micro_batch % 3}")


def ping_pong(ctx: df.ScheduleContext) -> None:
    """Attention on one lane, all else on another."""
    ctx.split([1, ctx.batch_size - 1])
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, lane=("memory", "compute")["attention" not in op.tags])


def merged_middle(ctx: df.ScheduleContext) -> None:
    """The second layer's mlp runs once for all rows."""
    ctx.split(3)
    for op in ctx.ops:
        items = ctx.items(op)
        if op.name == "layers.1.mlp":
            ctx.execute(items, lane="lane1")
        else:
            for item in items:
                ctx.execute(item, lane=f"lane{item.micro_batch % 2}")


def merged_apart(ctx: df.ScheduleContext) -> None:
    """Attention for the first and the third part together: not neighbours."""
    ctx.split([2, 1, ctx.batch_size - 3])
    for op in ctx.ops:
        items = ctx.items(op)
        if "attention" in op.tags:
            ctx.execute([items[0], items[2]], lane="memory")
            ctx.execute(items[1], lane="compute")
        else:
            for item in items:
                ctx.execute(item, lane="compute")


@pytest.mark.parametrize("schedule", [in_sequence, lane_each, ping_pong, merged_middle, merged_apart])
@pytest.mark.parametrize("rules", [STACK_RULES, [df.SplitModule("layers.*", tag="attention")]])
def test_stack_of_layers(schedule: Callable[[df.ScheduleContext], None], rules: Sequence[Any]) -> None:
    model = Stack(blocks=3)
    fast = fast_of(model, Scheduler(schedule, rules))
    with torch.no_grad():
        for batch in (6, 9, 6):
            x = randn(batch, 5, 8)
            assert_equal(fast(x), model(x))
        code = fast.plan(x).code
    if schedule in (in_sequence, lane_each):
        assert len(re.findall(r"^\s*# [\d, ]+:", code, re.M)) == 3, "one call for each micro-batch"


class Caches(nn.Module):
    """Each layer writes its slot of a cache that is an input, and reads all slots written so far."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            cache[:, i] = layer(x)
            x = x + cache[:, : i + 1].sum(1)
            self.steps += 1
            x = x * self.steps
        return x


def back_and_forth(ctx: df.ScheduleContext) -> None:
    """Uncut, on two lanes in turn."""
    while ops := ctx.get_ready_ops():
        ctx.execute(ops[0], lane=f"lane{ops[0].op.index % 2}")


IN_PLACE = {
    "one lane": Each(split=3).schedule,
    "lane each": lane_each,
    "ping-pong": ping_pong,
    "one part": run_rest,
    "one part, two lanes": back_and_forth,
}


@pytest.mark.parametrize("schedule", IN_PLACE)
def test_inputs_and_buffers_written_in_place(schedule: str) -> None:
    plain, model = Caches().double(), Caches().double()  # numbers grow from layer to layer
    model.load_state_dict(plain.state_dict())
    fast = fast_of(model, Scheduler(IN_PLACE[schedule], [df.SplitModule("layers.*", tag="attention")]))
    x, mine, expected = X.double(), torch.zeros(6, 4, 8).double(), torch.zeros(6, 4, 8).double()
    with torch.no_grad():
        for _ in range(2):
            assert_equal(fast(x, mine), plain(x, expected))
            assert_equal(mine, expected)
            assert model.steps == plain.steps


def test_value_written_in_place_within_a_chain_and_after_it() -> None:
    """b writes what a made, inside one call; d writes it again, in another."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with df.mark("a"):
            y = torch.sin(x)
        with df.mark("b"):
            y.mul_(3)
        with df.mark("c"):
            z = torch.cos(y)
        with df.mark("d"):
            y.add_(z)
        return y, z

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(3)
        for names, lane in ((("a", "b"), "x"), (("c",), "y"), (("d",), "x")):
            for m in range(3):
                for name in names:
                    ctx.execute(ctx.items(name)[m], lane=lane)

    fast = fast_of(model, Scheduler(schedule))
    with torch.no_grad():
        found = fast(X)
        assert "a[0], then b[0]" in fast.plan(X).code
        assert_equal(found, model(X))
        assert_equal(fast(X + 1), model(X + 1))
        assert_equal(found, model(X))


@pytest.mark.parametrize("schedule", [run_rest, lane_each])
def test_random_numbers_come_in_the_order_of_the_model(schedule: Callable[[df.ScheduleContext], None]) -> None:
    """Dropout draws for the whole batch, as the model does, whether in a chain or between parts."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x + 1) + torch.rand_like(x)
            return x

    model = Drops().train()
    fast = fast_of(model, Scheduler(schedule, [df.SplitModule("layers.*")]))
    with torch.no_grad():
        torch.manual_seed(3)
        expected = [model(X), model(X)]
        torch.manual_seed(3)
        found = [fast(X), fast(X)]
        code = fast.plan(X).code
    assert_equal(found, expected, tolerance=0)
    assert not torch.equal(*found)
    assert schedule is lane_each or code.count("# 0, 1") == 1, "a one-part plan on one lane is one call"


@pytest.mark.parametrize("schedule", [run_rest, in_sequence, lane_each])
def test_values_made_in_the_middle_of_a_chain_are_returned(schedule: Callable[[df.ScheduleContext], None]) -> None:
    layers = [Row(n / 4) for n in range(4)]

    class Middles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            made = [x]
            for layer in self.layers:
                made.append(layer(made[-1]))
            # In the middle, a view of the middle, the same twice, and the last.
            return made[2], made[1].view(-1, 2, 4), made[4], made[2]

    fast = fast_of(Middles(), Scheduler(schedule, ROWS))
    with torch.no_grad():
        found, expected = fast(X), Middles()(X)
        fast(X + 1)
    assert_equal(found, expected)
    assert found[0] is found[3]


@torch.library.custom_op("dynaflow_tests::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    if x.min() < 0:
        raise ValueError("a negative number")
    return x.clone()


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with df.mark("check", splittable=True):
            z = torch.ops.dynaflow_tests.positive(y + x)
        return self.b(z)


@pytest.mark.parametrize("lanes", [1, 2])
def test_error_inside_a_chain_names_all_its_tasks(lanes: int) -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        for m in ctx.split(2):
            for name in ("a", "check", "b"):
                ctx.execute(ctx.items(name)[m], lane=f"lane{m % lanes}")

    fast = fast_of(Picky(), Scheduler(schedule, [df.SplitModule(nn.ReLU)]))
    x = torch.ones(4, 3)
    bad = torch.cat([x[:3], -x[:1]])  # in the second micro-batch
    with torch.no_grad():
        assert_equal(fast(x), Picky()(x))
        with pytest.raises(ValueError, match="a negative number") as caught:
            fast(bad)
        lane = lanes - 1
        assert caught.value.__notes__ == [
            f"dynaflow: in tasks 3, 4, 5, compiled as one, a[1], then check[1], then b[1], on lane lane{lane}"
        ]
        assert_equal(fast(x), Picky()(x))


def test_error_in_a_task_by_itself_names_that_one() -> None:
    fast = fast_of(Picky(), Each([df.SplitModule(nn.ReLU)]))
    with torch.no_grad(), pytest.raises(ValueError, match="negative") as caught:
        fast(-torch.ones(4, 3))
    assert caught.value.__notes__ == ["dynaflow: in task 2, check[0], on lane lane0"]


# --- segments: which calls become one graph -------------------------------------------------------------------


def program(*steps: str, returns: str = "") -> Program:
    """Hand-made: `x: a -> p, q after 1` is a step on lane x that reads a and makes p and q."""
    names: dict[str, Var] = {}
    made = []

    def variables(text: str) -> tuple[Var, ...]:
        for name in text.split():
            if name not in names:
                number = len(names)
                names[name] = Var(id=number, kind="made", value=ord(name), parts=(0,), whole=True)
        return tuple(names[name] for name in text.split())

    for number, text in enumerate(steps):
        found = re.fullmatch(r"(\w+): ([\w ]*)-> ?([\w ]*?)(?: after ([\d ]+))?", text)
        assert found, text
        lane, reads, makes, after = found.groups()
        call = Replace(makes=variables(makes), function=min, task=number, reads=variables(reads))
        waits = tuple(map(int, (after or "").split()))
        made.append(Step(tasks=(number,), lane=lane, title=text, after=waits, call=call))
    lanes = tuple(dict.fromkeys(s.lane for s in made))
    return Program(arguments=1, inputs=(), lanes=lanes, steps=tuple(made), results=variables(returns))


def letters(found: Iterable[Var]) -> str:
    return " ".join(chr(var.value) for var in found)


def runs(program: Program, *outside: int) -> list[tuple[int, ...]]:
    return [segment.steps for segment in make_segments(program, frozenset(outside))]


def test_one_lane_is_one_segment() -> None:
    line = program("x: a -> p", "x: p -> q", "x: q -> r")
    assert runs(line) == [(0, 1, 2)]
    assert runs(line, 1) == [(0,), (2,)]
    assert runs(line, 0) == [(1, 2)]
    assert runs(line, 0, 1, 2) == []


def test_outside_step_ends_the_run_of_its_own_lane_only() -> None:
    two = program("x: a -> p", "y: a -> q", "x: p -> r", "y: q -> s", "x: r -> t", "y: s -> u")
    assert runs(two) == [(0, 2, 4), (1, 3, 5)]
    assert runs(two, 2) == [(0,), (1, 3, 5), (4,)]


def test_runs_end_at_waits_and_at_awaited_steps() -> None:
    # 3 waits for 1. So 3 starts a run on y; and 1 ends one on x, or 3 would wait for 4 as well.
    two = program("x: a -> p", "x: p -> q", "y: a -> r", "y: q r -> s after 1", "x: q -> t", "y: s -> u")
    assert runs(two) == [(0, 1), (2,), (3, 5), (4,)]
    assert runs(two, 0) == [(1,), (2,), (3, 5), (4,)]


def test_inputs_outputs_and_what_moves() -> None:
    made = program("x: a w -> p", "x: p w -> q h", "x: h -> r", "x: r q -> s", "x: s r p -> t", returns="t q")
    first, second = make_segments(made, frozenset([2]))
    assert (first.steps, letters(first.inputs), letters(first.outputs)) == ((0, 1), "a w", "p q h")
    assert not first.made_outside
    # r comes from outside, so it is elsewhere each time; q and p are another graph's, and stay. s stays inside.
    assert (second.steps, letters(second.inputs), letters(second.outputs)) == ((3, 4), "r q p", "t")
    assert second.made_outside == {0}


def test_what_no_other_segment_reads_is_not_handed_out() -> None:
    made = program("x: a -> p", "x: p -> q", "y: a -> r", "y: r q -> s after 1", returns="s")
    assert [(letters(s.inputs), letters(s.outputs)) for s in make_segments(made, frozenset())] == [
        ("a", "q"), ("a", "r"), ("r q", "s"),
    ]  # fmt: skip


# --- segments: the generated code -----------------------------------------------------------------------------


class FakeGraph:
    """A segment as a CUDA graph has it: results lie in the same memory every time; what is no moving input may not
    have moved since the first call."""

    def __init__(self, name: str, function: Callable[..., Any], moving: frozenset[int], log: list[str]) -> None:
        self.name, self.function, self.moving, self.log = name, function, moving, log
        self.places: list[int] | None = None
        self.results: tuple[Tensor, ...] | None = None

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        self.log.append(self.name)
        places = [a.data_ptr() for i, a in enumerate(args) if i not in self.moving]
        assert self.places in (None, places), f"{self.name}: an input has moved"
        self.places, made = places, self.function(*args)
        if self.results is None:
            self.results = made
        for mine, new in zip(self.results, made, strict=True):
            mine.copy_(new)
        return self.results


class FakeStream:
    """Notes what waits for what; an event that is waited for must have been recorded."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded is not None
        self.log.append(f"{self.name} waits for {event.recorded}")


class FakeEvent:
    recorded: str | None = None

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream.name


def arguments_of(fast: df.CompiledModel, *inputs: Tensor) -> tuple[Any, ...]:
    """What the captured graph gets when the model is called with these inputs."""
    planner, found = engine_of(fast).planner, []
    planner.renew()
    find = planner.find
    planner.find = lambda cache, request: (found.append(request.args), find(cache, request))[1]
    try:
        with torch.no_grad():
            fast(*inputs)
    finally:
        del planner.find
    return found[0]


def in_pieces(model: type[nn.Module], text: str, outside: str) -> tuple[Code, Program, list[Segment], list[str], Any]:
    """The plan's code with fake graphs, streams and events; and a function that runs it for some inputs."""
    plan, graph = plan_of(model, text)
    fast = captured(model)
    sizes = {**graph.graph.hints, **dict.fromkeys(graph.batch_axes[0], len(X))}
    operators = Operators("eager")
    operators.writes_into = True
    program = make_program(plan, graph, sizes, operators, {}, pieces=True, outside=frozenset(outside))
    alone = [plan.tasks[step.tasks[0]].items[0].op in outside for step in program.steps]
    segments = make_segments(program, frozenset(s for s, out in enumerate(alone) if out))
    code = emit(program, cuda=True, hook=False, segments=segments)
    log: list[str] = []
    for n, segment in enumerate(segments):
        # The engine copies the plan's arguments in.
        moving = segment.made_outside | {i for i, var in enumerate(segment.inputs) if var.root.kind == "argument"}
        code.names[f"graph_{n}"] = FakeGraph(f"graph_{n}", code.names[f"segment_{n}"], moving, log)
    _, memory = Arena([view for _, view in program.views], program.arena_bytes, torch.device("cpu"), BlockPool()).take()

    def run(*inputs: Tensor) -> Any:
        args = arguments_of(fast, *inputs)
        log.clear()
        more: tuple[Any, ...] = ()
        if len(program.lanes) > 1:
            streams = tuple(FakeStream(lane, log) for lane in program.lanes)
            events = [FakeEvent() for _ in range(event_count(program))]
            more = (streams, events, lambda stream: log.append(f"on {stream.name}"))
        with torch.no_grad():
            (result,) = code.run(args, *([memory] if program.views else []), *more)
        return result

    return code, program, segments, log, run


def functions_of(code: Code) -> list[str]:
    return re.findall(r"^def (\w+)", code.source, re.M)


def test_code_of_one_lane_with_an_operator_outside() -> None:
    code, _, segments, log, run = in_pieces(Scan, "a0 b0 c0 d0 a1 b1 c1 d1", "c")
    assert functions_of(code) == ["segment_0", "segment_1", "segment_2", "run"]
    assert len(segments) == 3, "a0 b0; d0 a1 b1, across micro-batches; d1"
    body = code.source.split("def run")[1]
    assert re.findall(r"graph_\d|op\d", body) == ["graph_0", "op2", "graph_1", "op2", "graph_2"]
    assert body.index("graph_1") < body.index("v3_0 = None"), "c's result lives until the graph that reads it has run"
    # d reads what c made, and that is a new tensor each time; a1 reads the argument.
    outside = [[str(segment.inputs[i]) for i in sorted(segment.made_outside)] for segment in segments]
    assert outside == [[], ["v3_0"], ["v3_1"]]
    model = made(Scan)
    first = run(X)
    assert log == ["graph_0", "graph_1", "graph_2"]
    expected = model(X)
    assert_equal(first, expected)
    assert_equal(run(X + 1), model(X + 1))
    assert_equal(first, expected)  # not what the graphs write again


def test_results_that_a_graph_makes_whole_are_not_its_memory() -> None:
    *_, run = in_pieces(Scan, "a0 b0 c0 a1 b1 c1 d01", "b")
    model = made(Scan)
    first, expected = run(X), model(X)
    assert_equal(first, expected)
    assert_equal(run(X + 1), model(X + 1))
    assert_equal(first, expected)


@pytest.mark.parametrize(
    "text",
    ["a0:x a1:x b0:x c0:y b1:x c1:y d0:y d1:x", "a0:x a1:x c01:y b0:x b1:x d0:y d1:y", "a01:x b01:y c01:x d01:y"],
)
def test_code_of_two_lanes_with_an_operator_outside(text: str) -> None:
    """The fakes see to it that what is waited for was recorded: behind the graph that holds it."""
    _, program, segments, log, run = in_pieces(Diamond, text, "b")
    model = made(Diamond)
    first, expected = run(X), model(X)
    assert_equal(first, expected)
    on, launched = "x", {}
    for line in log:
        on = line[3:] if line.startswith("on ") else on
        if line.startswith("graph"):
            launched[line] = on
    lanes = {f"graph_{n}": program.steps[segment.steps[0]].lane for n, segment in enumerate(segments)}
    assert launched == lanes, "each graph is launched once, on its own lane"
    assert log[-1] == "x waits for y" and on == "x", "the side lane joins the caller's, which is current again"
    waits = sum(len(step.after) for step in program.steps)
    assert sum(" waits for " in line for line in log) == waits + 1
    assert_equal(run(X * 2), model(X * 2))
    assert_equal(first, expected)


def test_segment_lets_go_of_its_own_values_only() -> None:
    """What a segment makes for itself ends inside; what it hands out, the plan lets go."""
    code, _, segments, _, run = in_pieces(Scan, "a0 a1 b0 b1 c0 c1 d0 d1", "a")
    assert len(segments) == 1
    body = code.source.split("def run")[1]
    bodies = code.source.split("def run")[0].split("def segment_")[1:]
    for segment, text in zip(segments, bodies, strict=True):
        freed = {name for line in re.findall(r"^\s+(.*) = None$", text, re.M) for name in line.split(" = ")}
        assert {"v3_0", "v3_1"} <= freed and not freed & {*map(str, segment.outputs), *map(str, segment.inputs)}
    for name in {name for line in re.findall(r"^\s+(.*) = None$", body, re.M) for name in line.split(" = ")}:
        assert re.search(rf"\b{name}\b.* = (graph|op)", body), f"{name} is not known here"
    assert_equal(run(X), made(Scan)(X))


def test_outside_operator_that_writes_into_the_arena_moves_nothing() -> None:
    _, program, segments, _, run = in_pieces(Line, "a0 b0 c0 d0 a1 b1 c1 d1", "c")
    assert program.views and not any(segment.made_outside for segment in segments)
    model = made(Line)
    for x in (X, X + 1):
        assert_equal(run(x), model(x))


def test_fake_graph_notices_an_input_that_moved() -> None:
    """The fakes above can fail."""
    graph = FakeGraph("graph", lambda x: (x + 1,), frozenset(), [])
    x = torch.ones(3)
    first = graph(x)
    x.add_(1)
    assert graph(x)[0] is first[0] and first[0][0] == 3
    with pytest.raises(AssertionError, match="moved"):
        graph(x.clone())
    with pytest.raises(AssertionError):
        FakeStream("x", []).wait_event(FakeEvent())
