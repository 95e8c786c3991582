"""Every mistake: the class of the error, the operator and the user's line in it, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, run_rest

HERE = "test_errors.py:"
X = torch.ones(6, 8)
Context = df.ScheduleContext


def raised(kind: type[df.DynaFlowError], schedule: Callable[[Context], Any], model: nn.Module | None = None) -> Any:
    """Runs the model under the schedule; gives the error, which must be of exactly this kind and give advice."""
    fast = compiled(model or Stack(), Scheduler(schedule, STACK_RULES if model is None else ()))
    with pytest.raises(kind) as caught, torch.no_grad():
        fast(X)
    assert type(caught.value) is kind
    assert caught.value.advice
    assert caught.value.advice in str(caught.value)
    return caught.value


def at_this_file(error: df.DynaFlowError) -> bool:
    return error.line is not None and HERE in error.line and error.line in str(error)


def test_all_errors_have_one_base() -> None:
    kinds = (df.PartitionError, df.SplitError, df.ScheduleError, df.PlanError, df.VerifyError)
    for kind in kinds:
        assert kind.__mro__[1] is df.DynaFlowError
    assert issubclass(df.DynaFlowError, Exception)


def test_message_holds_everything() -> None:
    error = df.SplitError("it broke", op="layers.0.attn", line="model.py:3", advice="mend it")
    assert all(part in str(error) for part in ("it broke", "layers.0.attn", "model.py:3", "mend it"))


# --- PartitionError --------------------------------------------------------------------------------------


def test_rule_matches_nothing() -> None:
    fast = compiled(Stack(), Each([df.SplitModule("*.atn")]))
    with pytest.raises(df.PartitionError) as caught:
        fast(X)
    assert caught.value.op == "*.atn"
    assert "*.atn" in str(caught.value)
    assert "layers.0.attn" in caught.value.advice or "layers.1.attn" in caught.value.advice


@pytest.mark.parametrize("rule", [df.SplitModule, df.SplitFunc])
def test_rule_of_a_wrong_kind(rule: Any) -> None:
    with pytest.raises(df.PartitionError, match="3") as caught:
        rule(3)
    assert at_this_file(caught.value)
    assert caught.value.advice


def test_partition_returns_something_else() -> None:
    fast = compiled(Stack(), Each(["*.attn"]))
    with pytest.raises(df.PartitionError, match="Each") as caught:
        fast(X)
    assert "SplitModule" in caught.value.advice


def test_partition_raises() -> None:
    class Broken(Each):
        def partition(self) -> list[Any]:
            raise ValueError("no rules today")

    fast = compiled(Stack(), Broken())
    with pytest.raises(df.DynaFlowError, match="no rules today") as caught:
        fast(X)
    assert at_this_file(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


# --- SplitError ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, -1, [], [6, 0], [7, -1], [3, 3.0], True, [True] * 6, "ab", 2.0, None])
def test_no_such_split(parts: Any) -> None:
    error = raised(df.SplitError, lambda ctx: ctx.split(parts))
    assert at_this_file(error)


@pytest.mark.parametrize("parts", [[3, 2], [6, 1], [1] * 7])
def test_sizes_do_not_add_up(parts: list[int]) -> None:
    error = raised(df.SplitError, lambda ctx: ctx.split(parts))
    assert f"adds up to {sum(parts)}, but the batch has 6 rows" in str(error)
    assert at_this_file(error)


def test_more_parts_than_rows() -> None:
    error = raised(df.SplitError, lambda ctx: ctx.split(7))
    assert "empty" in str(error)
    assert "at most 6" in error.advice
    assert at_this_file(error)


class AllMixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


def test_nothing_can_be_split() -> None:
    error = raised(df.SplitError, lambda ctx: ctx.split(2), AllMixed())
    assert error.op == "softmax"
    assert "softmax" in str(error)
    assert at_this_file(error), "the line of the model where the rows are mixed"


def test_no_batch_to_split() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(48) + 1

    error = raised(df.SplitError, lambda ctx: ctx.split(2), Fixed())
    assert "no batch" in str(error)
    assert at_this_file(error)


# --- ScheduleError ---------------------------------------------------------------------------------------


def test_operator_never_executed() -> None:
    def schedule(ctx: Context) -> None:
        ctx.split(2)
        for op in ctx.get_ready_ops():
            ctx.execute(op)

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0:add"
    assert "never executed" in str(error)
    assert error.line and "helpers.py" in error.line, "the model's line"


def test_nothing_executed_at_all() -> None:
    assert raised(df.ScheduleError, lambda ctx: None).op == "layers.0.attn"


def test_executed_twice() -> None:
    def schedule(ctx: Context) -> None:
        (op,) = ctx.get_ready_ops()
        ctx.execute(op)
        ctx.execute(op)

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0.attn"
    assert "executed already" in str(error)
    assert at_this_file(error)


def test_given_twice() -> None:
    def schedule(ctx: Context) -> None:
        (op,) = ctx.get_ready_ops()
        ctx.execute([op, op])

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0.attn"
    assert at_this_file(error)


def test_not_ready() -> None:
    def schedule(ctx: Context) -> None:
        ctx.split(2)
        ctx.execute(ctx.items("layers.1.mlp")[1])

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.1.mlp"
    assert "not ready" in str(error)
    assert "[1]" in str(error)
    assert at_this_file(error)


def test_refused_execute_changes_nothing() -> None:
    """A scheduler may try, catch and go on."""

    def schedule(ctx: Context) -> None:
        ctx.split(2)
        with pytest.raises(df.ScheduleError):
            ctx.execute([ctx.items("layers.0.attn")[0], ctx.items("layers.1.mlp")[0]], replace_func=lambda *a: None)
        with pytest.raises(df.ScheduleError):
            ctx.execute([ctx.items("layers.0.attn")[0], ctx.items("layers.0:add#2")[0]], replace_func=lambda *a: None)
        with pytest.raises(df.ScheduleError):
            ctx.execute(ctx.items("layers.1.mlp")[0])
        run_rest(ctx)

    model = Stack()
    with torch.no_grad():
        assert_equal(compiled(model, Scheduler(schedule, STACK_RULES))(X), model(X))


def test_different_operators_without_replace_func() -> None:
    def schedule(ctx: Context) -> None:
        ctx.execute([ctx.items("layers.0.attn")[0], ctx.items("layers.0:add")[0]])

    error = raised(df.ScheduleError, schedule)
    assert "layers.0.attn" in str(error)
    assert "layers.0:add" in str(error)
    assert "replace_func" in error.advice
    assert at_this_file(error)


def test_fusion_of_operators_that_do_not_chain() -> None:
    def schedule(ctx: Context) -> None:
        ctx.execute([ctx.items("layers.0.attn")[0], ctx.items("layers.1.mlp")[0]], replace_func=lambda *a: None)

    error = raised(df.ScheduleError, schedule)
    assert "does not chain" in str(error)
    assert error.op == "layers.0.attn"
    assert "layers.1.mlp" in str(error)
    assert at_this_file(error)


def test_fusion_in_the_wrong_order() -> None:
    def schedule(ctx: Context) -> None:
        ctx.execute([ctx.items("layers.0:add")[0], ctx.items("layers.0.attn")[0]], replace_func=lambda *a: None)

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0:add"
    assert at_this_file(error)


def test_fusion_across_micro_batches_that_do_not_meet() -> None:
    def schedule(ctx: Context) -> None:
        ctx.split(2)
        ctx.execute([ctx.items("layers.0.attn")[0], ctx.items("layers.0:add")[1]], replace_func=lambda *a: None)

    assert "does not chain" in str(raised(df.ScheduleError, schedule))


def test_fusion_around_an_operator_outside() -> None:
    """attn -> add -> mlp with add left out: mlp would run before what it needs."""

    def schedule(ctx: Context) -> None:
        ctx.execute(ctx.items("layers.0.attn"))
        ctx.execute([ctx.items("layers.0:add")[0], ctx.items("layers.0:add#2")[0]], replace_func=lambda *a: None)

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0:add#2"
    assert "layers.0.mlp" in str(error)


def test_scheduler_raised() -> None:
    def schedule(ctx: Context) -> None:
        ctx.split(2)
        raise KeyError("oops")

    error = raised(df.ScheduleError, schedule)
    assert "oops" in str(error)
    assert "KeyError" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert at_this_file(error)


def test_key_raised() -> None:
    class Broken(Each):
        def key(self, ctx: Context) -> Any:
            raise KeyError("no key")

    fast = compiled(Stack(), Broken(STACK_RULES))
    with pytest.raises(df.ScheduleError, match="no key") as caught:
        fast(X)
    assert at_this_file(caught.value)


@pytest.mark.parametrize("returned", [3, "sequential", [1]])
def test_schedule_returns_something_else(returned: Any) -> None:
    def schedule(ctx: Context) -> Any:
        run_rest(ctx)
        return returned

    error = raised(df.ScheduleError, schedule)
    assert repr(returned) in str(error)


@pytest.mark.parametrize("ops", [[], None, "layers.0.attn", ["layers.0.attn"], 3])
def test_execute_of_nothing_or_of_a_name(ops: Any) -> None:
    error = raised(df.ScheduleError, lambda ctx: ctx.execute(ops))
    assert "get_ready_ops" in error.advice
    assert at_this_file(error)


@pytest.mark.parametrize("lane", ["", None, 3])
def test_lane_is_no_name(lane: Any) -> None:
    error = raised(df.ScheduleError, lambda ctx: ctx.execute(ctx.get_ready_ops()[0], lane=lane))
    assert error.op == "layers.0.attn"
    assert at_this_file(error)


def test_split_too_late() -> None:
    def schedule(ctx: Context) -> None:
        ctx.get_ready_ops()
        ctx.split(2)

    assert at_this_file(raised(df.ScheduleError, schedule))


def test_sequential_too_late_and_execute_behind_it() -> None:
    def late(ctx: Context) -> None:
        run_rest(ctx)
        ctx.sequential()

    assert at_this_file(raised(df.ScheduleError, late))

    def behind(ctx: Context) -> None:
        ctx.sequential()
        ctx.execute(ctx.get_ready_ops()[0])

    assert at_this_file(raised(df.ScheduleError, behind))


def test_endless_loop_is_found() -> None:
    def schedule(ctx: Context) -> None:
        while ctx.get_ready_ops():
            pass

    error = raised(df.ScheduleError, schedule)
    assert error.op == "layers.0.attn"
    assert at_this_file(error)


def test_unknown_name() -> None:
    error = raised(df.ScheduleError, lambda ctx: ctx.items("layers.9"))
    assert "layers.9" in str(error)
    assert at_this_file(error)


@pytest.mark.parametrize("scheduler", [Each, object()])
def test_no_scheduler(scheduler: Any) -> None:
    with pytest.raises(df.ScheduleError) as caught:
        df.compile(Stack(), scheduler)
    assert "OpSchedulerBase" in caught.value.advice
    with pytest.raises(df.ScheduleError):
        compiled(Stack()).set_scheduler(scheduler)


def test_unknown_strategy() -> None:
    with pytest.raises(df.ScheduleError) as caught:
        df.compile(Stack(), "nanoflo")
    assert "'nanoflow'" in caught.value.advice
    with pytest.raises(df.ScheduleError):
        compiled(Stack()).set_scheduler("two batches")
    with pytest.raises(df.ScheduleError) as caught:
        df.compile(Stack(), "sequential", scheduler_options={"parts": 2})
    assert "'parts'" in str(caught.value)
    with pytest.raises(df.DynaFlowError):
        df.compile(Stack(), Each(), scheduler_options={"parts": 2})


@pytest.mark.parametrize("given", [["parts"], 3, "parts", {3: 4}, [], 0])
def test_options_of_a_strategy_have_names(given: Any) -> None:
    with pytest.raises(df.DynaFlowError, match=r"(?s)scheduler_options=.*options by name") as caught:
        df.compile(Stack(), "nanoflow", scheduler_options=given)
    assert '{"parts": 3}' in caught.value.advice
    with pytest.raises(df.DynaFlowError, match=r"(?s)scheduler_options=.*options by name"):
        df.configure(scheduler="nanoflow", scheduler_options=given)


@pytest.mark.parametrize("given", [[], 0, {}, False])
def test_what_is_empty_is_no_scheduler(given: Any) -> None:
    with pytest.raises(df.ScheduleError, match="is not a scheduler"):
        df.compile(Stack(), given)


def test_user_line_is_the_schedulers_not_ours() -> None:
    """The line that is named is the one that called, to the number."""

    def schedule(ctx: Context) -> None:
        ctx.split(100)

    line = schedule.__code__.co_firstlineno + 1
    assert raised(df.SplitError, schedule).line == f"{__file__}:{line}"


# --- PlanError -------------------------------------------------------------------------------------------


def test_function_of_a_plan_is_not_known() -> None:
    def local(*given: Tensor) -> Tensor:
        return given[0]

    def schedule(ctx: Context) -> None:
        ctx.execute(ctx.items("layers.0.attn"), replace_func=local)
        run_rest(ctx)

    with torch.no_grad():
        text = compiled(Stack(), Scheduler(schedule, STACK_RULES)).plan(X).to_json()
    error = raised(df.PlanError, lambda ctx: df.Plan.from_json(text))
    assert "local" in str(error)
    assert "module" in error.advice


# --- options ---------------------------------------------------------------------------------------------


def test_unknown_mode_of_operators() -> None:
    with pytest.raises(df.DynaFlowError, match="fast") as caught:
        df.compile(Stack(), operators="fast")  # type: ignore[arg-type]
    assert "inductor" in caught.value.advice


def test_error_is_raised_again_and_a_new_scheduler_helps() -> None:
    model = Stack()
    fast = compiled(model, Scheduler(lambda ctx: ctx.split(100), STACK_RULES))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(df.SplitError):
                fast(X)
        fast.set_scheduler(Each(STACK_RULES))
        assert_equal(fast(X), model(X))


# --- operators that fail when they run -------------------------------------------------------------------


class Trouble(Exception):
    """The model's own."""


fail_on: set[int] = set()


@torch.library.custom_op("dynaflow_tests::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    if x.shape[0] in fail_on:
        raise Trouble(f"no batch of {x.shape[0]}, please")
    return x * 2


@fragile.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.dynaflow_tests.fragile(self.before(x))
        return self.after(x.softmax(0))


FRAGILE_RULES = (
    df.SplitModule("before"),
    df.SplitFunc(torch.ops.dynaflow_tests.fragile, splittable=True),
    df.SplitFunc("softmax"),
    df.SplitModule("after"),
)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_failing_operator(lanes: int, size: int) -> None:
    """The parts are [1, 2, 3]: each size fails in another lane, and others wait for it before the softmax."""
    model = Fragile()
    fast = compiled(model, Each(FRAGILE_RULES, split=[1, 2, 3], lanes=lanes))
    x = torch.randn(6, 8)
    with torch.no_grad():
        expected = model(x)
        assert_equal(fast(x), expected)
        threads = threading.active_count()
        for _ in range(3):
            fail_on.add(size)
            try:
                with pytest.raises(Trouble, match=f"no batch of {size}") as caught:
                    fast(x)
            finally:
                fail_on.clear()
            (note,) = [n for n in caught.value.__notes__ if "dynaflow" in n]
            assert f"fragile[{size - 1}]" in note
            assert f"lane{(size - 1) % lanes}" in note
            assert_equal(fast(x), expected)
    assert threading.active_count() == threads


def test_all_lanes_fail_at_once() -> None:
    model = Fragile()
    fast = compiled(model, Each(FRAGILE_RULES, split=3, lanes=3))
    x = torch.randn(6, 8)
    with torch.no_grad():
        for _ in range(5):
            fail_on.add(2)
            try:
                with pytest.raises(Trouble) as caught:
                    fast(x)
            finally:
                fail_on.clear()
            assert len([n for n in caught.value.__notes__ if "dynaflow" in n]) == 1
        assert_equal(fast(x), model(x))


def test_failing_operator_in_the_uncut_graph() -> None:
    fast = df.compile(Fragile(), operators="eager")
    fail_on.add(6)
    try:
        with pytest.raises(Trouble), torch.no_grad():
            fast(torch.randn(6, 8))
    finally:
        fail_on.clear()
    with torch.no_grad():
        fast(torch.randn(6, 8))


def test_failing_replace_func_is_named() -> None:
    def broken(*given: Tensor) -> Tensor:
        raise Trouble("fusion")

    def schedule(ctx: Context) -> None:
        ctx.split(2)
        for item in ctx.items("layers.0.attn"):
            ctx.execute(item, replace_func=broken, lane=str(item.micro_batch.index))
        run_rest(ctx)

    fast = compiled(Stack(), Scheduler(schedule, STACK_RULES))
    with pytest.raises(Trouble) as caught, torch.no_grad():
        fast(X)
    assert any("layers.0.attn[" in note and "broken" in note for note in caught.value.__notes__)
