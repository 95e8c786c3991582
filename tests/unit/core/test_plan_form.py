"""Plans as files that anybody may have written: whatever is in one, it is a PlanError, or a plan that runs right.

Real plans are damaged at random, a few places at a time, by values that are almost right and by ones that are far off;
and random JSON is read as well. What is read is printed, drawn, checked, and run if the check lets it through.
"""

from __future__ import annotations

import functools
import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dynaflow as df
from dynaflow.observe.timelines import of_plan
from tests.helpers import STACK_RULES, Each, Scheduler, Stack, assert_equal, compiled, graph_of, randn, run_rest

X = randn(6, 8)
CASES = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)

FAR = [
    None, True, False, -1, 2**31, 2**63, -(2**63) - 1, 10**4000, 0.5, 1e308, math.nan, math.inf, "", "main", "\0",
    "\ud800", "\n\r\u2028", "\u202e", "os:system", "x" * 5000, [], [[]], {}, {"op": {}}, [None], "1", [0, 0],
]  # fmt: skip
NEAR = [0, 1, 2, 3, 4, 5, 6, "lane0", "lane1", "layers.0.attn", "layers.1.mlp", "layers.0:add", [0], [1], [0, 1], [2]]
values = st.recursive(
    st.sampled_from(FAR) | st.sampled_from(NEAR) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def mixed(x: Tensor, *rest: Tensor) -> Tensor:
    """In place of an attention: what it gets first."""
    return x


@functools.cache
def model() -> tuple[Stack, df.CompiledModel, Tensor]:
    torch.manual_seed(0)
    plain = Stack()
    fast = compiled(plain, Each(STACK_RULES))
    with torch.no_grad():
        return plain, fast, plain(X)


def fuse(ctx: df.ScheduleContext) -> None:
    ctx.split(2)
    for item in ctx.items("layers.0.attn"):
        ctx.execute(item, replace_func=mixed, lane=f"lane{item.micro_batch}")
    run_rest(ctx)


@functools.cache
def plans() -> list[str]:
    """Some that differ: one lane and several, uneven parts, merged operators, the uncut graph."""
    schedulers: list[df.OpSchedulerBase] = [
        Each(STACK_RULES),
        Each(STACK_RULES, split=[1, 5], lanes=2),
        Each(STACK_RULES, split=3, lanes=3),
        Each(STACK_RULES, split=None),
        Scheduler(fuse, STACK_RULES),
        Scheduler(lambda ctx: ctx.sequential(), STACK_RULES),
    ]
    with torch.no_grad():
        return [compiled(Stack(), scheduler).plan(X).to_json() for scheduler in schedulers]


def places(data: Any) -> list[tuple[Any, Any]]:
    """All that holds something in a document, and under which key or number."""
    found = []
    if isinstance(data, (dict, list)):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            found.append((data, key))
            found += places(data[key])
    return found


def damaged(text: str, seed: int, value: Any) -> str:
    chance, data = random.Random(seed), json.loads(text)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        holder, key = chance.choice(places(data))
        value = json.loads(json.dumps(value))
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(chance.randrange(len(holder) + 1), json.loads(json.dumps(holder[key])))
            case 1:
                holder[f"{key}2"] = value
            case 2:
                other, theirs = chance.choice(places(data))
                holder[key] = json.loads(json.dumps(other[theirs]))
            case 3 if isinstance(holder, list):
                chance.shuffle(holder)
            case 4:
                holder[key] = chance.choice(NEAR)
            case _:
                holder[key] = value
        if not places(data):
            break
    written = json.dumps(data)
    if chance.random() < 0.1:  # as bytes on a disk may be
        cut = chance.randrange(len(written))
        written = written[:cut] + chance.choice(["", "[" * 100_000, "9" * 5000, "\\ud800"]) + written[cut + 1 :]
    return written


def judge(text: Any) -> str:
    """What became of it."""
    refused: df.DynaFlowError | None = None
    try:
        plan = df.Plan.from_json(text)
    except df.PlanError as e:
        refused = e
    if refused is not None:
        assert refused.advice
        return "no plan"
    assert df.Plan.from_json(plan.to_json()) == plan and hash(plan) is not None
    assert str(plan)
    try:
        df.draw(plan)
        of_plan(plan)
    except df.DynaFlowError:
        pass
    _, fast, expected = model()
    scheduler = Scheduler(lambda ctx: plan, STACK_RULES)
    scheduler.functions = [mixed]
    with torch.no_grad():
        fast.set_scheduler(scheduler)
        try:
            found = fast(X)
        except df.DynaFlowError as e:
            refused = e
        if refused is not None:
            assert type(refused) in (df.PlanError, df.SplitError) and refused.advice
            return "refused"
        df.check(plan, graph_of(fast), 6)
        if not any(task.replace for task in plan.tasks):  # which computes something else by right
            assert_equal(found, expected)
        return "runs"


def test_the_plans_themselves_run() -> None:
    assert [judge(text) for text in plans()] == ["runs"] * len(plans())
    assert judge(plans()[0].encode()) == "runs"


seen: dict[str, int] = {}


@CASES
@given(which=st.integers(0, 5), seed=st.integers(0, 2**32), value=values)
def test_damaged_plans(which: int, seed: int, value: Any) -> None:
    outcome = judge(damaged(plans()[which], seed, value))
    seen[outcome] = seen.get(outcome, 0) + 1


def test_all_outcomes_were_seen() -> None:
    if seen:  # by the test above, in this process
        assert set(seen) == {"no plan", "refused", "runs"}


@CASES
@given(data=values, extra=values)
def test_random_json(data: Any, extra: Any) -> None:
    judge(json.dumps(data))
    judge(json.dumps({**json.loads(plans()[0]), "tasks": data, "lanes": extra}))
    judge(json.dumps({"format": 1, "graph": data, "micro_batches": extra, "lanes": data, "tasks": data}))


@CASES
@given(text=st.text() | st.binary() | st.none() | st.integers() | st.lists(st.integers(), max_size=2))
def test_random_text(text: Any) -> None:
    assert judge(text) == "no plan"


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_json(depth: int) -> None:
    for text in ("[" * depth, "[" * depth + "]" * depth, '{"format":' * depth, '{"format": 1, "tasks": ' + "[" * depth):
        assert judge(text) == "no plan"
