"""Scheduling: what the context records, merges, fusions, the cache of plans, and swapping the scheduler."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
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
    run_both,
    run_rest,
)

X = randn(6, 8)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


class Chain(nn.Module):
    """Two operators in a row, then one that uses both their results."""

    def forward(self, x: Tensor) -> Tensor:
        with df.mark("a"):
            a = x * 2
        with df.mark("b"):
            b = a + 1
        with df.mark("c"):
            return b * a


def chain_schedule(*fused: str, replace: Any, split: int | list[int] | None = 2) -> Scheduler:
    """Fuses the named operators for every micro-batch by itself; the rest runs as it comes."""

    def schedule(ctx: df.ScheduleContext) -> None:
        if split is not None:
            ctx.split(split)
        while ops := ctx.get_ready_ops():
            for op in ops:
                if op.name == fused[0]:
                    m = op.micro_batch.index
                    ctx.execute([ctx.items(name)[m] for name in fused], replace_func=replace)
                    break
                ctx.execute(op)

    return Scheduler(schedule)


# --- recording -------------------------------------------------------------------------------------------


def test_nothing_runs_inside_schedule() -> None:
    ran: list[str] = []
    during: list[list[str]] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        run_rest(ctx)
        during.append(list(ran))

    fast = compiled(Stack(), Scheduler(schedule), on_task=lambda task, moment: ran.append(str(task)))
    x = torch.full((6, 8), float("nan"))
    plan = fast.plan(x)
    assert during == [[]]
    assert ran == [], "a plan is made without a run"
    fast(X)
    assert len(ran) == 2 * len(plan.tasks)


def test_items_say_what_they_are() -> None:
    seen: list[Any] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        parts = ctx.split([5, 1])
        ready = ctx.get_ready_ops()
        assert isinstance(ready, list)
        seen.extend((op.name, op.tags, op.micro_batch, op.micro_batch.size) for op in ready)
        assert [op.micro_batch for op in ready] == list(parts)
        assert ctx.get_ready_ops() == ready, "asking changes nothing"
        run_rest(ctx)

    run_both(Stack(), (X,), Scheduler(schedule, STACK_RULES))
    assert [(name, tags, size) for name, tags, _, size in seen] == [
        ("layers.0.attn", frozenset({"attention"}), 5),
        ("layers.0.attn", frozenset({"attention"}), 1),
    ]


def test_ops_are_the_models_in_order() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        assert [op.name for op in ctx.ops if "mlp" in op.tags] == ["layers.0.mlp", "layers.1.mlp"]
        run_rest(ctx)

    run_both(Stack(), (X,), Scheduler(schedule, STACK_RULES))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.left(x) * self.right(x)


BRANCH_RULES = (df.SplitModule("stem"), df.SplitModule("left"), df.SplitModule("right"))


def test_independent_operators_are_ready_together() -> None:
    waves: list[list[str]] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            waves.append([str(op) for op in ops])
            for op in ops:
                ctx.execute(op, lane=op.name)

    run_both(Branches(), (X,), Scheduler(schedule, BRANCH_RULES))
    assert waves == [
        ["stem[0]", "stem[1]"],
        ["left[0]", "left[1]", "right[0]", "right[1]"],
        ["mul[0]", "mul[1]"],
    ]


def test_waits_are_only_those_that_lanes_do_not_imply() -> None:
    _, plan = run_both(Stack(), (X,), Each(STACK_RULES, lanes=2))
    assert all(not task.after for task in plan.tasks), "each micro-batch has its lane: nobody waits"

    def ping_pong(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="memory" if "attention" in op.tags else "compute")

    _, plan = run_both(Stack(), (X,), Scheduler(ping_pong, STACK_RULES))
    waits = {str(t): [str(plan.tasks[a]) for a in t.after] for t in plan.tasks}
    assert waits["layers.0.attn[0]"] == []
    assert waits["layers.0:add[1]"] == ["layers.0.attn[1]"]
    assert waits["layers.0.mlp[1]"] == [], "its input is made on its own lane"
    assert [lane.name for lane in plan.lanes] == ["memory", "compute"]


# --- merged ----------------------------------------------------------------------------------------------


def test_micro_batches_of_one_operator_run_merged() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 3, 2])
        while ops := ctx.get_ready_ops():
            mlp = [op for op in ops if "mlp" in op.tags]
            if len(mlp) == 3:
                ctx.execute(mlp)
            else:
                for op in ops:
                    if "mlp" not in op.tags:
                        ctx.execute(op, lane=f"lane{op.micro_batch.index}")

    fast, plan = run_both(Stack(), (X,), Scheduler(schedule, STACK_RULES))
    assert parts_of(plan, "layers.0.mlp") == [(0, 1, 2)]
    assert parts_of(plan, "layers.0.attn") == [(0,), (1,), (2,)]
    assert fast.stats.joined_bytes >= 2 * 6 * 8 * 4, "the inputs of both merged operators, at least, were joined"


@pytest.mark.parametrize("merged", [(0, 1), (1, 2), (0, 2), (2, 1)])
def test_some_micro_batches_merged(merged: tuple[int, int]) -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([1, 3, 2])
        while ops := ctx.get_ready_ops():
            if ops[0].name == "b":
                items = ctx.items("b")
                ctx.execute([items[m] for m in merged])
            for op in ctx.get_ready_ops():
                ctx.execute(op)

    _, plan = run_both(Chain(), (X,), Scheduler(schedule))
    assert tuple(sorted(merged)) in parts_of(plan, "b")


def test_merging_everything_joins_nothing_twice() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(3)
        while ops := ctx.get_ready_ops():
            ctx.execute([op for op in ops if op.name == ops[0].name])

    fast, _ = run_both(Stack(), (X,), Scheduler(schedule, STACK_RULES))
    assert fast.stats.joined_bytes == 0, "what stays whole is never cut"


# --- fusion ----------------------------------------------------------------------------------------------


def test_fusion_replaces_a_chain() -> None:
    seen: list[tuple[Any, ...]] = []

    def fused(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(x.shape))
        return x * 2, x * 2 + 1

    _, plan = run_both(Chain(), (X,), chain_schedule("a", "b", replace=fused))
    assert seen == [(3, 8), (3, 8)]
    assert [str(t).split(" -> ")[0] for t in plan.tasks] == ["a[0] + b[0]", "a[1] + b[1]", "c[0]", "c[1]"]
    assert plan.tasks[0].replace and plan.tasks[0].replace.endswith("fused")


def test_fusion_of_everything_returns_a_lone_tensor() -> None:
    _, plan = run_both(Chain(), (X,), chain_schedule("a", "b", "c", replace=lambda x: (x * 2 + 1) * (x * 2)))
    assert len(plan.tasks) == 2


class Signature(nn.Module):
    """Parameters, two inputs and two results that leave, so that the order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = self.first(x)
        b = self.second(a - y)
        return a, b


def test_fusion_gets_and_returns_what_signature_says() -> None:
    signature: list[Any] = []
    model = Signature()

    def fused(*given: Tensor) -> list[Tensor]:
        values = dict(zip([name.removeprefix("model.") for name in signature[0]], given, strict=True))
        assert values["first.weight"] is model.first.weight
        a = values["x"] @ values["first.weight"].t() + values["first.bias"]
        b = (a - values["y"]) @ values["second.weight"].t() + values["second.bias"]
        made = {"a": a, "b": b}
        return [made[name] for name in signature[1]]

    def schedule(ctx: df.ScheduleContext) -> None:
        for m in range(len(ctx.split(2))):
            items = [ctx.items(op)[m] for op in ctx.ops]
            signature[:] = ctx.signature(items)
            ctx.execute(items, replace_func=fused)

    run_both(model, (X, randn(6, 4)), Scheduler(schedule, [df.SplitModule("first"), df.SplitModule("second")]))
    assert signature == [
        ["x", "model.first.weight", "model.first.bias", "y", "model.second.weight", "model.second.bias"],
        ["a", "b"],
    ]


def test_fusion_across_micro_batches() -> None:
    """A grouped kernel: both micro-batches of both operators in one call, inputs and results item by item."""
    model = Signature()

    def fused(x0: Tensor, w: Tensor, b: Tensor, x1: Tensor, w1: Tensor, b1: Tensor) -> tuple[Tensor, Tensor]:
        assert (x0.shape[0], x1.shape[0]) == (2, 4)
        assert w is w1
        both = torch.cat([x0, x1]) @ w.t() + b
        return both[:2], both[2:]

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([2, 4])
        items = ctx.items("first")
        assert ctx.signature(items)[1] == ["a", "a"]
        ctx.execute(items, replace_func=fused)
        run_rest(ctx)

    rules = [df.SplitModule("first"), df.SplitModule("second")]
    _, plan = run_both(model, (X, randn(6, 4)), Scheduler(schedule, rules))
    assert [str(i) for i in plan.tasks[0].items] == ["first[0]", "first[1]"]


def test_fusion_of_a_chain_across_micro_batches() -> None:
    def fused(x0: Tensor, x1: Tensor) -> tuple[Tensor, ...]:
        return x0 * 2, x1 * 2, x0 * 2 + 1, x1 * 2 + 1

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split([2, 4])
        items = [*ctx.items("a"), *ctx.items("b")]
        assert [n for n, _ in zip(*ctx.signature(items), strict=False)] == ["x", "x"]
        ctx.execute(items, replace_func=fused)
        run_rest(ctx, lane="other")

    run_both(Chain(), (X,), Scheduler(schedule))


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x, x, x), lambda x: None, lambda x: {"a": x, "b": x}])
def test_fusion_with_a_wrong_number_of_results(result: Any) -> None:
    def wrong(x: Tensor) -> Any:
        return result(x)

    fast = compiled(Chain(), chain_schedule("a", "b", replace=wrong))
    with pytest.raises(df.ScheduleError, match="wrong") as caught:
        fast(X)
    assert "signature" in caught.value.advice
    assert any("a[0] + b[0]" in note for note in caught.value.__notes__)


def test_fusion_sees_only_what_it_was_given() -> None:
    """One function per plan: two local functions of one name must not be taken for each other."""

    def make(factor: int) -> Any:
        def fused(x: Tensor) -> tuple[Tensor, Tensor]:
            return x * factor, x * factor + 1

        return fused

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        a, b = ctx.items("a"), ctx.items("b")
        ctx.execute([a[0], b[0]], replace_func=make(2))
        ctx.execute([a[1], b[1]], replace_func=make(3))
        run_rest(ctx)

    fast = compiled(Chain(), Scheduler(schedule))
    expected = torch.cat([Chain()(X[:3]), (X[3:] * 3 + 1) * (X[3:] * 3)])
    assert_equal(fast(X), expected)


# --- the cache of plans ----------------------------------------------------------------------------------


class Counting(Each):
    """Counts every call of user code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.partitions = 0

    def partition(self) -> list[Any]:
        self.partitions += 1
        return super().partition()


def test_schedulers_that_cut_alike_share_the_partition() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES))
    fast(X)
    for scheduler in (Each(list(STACK_RULES), split=2), Each(STACK_RULES, split=3)):
        fast.set_scheduler(scheduler)
        assert_equal(fast(X), model(X))
    assert (fast.stats.partitions, fast.stats.plans) == (1, 3)
    fast.set_scheduler(Each(STACK_RULES[:1]))
    assert_equal(fast(X), model(X))
    assert fast.stats.partitions == 2


def test_of_many_ways_to_cut_a_graph_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaflow.engine.analyzed_graph.MAX_PARTITIONS", 2)
    model = Stack()
    fast = compiled(model, Each(STACK_RULES))
    fast(X)
    for rules, made in (STACK_RULES[:1], 2), ([], 3), (STACK_RULES[:1], 3), (STACK_RULES, 4):
        fast.set_scheduler(Each(rules))
        assert_equal(fast(X), model(X))
        assert fast.stats.partitions == made


def test_second_use_calls_no_user_code_and_no_partitioning() -> None:
    model, scheduler = Stack(), Counting(STACK_RULES)
    fast = compiled(model, scheduler)
    fast(X)
    assert (scheduler.calls, scheduler.partitions) == (1, 1)
    before = fast.stats.partitions, fast.stats.scheduler_calls, fast.stats.plans, fast.stats.graphs
    assert before == (1, 1, 1, 1)
    for _ in range(5):
        assert_equal(fast(X + 1), model(X + 1))
    assert (scheduler.calls, scheduler.partitions) == (1, 1)
    assert before == (fast.stats.partitions, fast.stats.scheduler_calls, fast.stats.plans, fast.stats.graphs)
    assert fast.stats.replays == 5
    assert fast.stats.runs == 6


def test_default_key_is_the_sizes() -> None:
    fast = compiled(Stack(), scheduler := Each(STACK_RULES))
    for batch in (6, 4, 6, 4):
        fast(randn(batch, 8))
    assert scheduler.calls == 2


def test_default_key_holds_dtypes() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    fast = compiled(Net(), scheduler := Each())
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert fast(X.to(dtype)).dtype == dtype
    assert scheduler.calls == 2


def test_plan_is_the_one_that_runs() -> None:
    fast = compiled(Stack(), scheduler := Each(STACK_RULES))
    plan = fast.plan(X)
    assert fast.stats.runs == 0
    fast(X)
    assert fast.plan(X) == plan
    assert scheduler.calls == 1


class OwnKey(Each):
    """Small batches and large ones: one decision for each kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: list[Any] = []

    def key(self, ctx: df.ScheduleContext) -> str:
        self.keys.append(ctx.batch_size)
        return "small" if ctx.batch_size < 8 else "large"


def test_own_key_serves_other_batch_sizes() -> None:
    model, scheduler = Stack(), OwnKey(STACK_RULES, split=2, lanes=2)
    fast = compiled(model, scheduler)
    for batch in (6, 4, 7, 2, 6):
        x = randn(batch, 8)
        assert_equal(fast(x), model(x))
        assert [m.size for m in fast.plan(x).micro_batches] == [batch - batch // 2, batch // 2]
    assert scheduler.calls == 1, "one key, one decision"
    assert_equal(fast(randn(8, 8)), model(randn(8, 8)))
    assert scheduler.calls == 2
    assert set(scheduler.keys) == {6, 4, 7, 2, 8}


def test_own_key_is_asked_once_for_the_same() -> None:
    """For the same sizes and the same facts that it read; in calls with facts about requests, each time."""

    class ByPhase(OwnKey):
        def key(self, ctx: df.ScheduleContext) -> str:
            return super().key(ctx) + str(ctx.facts.get("phase"))

    scheduler = ByPhase(STACK_RULES, split=2)
    fast = compiled(Stack(), scheduler)
    x = randn(6, 8)
    for facts in ({"phase": "a"}, {"phase": "a", "other": 1}, {"phase": "b"}, {"phase": "a"}, {}):
        fast(x, facts=facts)
    assert scheduler.calls == 3
    asked = len(scheduler.keys)
    for facts in ({"phase": "a"}, {"phase": "b", "other": 2}, {}):
        fast(x, facts=facts)
    assert len(scheduler.keys) == asked
    fast(x, facts={"num_tokens": [2, 4]})
    fast(x, facts={"num_tokens": [3, 3]})
    assert len(scheduler.keys) > asked + 1


def test_own_key_with_given_sizes_asks_again() -> None:
    """Sizes given as numbers fit one batch size only."""
    model, scheduler = Stack(), OwnKey(STACK_RULES, split=lambda b: [1, b - 1])
    fast = compiled(model, scheduler)
    for batch in (6, 4, 6):
        x = randn(batch, 8)
        assert_equal(fast(x), model(x))
    assert scheduler.calls == 2


def test_own_key_with_more_parts_than_rows_asks_again() -> None:
    model, scheduler = Stack(), OwnKey(STACK_RULES, split=lambda b: min(b, 4))
    fast = compiled(model, scheduler)
    for batch in (6, 3):
        x = randn(batch, 8)
        assert_equal(fast(x), model(x))
    assert scheduler.calls == 2


class ReadsPhase(Each):
    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if ctx.facts.get("phase") == "decode":
            self.calls += 1
            return ctx.sequential()
        return super().schedule(ctx)


def test_facts_that_were_read_are_part_of_the_key() -> None:
    fast = compiled(Stack(), scheduler := ReadsPhase(STACK_RULES))
    assert not fast.plan(X, facts={"phase": "prefill"}).sequential
    assert fast.plan(X, facts={"phase": "decode"}).sequential
    assert not fast.plan(X, facts={"phase": "prefill"}).sequential
    assert scheduler.calls == 2


def test_facts_that_were_not_read_are_not() -> None:
    fast = compiled(Stack(), scheduler := ReadsPhase(STACK_RULES))
    for step in range(4):
        fast(X, facts={"phase": "prefill", "step": step, "unhashable": [{}]})
    assert scheduler.calls == 1


def test_absent_fact_that_was_asked_for_is_part_of_the_key() -> None:
    fast = compiled(Stack(), ReadsPhase(STACK_RULES))
    assert not fast.plan(X).sequential
    assert fast.plan(X, facts={"phase": "decode"}).sequential


@pytest.mark.parametrize("ask", [lambda f: "phase" in f, lambda f: len(f) > 0, lambda f: "phase" in list(f), dict],
                         ids=["in", "len", "iter", "dict"])
def test_looking_for_a_fact_is_reading_it(ask: Any) -> None:
    def schedule(ctx: df.ScheduleContext) -> Any:
        if ask(ctx.facts):
            return ctx.sequential()
        return run_rest(ctx)

    fast = compiled(Stack(), Scheduler(schedule, STACK_RULES))
    assert not fast.plan(X).sequential
    assert fast.plan(X, facts={"phase": 1}).sequential


def test_call_facts_are_laid_over_those_of_compile() -> None:
    seen: list[Any] = []

    def schedule(ctx: df.ScheduleContext) -> Any:
        seen.append((ctx.facts["a"], ctx.facts["b"]))
        return ctx.sequential()

    fast = compiled(Stack(), Scheduler(schedule), facts={"a": 1, "b": 2})
    fast(X, facts={"b": 3})
    fast(X)
    assert seen == [(1, 3), (1, 2)]


# --- swapping the scheduler ------------------------------------------------------------------------------


def test_set_scheduler() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES))
    assert len(fast.plan(X).micro_batches) == 2
    fast.set_scheduler(Each(STACK_RULES, split=3))
    assert len(fast.plan(X).micro_batches) == 3
    assert_equal(fast(X), model(X))
    fast.set_scheduler(df.Sequential())
    assert fast.plan(X).sequential
    assert_equal(fast(X), model(X))
    assert fast.stats.graphs == 1, "the model was captured once"


def test_set_scheduler_brings_its_own_rules() -> None:
    fast = compiled(Stack(), Each([]))
    assert len(names(fast.plan(X))) == 1
    fast.set_scheduler(Each(STACK_RULES))
    assert "layers.1.mlp" in names(fast.plan(X))


def test_set_scheduler_keeps_compiled_operators() -> None:
    """Inductor itself: another scheduler over the same cut finds every operator compiled."""
    model, rules = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), [df.SplitModule(nn.Linear)]
    fast = compiled(model, Each(rules, split=2), operators="inductor")
    x = randn(6, 4)
    assert_equal(fast(x), model(x))
    assert fast.stats.operators_compiled == 2, "one for three equal layers, one for that which writes the result"
    fast.set_scheduler(Each(rules, split=[3, 3]))
    assert_equal(fast(x), model(x))
    assert fast.stats.operators_compiled == 2
    fast.set_scheduler(Each(rules, split=[4, 2]))
    assert_equal(fast(x), model(x))
    assert [m.size for m in fast.plan(x).micro_batches] == [4, 2]
    assert fast.stats.operators_compiled == 4, "a second size is compiled for all that follow"
    fast.set_scheduler(Each(rules, split=[2, 4]))
    assert_equal(fast(x), model(x))
    assert fast.stats.operators_compiled == 4 and fast.stats.joined_bytes == 0


def test_set_scheduler_from_another_thread() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, split=2, lanes=2))
    expected = model(X)
    fast(X)
    stop = threading.Event()

    def swap() -> None:
        parts = 0
        while not stop.is_set():
            parts = parts % 3 + 1
            fast.set_scheduler(Each(STACK_RULES, split=parts, lanes=parts))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(40):
            assert_equal(fast(X), expected)
    finally:
        stop.set()
        thread.join()
    assert fast.stats.scheduler_calls > 1
    assert fast.stats.graphs == 1


def test_no_scheduler_means_sequential() -> None:
    fast = df.compile(Stack(), operators="eager")
    assert fast.plan(X).sequential
    fast(X)
    assert fast.stats.sequential_runs == fast.stats.runs == 1


# --- a plan as the answer --------------------------------------------------------------------------------


def test_schedule_may_return_a_plan_from_json() -> None:
    model = Stack()
    text = compiled(model, Each(STACK_RULES, split=[1, 5], lanes=2)).plan(X).to_json()
    fast, plan = run_both(model, (X,), Scheduler(lambda ctx: df.Plan.from_json(text), STACK_RULES))
    assert [m.size for m in plan.micro_batches] == [1, 5]
    assert fast.stats.plans == 1


def module_level_fusion(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 2 + 1


def test_plan_from_json_calls_what_the_scheduler_lists() -> None:
    text = compiled(Chain(), chain_schedule("a", "b", replace=module_level_fusion)).plan(X).to_json()
    scheduler = Scheduler(lambda ctx: df.Plan.from_json(text))
    with pytest.raises(df.PlanError, match="module_level_fusion") as caught:
        compiled(Chain(), scheduler)(X)
    assert "`functions`" in caught.value.advice
    scheduler.functions = [module_level_fusion]
    _, plan = run_both(Chain(), (X,), scheduler)
    assert plan.tasks[0].replace == f"{__name__}:module_level_fusion"


def test_plan_from_json_for_another_batch_size() -> None:
    text = compiled(Stack(), Each(STACK_RULES)).plan(X).to_json()
    fast = compiled(Stack(), Scheduler(lambda ctx: df.Plan.from_json(text), STACK_RULES))
    with pytest.raises(df.SplitError, match="6 rows, but the batch has 4"):
        fast(randn(4, 8))


def test_items_of_another_context_are_refused() -> None:
    kept: list[df.OpItem] = []

    class Keeps(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            if kept:
                ctx.split(3)
                ctx.execute(kept[0])
            kept.extend(ctx.get_ready_ops())
            super().schedule(ctx)

    fast = compiled(Stack(), Keeps(STACK_RULES, split=None))
    fast(randn(6, 8))
    with pytest.raises(df.ScheduleError, match="not of this context") as caught:
        fast(randn(9, 8))
    assert caught.value.op == kept[0].name and caught.value.advice


def test_a_bounded_number_of_plans_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaflow.engine.plan_cache.MAX_ENTRIES", 2)
    scheduler = Each(STACK_RULES)
    model = Stack()
    fast = compiled(model, scheduler)
    for batch in (4, 5, 6, 6, 5, 4):
        assert_equal(fast(randn(batch, 8)), model(randn(batch, 8)))
    assert scheduler.calls == 4, "the first plan made room for the third, and is made again"
