"""A scheduler's identity: the same in every process, another for every change that could matter, else None."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaflow as df
from dynaflow.schedule.identity import graph_identity, identity, plan_key
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, compiled, run_rest, uneven

SOURCE = '''
import collections
import dataclasses
import enum
import functools
import logging
import math
import re
from typing import NamedTuple

import torch
import dynaflow as df

LIMIT = 4
NAMES = {"attention", "mlp", "router", "norm"}
LANES = {"attention": ["memory"], "mlp": ("compute", 1.5)}
PATTERN = re.compile("layers")
COUNTS = collections.defaultdict(list, {"a": [1]})
log = logging.getLogger(__name__)


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2

    def other(self):
        return Kind.FIRST


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    lanes: int = 2
    kinds: tuple = (Kind.FIRST,)
    more: dict = dataclasses.field(default_factory=dict)

    def total(self):
        return self.lanes + 10


class Pair(NamedTuple):
    left: int
    right: int = 5


SETTING = Setting(lanes=3)


def outer(scale):
    def inner(n, power=2):
        return scale * n ** power
    return inner


cost = outer(7)


@functools.lru_cache
def deep(n):
    return math.sqrt(n) + max(n, 3)


def helper(ctx):
    log.info("split")
    return LIMIT + deep(ctx.batch_size) + SETTING.lanes + cost(1) + len(NAMES) + len(LANES) + len(COUNTS)


class Base(df.OpSchedulerBase):
    parts = 2
    __slots__ = ("slot",)

    @property
    def twice(self):
        return self.parts * 2

    @staticmethod
    def lane(op):
        return "memory" if "attention" in {"attention", "mlp", op} else "compute"

    @classmethod
    def make(cls):
        return cls()


class Inner(df.OpSchedulerBase):
    def __init__(self, n=0):
        self.n = n


class S(Base):
    """Splits."""

    def __init__(self, inner=None, pair=Pair(1)):
        super().__init__()
        self.inner = inner or Inner(8)
        self.rules = [df.SplitModule("*.mlp", tag="mlp"), df.SplitFunc(torch.ops.aten.mm), df.SplitModule(PATTERN)]
        self.kind, self.pair, self.slot = Kind.SECOND, pair, 11
        self.again = self.partition
        self.dtype, self.shape, self.wide = torch.float16, torch.Size((1, 2)), range(4)
        self.key_of = functools.partial(helper, 1)

    def partition(self):
        return self.rules

    def schedule(self, ctx):
        # all at once
        if ctx.batch_size < 4 or PATTERN.match("x"):
            return ctx.sequential()
        ctx.split(self.parts if helper(ctx) > 1e3 else 2)
        sizes = [x for x in (1, 2) if x in {5, 6, 7} or isinstance(x, torch.Tensor)]
        order = sorted(ctx.ops, key=lambda op: (op.name != "zz", self.twice, sizes))
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=self.lane(op))
'''


def module(source: str = SOURCE, **names: Any) -> Any:
    made = sys.modules["schedulers"] = types.ModuleType("schedulers")  # where dataclass looks for it
    vars(made).update(names)
    exec(compile(source, "schedulers.py", "exec", dont_inherit=True), vars(made))
    return made


def of(source: str = SOURCE) -> str | None:
    return identity(module(source).S())


KNOWN = of()


def one(body: str, **names: Any) -> str | None:
    """The identity of a scheduler with this body of `schedule`."""
    source = "import dynaflow as df\nclass S(df.OpSchedulerBase):\n    def schedule(self, ctx):\n        " + body
    return identity(module(source, **names).S())


# --- the same -----------------------------------------------------------------------------------------------


def test_the_same_in_every_process(tmp_path: Path) -> None:
    """With other hash seeds; compiled anew, and read from the .pyc that the first process leaves."""
    (tmp_path / "schedulers.py").write_text(SOURCE)
    found = {KNOWN}
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        code = "import schedulers; from dynaflow.schedule.identity import identity; print(identity(schedulers.S()))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout.strip())
        assert list(tmp_path.rglob("*.pyc"))
    assert len(found) == 1 and None not in found


@pytest.mark.parametrize(
    "old, new",
    [
        ("# all at once", "# one by one"),
        ("        # all at once\n", ""),
        ("\nLIMIT = 4", "\n\n\n\nLIMIT = 4"),
        ('"""Splits."""', '"""Splits the batch."""'),  # of a class; a function's docstring is a constant of it
        ("NAMES = {", "UNUSED = 5\nNAMES = {"),
        ('{"attention", "mlp", "router", "norm"}', '{"norm", "router", "mlp", "attention"}'),
        ("def schedule(self, ctx):", "def schedule(self, ctx: object) -> None:"),
    ],
)
def test_what_does_not_matter(old: str, new: str) -> None:
    assert SOURCE.count(old) == 1
    assert of(SOURCE.replace(old, new)) == KNOWN


def test_running_code_changes_nothing() -> None:
    """The interpreter rewrites the bytecode of what runs often."""
    found = module()
    scheduler = found.S()
    for _ in range(1000):
        found.helper(types.SimpleNamespace(batch_size=8)), scheduler.lane("x"), found.SETTING.total()
    assert identity(scheduler) == KNOWN


# --- another ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new",
    [
        ("ctx.batch_size < 4", "ctx.batch_size < 5"),  # a constant
        ("ctx.batch_size < 4", "ctx.batch_size <= 4"),  # a method's body
        ("1e3", "1000"),  # equal, but of another type
        ("ctx.batch_size", "ctx.size"),
        ('"zz"', '"yy"'),  # in a lambda
        ("(1, 2) if", "(2, 1) if"),  # in a comprehension
        ("{5, 6, 7}", "{5, 6, 8}"),  # a frozen set
        ("x, torch.Tensor", "x, torch.Size"),  # something else from a module
        ("class S(Base)", "class S(Base, Inner)"),
        ('{"attention", "mlp", op}', '{"attention", op}'),  # a static method of the base
        ("return self.parts * 2", "return self.parts * 3"),  # a property
        ("return cls()", "return cls"),  # a class method
        ("parts = 2", "parts = 3"),  # a class attribute
        ("parts = 2", "parts = 2\n    other = 2"),
        ("return LIMIT +", "return LIMIT *"),  # a helper
        ("LIMIT = 4", "LIMIT = 4.0"),  # a global
        ("LIMIT = 4", "def LIMIT(): pass"),
        ("LIMIT = 4", ""),
        ('"router", ', ""),  # in a global set
        ('"compute", 1.5', '"compute", 2.5'),  # deep in a global dict
        ('{"a": [1]}', '{"a": [2]}'),
        ('compile("layers")', 'compile("layers", re.I)'),
        ("math.sqrt(n)", "math.log(n)"),  # a helper's helper, behind a cache
        ("max(n, 3)", "min(n, 3)"),
        ("outer(7)", "outer(8)"),  # a closure
        ("power=2", "power=3"),  # a default
        ("scale * n", "scale + n"),
        ("SECOND = 2", "SECOND = 3"),
        ("Kind.SECOND, pair", "Kind.FIRST, pair"),
        ("return Kind.FIRST", "return Kind.SECOND"),
        ("Setting(lanes=3)", "Setting(lanes=4)"),
        ("lanes: int = 2", "lanes: int = 1"),
        ("frozen=True, ", ""),
        ("self.lanes + 10", "self.lanes + 11"),
        ("right: int = 5", "right: int = 6"),
        ("Pair(1)", "Pair(2)"),
        ("Inner(8)", "Inner(9)"),  # a wrapped scheduler's state
        ("n=0):\n        self.n = n", "n=0):\n        self.n = n + 0"),  # its code
        ('tag="mlp"', 'tag="other"'),
        ("aten.mm", "aten.bmm"),
        ("pair, 11", "pair, 12"),  # in a slot
        ("self.again = self.partition", "self.again = self.schedule"),
        ("torch.float16", "torch.bfloat16"),
        ("Size((1, 2))", "Size((1, 3))"),
        ("range(4)", "range(5)"),
        ("partial(helper, 1)", "partial(helper, 2)"),
        ("class S(", "class T: pass\nclass S("),
    ],
)
def test_what_matters(old: str, new: str) -> None:
    assert SOURCE.count(old) >= 1
    found = of(SOURCE.replace(old, new))
    assert found is not None
    assert (found == KNOWN) == (old == "class S(")  # the last one adds what nothing reaches


def test_state_matters() -> None:
    found = [identity(Each(STACK_RULES, split=n, lanes=2)) for n in (2, 3, [2, 3], [3, 2], uneven, None)]
    assert None not in found and len(set(found)) == len(found)
    assert identity(Each(STACK_RULES, split=3, lanes=2)) == found[1]
    counting = Each(STACK_RULES, split=3, lanes=2)
    counting.calls += 1
    assert identity(counting) != found[1]


def test_a_function_as_state() -> None:
    def made(n: int) -> Scheduler:
        return Scheduler(lambda ctx: (ctx.split(n), run_rest(ctx)))

    assert identity(made(2)) == identity(made(2)) != identity(made(3))
    assert None not in (identity(made(2)), identity(made(3)))


def test_a_change_in_another_module() -> None:
    helpers = [types.ModuleType("helpers") for _ in range(2)]
    for n, m in enumerate(helpers):
        exec(f"WIDTH = 5\ndef parts(): return {n}", vars(m))
    first, second = (one("ctx.split(helpers.parts())", helpers=m) for m in helpers)
    assert None not in (first, second) and first != second
    assert one("return helpers.WIDTH", helpers=helpers[0]) == one("return helpers.WIDTH", helpers=helpers[1])


def test_what_refers_to_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [1, [1, loop]]
    scheduler = Each()
    scheduler.rules = [scheduler]  # type: ignore[list-item]
    found = [one("return loop", loop=loop), one("return loop", loop=other), identity(scheduler)]
    assert None not in found and len(set(found)) == 3


def test_library_schedulers_and_classes() -> None:
    assert identity(df.Sequential()) is not None
    assert identity(df.Sequential()) != identity(df.OpSchedulerBase())
    assert identity(Each([df.SplitModule(torch.nn.Linear)])) != identity(Each([df.SplitModule(torch.nn.ReLU)]))
    assert identity(Each([df.SplitModule(Stack)])) is not None


# --- unknown --------------------------------------------------------------------------------------------------


class Plain:
    pass


class Odd(property):
    """Does as it likes."""


class Words(df.OpSchedulerBase, dict):  # type: ignore[type-arg]
    """What a dict holds is in no attribute."""


def chance() -> Any:
    import random

    return random.Random(0)


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.zeros(2),
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.Generator(),
        lambda: sys.__stderr__,
        lambda: threading.Lock(),
        lambda: iter([1]),
        lambda: (n for n in range(3)),
        chance,
        lambda: chance().random,
        lambda: chance().choice,
        lambda: object(),
        lambda: Plain(),
        lambda: [{"deep": (Plain(),)}],
        lambda: frozenset([Plain()]),
        lambda: os.environ,
        lambda: os,
        lambda: torch,
        lambda: Words(),
        lambda: Odd(len),
        lambda: (lambda: 0).__code__,
        lambda: torch.no_grad()(len),
    ],
)
def test_state_that_can_not_be_judged(state: Callable[[], Any]) -> None:
    assert identity(Each([state()])) is None


def test_a_scheduler_that_is_more_than_its_attributes() -> None:
    assert identity(Words()) is None


@pytest.mark.parametrize(
    "body",
    [
        "return os.environ['X']",
        "return os.getenv('X')",
        "return os.path.exists('X')",
        "return time.perf_counter()",
        "return clock()",
        "return [t() for t in (lambda: time.time(),)]",
        "return random.random()",
        "return random.choice([1, 2])",
        "return datetime.datetime.now()",
        "return torch.rand(2)",
        "return torch.randperm(2)",
        "return torch.is_grad_enabled()",
        "return torch.get_num_threads()",
        "return torch.cuda.mem_get_info()",
        "return torch.distributed.get_rank()",
        "return mem_get_info()",
        "return torch.default_generator",
        "return open('x')",
        "return hash('x')",
        "return id(ctx)",
        "return sorted(ctx.ops, key=id)",
        "return eval('1')",
        "return globals()",
        "import math; return math.pi",
        "from math import pi; return pi",
        "clock = time; return clock.time()",
        "return getattr(os, 'environ')",
        "return GLOBAL",
        "return threading.get_ident()",
    ],
)
def test_code_that_can_not_be_judged(body: str) -> None:
    head = (
        "import datetime, os, random, threading, time, torch\nfrom time import perf_counter as clock\n"
        "from torch.cuda import mem_get_info\n"
    )
    names: dict[str, Any] = {"GLOBAL": Plain()}
    exec(head, names)
    names.pop("__builtins__")
    assert one(body, **names) is None
    assert one("return 1", **names) is not None  # what is not reached does not count
    exec(f"def helper(ctx):\n    {body}", names)
    assert one("return [helper(ctx)]", **names) is None


def test_code_that_can() -> None:
    for body in (
        "return sys.maxsize, os.sep, torch.version.cuda",  # plain values count as they are
        "return math.inf, torch.float32, torch.nn.functional.relu, torch.add",
        "return 'x'.join, [].append, dict.fromkeys, str.lower",
        "print(f'{ctx!r}'); raise ValueError(super().key(ctx))",
        "with warnings.catch_warnings(): return functools.reduce(operator.add, itertools.chain([1], [2]))",
        "return torch.ops.aten.mm(ctx, ctx), torch.ops.aten.mm.default",
        "class Local: x = 1\n        return Local",
    ):
        names = {
            n: __import__(n) for n in ("sys", "os", "torch", "math", "warnings", "functools", "operator", "itertools")
        }
        assert one(body, **names) is not None, body


def test_decorators_are_seen_through() -> None:
    head = "import contextlib, functools\n@contextlib.contextmanager\ndef f(n):\n    yield n + "
    names: list[dict[str, Any]] = [{}, {}]
    for n, scope in enumerate(names):
        exec(f"{head}{n}", scope)
    first, second = (one("return f(1)", f=scope["f"]) for scope in names)
    assert None not in (first, second) and first != second


# --- the key ----------------------------------------------------------------------------------------------------


def graph_of(width: int, tag: str = "mlp", dtype: torch.dtype = torch.float32) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(width, width, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with df.mark("middle", tag=tag):
                x = self.linear(x)
            return x.relu()

    graphs: list[Any] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        graphs.append(ctx._graph)
        ctx.sequential()

    with torch.no_grad():
        compiled(Model(), Scheduler(schedule)).plan(torch.ones(4, width, dtype=dtype))
    return graphs[0]


def test_graphs_that_look_different() -> None:
    graphs = [graph_of(8), graph_of(16), graph_of(8, tag="router"), graph_of(8, dtype=torch.bfloat16)]
    assert len({g.fingerprint for g in graphs}) == 1
    assert len({graph_identity(g) for g in graphs}) == len(graphs)
    assert graph_identity(graph_of(8)) == graph_identity(graphs[0])


def test_plan_key() -> None:
    base: dict[str, Any] = dict(
        scheduler_identity="s", fingerprint="f", sizes=(1, 2), batch_size=4, facts=None, device="cuda", sms=132
    )
    found = {plan_key(**base)}
    changes = dict(scheduler_identity="t", fingerprint="g", sizes=(1, 3), batch_size=5, device="cpu", sms=0)
    for name, value in changes.items():
        found.add(plan_key(**{**base, name: value}))
    for facts in ((), (("a", 1),), (("a", 1.0),), (("a", True),), (("a", frozenset("xyz")),), (("b", (1, 2)),)):
        found.add(plan_key(**{**base, "facts": facts}))
        assert plan_key(**{**base, "facts": facts}) in found
    assert None not in found and len(found) == 1 + 6 + 6
    key = plan_key(**base)
    assert key is not None and torch.__version__ in key and df.__version__ in key and sys.version.split()[0] in key
    assert plan_key(**{**base, "facts": (("a", Plain()),)}) is None
