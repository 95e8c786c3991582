"""Whatever a user hands in: what is right is taken, and all else is a DynaFlowError with advice; never a bare error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow import options, strategies
from dynaflow.cli.arguments import scheduler_named
from dynaflow.core import validate
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, graph_of, run_rest

X = torch.ones(6, 8)
Context = df.ScheduleContext


class Odd:
    """Of no use for anything, not even for printing."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


NUMBERS: list[Any] = [0, -1, 10**9, 10**400, 2.0, 1e308, float("nan"), float("inf"), np.int64(-3), np.float32(2.5), 1j]
TEXTS: list[Any] = ["", "image", "\n", "\ud800", "x" * 10_000, b"bytes"]
OTHERS: list[Any] = [
    None, True, False, [], [1], ["a"], [[]], (), {}, {"a": 1}, {1: 2}, {"x"}, object(), Odd(), int, print, nn.Linear,
    np.array([1, 2]), np.array("a"), np.array([]), torch.ones(2), torch.tensor(2.5), torch.tensor([3, 3]), range(3),
]  # fmt: skip
EVERYTHING = NUMBERS + TEXTS + OTHERS


def survives(call: Callable[[Any], Any], value: Any) -> str | None:
    """What went wrong, other than by a DynaFlowError with advice."""
    try:
        call(value)
    except df.DynaFlowError as e:
        return None if e.advice and str(e).count("\n") < 12 and len(str(e)) < 3000 else f"no advice, or no end: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


# --- inside of schedule() ---------------------------------------------------------------------------------


def raised_inside(call: Callable[[Context], Any]) -> BaseException | None:
    """What a call on the context raises, before anything wraps it."""
    found: list[BaseException] = []

    def schedule(ctx: Context) -> None:
        try:
            call(ctx)
        except Exception as e:
            found.append(e)
        ctx.sequential()

    fast = compiled(Stack(), Scheduler(schedule, STACK_RULES))
    with torch.no_grad():
        fast.plan(X)
    return found[0] if found else None


INSIDE: dict[str, Callable[[Context, Any], Any]] = {
    "split": lambda ctx, v: ctx.split(v),
    "split sizes": lambda ctx, v: ctx.split([v, 3]),
    "items": lambda ctx, v: ctx.items(v),
    "execute": lambda ctx, v: ctx.execute(v),
    "execute several": lambda ctx, v: ctx.execute([v]),
    "after": lambda ctx, v: ctx.execute(ctx.get_ready_ops()[0], after=v),
    "after several": lambda ctx, v: ctx.execute(ctx.get_ready_ops()[0], after=[v]),
    "replace_func": lambda ctx, v: ctx.execute(ctx.get_ready_ops()[0], replace_func=v),
    "lane of execute": lambda ctx, v: ctx.execute(ctx.get_ready_ops()[0], lane=v),
    "signature": lambda ctx, v: ctx.signature(v),
    "signature of several": lambda ctx, v: ctx.signature([v]),
    "cost": lambda ctx, v: ctx.cost(v),
    "uses": lambda ctx, v: ctx.uses(v),
    "lane": lambda ctx, v: ctx.lane(v),
    "sms": lambda ctx, v: ctx.lane("a", sms=v),
    "priority": lambda ctx, v: ctx.lane("a", priority=v),
    "decide_later": lambda ctx, v: ctx.decide_later(v),
    "an item of a wrong operator": lambda ctx, v: ctx.execute(
        df.OpItem(op=v, micro_batch=ctx.micro_batches[0], micro_batches=(0,))
    ),
    "an item of wrong parts": lambda ctx, v: ctx.execute(
        df.OpItem(op=ctx.ops[0], micro_batch=ctx.micro_batches[0], micro_batches=v)
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_methods_of_the_context(name: str) -> None:
    wrong: list[str] = []

    def schedule(ctx: Context) -> None:
        for value in EVERYTHING:
            fresh = Context(
                ctx.graph, batch_size=6, has_batch=True, device=ctx.device, facts={}, sizes=ctx.sizes
            )
            if problem := survives(lambda v, c=fresh: INSIDE[name](c, v), value):
                wrong.append(f"{validate.shown(value)}: {problem}")
        ctx.sequential()

    with torch.no_grad():
        compiled(Stack(), Scheduler(schedule, STACK_RULES)).plan(X)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (np.int64(2), [3, 3]), (np.int8(3), [2, 2, 2]), (torch.tensor(2), [3, 3]), (np.array([5, 1]), [5, 1]),
        (torch.tensor([1, 5]), [1, 5]), ((2, 4), [2, 4]), (range(1, 4), [1, 2, 3]), ([np.int32(2), 4], [2, 4]),
        ({2: 0, 4: 0}.keys(), [2, 4]),
    ],
)  # fmt: skip
def test_whole_numbers_of_all_kinds_split(parts: Any, sizes: list[int]) -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES, split=lambda _: parts))
    with torch.no_grad():
        assert_equal(fast(X), model(X))
        plan = fast.plan(X)
    assert [m.size for m in plan.micro_batches] == sizes
    assert df.Plan.from_json(plan.to_json()) == plan, "no numpy in it"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda ctx: ctx.split(2.0), "split=2.0"),
        (lambda ctx: ctx.split([3.0, 3]), "integers"),
        (lambda ctx: ctx.split(0), "can't be empty"),
        (lambda ctx: ctx.execute("image"), "execute() got 'image'"),
        (lambda ctx: ctx.execute(ctx.get_ready_ops()[0], after="image"), "execute(after=...) got 'image'"),
        (lambda ctx: ctx.execute(ctx.ops[0]), "execute() got layers.0.attn"),
        (lambda ctx: ctx.lane("a", sms=10**9), "sms=1000000000"),
        (lambda ctx: ctx.lane("a\nb"), "lane('a\\nb'): not a name"),
    ],
)
def test_what_is_told(call: Callable[[Context], Any], told: str) -> None:
    error = raised_inside(call)
    assert isinstance(error, df.DynaFlowError) and told in str(error)
    assert error.line and "test_arguments.py" in error.line


def test_a_numpy_share() -> None:
    def schedule(ctx: Context) -> None:
        ctx.lane("a", sms=np.int64(1), priority=np.int32(-1))
        ctx.split(2)
        run_rest(ctx, "a")

    with torch.no_grad():
        plan = compiled(Stack(), Scheduler(schedule, STACK_RULES)).plan(X)
    assert json.loads(plan.to_json())["lanes"] == [{"name": "a", "sms": 1, "priority": -1}]


def test_a_refused_after_changes_nothing() -> None:
    def schedule(ctx: Context) -> None:
        ctx.split(2)
        first, *_ = ctx.get_ready_ops()
        for after in ("no", [None], [ctx.items("layers.1.mlp")[0]], [first]):
            with pytest.raises(df.ScheduleError):
                ctx.execute(first, after=after)
        run_rest(ctx)

    model = Stack()
    with torch.no_grad():
        assert_equal(compiled(model, Scheduler(schedule, STACK_RULES))(X), model(X))


# --- what methods of a scheduler return -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["partition", "key", "bucket", "choose", "schedule", "elastic", "functions"])
def test_what_a_scheduler_returns(method: str) -> None:
    wrong = []
    model = Stack()
    fast = compiled(model)
    with torch.no_grad():
        expected = model(X)
        for value in EVERYTHING:
            attribute = value if method in ("elastic", "functions") else lambda self, *_, v=value: v
            kind = type("Returns", (Each,), {method: attribute})

            def call(_: Any, kind: Any = kind) -> None:
                fast.set_scheduler(kind(STACK_RULES))
                assert_equal(fast(X), expected)

            if problem := survives(call, value):
                wrong.append(f"{validate.shown(value)}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_a_key_that_is_a_list() -> None:
    class Keyed(Each):
        def key(self, ctx: Context) -> Any:
            return [ctx.batch_size]

    with pytest.raises(df.ScheduleError, match=r"Keyed.key\(\) returned is \[6\]") as caught:
        compiled(Stack(), Keyed(STACK_RULES)).plan(X)
    assert "tuple" in caught.value.advice


def test_a_partition_that_is_none() -> None:
    class Cuts(Each):
        def partition(self) -> Any:
            return None

    with pytest.raises(df.PartitionError, match="returned None"):
        compiled(Stack(), Cuts()).plan(X)


def test_a_partition_that_yields() -> None:
    class Cuts(Each):
        def partition(self) -> Any:
            yield df.SplitModule("*.mlp")
            if self.calls < 0:
                raise KeyError("of the user's")

    with torch.no_grad():
        assert any("mlp" in str(task) for task in compiled(Stack(), Cuts()).plan(X).tasks)
    scheduler = Cuts()
    scheduler.calls = -1
    with pytest.raises(df.ScheduleError, match="of the user's"):
        compiled(Stack(), scheduler).plan(X)


def test_schedulers_that_choose_each_other() -> None:
    class Chooses(Each):
        def choose(self, ctx: Context) -> Any:
            return Chooses()

    with pytest.raises(df.ScheduleError, match=r"Chooses.choose\(\) never comes to an end") as caught:
        compiled(Stack(), Chooses()).plan(X)
    assert "return self" in caught.value.advice


def test_what_is_asynchronous() -> None:
    async def function(x: Tensor) -> Tensor:
        return x + 1

    async def generator(x: Tensor) -> Any:
        yield x

    class Module(nn.Module):
        async def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Callable:
        async def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    class Inherits(Callable):
        pass

    for model in (function, generator, Module(), Callable(), Inherits()):
        with pytest.raises(df.DynaFlowError, match="asynchronous") as caught:
            df.compile(model)
        assert caught.value.advice


# --- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [*options.OPTIONS, "fullgraph"])
def test_options_of_compile(option: str) -> None:
    model = Stack()

    def call(value: Any) -> None:
        fast = df.compile(model, **{"scheduler": Each(STACK_RULES), "operators": "eager", option: value})
        if option.endswith(("dims", "facts", "inputs")):  # which are looked at then
            with torch.no_grad():
                fast(X)

    wrong = [f"{validate.shown(v)}: {p}" for v in EVERYTHING if (p := survives(call, v))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("option", options.OPTIONS)
def test_options_that_are_configured(option: str) -> None:
    def call(value: Any) -> None:
        with df.configure(**{option: value}):
            pass

    wrong = [f"{validate.shown(v)}: {p}" for v in EVERYTHING if (p := survives(call, v))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("value", [["scheduler"], "nanoflow", {3: 4}, {"scheduler": 3}, {"parts": 2}, 7])
def test_options_of_the_backend(value: Any) -> None:
    torch._dynamo.reset()
    with pytest.raises(df.DynaFlowError) as caught, torch.no_grad():
        torch.compile(Stack(), backend="dynaflow", options=value)(X)
    assert caught.value.advice


DIMS = [
    {"x": 0.0}, {"x": "0"}, {"x": [0]}, {"x": True}, {"x": 10**9}, {"x": -9}, ["x"], "x", {0: 0}, {"y": 0}, 0,
]  # fmt: skip


@pytest.mark.parametrize("dims", DIMS)
def test_batch_dims(dims: Any) -> None:
    with pytest.raises(df.DynaFlowError) as caught, torch.no_grad():
        compiled(Stack(), batch_dims=dims)(X)
    assert caught.value.advice


@pytest.mark.parametrize("dims", [{"x": np.int64(0)}, {"x": -2}, {"x": torch.tensor(0)}, {"x": 0, "*.weight": None}])
def test_batch_dims_of_all_kinds(dims: Any) -> None:
    model = Stack()
    with torch.no_grad():
        assert_equal(compiled(model, batch_dims=dims, dynamic_dims={"x": np.array([0])})(X), model(X))


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DYNAFLOW_SCHEDULER", "nanoflo"), ("DYNAFLOW_SCHEDULER", ":"), ("DYNAFLOW_OPERATORS", "fast"),
        ("DYNAFLOW_SCHEDULER_OPTIONS", "[1]"), ("DYNAFLOW_SCHEDULER_OPTIONS", "{"), ("DYNAFLOW_SCHEDULER_OPTIONS", "3"),
        ("DYNAFLOW_SCHEDULER_OPTIONS", "[" * 100_000), ("DYNAFLOW_CUDAGRAPH", "yes"), ("DYNAFLOW_VERIFY", "[1]"),
        ("DYNAFLOW_VERIFY", "maybe"), ("DYNAFLOW_VERIFY", "2"),
    ],
)  # fmt: skip
def test_the_environment(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv(variable, text)
    with pytest.raises(df.DynaFlowError) as caught, torch.no_grad():
        torch.compile(Stack(), backend="dynaflow")(X)
    assert caught.value.advice


# --- facts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 5.0, "5", [5.0, 1], [-1, 7], [True] * 6, [[6]], {"a": 6}, torch.ones(6), Odd()])
@pytest.mark.parametrize("where", ["compile", "call", "function"])
def test_num_tokens_of_a_wrong_kind(tokens: Any, where: str) -> None:
    facts: Any = {"num_tokens": tokens}
    given = {"compile": facts, "function": lambda: facts, "call": None}[where]
    fast = compiled(Stack(), Each(STACK_RULES), facts=given)
    with pytest.raises(df.DynaFlowError, match="num_tokens") as caught, torch.no_grad():
        fast(X, **({"facts": facts} if where == "call" else {}))
    assert caught.value.advice


@pytest.mark.parametrize("tokens", [[2, 4], (2, 4), torch.tensor([2, 4]), np.array([2, 4]), [np.int64(2), np.int32(4)]])
def test_num_tokens_of_all_kinds(tokens: Any) -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES), facts={"num_tokens": tokens})
    with torch.no_grad():
        assert_equal(fast(X), model(X))
        assert_equal(fast(X), model(X))
        assert [m.size for m in fast.plan(X).micro_batches] == [2, 4]
    assert fast.stats.plans == 1


@pytest.mark.parametrize("facts", [3, [1], "phase", {3: 4}, Odd(), np.array([1])])
def test_facts_of_a_wrong_kind(facts: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: compiled(Stack(), facts=facts)(X),
        lambda: compiled(Stack())(X, facts=facts),
    ]
    if not isinstance(facts, dict):
        calls.append(lambda: compiled(Stack(), facts=lambda: facts)(X))
    for call in calls:
        with pytest.raises(df.DynaFlowError) as caught, torch.no_grad():
            call()
        assert caught.value.advice


@pytest.mark.parametrize("fact", [[1, {2}], {"b": 1, 3: 2}, np.array([[1, 2]]), np.float32(1.5), {1, "a"}, Odd()])
def test_facts_that_are_read(fact: Any) -> None:
    class Reads(Each):
        def schedule(self, ctx: Context) -> None:
            ctx.facts["fact"]
            super().schedule(ctx)

    fast = compiled(Stack(), Reads(STACK_RULES), facts={"fact": fact})
    with torch.no_grad():
        if isinstance(fact, Odd):
            with pytest.raises(df.ScheduleError, match="part of a key"):
                fast(X)
        else:
            fast(X), fast(X)
            assert fast.stats.plans == 1


# --- functions --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast() -> df.CompiledModel:
    made = compiled(Stack(), Each(STACK_RULES, lanes=2))
    with torch.no_grad():
        made(X)
    return made


def recorded(save: Callable[[df.Recording], Any]) -> None:
    with df.record() as recording:
        pass
    save(recording)


def step(value: Any, **more: Any) -> None:
    df.TrainStep(lambda x: x.square().sum(), **{"operators": "eager", **more})(value)


PLAN = df.Plan(graph="g", micro_batches=(df.MicroBatch(index=0, start=0, stop=6),), lanes=(), tasks=())

FUNCTIONS: dict[str, Callable[[df.CompiledModel, Any], Any]] = {
    "compile": lambda f, v: df.compile(v) and None,
    "set_scheduler": lambda f, v: compiled(Stack()).set_scheduler(v),
    "set_scheduler options": lambda f, v: compiled(Stack()).set_scheduler("nanoflow", parts=v),
    "SplitModule": lambda f, v: df.SplitModule(v),
    "SplitModule tag": lambda f, v: df.SplitModule("*", tag=v),
    "SplitModule splittable": lambda f, v: df.SplitModule("*", splittable=v),
    "SplitModule optional": lambda f, v: df.SplitModule("*", optional=v),
    "SplitFunc": lambda f, v: df.SplitFunc(v),
    "SplitFunc tag": lambda f, v: df.SplitFunc("*", tag=v),
    "mark": lambda f, v: df.mark(v),
    "mark tag": lambda f, v: df.mark("a", tag=v),
    "mark splittable": lambda f, v: df.mark("a", splittable=v),
    "by_rows": lambda f, v: df.by_rows(v) if not isinstance(v, str) else None,
    "by_rows follows": lambda f, v: df.by_rows(follows=v),
    "collective": lambda f, v: df.collective(v, group="g") if not isinstance(v, str) else None,
    "collective group": lambda f, v: df.collective(group=v),
    "collective dim": lambda f, v: df.collective(group="g", dim=v),
    "collective named": lambda f, v: df.collective(group="g", named=v),
    "choose": lambda f, v: df.choose(v),
    "offload": lambda f, v: df.offload(v, "cpu"),
    "offload device": lambda f, v: df.offload(Stack(), v),
    "offload match": lambda f, v: df.offload(Stack(), "cpu", v),
    "offload at_least": lambda f, v: df.offload(Stack(), "cpu", at_least=v),
    "restore": lambda f, v: df.restore(v),
    "record": lambda f, v: df.record(v).__enter__() and None if not validate.is_integer(v) or v < 1 else None,
    "save": lambda f, v: recorded(lambda r: r.save(v)) if not isinstance(v, (str, int)) else None,
    "draw": lambda f, v: df.draw(v),
    "draw spans": lambda f, v: df.draw(f.plan(X), v),
    "draw width": lambda f, v: df.draw(f.plan(X), None, v),
    "check": lambda f, v: df.check(v, graph_of(f), 6),
    "check graph": lambda f, v: df.check(f.plan(X), v, 6),
    "check batch_size": lambda f, v: df.check(f.plan(X), graph_of(f), v),
    "check num_tokens": lambda f, v: df.check(f.plan(X), graph_of(f), 6, v),
    "from_json": lambda f, v: df.Plan.from_json(v),
    "a plan's graph": lambda f, v: df.check(df.Plan(**{**vars(PLAN), "graph": v}), graph_of(f), 6),
    "a plan's micro-batches": lambda f, v: df.check(df.Plan(**{**vars(PLAN), "micro_batches": v}), graph_of(f), 6),
    "a plan's lanes": lambda f, v: df.check(df.Plan(**{**vars(PLAN), "lanes": v}), graph_of(f), 6),
    "a plan's tasks": lambda f, v: df.check(df.Plan(**{**vars(PLAN), "tasks": v}), graph_of(f), 6),
    "a micro-batch": lambda f, v: df.check(
        df.Plan(**{**vars(PLAN), "micro_batches": (df.MicroBatch(index=0, start=0, stop=v, requests=v),)}),
        graph_of(f), 6,
    ),
    "a lane": lambda f, v: df.draw(df.Plan(**{**vars(PLAN), "lanes": (df.Lane(name=v, sms=v, priority=v),)})),
    "a task": lambda f, v: df.draw(df.Plan(**{**vars(PLAN), "tasks": (df.Task(items=v, lane=v, after=v, replace=v),)})),
    "an item": lambda f, v: df.draw(
        df.Plan(**{**vars(PLAN), "tasks": (df.Task(items=(df.Item(op=v, micro_batches=v),), lane="a"),)})
    ),
    "simulate device": lambda f, v: f.simulate(X, device=v),
    "simulate profile": lambda f, v: f.simulate(X, profile=v),
    "report profile": lambda f, v: f.report(X, profile=v) if v is not None and not isinstance(v, dict) else None,
    "TrainStep": lambda f, v: df.TrainStep(v),
    "TrainStep micro_batches": lambda f, v: step(X.clone().requires_grad_(), micro_batches=v),
    "TrainStep in_flight": lambda f, v: step(X.clone().requires_grad_(), in_flight=v),
    "TrainStep reduction": lambda f, v: df.TrainStep(Stack(), reduction=v),
    "TrainStep weight": lambda f, v: df.TrainStep(Stack(), weight=v),
    "TrainStep batch_dims": lambda f, v: df.TrainStep(Stack(), batch_dims=v),
    "make": lambda f, v: strategies.make("nanoflow", parts=v, sms=v, merged=v),
    "NanoFlow": lambda f, v: strategies.NanoFlow(parts=v),
    "NanoFlow merged": lambda f, v: strategies.NanoFlow(merged=v),
    "Branches": lambda f, v: strategies.Branches(cuts=v),
    "Branches lanes": lambda f, v: strategies.Branches(lanes=v),
    "Prefetch": lambda f, v: strategies.Prefetch(ahead=v),
    "Auto": lambda f, v: strategies.Auto(among=v),
    "Auto seconds": lambda f, v: strategies.Auto(seconds=v),
    "Auto when": lambda f, v: strategies.Auto(when=v),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, fast: df.CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.no_grad() if "TrainStep" not in name else torch.enable_grad():
        found = [(v, survives(lambda v: FUNCTIONS[name](fast, v), v)) for v in EVERYTHING]
    wrong = [f"{validate.shown(v)}: {problem}" for v, problem in found if problem]
    assert not wrong, "\n".join(wrong)


def test_the_model_raises_what_is_its_own() -> None:
    class Mine(Exception):
        pass

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] == 8:
                raise Mine
            return x

    with pytest.raises(Mine):
        compiled(Raises())(X)
    with pytest.raises(TypeError):
        compiled(Stack())()


# --- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("cuts=image,text", ("image", "text")), ("cuts=image", ("image",)), ("cuts=('a', 'b')", ("a", "b")),
        ("cuts=['a']", ("a",)), ("cuts=*.q,*.k,*.v", ("*.q", "*.k", "*.v")), ("cuts='a,b'", ("a", "b")),
    ],
)  # fmt: skip
def test_an_option_that_takes_several(text: str, cuts: tuple[str, ...]) -> None:
    if text == "cuts='a,b'":
        cuts = ("'a", "b'")  # quotes inside of a list are the user's own
    assert scheduler_named("branches", [text]).cuts == cuts  # type: ignore[attr-defined]


def test_options_that_take_one() -> None:
    found: Any = scheduler_named("nanoflow", ["attention=*a{1,2}*", "merged=*.mlp,*.norm", "parts=3"])
    assert (found.attention, found.merged, found.parts) == ("*a{1,2}*", ("*.mlp", "*.norm"), 3)
    found = scheduler_named("auto", ["among=nanoflow,branches", "seconds=0"])
    assert found.among == ["nanoflow", "branches"]


@pytest.mark.parametrize(
    "text",
    ["", "=", "parts", "parts=", "parts=[", "parts=2.5", "parts=None", "parts=True", "parts=0", "min_rows=0", "sms='a'",
     "parts=" + "[" * 10_000, "parts=" + "9" * 5000, "\ud800=1", "par\nts=1", "merged=3", "x=1"],
)  # fmt: skip
def test_options_that_are_wrong(text: str) -> None:
    with pytest.raises(df.DynaFlowError) as caught:
        scheduler_named("nanoflow", [text])
    assert caught.value.advice and len(str(caught.value)) < 6000


@pytest.mark.parametrize("device", ["meta", "hpu", "cuda:99", "fpga"])
def test_devices_that_hold_nothing_here(device: str) -> None:
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(df.DynaFlowError, match=f"no device '{device}'"):
        df.offload(model, device)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
