"""A compiled model among others: threads, graph breaks, modes, torch's own door, and what is left behind."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, names, randn, run_both, whole

X = randn(6, 8)


def lanes_alive() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("dynaflow")}


# --- several models, several threads ---------------------------------------------------------------------


def test_two_compiled_models() -> None:
    first, second = Stack(), Stack(blocks=3)
    one, two = compiled(first, Each(STACK_RULES, lanes=2)), compiled(second, Each(STACK_RULES, split=3, lanes=3))
    with torch.no_grad():
        for batch in (6, 4, 6):
            x = randn(batch, 8)
            assert_equal(one(x), first(x))
            assert_equal(two(x), second(x))
    assert one.stats.runs == two.stats.runs == 3
    assert (len(one.plan(X).micro_batches), len(two.plan(X).micro_batches)) == (2, 3)


def test_one_model_compiled_twice() -> None:
    model = Stack()
    one, two = compiled(model, Each(STACK_RULES)), compiled(model, Each(split=3))
    with torch.no_grad():
        assert_equal(one(X), two(X))
        assert len(one.plan(X).micro_batches) == 2
        assert len(two.plan(X).micro_batches) == 3


def test_many_models_of_one_class() -> None:
    """More than Dynamo's limit of recompiles: they must not share it."""
    with torch.no_grad():
        for _ in range(12):
            run_both(Stack(blocks=1), (X,), Each(STACK_RULES))


@pytest.mark.parametrize("warm", [True, False])
def test_threads_call_one_compiled_model(warm: bool) -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, lanes=2))
    batches = (2, 3, 6, 7)
    inputs = {b: randn(b, 8) for b in batches}
    with torch.no_grad():
        expected = {b: model(x) for b, x in inputs.items()}
        if warm:  # else all of them capture at once
            fast(inputs[2])
    errors: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            with torch.no_grad():
                for i in range(60):
                    b = batches[(i + offset) % len(batches)]
                    assert_equal(fast(inputs[b]), expected[b])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    if warm:
        assert fast.stats.graphs == 1
        assert fast.stats.plans == len(batches), "each plan was made once"


def test_facts_belong_to_the_thread_that_gives_them() -> None:
    seen: dict[str, set[int]] = {"a": set(), "b": set()}

    class Read(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            super().schedule(ctx)
            seen[ctx.facts["who"]].add(ctx.batch_size)

    fast = compiled(Stack(), Read())
    fast(X, facts={"who": "a"})

    def work(who: str, batch: int) -> None:
        for _ in range(20):
            fast(randn(batch, 8), facts={"who": who})

    threads = [threading.Thread(target=work, args=args) for args in (("a", 4), ("b", 5))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"a": {6, 4}, "b": {5}}


def test_lanes_truly_run_side_by_side() -> None:
    """Two tasks on two lanes meet in a barrier: one after the other they would wait for ever."""
    barrier = threading.Barrier(2)

    @torch.library.custom_op("dynaflow_tests::meet", mutates_args=())
    def meet(x: Tensor) -> Tensor:
        barrier.wait(20)
        return x + 1

    meet.register_fake(lambda x: torch.empty_like(x))

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return meet(x)

    fast = compiled(Net(), Each([df.SplitFunc("*meet", splittable=True)], lanes=2))
    assert_equal(fast(X), X + 1)


# --- graph breaks ----------------------------------------------------------------------------------------


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x).tanh()


def test_graph_break() -> None:
    model = Breaking()
    rules = [df.SplitModule("*first", tag="1"), df.SplitModule("*second", tag="2")]
    fast = compiled(model, Each(rules, lanes=2))
    with torch.no_grad():
        for batch in (6, 4, 6):
            x = randn(batch, 8)
            assert_equal(fast(x), model(x))
    assert fast.stats.graph_breaks > 0
    assert fast.stats.graphs == 2
    assert fast.stats.plain_graphs == 0
    assert fast.stats.plans == 4, "both parts are scheduled, at two sizes"
    plan = fast.plan(X)
    assert any("first" in name for name in names(plan)), "the plan is that of the first part"
    assert whole(plan) == []


def test_branch_on_data_breaks_the_graph() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            if x.sum() > 0:
                return x + 1
            return x - 1

    model = Net()
    fast = compiled(model, Each())
    with torch.no_grad():
        for x in (X.abs(), -X.abs(), X.abs()):
            assert_equal(fast(x), model(x))
    assert fast.stats.graph_breaks > 0


def test_part_without_a_batch_runs_plainly() -> None:
    """The scheduler splits whatever it gets; a part that has nothing to split is not its mistake."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = (x * 2).sum()
            torch._dynamo.graph_break()
            total = total * 3
            torch._dynamo.graph_break()
            with df.mark("rows"):
                return x + total

    model = Net()
    fast = compiled(model, Each(lanes=2))
    with torch.no_grad():
        for _ in range(2):
            assert_equal(fast(X), model(X))
    assert fast.stats.graphs == 3
    assert fast.stats.plain_graphs == 1
    assert "no batch" in fast.stats.plain_reasons[0]
    assert fast.stats.sequential_runs == 2
    assert fast.stats.runs == 6


def test_fullgraph_refuses_a_break() -> None:
    with pytest.raises(Exception, match=r"graph.break|Graph break|fullgraph"):
        compiled(Breaking(), fullgraph=True)(X)


# --- calls -----------------------------------------------------------------------------------------------


def test_kwargs_only_calls() -> None:
    class Net(nn.Module):
        def forward(self, *, ids: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
            y = ids * scale
            return y if mask is None else y * mask

    model = Net()
    fast = compiled(model, Each())
    mask = randn(6, 8)
    assert_equal(fast(ids=X), model(ids=X))
    assert_equal(fast(ids=X, mask=mask), model(ids=X, mask=mask))
    assert_equal(fast(mask=mask, scale=0.5, ids=X), model(ids=X, scale=0.5, mask=mask))
    assert len(fast.plan(mask=mask, ids=X).micro_batches) == 2


@dataclass
class Result:
    logits: Tensor
    extra: tuple[Tensor, None]


def test_result_keeps_its_type() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Result:
            return Result(x + 1, (x * 2, None))

    assert_equal(compiled(Net())(X), Net()(X))


def test_attributes_and_signature_are_the_models() -> None:
    model = Stack()
    fast = compiled(model)
    assert fast.head is model.head
    assert list(fast.state_dict()) == list(model.state_dict())
    import inspect

    assert inspect.signature(fast) == inspect.signature(model.forward)
    with pytest.raises(AttributeError):
        fast.no_such_thing  # noqa: B018


def test_the_model_is_left_as_it_is() -> None:
    model = Stack()
    before = dict(model.__dict__), model.forward
    compiled(model)(X)
    assert model.__dict__ == before[0]
    assert model.forward == before[1]


@pytest.mark.parametrize("kind", ["no tensor", "0-d", "nothing"])
def test_no_batch_at_all(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(randn(4, 4))

        def forward(self, x: Any = 2) -> Tensor:
            return (self.w * x).relu() @ self.w

    model = Net()
    args: tuple[Any, ...] = {"no tensor": (3,), "0-d": (torch.tensor(2.0),), "nothing": ()}[kind]
    with torch.no_grad():
        fast = compiled(model, Each([df.SplitFunc("relu")], split=None, lanes=2))
        assert_equal(fast(*args), model(*args))
        plan = fast.plan(*args)
    assert plan.batch_size == 1
    assert "relu" in names(plan)


def test_no_operator_at_all() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    fast = compiled(Net(), Each(split=None))
    assert fast(X) is X


def test_empty_batch() -> None:
    model = Stack()
    fast = df.compile(model, operators="eager")
    with torch.no_grad():
        assert_equal(fast(torch.empty(0, 8)), model(torch.empty(0, 8)))


# --- modes -----------------------------------------------------------------------------------------------


def test_inference_mode() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, lanes=2))
    with torch.inference_mode():
        result = fast(X)
        assert_equal(result, model(X))
    assert result.is_inference()
    with torch.no_grad():
        result = fast(X)
        assert_equal(result, model(X))
    assert not result.is_inference()
    assert not result.requires_grad


@pytest.mark.parametrize("lanes", [1, 2])
def test_gradients(lanes: int) -> None:
    plain, mine = Stack(), Stack()
    mine.load_state_dict(plain.state_dict())
    fast = compiled(mine, Each(STACK_RULES, split=[2, 4], lanes=lanes))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    result, expected = fast(x), plain(y)
    assert result.requires_grad
    assert_equal(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    assert_equal(x.grad, y.grad)
    for (name, p), q in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        assert_equal(p.grad, q.grad)


def test_gradients_with_inductor() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sigmoid() * x

    plain, mine = Tiny(), Tiny()
    mine.load_state_dict(plain.state_dict())
    fast = compiled(mine, Each([df.SplitModule("a")]), operators="inductor")
    x, y = randn(6, 4).requires_grad_(), randn(6, 4).requires_grad_()
    result, expected = fast(x), plain(y)
    assert_equal(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    assert_equal(x.grad, y.grad)
    assert_equal(mine.a.weight.grad, plain.a.weight.grad)
    with torch.no_grad():
        assert_equal(fast(x), plain(y))
        assert not fast(x).requires_grad


@pytest.mark.parametrize("lanes", [1, 2])
def test_autocast(lanes: int) -> None:
    """Half precision: not all CPUs have bfloat16 products."""
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, lanes=lanes))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        expected = model(X)
        assert expected.dtype == torch.float16
        assert_equal(fast(X), expected, tolerance=5e-3)
    with torch.no_grad():
        result = fast(X)
        assert result.dtype == torch.float32
        assert_equal(result, model(X))


def test_autocast_and_no_grad_inside_the_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.float16):
                y = self.a(x)
                with torch.autocast("cpu", enabled=False):
                    z = self.b(x)
            with torch.no_grad():
                w = self.c(x)
            return y.float() + z, w

    model = Net()
    fast = compiled(model, Each([df.SplitModule(nn.Linear)], lanes=2))
    found, expected = fast(X), model(X)
    assert_equal(found, expected, tolerance=5e-3)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in expected] == [True, False]
    assert torch.is_grad_enabled()


# --- torch's own door ------------------------------------------------------------------------------------


def test_backend_by_name() -> None:
    model, scheduler = Stack(), Each(STACK_RULES)
    fast = torch.compile(model, backend="dynaflow", options={"scheduler": scheduler, "operators": "eager"})
    with torch.no_grad():
        for batch in (6, 4):
            x = randn(batch, 8)
            assert_equal(fast(x), model(x))
    assert scheduler.calls == 2


def test_backend_found_without_importing_us() -> None:
    """In a process of its own: torch finds the backend by its entry point. Without options it runs in sequence."""
    if not [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "dynaflow"]:
        pytest.skip("dynaflow is not installed (pip install -e .), so it has no entry point")
    code = """
        import sys, torch
        assert "dynaflow" in torch._dynamo.list_backends(None)
        assert "dynaflow" not in sys.modules
        model = torch.nn.Linear(4, 4)
        x = torch.ones(3, 4)
        fast = torch.compile(model, backend="dynaflow", options={"operators": "eager"})
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
        print("captured by", sys.modules["dynaflow"].__name__)
    """
    with tempfile.TemporaryDirectory() as elsewhere:  # not where the package's source would be found
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=elsewhere, capture_output=True, text=True, check=False
        )
    assert done.stdout.strip() == "captured by dynaflow", done.stderr


def test_backend_refuses_unknown_options() -> None:
    fast = torch.compile(Stack(), backend="dynaflow", options={"schedule": Each()})
    with pytest.raises(Exception, match="unknown option 'schedule'"):
        fast(X)


# --- nothing is left behind ------------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "dynamo": dynamo.get_config_copy(),
        "inductor": inductor.get_config_copy(),
        "process group": torch.distributed.is_initialized(),
        "rng": torch.get_rng_state().tolist(),
    }


def test_no_setting_is_changed() -> None:
    compiled(Stack())(X)  # what torch itself sets up on its first use is not ours
    before = _settings()
    with torch.no_grad():
        run_both(Stack(), (X,), Each(STACK_RULES, lanes=2), verify=True)
    with torch.no_grad(), pytest.raises(df.SplitError):
        compiled(Stack(), Each(split=100))(X)
    with torch.inference_mode():
        compiled(Stack(), Each(STACK_RULES, lanes=3))(X)
    after = _settings()
    assert {k for k in before if before[k] != after[k]} - {"rng"} == set()


def test_random_state_is_left_alone() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES), verify=True)
    before = torch.get_rng_state()
    with torch.no_grad():
        fast(X)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_default_process_group() -> None:
    """Cumulative sums along a dim that is not the batch, and other operators that ask DTensor's rules."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.special.xlog1py(x.cumsum(1), x.exp())
            return torch.linalg.vector_norm(x.unfold(1, 2, 2), dim=-1)

    run_both(Net(), (X,), Each())
    assert not torch.distributed.is_initialized()


def test_inputs_carry_no_marks() -> None:
    x, y = X.clone(), X.clone()
    with torch.no_grad():
        run_both(Stack(), (x,), Each(STACK_RULES))
        compiled(Stack(), Each(STACK_RULES), batch_dims={"x": 0})(y)
    assert vars(x) == vars(y) == {}


def test_inputs_carry_no_marks_after_a_failure() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(5, 5)

    x = X.clone()
    with pytest.raises(Exception, match=r"view|shape"):
        compiled(Net())(x)
    with pytest.raises(df.SplitError):
        compiled(Stack(), batch_dims={"nothing": 0})(x)
    assert vars(x) == {}


def test_marks_of_the_user_stay() -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    before = dict(vars(x))
    with torch.no_grad():
        compiled(Stack(), Each(STACK_RULES))(x)
    assert vars(x) == before


def test_threads_end_with_the_compiled_object() -> None:
    gc.collect()
    before = lanes_alive()
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, split=3, lanes=3))
    with torch.no_grad():
        fast(X)
    assert len(lanes_alive() - before) == 2, "the first lane is the caller's own thread"
    gone = weakref.ref(engine_of(fast))
    del fast
    gc.collect()
    assert gone() is None, "something keeps the engine alive"
    deadline = time.monotonic() + 5
    while lanes_alive() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes_alive() - before == set()


def test_threads_end_when_the_graph_was_broken() -> None:
    """The parts behind a break are kept by Dynamo with the code of the model's class."""
    fast = compiled(Breaking(), Each([df.SplitModule("*first")], lanes=2))
    with torch.no_grad():
        fast(X)
    gone = weakref.ref(engine_of(fast))
    del fast
    gc.collect()
    assert gone() is None


def test_model_is_let_go_with_the_compiled_object() -> None:
    model = Stack()
    gone = weakref.ref(model)
    fast = compiled(model, Each(STACK_RULES, lanes=2))
    with torch.no_grad():
        fast(X)
    del fast, model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("lanes", [1, 2])
def test_values_between_operators_are_let_go(lanes: int) -> None:
    """After a call, nothing is left of what was made between operators."""
    made: list[weakref.ref[Tensor]] = []

    def keep_watch(*given: Tensor) -> Tensor:
        made.append(weakref.ref(result := given[0] + 1))
        return result

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                replace = keep_watch if "attention" in op.tags else None
                ctx.execute([op], lane=f"lane{op.micro_batch.index % lanes}", replace_func=replace)

    fast = compiled(Stack(), Scheduler(schedule, STACK_RULES))
    with torch.no_grad():
        result = fast(X)
    assert len(made) == 4
    deadline = time.monotonic() + 5  # a lane lets go of its work just after the call returns
    while any(r() is not None for r in made) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [r() for r in made] == [None] * 4
    assert result.shape == (6, 3)


def test_values_die_during_the_call() -> None:
    """Each value between operators is let go as soon as its readers are done, not at the end of the call."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @torch.library.custom_op("dynaflow_tests::watch", mutates_args=())
    def watch(x: Tensor) -> Tensor:
        alive.append(sum(r() is not None for r in made))
        y = x + 1
        made.append(weakref.ref(y))
        return y

    watch.register_fake(lambda x: torch.empty_like(x))

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = watch(x)
            return x

    fast = compiled(Net(), Each([df.SplitFunc("*watch", splittable=True)], split=None))
    with torch.no_grad():
        fast(X)
    assert max(alive) <= 1, alive


def test_under_a_process_group_of_the_users() -> None:
    """gloo, one process: the split oracle neither uses nor disturbs it."""
    code = """
        import sys, tempfile
        import torch, torch.distributed as dist
        from tests.unit.test_api import X, Each, STACK_RULES, Stack, run_both
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
        group = dist.group.WORLD
        run_both(Stack(), (X,), Each(STACK_RULES, lanes=2))
        class Odd(torch.nn.Module):  # has no rule of ours: DTensor's are asked
            def forward(self, x):
                return torch.special.xlog1py(x.cumsum(1), x.exp()).unfold(1, 2, 2).sum(-1)
        run_both(Odd(), (X,), Each())
        assert dist.group.WORLD is group and dist.get_world_size() == 1 and dist.get_backend() == "gloo"
        t = torch.ones(2)
        dist.all_reduce(t)
        assert t.tolist() == [1, 1]
        dist.destroy_process_group()
        print("fine")
    """
    with tempfile.TemporaryDirectory() as store:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), store], capture_output=True, text=True, check=False
        )
    assert done.stdout.strip().endswith("fine"), done.stderr


def test_where_torch_compile_is_turned_off_the_stats_say_so() -> None:
    model = nn.Linear(4, 4)
    fast = df.compile(model)
    with torch._dynamo.config.patch(disable=True), torch.no_grad():
        torch.testing.assert_close(fast(torch.ones(4, 4)), model(torch.ones(4, 4)))
    (reason,) = fast.stats.plain_reasons
    assert "turned off" in reason


def test_sizes_that_are_tried_out_are_not_logged() -> None:
    """The cache has fewer rows than the batch that a graph is probed with."""
    cache, records = torch.zeros(16, 4), []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        fast = compiled(lambda x: torch.cat([cache[: x.shape[0]], x], 1) * 2, Each(split=None))
        with torch.no_grad():
            fast(torch.ones(6, 4))
    finally:
        log.removeHandler(handler)
    assert not records


def test_a_call_while_another_thread_traces() -> None:
    """torch has one mark of a trace for all threads."""
    fast = compiled(nn.ReLU(), df.Sequential())
    x = randn(4, 4)
    inside, done = threading.Event(), threading.Event()

    def traced(y: Any) -> Any:
        inside.set()
        done.wait(1.0)
        return y + 1

    def trace() -> None:
        torch.fx.symbolic_trace(traced)

    for _ in range(3):  # the first call, and others
        inside.clear()
        done.clear()
        thread = threading.Thread(target=trace)
        thread.start()
        inside.wait()
        assert torch.equal(fast(x), x.relu())
        done.set()
        thread.join()
