"""Strategies: right on every kind of model, by name, within their size; and schedulers that choose others."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow import strategies
from tests.helpers import (
    STACK_RULES,
    Each,
    Scheduler,
    Stack,
    assert_equal,
    compiled,
    names,
    parts_of,
    randn,
    write_results,
)
from tests.zoo import ZOO, tensors

X = randn(6, 8)
SPLITTING = ["nanoflow", "dual_batch", "comm_overlap", "solver"]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@torch.library.custom_op("dynaflow_tests::send", mutates_args=())
def send(x: Tensor) -> Tensor:
    """Stands for a collective."""
    return x.clone()


@send.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Parallel(nn.Module):
    """Blocks that end in a collective."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + send(torch.relu(block(x)))
        return x


# --- what they do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "bert", "mixtral", "deepseek_v3"])
def test_equal_to_the_plain_model(model: str) -> None:
    """One capture serves all strategies: it takes the most of the time."""
    entry = ZOO[model]
    if not entry.available:
        pytest.skip(f"{entry.requires} is not installed")
    plain = entry.build()
    fast = df.compile(plain, operators="eager", verify=True)
    for name in SPLITTING:
        fast.set_scheduler(name)
        for batch in (5, 1):
            inputs = entry.inputs(batch)
            for found, expected in zip(tensors(fast(**inputs)), tensors(plain(**inputs)), strict=True):
                assert_equal(found, expected, 1e-4)
    assert fast.stats.verified >= 2 * len(SPLITTING) and fast.stats.runs == 2 * len(SPLITTING)


def test_nanoflow_splits_and_uses_its_lanes() -> None:
    entry = ZOO["llama"]
    fast = df.compile(entry.build(), "nanoflow", scheduler_options={"parts": 3, "sms": None}, operators="eager")
    plan = fast.plan(**entry.inputs(6))
    assert [m.size for m in plan.micro_batches] == [2, 2, 2]
    on_memory = [t for t in plan.tasks if t.lane == "memory"]
    assert on_memory and all("attention" in t.items[0].op for t in on_memory)
    assert {len(t.items[0].micro_batches) for t in on_memory} == {1}


def test_nanoflow_merges_what_it_is_told() -> None:
    entry = ZOO["llama"]
    options = {"merged": ("*.mlp",)}
    plain = entry.build()
    fast = df.compile(plain, "nanoflow", scheduler_options=options, operators="eager", verify=True)
    inputs = entry.inputs(4)
    assert_equal(fast(**inputs).logits, plain(**inputs).logits)
    plan = fast.plan(**inputs)
    mlp = next(n for n in names(plan) if n.endswith(".mlp"))
    assert parts_of(plan, mlp) == [(0, 1)]
    assert (0,) in parts_of(plan, next(n for n in names(plan) if "attention" in n))


def test_collectives_run_beside_the_other_half() -> None:
    plain = Parallel()
    fast = compiled(plain, strategies.CommOverlap(collectives="dynaflow_tests.send", by_rows=True), verify=True)
    assert_equal(fast(X), plain(X))
    plan = fast.plan(X)
    sent = [i for i, t in enumerate(plan.tasks) if t.lane == "network"]
    assert len(sent) == 6
    beside = 0
    for i in sent:
        for j, task in enumerate(plan.tasks):
            unordered = not plan.happens_before[i] >> j & 1 and not plan.happens_before[j] >> i & 1
            if task.lane == "compute" and unordered:
                assert task.items[0].micro_batches != plan.tasks[i].items[0].micro_batches
                beside += 1
    assert beside >= 4, "half a block of the one beside what the other sends, all the way"


def test_sequence_where_there_is_nothing_to_do() -> None:
    for name in ("comm_overlap", "dual_batch", "nanoflow", "solver"):
        assert df.compile(Stack(), name, operators="eager").plan(X).sequential, name
    entry = ZOO["llama"]
    assert df.compile(entry.build(), "nanoflow", operators="eager").plan(**entry.inputs(1)).sequential


def test_small_micro_batches_are_not_worth_it() -> None:
    entry = ZOO["llama"]
    fast = df.compile(entry.build(), "nanoflow", scheduler_options={"min_rows": 4}, operators="eager")
    assert fast.plan(**entry.inputs(7)).sequential
    assert len(fast.plan(**entry.inputs(8)).micro_batches) == 2


@pytest.mark.parametrize("name", ["nanoflow", "nanoflow, merged", "solver", "prefetch", "prefetch(nanoflow)"])
def test_nothing_is_copied_to_join_the_parts_of_a_llama(name: str) -> None:
    entry = ZOO["llama"]
    plain, model = entry.build(), entry.build()
    nano = strategies.NanoFlow(merged=("*.mlp",) if "merged" in name else ())
    scheduler: df.OpSchedulerBase = strategies.Solver(seconds=1.0) if name == "solver" else nano
    if name.startswith("prefetch"):
        df.offload(model, "cpu", match="*.layers.*")
        scheduler = strategies.Prefetch(nano if "(" in name else None)
    fast = compiled(model, scheduler)
    write_results(fast)  # as compiled ones do
    inputs = entry.inputs(6)
    assert_equal(fast(**inputs).logits, plain(**inputs).logits)
    assert fast.stats.joined_bytes == 0
    assert fast.stats.arena_bytes > 0
    assert len(fast.plan(**inputs).micro_batches) == (1 if name == "prefetch" else 2)


# --- as examples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", strategies.CLASSES)
def test_short_enough_to_be_copied(name: str) -> None:
    kind = type(strategies.make(name))
    for method, most in ((kind.partition, 15), (kind.schedule, 40)):
        lines = [line for line in inspect.getsource(method).splitlines() if line.strip()]
        assert len(lines) <= most, f"{kind.__name__}.{method.__name__}: {len(lines)} lines"


@pytest.mark.parametrize("name", [n for n in strategies.CLASSES if n not in ("auto", "solver", "token_weave")])
def test_written_with_the_public_api(name: str) -> None:
    module = inspect.getmodule(type(strategies.make(name)))
    if name == "sequential":
        return
    lines = [line for line in inspect.getsource(module).splitlines() if "import" in line and "dynaflow" in line]
    assert [line.strip() for line in lines] == ["import dynaflow as df"], name


def test_torch_compile_takes_a_name() -> None:
    options = {"scheduler": "nanoflow", "scheduler_options": {"parts": 2}, "operators": "eager"}
    entry = ZOO["llama"]
    plain = entry.build()
    fast = torch.compile(plain, backend="dynaflow", options=options)
    inputs = entry.inputs(4)
    assert_equal(fast(**inputs).logits, plain(**inputs).logits)


class Own(df.OpSchedulerBase):
    """Found by its name, as a setting of another system has it."""

    def __init__(self, parts: int = 2) -> None:
        self.parts = parts


def test_a_scheduler_of_ones_own_by_name() -> None:
    made = strategies.make("tests.unit.strategies.test_strategies:Own", parts=3)
    assert type(made).__name__ == "Own" and made.parts == 3  # type: ignore[attr-defined]
    for name, message in (
        ("tests.unit.strategies.test_strategies:Missing", "no scheduler"),
        ("no.such.module:Own", "no scheduler"),
        ("tests.unit.strategies.test_strategies:X", "is not a scheduler"),
    ):
        with pytest.raises(df.ScheduleError, match=message):
            strategies.make(name)
    with pytest.raises(df.ScheduleError, match="its options are"):
        strategies.make("tests.unit.strategies.test_strategies:Own", pats=3)


def test_options_are_judged_by_plain_annotations() -> None:
    for options, told in [
        ({"parts": "abc"}, "parts='abc' is not an int"),
        ({"parts": 2.5}, "parts=2.5 is not an int"),
        ({"sms": "many"}, "sms='many' is not an int or None"),
        ({"attention": 3}, "attention=3 is not a str"),
    ]:
        with pytest.raises(df.ScheduleError, match=re.escape(f"strategy 'nanoflow': {told}")):
            strategies.make("nanoflow", **options)
    for options in ({"sms": None}, {"sms": 64}, {"exclusive": 1}, {"merged": ("*.mlp",)}, {"by_rows": True}):
        strategies.make("nanoflow", **options)
    strategies.make("auto", seconds=3, among=["nanoflow"])


@pytest.mark.parametrize("name", ["nanoflow", "comm_overlap", "dual_batch", "token_weave", "comet", "solver"])
def test_less_than_one_part_is_an_error(name: str) -> None:
    for options in ({"parts": 0}, {"parts": -1}, {"seconds": -1.0} if name == "solver" else {"min_rows": 0}):
        ((option, value),) = options.items()
        with pytest.raises(df.ScheduleError, match=rf"(?s){option}={value}.*what to do: pass [01] or more"):
            strategies.make(name, **options)
    strategies.make(name, parts=1)


def test_fetches_go_with_an_order_that_is_searched_for() -> None:
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    df.offload(model, "cpu", match="*")
    fast = compiled(model, strategies.Prefetch(strategies.Solver(attention="*relu", seconds=1.0)))
    assert_equal(fast(X), plain(X))


# --- choosing --------------------------------------------------------------------------------------------


def test_choose_by_situation() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    split = Each(STACK_RULES, split=3)

    def by_size(ctx: df.ScheduleContext) -> Any:
        asked.append((ctx.batch_size, ctx.inputs["x"]))
        return split if ctx.batch_size >= 6 else "sequential"

    plain = Stack()
    fast = compiled(plain, df.choose(by_size))
    for batch in (6, 3, 6, 3):
        x = randn(batch, 8)
        assert_equal(fast(x), plain(x))
        assert len(fast.plan(x).micro_batches) == (3 if batch == 6 else 1)
    assert asked == [(6, (6, 8)), (3, (3, 8))], "asked once for each situation"


def test_choose_by_fact() -> None:
    both = {"a": Each(STACK_RULES, split=2), "b": Each(STACK_RULES, split=3)}
    fast = compiled(Stack(), df.choose(lambda ctx: both[ctx.facts["phase"]]))
    assert len(fast.plan(X, facts={"phase": "a"}).micro_batches) == 2
    assert len(fast.plan(X, facts={"phase": "b"}).micro_batches) == 3
    assert len(fast.plan(X, facts={"phase": "a"}).micro_batches) == 2


def test_a_choice_is_kept_under_the_choosers_key() -> None:
    class ByKey(df.OpSchedulerBase):
        asked = 0

        def key(self, ctx: df.ScheduleContext) -> bool:
            return ctx.batch_size > 6

        def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
            self.asked += 1
            return Each(STACK_RULES, split=3 if ctx.batch_size > 6 else 2)

    chooser = ByKey()
    fast = compiled(Stack(), chooser)
    for batch, parts in ((4, 2), (5, 2), (8, 3), (6, 2), (9, 3)):
        assert len(fast.plan(randn(batch, 8)).micro_batches) == parts
    assert chooser.asked == 2


def test_choose_among_choosers() -> None:
    inner = df.choose(lambda ctx: Each(STACK_RULES, split=ctx.batch_size))
    assert len(compiled(Stack(), df.choose(lambda ctx: inner)).plan(X).micro_batches) == 6


def test_choosing_no_scheduler() -> None:
    with pytest.raises(df.ScheduleError, match="not a scheduler"):
        compiled(Stack(), df.choose(lambda ctx: 3)).plan(X)  # type: ignore[arg-type, return-value]


def test_bucket_of_the_chosen() -> None:
    class Padded(Each):
        def bucket(self, batch_size: int) -> int:
            return -(-batch_size // 4) * 4

    plain = Stack()
    chosen = Padded(STACK_RULES, split=2)
    fast = compiled(plain, df.choose(lambda ctx: chosen))
    assert_equal(fast(X), plain(X))
    assert fast.plan(X).batch_size == 8


# --- waits -----------------------------------------------------------------------------------------------


def test_explicit_wait() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                m = op.micro_batch.index
                wait = ctx.items(op.op)[0] if m == 1 and op.op.splittable else ()
                ctx.execute(op, lane=f"lane{m}", after=wait)

    plain = Stack()
    fast = compiled(plain, Scheduler(schedule, STACK_RULES), verify=True)
    assert_equal(fast(X), plain(X))
    plan = fast.plan(X)
    where = {(t.items[0].op, t.items[0].micro_batches): i for i, t in enumerate(plan.tasks)}
    for (op, parts), i in where.items():
        if parts == (1,):
            assert plan.happens_before[i] >> where[op, (0,)] & 1


def test_waiting_for_what_was_not_executed() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.execute(ctx.get_ready_ops()[0], after=ctx.items(ctx.ops[-1]))

    with pytest.raises(df.ScheduleError, match="was not executed before") as caught:
        compiled(Stack(), Scheduler(schedule, STACK_RULES)).plan(X)
    assert caught.value.op


@pytest.mark.parametrize(("old", "new"), [("searched", "solver"), ("optimizer_beside", "optimizer_overlap")])
def test_former_names_still_work(old: str, new: str) -> None:
    kind = getattr(strategies, strategies.CLASSES[new])
    former = next(k for k, v in strategies.ALIASES.items() if v == kind.__name__)
    assert type(strategies.make(old)) is kind and getattr(strategies, former) is kind
    assert df.compile(Stack(), old, operators="eager").plan(X).sequential
    assert old not in strategies.CLASSES, "one name each in lists"
