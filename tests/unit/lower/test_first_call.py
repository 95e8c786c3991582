"""A compiler that fails: what it fails on runs uncompiled, one warning says so, and the call succeeds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError, InductorError
from torch.utils.checkpoint import checkpoint

import dynaflow as df
from dynaflow import _torch
from dynaflow.cli.doctor import cpp_compiler
from dynaflow.lower.first_call import FirstCall
from tests.helpers import Each, assert_equal, lowered_of, randn

RULES = (df.SplitModule("first"), df.SplitModule("second"))


class Two(nn.Module):
    """`first` has a tanh, `second` none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + 1) * 2


class Stretching(Each):
    elastic = True

    def key(self, ctx: df.ScheduleContext) -> Any:
        return "all"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def has(graph: fx.GraphModule, name: str) -> bool:
    return any(name in str(node.target) for node in graph.graph.nodes)


def error() -> Exception:
    return InductorError(AssertionError("no tanh today"), None)


@pytest.fixture
def no_tanh(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The compiler fails on all graphs with a tanh: whether these were backward passes."""
    usual, seen = torch._inductor.compile_fx.compile_fx_inner, []

    def inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
        if has(graph, "tanh"):
            seen.append(bool(options.get("is_backward")))
            raise error()
        return usual(graph, given, **options)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", inner)
    with torch._inductor.config.patch(force_disable_caches=True):  # or it need not be asked
        yield seen


def told(records: list[Any]) -> list[str]:
    return [str(r.message) for r in records if "dynaflow" in str(r.message)]


@pytest.mark.parametrize("scheduler", [Each, Stretching])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_piece(no_tanh: list[bool], scheduler: type[Each], lanes: int) -> None:
    model = Two()
    fast = df.compile(model, scheduler(RULES, split=2, lanes=lanes))
    with torch.no_grad(), pytest.warns(UserWarning, match="dynaflow") as records:
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
    (message,) = told(list(records))
    assert "first" in message and "no tanh today" in message
    assert "dynaflow doctor" in message and 'operators="eager"' in message and message.count("\n") == 0
    assert len(fast.stats.compile_failures) == 1 and "first" in fast.stats.compile_failures[0]
    assert "compile_failures" in str(fast.stats)
    if lanes == 1:  # else all that a lane does is one call
        assert fast.stats.operators_compiled >= 1, "the others are compiled"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (6, 9, 4):
            assert_equal(fast(randn(size, 8)), model(randn(size, 8)))
    assert len(fast.stats.compile_failures) == 1


def test_the_uncut_graph(no_tanh: list[bool]) -> None:
    model = Two()
    fast = df.compile(model)
    with torch.no_grad(), pytest.warns(UserWarning, match="failed on the uncut graph"):
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
    with torch.no_grad():
        assert_equal(fast(randn(7, 8)), model(randn(7, 8)))
    assert len(fast.stats.compile_failures) == 1 and fast.stats.sequential_runs == 2


def test_with_verify(no_tanh: list[bool]) -> None:
    model = Two()
    fast = df.compile(model, Each(RULES, split=2), verify=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="dynaflow"):
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
    assert fast.stats.verified == 1


# --- when kernels are awaited -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("scheduler", [lambda: Each(RULES, split=2, lanes=2), lambda: Stretching(RULES), df.Sequential])
def test_kernels_that_are_awaited(monkeypatch: Any, which: tuple[int, ...], scheduler: Callable[[], Any]) -> None:
    usual, count = AsyncCompile.wait, iter(range(1000))

    def wait(self: AsyncCompile, scope: Any) -> None:
        if next(count) in which:
            raise CppCompileError(["g++"], "a.cpp:3: error: no such thing\n" * 50)
        usual(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", wait)
    model = Two()
    fast = df.compile(model, scheduler())
    with torch.no_grad(), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for size in (6, 6, 8):
            assert_equal(fast(randn(size, 8)), model(randn(size, 8)))
    assert len(told(list(records))) == len(fast.stats.compile_failures) >= 1 or which == (1,)
    assert all("error: no such thing" in text and len(text) < 300 for text in fast.stats.compile_failures)


# --- at the first call --------------------------------------------------------------------------------------


@pytest.fixture
def fails_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Exception]], None]:
    """Compiled code with a tanh raises when it is called."""

    def install(raised: Callable[[], Exception]) -> None:
        usual = _torch.compile_operator

        def compile_operator(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            bad = has(gm, "tanh")
            call = usual(gm, *args, **kwargs)

            def fails(args: list[Any]) -> Any:
                args.clear()
                raise raised()

            return fails if bad else call

        monkeypatch.setattr(_torch, "compile_operator", compile_operator)

    return install


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("scheduler", [Each, Stretching])
def test_at_the_first_call(fails_late: Any, lanes: int, scheduler: type[Each]) -> None:
    fails_late(error)
    model = Two()
    fast = df.compile(model, scheduler(RULES, split=3, lanes=lanes))
    with torch.no_grad(), pytest.warns(UserWarning, match="first") as records:
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
        assert_equal(fast(randn(9, 8)), model(randn(9, 8)))
    assert len(told(list(records))) == len(fast.stats.compile_failures) == len(set(fast.stats.compile_failures))


def test_at_the_first_call_of_the_uncut_graph(fails_late: Any) -> None:
    fails_late(error)
    model = Two()
    fast = df.compile(model)
    with torch.no_grad(), pytest.warns(UserWarning, match="uncut"):
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))
        assert_equal(fast(randn(6, 8)), model(randn(6, 8)))


def test_what_writes_can_not_start_again(fails_late: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return torch.tanh(x + self.seen)

    fails_late(error)
    fast = df.compile(Counts())
    with torch.no_grad(), pytest.raises(df.DynaFlowError, match="no tanh today") as caught:
        fast(randn(6, 8))
    assert 'operators="eager"' in caught.value.advice


def test_errors_of_the_model_are_its_own(fails_late: Any) -> None:
    class Mine(Exception):
        pass

    fails_late(Mine)
    fast = df.compile(Two(), Each(RULES, split=2))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(Mine):
                fast(randn(6, 8))
    assert not fast.stats.compile_failures


@torch.library.custom_op("dynaflow_tests::grumpy", mutates_args=())
def grumpy(x: Tensor) -> Tensor:
    raise AssertionError("the model's own")


@grumpy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("scheduler", [df.Sequential, Each])
def test_errors_inside_of_compiled_code_are_the_models_own(scheduler: Any) -> None:
    fast = df.compile(lambda x: torch.ops.dynaflow_tests.grumpy(x + 1).tanh(), scheduler())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError, match="the model's own"):
            fast(randn(6, 8))
    assert not fast.stats.compile_failures


def test_a_layout_that_compiled_code_was_not_made_for() -> None:
    """Inductor's code looks at what it gets; where the fault is ours, it is still right."""
    world = _torch.Symbols()
    with world.mode:
        example = torch.empty(4, 8)
    gm = fx.symbolic_trace(lambda x: (x.tanh(),))
    with torch.no_grad():
        call = _torch.compile_operator(gm, [example], world, static=frozenset(), direct=True, failed=print)
        with pytest.raises(AssertionError) as caught:
            call([torch.empty(8, 4).t()])
    assert _torch.is_compiler_error(caught.value)


def test_no_later_call_pays_for_it() -> None:
    """What looks after the first call is not called any more."""
    model = Two()
    fast = df.compile(model, Each(RULES, split=2, lanes=2))
    uncut = df.compile(Two())
    with torch.no_grad():
        fast(randn(6, 8)), uncut(randn(6, 8))
        (lowered,) = lowered_of(fast)
        (whole,) = lowered_of(uncut)
    assert lowered.code is not None
    assert not any(isinstance(value, FirstCall) for value in lowered.code.names.values())
    assert not isinstance(whole.entry.call, FirstCall)


def test_two_lanes_fail_at_once() -> None:
    both, calls = threading.Barrier(2), []

    def fails(args: list[Any]) -> Any:
        args.clear()
        both.wait(10)
        raise error()

    untried = FirstCall(fails, lambda e: lambda args: calls.append(list(args)) or "right")
    found: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: found.append(untried([n]))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["right", "right"] and sorted(calls) == [[0], [1]]


# --- training -----------------------------------------------------------------------------------------------


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The compiler fails on all pieces for which "on" says so."""
    usual, state = _torch.compile_operator, {"on": lambda gm: False}

    def compile_operator(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if state["on"](gm):
            raise error()
        return usual(gm, *args, **kwargs)

    monkeypatch.setattr(_torch, "compile_operator", compile_operator)
    return state


@pytest.mark.parametrize("scheduler", [lambda: Each(RULES, split=2, lanes=2), df.Sequential])
@pytest.mark.parametrize("fails", ["forward", "backward", "both"])
def test_training(failing: dict[str, Any], scheduler: Callable[[], Any], fails: str) -> None:
    model, x = Two(), randn(6, 8)
    expected = gradients(model, model, x)
    fast = df.compile(model, scheduler())
    for _ in range(2):  # the second time nothing is compiled
        model.zero_grad()
        given = x.clone().requires_grad_()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            failing["on"] = lambda gm: fails != "backward"
            loss = fast(given).square().sum()
            failing["on"] = lambda gm: fails != "forward"
            loss.backward()
        assert_equal([given.grad, *(p.grad for p in model.parameters())], expected)
    assert fast.stats.compile_failures


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False)  # so all of it is drawn again

    def both(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x).tanh(), 0.5) * F.dropout(x, 0.25)


@pytest.mark.parametrize("fails", ["forward", "backward", "both"])
def test_what_is_drawn_is_drawn_again(failing: dict[str, Any], fails: str) -> None:
    """The backward pass draws by the seeds of the forward pass, though one of them is uncompiled."""
    drew = {"forward": 0, "backward": 0}

    def draws(phase: str) -> Callable[[fx.GraphModule], bool]:
        def on(gm: fx.GraphModule) -> bool:
            if not _torch.draws_from_seeds(gm) or len(gm.graph.nodes) <= 3:  # a draw by itself is compiled
                return False
            drew[phase] += 1
            return fails in (phase, "both")

        return on

    model, x = Drops(), (randn(64, 8) + 3).requires_grad_()
    fast = df.compile(model, Each(split=2))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        failing["on"] = draws("forward")
        result = fast(x)
        failing["on"] = draws("backward")
        result.sum().backward()
    assert all(drew.values()) and fast.stats.compile_failures and x.grad is not None
    h = model.layer(x).tanh()
    scale = torch.where(result != 0, result / (h * x), 0.0).detach()  # by both masks together
    assert {round(v, 2) for v in scale.unique().tolist()} == {0.0, 2.67}
    expected = torch.autograd.grad((h * x * scale).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_that_is_compiled_late(monkeypatch: Any, no_tanh: list[bool]) -> None:
    """Where the passes can't be traced apart, autograd's own backward of compiled code fails."""
    usual = torch._inductor.compile_fx.compile_fx_inner

    def no_passes(*args: Any, **options: Any) -> Any:
        raise RuntimeError("not today")

    def inner(graph: fx.GraphModule, given: Any, **options: Any) -> Any:
        if options.get("is_backward"):
            raise error()
        return usual(graph, given, **options)

    monkeypatch.setattr(_torch, "compile_passes", no_passes)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", inner)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    x = randn(6, 8)
    fast = df.compile(model, Each(split=2))
    expected = gradients(model, model, x)
    with pytest.warns(UserWarning, match="no tanh today"):
        assert_equal(gradients(model, fast, x), expected)
    assert fast.stats.compile_failures


# --- no compiler at all -------------------------------------------------------------------------------------

SCRIPT = """
import torch, dynaflow as df
from tests.unit.lower.test_first_call import *
model, x = Two(), randn(6, 8)
fast = df.compile(model, Each(RULES, split=2, lanes=2))
with torch.no_grad():
    assert_equal(fast(x), model(x))
assert_equal(gradients(model, fast, x), gradients(model, model, x))
print(len(fast.stats.compile_failures), fast.stats.operators_compiled)
"""


def run_with(compiler: str, tmp_path: Path) -> tuple[str, list[str]]:
    env = {**os.environ, "CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def test_no_cpp_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, lines = run_with("/nowhere/g++", tmp_path)
    assert said == "1 0"
    assert len(lines) <= 4 and "no C++ compiler" in lines[0] and "dynaflow doctor" in lines[0]
    monkeypatch.setenv("CXX", "/nowhere/g++")
    check = cpp_compiler()
    assert not check.ok and "/nowhere/g++" in check.found and "g++" in check.advice


def test_a_cpp_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    lines = ["#!/bin/sh", 'case "$*" in *--version*) echo "g++ 12.2.0"; exit 0;; esac',
             'echo "a.cpp:1: error: broken" >&2', "exit 1"]  # fmt: skip
    broken.write_text("\n".join(lines))
    broken.chmod(0o755)
    said, lines = run_with(str(broken), tmp_path)
    failures = int(said.split()[0])
    assert failures >= 1 and len(lines) <= 4 * failures + 4
