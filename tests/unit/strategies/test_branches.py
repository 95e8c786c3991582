"""Independent operators on lanes: what runs beside what, in which order, and when it is not worth it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.strategies.branches import CUTS, Branches
from tests import zoo
from tests.helpers import Stack, compiled, randn, run_both, write_results
from tests.zoo import ZOO


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators take a millisecond for each call that they hold, and fill nothing, whatever this machine is."""
    monkeypatch.setattr(df.ScheduleContext, "cost", lambda ctx, op: 1e-3 * len(op.functions))
    monkeypatch.setattr(df.ScheduleContext, "uses", lambda ctx, op: {"compute": 0.3})


def costs(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Operators take what the entry that their name ends with says; the others nothing to speak of."""

    def cost(ctx: df.ScheduleContext, op: df.Op) -> float:
        return next((s for name, s in seconds.items() if op.name.endswith(name)), 1e-9)

    monkeypatch.setattr(df.ScheduleContext, "cost", cost)


def fills(monkeypatch: pytest.MonkeyPatch, **resources: str) -> None:
    """Operators fill the resource that the entry that their name ends with says."""

    def uses(ctx: df.ScheduleContext, op: df.Op) -> dict[str, float]:
        return {resource: 0.9 for name, resource in resources.items() if op.name.endswith(name)}

    monkeypatch.setattr(df.ScheduleContext, "uses", uses)


def chain(length: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(length)))


class Fork(nn.Module):
    """A stem, branches of the lengths given, and their sum."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        for n, length in enumerate(lengths):
            setattr(self, f"branch{n}", chain(length))
        self.count = len(lengths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return torch.stack([getattr(self, f"branch{n}")(x) for n in range(self.count)]).sum(0)


def lanes_of(plan: df.Plan) -> dict[str, str]:
    return {item.op: task.lane for task in plan.tasks for item in task.items}


def order(plan: df.Plan) -> list[str]:
    return [item.op for task in plan.tasks for item in task.items]


def unordered(plan: df.Plan, *ops: str) -> bool:
    """Nothing in the plan keeps any two of these from running at the same time."""
    at = [order(plan).index(op) for op in ops]
    return not any(plan.happens_before[b] >> a & 1 for a, b in itertools.permutations(at, 2))


def run_zoo(name: str, batch: int = 3, scheduler: df.OpSchedulerBase | None = None) -> tuple[df.Plan, df.Stats]:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"needs {entry.requires}")
    model, inputs = entry.build(), entry.inputs(batch)
    fast = compiled(model, scheduler or Branches(), verify=True)
    with torch.no_grad():
        found, expected = zoo.tensors(fast(**inputs)), zoo.tensors(model(**inputs))
        assert len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-4)
        plan = fast.plan(**inputs)
    assert fast.stats.verified == 1 and not fast.stats.plain_graphs
    return plan, fast.stats


# Models


def test_branches_of_a_block_run_beside_each_other() -> None:
    plan, _ = run_zoo("branch_cnn")
    assert len(plan.lanes) == 4 and len(plan.micro_batches) == 1
    for block in ("block0", "block1"):
        branches = [f"{block}.{name}" for name in ("branch1x1", "branch3x3", "branch5x5", "branch_pool")]
        assert unordered(plan, *branches)
        assert len({lanes_of(plan)[b] for b in branches}) == 4


def test_branches_write_into_planned_buffers() -> None:
    model, x = ZOO["branch_cnn"].build(), ZOO["branch_cnn"].inputs(3)["x"]
    fast = compiled(model, Branches(), verify=True)
    write_results(fast)
    with torch.no_grad():
        for inputs in (x, x[:2], x):
            torch.testing.assert_close(fast(inputs), model(inputs), rtol=1e-4, atol=1e-4)
    assert fast.stats.arena_bytes > 0


def test_projections_of_attention_run_beside_each_other() -> None:
    plan, _ = run_zoo("llama")
    for layer in range(2):
        projections = [f"model.layers.{layer}.self_attn.{p}_proj" for p in "qkv"]
        assert unordered(plan, *projections)
        assert len({lanes_of(plan)[p] for p in projections}) == 3


def test_shared_experts_run_beside_routed_ones() -> None:
    plan, _ = run_zoo("deepseek_v3")
    assert unordered(plan, "model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts")
    assert unordered(plan, "model.layers.0.self_attn.q_b_proj", "model.layers.0.self_attn.kv_b_proj")


def test_routed_experts_alone() -> None:
    plan, _ = run_zoo("mixtral")
    assert "model.layers.0.mlp.experts" in order(plan)
    assert unordered(plan, "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")


def test_two_streams_of_a_diffusion_block_run_beside_each_other() -> None:
    plan, _ = run_zoo("flux")
    block = "transformer_blocks.0"
    assert unordered(plan, f"{block}.attn.to_q", f"{block}.attn.add_q_proj")
    assert unordered(plan, f"{block}.attn.to_out.0", f"{block}.attn.to_add_out")
    assert unordered(plan, f"{block}.ff", f"{block}.ff_context")
    assert unordered(plan, *(f"single_{block}.{name}" for name in ("attn.to_q", "attn.to_k", "proj_mlp")))


# The order


def test_longest_path_goes_first_and_stays_behind_its_predecessor() -> None:
    _, plan = run_both(Fork(1, 5, 2), (randn(4, 8),), Branches(), verify=True)
    assert order(plan)[1:4] == ["branch1", "branch2", "branch0"]
    lanes = lanes_of(plan)
    assert lanes["branch1"] == lanes[order(plan)[0]] == lanes[order(plan)[-1]]
    assert len({lanes["branch0"], lanes["branch1"], lanes["branch2"]}) == 3


def test_costs_decide_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, branch0=3e-3, branch1=1e-3, branch2=2e-3)
    _, plan = run_both(Fork(1, 5, 2), (randn(4, 8),), Branches(), verify=True)
    assert order(plan)[1:4] == ["branch0", "branch2", "branch1"]


def test_short_branches_share_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, branch0=2e-3, branch1=4e-3, branch2=2e-3)
    _, plan = run_both(Fork(1, 1, 1), (randn(4, 8),), Branches(lanes=2), verify=True)
    lanes = lanes_of(plan)
    assert lanes["branch0"] == lanes["branch2"] != lanes["branch1"]


@pytest.mark.parametrize("lanes", [2, 3])
def test_number_of_lanes_is_respected(lanes: int) -> None:
    plan, _ = run_zoo("branch_cnn", scheduler=Branches(lanes))
    assert len(plan.lanes) == lanes


def test_waits_are_few() -> None:
    """A branch waits for its stem, unless it is on its lane, and a join for the other branches; a chain for nobody."""
    cuts = [df.SplitModule("stem"), df.SplitModule("branch*.*")]
    _, plan = run_both(Fork(3, 3), (randn(4, 8),), Branches(cuts=cuts), verify=True)
    assert len(plan.tasks) > 6
    assert sum(len(task.after) for task in plan.tasks) == 2


# Not worth it


def test_a_chain_is_left_uncut() -> None:
    fast, plan = run_both(Stack(), (randn(4, 8),), Branches(cuts=["*.attn", "*.mlp"]), verify=True)
    assert plan.sequential and fast.stats.sequential_runs == 1


def test_one_lane_is_the_uncut_graph() -> None:
    _, plan = run_both(Fork(2, 2), (randn(4, 8),), Branches(lanes=1))
    assert plan.sequential


def test_branches_shorter_than_a_wait_are_left_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(monkeypatch, branch0=4e-6, branch1=4e-6)
    assert run_both(Fork(2, 2), (randn(4, 8),), Branches())[1].sequential
    assert not run_both(Fork(2, 2), (randn(4, 8),), Branches(wait=1e-6))[1].sequential


def test_branches_that_fill_the_device_are_left_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    fills(monkeypatch, branch0="compute", branch1="compute")
    assert run_both(Fork(2, 2), (randn(4, 8),), Branches())[1].sequential
    fills(monkeypatch, branch0="compute", branch1="memory")
    assert not run_both(Fork(2, 2), (randn(4, 8),), Branches())[1].sequential


def test_costs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run_both(Fork(1, 5, 2), (randn(4, 8),), Branches(), verify=True)


def test_a_model_that_has_none_of_the_names_is_left_uncut() -> None:
    assert run_both(Stack(), (randn(4, 8),), Branches())[1].sequential


# Options


def test_cuts_are_globs_patterns_or_rules() -> None:
    cuts: list[Any]
    for cuts in (
        ["branch?"],
        [re.compile(r"^branch\d$")],
        [df.SplitModule("branch?")],
        [df.SplitFunc(torch.nn.functional.linear)],
    ):
        _, plan = run_both(Fork(2, 2), (randn(4, 8),), Branches(cuts=cuts), verify=True)
        assert len(plan.lanes) == 2


def test_a_glob_of_the_users_must_match() -> None:
    with pytest.raises(df.PartitionError, match="brunch"):
        compiled(Fork(2, 2), Branches(cuts=["brunch*"]))(randn(4, 8))


@pytest.mark.parametrize(
    ("path", "cut"),
    [
        ("inception3a.branch2", True),
        ("inception3a.branch2.0", False),
        ("Mixed_5b.branch5x5_1", True),
        ("stage2.0.branches.1", True),
        ("stage2.0.branches", False),
        ("layer2.0.downsample", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn.o_proj", False),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", True),
        ("encoder.layer.0.attention.self.query", True),
        ("decoder.block.0.layer.0.SelfAttention.q", True),
        ("model.layers.1.mlp.shared_expert", True),
        ("model.layers.1.mlp.shared_expert_gate", False),
        ("model.layers.1.mlp.experts.3", True),
        ("transformer_blocks.0.attn.to_out.0", True),
        ("transformer_blocks.0.attn.add_k_proj", True),
        ("blocks.0.attn1.norm_q", False),
    ],
)
def test_names_that_are_cut_by_default(path: str, cut: bool) -> None:
    assert any(pattern.search(path) for pattern in CUTS) == cut


def test_no_lane_is_an_error() -> None:
    with pytest.raises(df.ScheduleError, match="lanes=0"):
        Branches(lanes=0)
