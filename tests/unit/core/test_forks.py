"""A process that forks after a compiled model's first call: the child's calls neither hang nor differ."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.core import forks
from tests.helpers import STACK_RULES, Each, Stack, assert_equal, compiled, randn

X, LARGER = randn(6, 8), randn(9, 8)
SECONDS = 300
"""Long, for a machine that is busy; a child that hangs ends by itself."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's own threads don't survive a fork either: torch's advice is to have one in the child."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def in_child(function: Callable[[], None]) -> None:
    """Runs it in a forked process, and fails if that does not end well."""
    process = os.fork()
    if process == 0:
        signal.alarm(SECONDS)
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def on_lanes(model: nn.Module, **options: Any) -> df.CompiledModel:
    return compiled(model, Each(STACK_RULES, split=3, lanes=3), **options)


@pytest.fixture
def stack() -> tuple[df.CompiledModel, Stack]:
    model = Stack().eval().requires_grad_(False)
    fast = on_lanes(model)
    assert_equal(fast(X), model(X))
    assert len(fast.plan(X).lanes) == 3
    return fast, model


def check(fast: df.CompiledModel, model: nn.Module) -> None:
    for x in (X, LARGER, X):  # one that is planned, one that is new
        assert_equal(fast(x), model(x))


def test_a_child_and_its_child(stack: tuple[df.CompiledModel, Stack]) -> None:
    def child() -> None:
        check(*stack)
        in_child(lambda: check(*stack))
        check(*stack)

    in_child(child)
    check(*stack)


def test_a_child_sets_torchs_threads_up_before_its_lanes_need_them(
    stack: tuple[df.CompiledModel, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes that both come first get an "Invalid thread pool" of torch."""
    steps: list[str] = []
    start = threading.Thread.start
    settle = torch.set_num_threads
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (steps.append("lane"), start(thread)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (steps.append("threads"), settle(count)))

    def child() -> None:
        check(*stack)
        assert steps[:2] == ["threads", "lane"], steps

    in_child(child)


def test_a_process_of_multiprocessing(stack: tuple[df.CompiledModel, Stack]) -> None:
    process = multiprocessing.get_context("fork").Process(target=check, args=stack)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


class Features(Dataset[Tensor]):
    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Tensor:
        return self.model(X + place)


def test_workers_of_a_data_loader(stack: tuple[df.CompiledModel, Stack]) -> None:
    fast, model = stack
    loader = DataLoader(Features(fast), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for place, found in enumerate(loader):
        assert_equal(found, model(X + place))


def test_training_goes_on_in_a_child() -> None:
    model = Stack()
    fast = on_lanes(model)

    def step() -> None:
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        fast(x).square().sum().backward()
        model(y).square().sum().backward()
        assert_equal(x.grad, y.grad)

    step()
    in_child(step)
    step()


def test_forked_while_other_threads_call(stack: tuple[df.CompiledModel, Stack]) -> None:
    fast, _ = stack
    going = True

    def calls() -> None:
        while going:
            fast(X)

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            time.sleep(0.01)
            in_child(lambda: check(*stack))
    finally:
        going = False
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("where", ["schedule", "trace"])
def test_forked_while_another_thread_prepares_its_first_call(stack: tuple[df.CompiledModel, Stack], where: str) -> None:
    """It holds the engine's lock, or Dynamo's."""
    parent, inside, go_on = os.getpid(), threading.Event(), threading.Event()

    def hold(here: str) -> None:
        if os.getpid() == parent and here == where:
            inside.set()
            assert go_on.wait(SECONDS)

    @torch.compiler.assume_constant_result
    def traced() -> float:
        hold("trace")
        return 1.0

    class Slow(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            hold("schedule")
            super().schedule(ctx)

    fast = compiled(lambda x: torch.relu(x) * traced(), Slow(lanes=2))
    thread = threading.Thread(target=fast, args=(X,))
    thread.start()
    assert inside.wait(SECONDS)

    def child() -> None:
        check(*stack)
        assert_equal(fast(X), torch.relu(X))

    try:
        in_child(child)
    finally:
        go_on.set()
        thread.join()
    assert_equal(fast(X), torch.relu(X))


def test_a_graph_on_cuda_raises_in_a_child(stack: tuple[df.CompiledModel, Stack]) -> None:
    """Without CUDA: by what its graph says of itself."""
    engine = engine_of(stack[0])
    graph = SimpleNamespace(device=torch.device("cuda", 0))
    request: Any = SimpleNamespace(graph=SimpleNamespace(graph=graph))

    def child() -> None:
        with pytest.raises(df.DynaFlowError, match=r"Stack runs on CUDA(.|\n)*spawn"):
            engine.planner.decider(request)
        check(*stack)

    in_child(child)


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock, other = forks.rlock(), forks.lock()

    def child() -> None:
        assert other.acquire(timeout=1), "nobody is left to release it"
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    with lock:
        holder = threading.Thread(target=other.acquire)
        holder.start()
        holder.join()
        in_child(child)


def test_all_locks_are_opened_in_a_child() -> None:
    """Those of a `ThreadRun` belong to one run, and the one of recordings says that one is on."""
    allowed = {"core/forks.py": 2, "observe/recording.py": 1}
    root = Path(df.__file__).parent
    for path in sorted(root.rglob("*.py")):
        found = re.findall(r"threading\.(?:R?Lock|Condition|Semaphore|Event|Barrier)\(", path.read_text())
        assert len(found) == allowed.get(path.relative_to(root).as_posix(), 0), f"{path}: use dynaflow.core.forks"
