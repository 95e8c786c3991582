"""Tuning: what is measured, how the order is solved, what is decided and remembered."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.tune.decision import Attempt, Decision
from dynaflow.tune.measure import Timing, side_by_side, timings
from dynaflow.tune.solver import Job, list_schedule, solve
from tests.helpers import STACK_RULES, Each, Stack, assert_equal, compiled, randn

X = randn(6, 8)


class Time:
    """Stands for the module `time`: it only passes where a caller rests. Lanes of their own rest meanwhile."""

    def __init__(self) -> None:
        self.now, self.rests = 0.0, 0

    def perf_counter(self) -> float:
        self.now += 1e-7  # nothing takes no time at all
        return self.now

    def rest(self, seconds: float) -> None:
        self.rests += 1
        if not threading.current_thread().name.startswith("dynaflow-lane"):
            self.now += seconds


clock = Time()


@pytest.fixture(autouse=True)
def _no_grad(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DYNAFLOW_CACHE", "1")
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path))
    for module in ("clock", "measure", "tuner"):
        monkeypatch.setattr(f"dynaflow.tune.{module}.time", clock)
    with torch.no_grad():
        yield


@torch.library.custom_op("dynaflow_tests::rest", mutates_args=())
def rest(x: Tensor, seconds: float) -> Tensor:
    """Takes time and no processor, as a copy or a message does."""
    clock.rest(seconds)
    return x.clone()


@rest.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Resting(nn.Module):
    """Two things that could be done at once, a few times over."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with df.mark("left"):
                a = rest(x, 0.01)
            with df.mark("right"):
                b = rest(x + 1, 0.01)
            x = a + b
        return x


class Beside(df.OpSchedulerBase):
    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane="other" if "right" in op.tags else "main")


def slower(x: Tensor) -> Tensor:
    clock.rest(0.02)
    return x.clone()


class Slow(Beside):
    """In sequence, and something slower in place of an operator."""

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0], replace_func=slower if "left" in ops[0].tags else None)


class Counter(nn.Module):
    """Writes one of its inputs."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        with df.mark("left"):
            a = rest(x, 0.005)
        with df.mark("right"):
            b = rest(x + 1, 0.005)
        state.add_(1)
        return a + b + state


# --- auto ------------------------------------------------------------------------------------------------


def test_auto_takes_what_is_faster() -> None:
    plain = Resting()
    fast = df.compile(plain, "auto", scheduler_options={"seconds": 5.0, "among": [Slow(), Beside()]}, operators="eager")
    assert_equal(fast(X), plain(X))
    decision = fast.explain(X).decision
    assert decision.chosen == "Beside()", str(decision)
    found = {t.name: t for t in decision.tried}
    assert found["Beside()"].measured.ratio == pytest.approx(0.5, rel=0.01)
    assert "Slow()" not in found or found["Slow()"].measured is None or found["Slow()"].measured.ratio > 1
    assert found["sequential"].measured is not None
    assert {t.lane for t in fast.plan(X).tasks} == {"main", "other"}
    assert "Beside()" in str(fast.explain(X)) and "against sequence" in str(fast.explain(X))


def test_auto_never_takes_what_is_slower() -> None:
    plain = Resting()
    fast = df.compile(plain, "auto", scheduler_options={"seconds": 3.0, "among": [Slow()]}, operators="eager")
    assert_equal(fast(X), plain(X))
    assert fast.explain(X).decision.chosen == "sequential"
    assert fast.plan(X).sequential


def test_auto_leaves_no_trace() -> None:
    """Tuning runs the model many times; what it writes is written once."""
    plain, state = Counter(), torch.zeros(6, 8)
    fast = df.compile(plain, "auto", scheduler_options={"seconds": 3.0, "among": [Beside()]}, operators="eager")
    found = fast(X, state)
    assert_equal(state, torch.ones(6, 8))
    assert_equal(found, 2 * X + 2)


def test_auto_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    races = []
    monkeypatch.setattr("dynaflow.tune.tuner.side_by_side", lambda *a, **k: races.append(1) or side_by_side(*a, **k))
    options = {"seconds": 5.0, "among": [Slow(), Beside()]}
    first = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
    first(X)
    assert len(races) == 2
    again = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
    decision = again.explain(X).decision
    assert decision.tried == first.explain(X).decision.tried, "from disk"
    assert len(races) == 3, "whether the winner still is one"
    assert not again.plan(X).sequential


def test_auto_does_not_believe_what_no_longer_holds() -> None:
    """A decision that says a slow schedule is fast is measured again, and dropped."""
    options = {"seconds": 5.0, "among": [Slow()]}
    first = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
    decision = first.explain(X).decision
    from dynaflow.tune import tuner

    wrong = Decision(chosen="Slow()", why="measured", tried=decision.tried)
    keys = list(_keys_of(tuner.store))
    assert len(keys) == 1
    kept = tuner.store.get
    try:
        tuner.store.get = lambda key: wrong.to_json()  # type: ignore[method-assign]
        again = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
        assert again.explain(X).decision.chosen == "sequential"
    finally:
        tuner.store.get = kept  # type: ignore[method-assign]


@pytest.mark.parametrize("timed", [True, False])
def test_auto_whose_time_is_up(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed operator by operator is compiled: the best of that still runs once. Else nothing is decided."""
    from dynaflow.tune import tuner

    profile = tuner.Tuner.time_operators

    def slow(self: Any, found: Any) -> None:
        if timed:
            profile(self, found)
        self.end = 0.0

    options = {"seconds": 5.0, "most": 1, "among": [Slow(), Beside()]}
    with monkeypatch.context() as patched:
        patched.setattr(tuner.Tuner, "time_operators", slow)
        first = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
        decision = first.explain(X).decision
    measured = {t.name for t in decision.tried if t.measured}
    assert measured == ({"sequential", "Beside()"} if timed else set()), str(decision)
    assert decision.chosen == ("Beside()" if timed else "sequential")
    assert ("no time" in decision.why) is not timed
    again = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
    assert again.explain(X).decision.chosen == "Beside()"


def test_operators_are_timed_only_to_choose_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow.tune import tuner

    timed: list[str] = []
    monkeypatch.setattr(tuner.Tuner, "time_operators", lambda self, found: timed.extend(c.name for c in found))
    for most in (2, 1):
        options = {"seconds": 5.0, "most": most, "among": [Slow(), Beside()]}
        fast = df.compile(Resting(), "auto", scheduler_options=options, operators="eager")
        decision = fast.explain(X).decision
        monkeypatch.setattr(tuner.store, "get", lambda key: None)
        assert len([t for t in decision.tried if t.measured]) == most + 1
        assert timed == ([] if most == 2 else ["sequential", "Slow()", "Beside()"])


def _keys_of(store: Any) -> list[Any]:
    from dynaflow.core.disk_cache import default_root

    return list((default_root() / store.kind).iterdir())


def test_auto_without_time_goes_by_the_cost_model() -> None:
    model = Stack()
    fast = df.compile(model, "auto", scheduler_options={"seconds": 0}, operators="eager")
    assert_equal(fast(X), model(X))
    decision = fast.explain(X).decision
    assert all(t.measured is None for t in decision.tried)
    assert decision.tried[0].predicted is not None


def test_auto_in_the_background() -> None:
    plain = Resting()
    options = {"seconds": 5.0, "among": [Beside()], "when": "background"}
    fast = df.compile(plain, "auto", scheduler_options=options, operators="eager")
    assert_equal(fast(X), plain(X))
    assert fast.plan(X).sequential, "until it knows better"
    for thread in engine_of(fast).planner.deciding:
        thread.join(60)
        assert not thread.is_alive()
    assert not fast.plan(X).sequential
    assert_equal(fast(X), plain(X))


def test_a_failing_candidate_is_no_candidate() -> None:
    class Broken(df.OpSchedulerBase):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            raise df.ScheduleError("no")

    fast = df.compile(Resting(), "auto", scheduler_options={"seconds": 3.0, "among": [Broken()]}, operators="eager")
    fast(X)
    assert fast.explain(X).decision.chosen == "sequential"


def test_explain_without_a_tuner() -> None:
    fast = compiled(Stack(), Each(STACK_RULES))
    text = str(fast.explain(X))
    assert "batch of 6 as [3, 3]" in text and "by the cost model" in text


def test_profile_and_simulate() -> None:
    fast = df.compile(Resting(), Beside(), operators="eager")
    profile = fast.profile(X)
    assert sorted(profile.values())[-1] == pytest.approx(0.01, rel=0.01)
    told, guessed = fast.simulate(X, profile=profile), fast.simulate(X)
    assert told.seconds == pytest.approx(0.03, rel=0.01), "three times two rests at once"
    assert guessed.seconds < 0.005, "nobody told it that they take so long"
    assert fast.simulate(X, device="b200").device == "b200"


def test_profile_of_a_sequence_compiles_nothing() -> None:
    fast = df.compile(Stack(), "sequential")
    with torch.no_grad():
        fast(X)
        before = engine_of(fast).operators.compiled
        (seconds,) = fast.profile(X).values()
    assert seconds > 0 and engine_of(fast).operators.compiled == before > 0


def test_profile_of_shares() -> None:
    """Each operator is timed on the share of its lane."""

    class Shared(Beside):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            ctx.lane("other", sms=1)
            super().schedule(ctx)

    torch.set_num_threads(2)
    fast = df.compile(Resting(), Shared(), operators="eager")
    shares = [sms for _, _, sms in fast.profile(X)]
    assert shares.count(1) >= 2 and set(shares) == {1}, "one of two threads for the other, and one is left"
    assert fast.simulate(X, profile=fast.profile(X)).seconds == pytest.approx(0.03, rel=0.01)


def test_profile_leaves_no_trace() -> None:
    state = torch.zeros(6, 8)
    fast = df.compile(Counter(), Beside(), operators="eager")
    fast.profile(X, state)
    assert_equal(state, torch.zeros(6, 8))


# --- measuring -------------------------------------------------------------------------------------------


def test_side_by_side_alternates_and_restores() -> None:
    order: list[str] = []
    found = side_by_side(
        [lambda: order.append("a"), lambda: order.append("b")],
        lambda: order.append("r"),
        seconds=0.0,
        cuda=False,
        rounds=4,
    )
    assert [len(times) for times in found] == [4, 4]
    assert "".join(order[-17:]) == "ra" + "rb" + "rarb" * 3 + "r"


def test_timings() -> None:
    first, second = timings([[1.0, 2.0, 4.0], [0.5, 1.0, 4.0]])
    assert (first.ratio, first.seconds) == (1.0, 2.0)
    assert (second.ratio, second.low, second.high) == (0.5, 0.5, 1.0)


def test_decision_as_text() -> None:
    timing = Timing(seconds=0.5, ratio=0.5, low=0.4, high=0.6, rounds=9)
    tried = (Attempt(name="sequential", predicted=1.0), Attempt(name="fast(parts=2)", predicted=0.5, measured=timing))
    decision = Decision(chosen="fast(parts=2)", why="measured", tried=tried, seconds=3.0)
    assert Decision.from_json(decision.to_json()) == decision
    assert "2.000x (1.67-2.50)" in str(decision)


# --- order -----------------------------------------------------------------------------------------------


def _pieces(seed: int, count: int) -> list[Job]:
    rng = random.Random(seed)
    pieces = []
    for i in range(count):
        after = tuple(sorted({rng.randrange(i) for _ in range(rng.randrange(3))})) if i else ()
        lane = rng.choice(["compute", "memory", "network"])
        uses = {name: rng.choice([0.0, 0.3, 0.7, 1.0]) for name in ("power", "link")}
        pieces.append(Job(seconds=rng.uniform(0.1, 1.0), lane=lane, after=after, uses=uses))
    return pieces


def _check(pieces: list[Job], starts: list[float], resources: bool) -> float:
    slack = 2e-3 * sum(p.seconds for p in pieces)
    ends = [s + p.seconds for s, p in zip(starts, pieces, strict=True)]
    for i, piece in enumerate(pieces):
        for a in piece.after:
            assert starts[i] >= ends[a] - slack
        for j in range(i):
            if pieces[j].lane == piece.lane:
                assert starts[i] >= ends[j] - slack or starts[j] >= ends[i] - slack
        if resources:
            inside = starts[i] + slack
            running = [p for s, e, p in zip(starts, ends, pieces, strict=True) if s <= inside < e - slack]
            for name in ("power", "link"):
                assert sum(p.uses[name] for p in running) <= 1 + 1e-6
    return max(ends)


@hypothesis_settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 14))
def test_solved_orders_are_legal_and_no_worse(seed: int, count: int) -> None:
    pytest.importorskip("ortools")
    pieces = _pieces(seed, count)
    _check(pieces, list_schedule(pieces), resources=False)
    solved = solve(pieces, 1.0)
    makespan = _check(pieces, solved, resources=True)
    longest = 0.0
    way: list[float] = []
    for p in pieces:
        way.append(p.seconds + max((way[a] for a in p.after), default=0.0))
        longest = max(longest, way[-1])
    assert makespan >= longest * 0.99


def test_solver_finds_what_a_list_does_not() -> None:
    """The longest way first starves the link here; the solver sends early."""
    pytest.importorskip("ortools")
    pieces = [
        Job(seconds=2.0, lane="compute", after=(), uses={}),
        Job(seconds=1.0, lane="compute", after=(), uses={}),
        Job(seconds=3.0, lane="network", after=(1,), uses={}),
        Job(seconds=2.5, lane="compute", after=(0,), uses={}),
    ]
    solved = solve(pieces, 2.0)
    assert _check(pieces, solved, resources=False) == pytest.approx(5.5, rel=0.01)
