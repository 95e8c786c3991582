"""Parameters in host memory, fetched where they are used; and the schedule that does so ahead, in bounded memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.strategies.branches import Branches
from dynaflow.strategies.nanoflow import NanoFlow
from dynaflow.strategies.prefetch import Prefetch
from tests.helpers import (
    STACK_RULES,
    Each,
    Scheduler,
    Stack,
    compiled,
    graph_of,
    lowered_of,
    parts_of,
    randn,
    run_both,
    run_rest,
    write_results,
)
from tests.zoo import ZOO

FETCH = torch.ops.dynaflow.fetch.default


class Deep(nn.Module):
    """Layers of large weights and small activations."""

    def __init__(self, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def tasks_of(plan: df.Plan, op: str) -> list[int]:
    return [t for t, task in enumerate(plan.tasks) if any(item.op == op for item in task.items)]


def fetches(fast: df.CompiledModel) -> dict[str, list[str]]:
    """By the name of each fetch: the operators that use it."""
    ops = graph_of(fast).ops
    return {op.name: [u.name for u in ops if op.index in u.after] for op in ops if "fetch" in op.tags}


def most_alive(fast: df.CompiledModel, plan: df.Plan) -> int:
    """For how many operators weights can be in memory at once, by all that the plan makes certain."""
    by_users: dict[tuple[str, ...], list[int]] = {}
    for name, users in fetches(fast).items():
        by_users.setdefault(tuple(users), []).extend(tasks_of(plan, name))
    loads = [(min(tasks), [t for u in users for t in tasks_of(plan, u)]) for users, tasks in by_users.items()]
    most = 0
    for at, _ in loads:
        others = [uses for earlier, uses in loads if earlier < at]
        alive = [uses for uses in others if not all(plan.happens_before[at] >> t & 1 for t in uses)]
        most = max(most, 1 + len(alive))
    return most


def fetch_nodes(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.fx.Node]:
    """The fetches in the graph that Dynamo makes of the model, which must be one."""
    found: list[torch.fx.Node] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.extend(gm.graph.find_nodes(op="call_function", target=FETCH))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    return found


# offload and restore


def test_an_offloaded_model_is_the_same_model() -> None:
    model, x = Stack(), randn(4, 8)
    expected, text, kinds = model(x), repr(model), [type(m) for m in model.modules()]
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert df.offload(model, "cpu") is model
    assert torch.equal(model(x), expected)
    assert repr(model) == text and isinstance(model.head, nn.Linear)
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert list(model.state_dict()) == list(state)
    assert model.head.weight is not parameters["head.weight"], "it was not fetched"
    assert torch.equal(model.head.weight, parameters["head.weight"])
    assert df.restore(model) is model
    assert [type(m) for m in model.modules()] == kinds and model.head.weight is parameters["head.weight"]
    assert torch.equal(model(x), expected)


def test_a_state_dict_is_loaded_into_host_memory() -> None:
    model, other, x = Stack(), Stack(), randn(4, 8)
    df.offload(model, "cpu").load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), other(x))


def test_a_fetch_is_a_copy_that_keeps_the_layout() -> None:
    host = randn(4, 6).t()
    found = torch.ops.dynaflow.fetch(host, torch.device("cpu"))
    assert torch.equal(found, host) and found.stride() == host.stride() and found.data_ptr() != host.data_ptr()
    torch.library.opcheck(FETCH, (randn(4, 6).requires_grad_(), torch.device("cpu")))


def test_one_fetch_for_each_use_inside_the_users_path() -> None:
    model = ZOO["llama"].build()
    nodes = fetch_nodes(df.offload(model, "cpu"), **ZOO["llama"].inputs(2))
    paths = [list(node.meta["nn_module_stack"].values())[-1][0].removeprefix("L['self'].") for node in nodes]
    assert sorted(paths) == sorted(name.removesuffix(".weight") for name, _ in model.named_parameters())


def test_globs_and_sizes_choose_what_is_offloaded() -> None:
    x = randn(4, 8)
    assert len(fetch_nodes(df.offload(Stack(), "cpu"), x)) == 14
    assert len(fetch_nodes(df.offload(Stack(), "cpu", "layers.*"), x)) == 12
    assert len(fetch_nodes(df.offload(Stack(), "cpu", ["layers.0.*", "head.*"]), x)) == 8
    assert len(fetch_nodes(df.offload(Stack(), "cpu", at_least=4 * 8 * 8), x)) == 6
    twice = df.offload(df.offload(Stack(), "cpu", "*.attn.weight"), "cpu", "*.attn.bias")
    assert len(fetch_nodes(twice, x)) == 4
    assert type(df.restore(twice).layers[0].attn) is nn.Linear


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(self.embed(ids))))


@pytest.mark.parametrize("match", ["*", "head.weight"])
def test_tied_weights_stay_tied(match: str) -> None:
    model, ids = Tied(), torch.arange(12).view(4, 3) % 11
    expected = model(ids)
    df.offload(model, "cpu", match)
    assert len(list(model.parameters())) == 3 and torch.equal(model(ids), expected)
    assert len(fetch_nodes(model, ids)) == (6 if match == "*" else 2)
    run_both(model, (ids,), Prefetch(), verify=True)
    df.restore(model)
    assert model.head.weight is model.embed.weight


def test_a_module_called_twice_fetches_twice() -> None:
    model = df.offload(Tied(), "cpu", "inner.*")
    fast, plan = run_both(model, (torch.arange(12).view(4, 3) % 11,), Prefetch(), verify=True)
    assert len(fetches(fast)) == 4 and most_alive(fast, plan) == 2


def test_buffers_are_not_fetched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model(randn(16, 8))
    df.offload(model.eval(), "cpu")
    assert len(fetch_nodes(model, randn(4, 8))) == 6
    run_both(model, (randn(4, 8),), Prefetch(), verify=True)
    model.train()(randn(16, 8))
    assert int(model[1].num_batches_tracked) == 2


def test_parameters_in_lists_and_parametrizations() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(randn(8)) for _ in range(3))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = self.normed(x * scale)
            return x

    model, x = Listed(), randn(4, 8)
    expected = model(x)
    assert torch.equal(df.offload(model, "cpu")(x), expected)
    run_both(model, (x,), Prefetch(), verify=True)


@pytest.mark.parametrize(
    ("model", "match", "message"),
    [
        (Stack(), "heads.*", "no parameter fits 'heads.*'(.|\n)*head.weight"),
        (nn.LSTM(4, 4), "*", "weight_ih_l0 belongs to a LSTM"),
        (nn.Linear(4, 4, device="meta"), "*", "weight has no values yet"),
    ],
)
def test_what_cant_be_offloaded(model: nn.Module, match: str, message: str) -> None:
    with pytest.raises(df.DynaFlowError, match=message):
        df.offload(model, "cpu", match)
    assert not any("_dynaflow" in name for name in vars(model))


def test_only_what_was_offloaded_is_restored() -> None:
    with pytest.raises(df.DynaFlowError, match="Stack was not offloaded"):
        df.restore(Stack())


# The plan


def run_on(ctx: df.ScheduleContext) -> None:
    """Takes one micro-batch as far as it gets, then the other."""
    ctx.split(2)
    while ops := ctx.get_ready_ops():
        ctx.execute(ops[-1])


@pytest.mark.parametrize("inner", [None, Each(split=2), Each(split=3, lanes=3), NanoFlow(), Scheduler(run_on)])
def test_fetches_run_ahead_on_a_lane_of_their_own(inner: df.OpSchedulerBase | None) -> None:
    fast, plan = run_both(df.offload(Deep(), "cpu"), (randn(6, 64),), Prefetch(inner), verify=True)
    by_user: dict[str, list[int]] = {}
    for fetch, (user,) in fetches(fast).items():
        by_user.setdefault(user, []).extend(tasks_of(plan, fetch))
    copies = {t for tasks in by_user.values() for t in tasks}
    assert {t for t, task in enumerate(plan.tasks) if task.lane == "copy"} == copies
    issued = [min(tasks) for tasks in by_user.values()]
    used = [tasks_of(plan, user) for user in by_user]
    assert len(used) == 6
    for i in range(5):
        assert issued[i + 1] < used[i][0], "the next weights are asked for before this operator runs"
        assert not any(plan.happens_before[issued[i + 1]] >> t & 1 for t in used[i]), "and need not wait for it"
    for i in range(2, 6):
        assert all(plan.happens_before[issued[i]] >> t & 1 for t in used[i - 2]), "but for the one before"


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_memory_is_bounded(ahead: int) -> None:
    fast, plan = run_both(df.offload(Deep(), "cpu"), (randn(4, 64),), Prefetch(ahead=ahead), verify=True)
    assert most_alive(fast, plan) == min(ahead + 1, 6)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(
    "inner",
    [
        Each(split=2),
        Each(split=3, lanes=3),
        Each([df.SplitModule("layers.[24]")], split=2, lanes=2),
        NanoFlow(attention="relu"),
        NanoFlow(attention="relu", merged=("layers.3",)),
        Scheduler(run_on),
    ],
)
def test_memory_is_bounded_when_the_batch_is_split(inner: df.OpSchedulerBase, ahead: int) -> None:
    fast, plan = run_both(df.offload(Deep(), "cpu"), (randn(6, 64),), Prefetch(inner, ahead), verify=True)
    assert len(plan.micro_batches) > 1
    assert all(len(parts_of(plan, fetch)) == 1 for fetch in fetches(fast)), "weights are fetched once for all"
    assert most_alive(fast, plan) == ahead + 1


@pytest.mark.parametrize("inner", [None, Each(split=2, lanes=2)])
def test_the_arena_holds_what_is_alive_and_no_more(inner: df.OpSchedulerBase | None) -> None:
    model, x = df.offload(Deep(layers=12), "cpu"), randn(4, 64)
    sizes = []
    for ahead in (0, 1, 11):
        fast = compiled(model, Prefetch(inner, ahead), verify=True)
        write_results(fast)
        with torch.no_grad():
            for batch in (x, x[:3], x):
                torch.testing.assert_close(fast(batch), model(batch))
        assert "fetch_out" in str(graph_code(fast)), "fetches write straight into the arena"
        sizes.append(fast.stats.arena_bytes)
    layer = 64 * 64 * 4
    assert 1 * layer < sizes[0] < 1.3 * layer
    assert 2 * layer < sizes[1] < 2.3 * layer
    assert 12 * layer < sizes[2]


def graph_code(fast: df.CompiledModel) -> list[str]:
    """What the operators of the last plan call."""
    lowered = lowered_of(fast)[-1]
    assert lowered.code is not None
    calls = [f.__self__ for f in lowered.code.names.values() if isinstance(getattr(f, "__self__", None), nn.Module)]
    return [call.code for call in calls]


def test_whole_layers_are_fetched_where_the_inner_scheduler_cuts_whole_layers() -> None:
    class Layers(df.OpSchedulerBase):
        def partition(self) -> list[Any]:
            return [df.SplitModule("layers.[0-9]")]

    fast, plan = run_both(df.offload(Stack(blocks=4), "cpu"), (randn(4, 8),), Prefetch(Layers()), verify=True)
    assert most_alive(fast, plan) == 2
    assert [len(us) for us in fetches(fast).values()] == [1] * 26
    assert tasks_of(plan, "layers.1")[0] - tasks_of(plan, "layers.0")[0] == 7, "six fetches between the two"


def test_llama_in_two_micro_batches() -> None:
    model, inputs = ZOO["llama"].build(), ZOO["llama"].inputs(4)
    df.offload(model, "cpu", "model.layers.*", at_least=512)
    fast = compiled(model, Prefetch(NanoFlow()), verify=True, fullgraph=True)
    write_results(fast)
    with torch.no_grad():
        for batch in (4, 6, 4):
            inputs = ZOO["llama"].inputs(batch)
            torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
        plan = fast.plan(**inputs)
    assert fast.stats.verified == 2 and len(plan.micro_batches) == 2
    assert {"copy", "compute", "memory"} == {lane.name for lane in plan.lanes}
    assert len(fetches(fast)) == 14 and most_alive(fast, plan) == 2


# The inner scheduler


def test_the_inner_scheduler_sees_no_fetches() -> None:
    seen: list[Any] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        seen.append((ctx.batch_size, [op.name for op in ctx.ops]))
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            seen.extend(op.name for op in ops)
            ctx.execute(ops[-1], lane="inner")

    _, plan = run_both(
        df.offload(Stack(), "cpu"), (randn(4, 8),), Prefetch(Scheduler(schedule, STACK_RULES)), verify=True
    )
    assert seen[0][0] == 4 and not any("fetch" in str(name) for name in seen)
    assert {task.lane for task in plan.tasks} == {"copy", "inner"}


def test_beside_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(df.ScheduleContext, "cost", lambda ctx, op: 1e-3)
    monkeypatch.setattr(df.ScheduleContext, "uses", lambda ctx, op: {})

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch0, self.branch1, self.head = Deep(3, 8), Deep(2, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.branch0(x) + self.branch1(x))

    _, plan = run_both(df.offload(Fork(), "cpu"), (randn(4, 8),), Prefetch(Branches(), ahead=2), verify=True)
    assert {task.lane for task in plan.tasks} == {"copy", "main", "branch1"}


def test_out_of_order_weights_are_fetched_when_they_are_used() -> None:
    """The last operators of one micro-batch come before the first of the other: all weights are in use at once."""

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        for m in range(2):
            for op in ctx.ops:
                ctx.execute(ctx.items(op)[m])

    fast, plan = run_both(df.offload(Deep(), "cpu"), (randn(4, 64),), Prefetch(Scheduler(schedule)), verify=True)
    assert most_alive(fast, plan) == 6


def test_a_fusion_gets_fetched_weights() -> None:
    def fused(*values: Tensor) -> Tensor:
        (x,) = (v for v in values if v.shape == (4, 8))
        first, second = (v for v in values if v.shape == (8, 8))
        return torch.nn.functional.linear(torch.nn.functional.linear(x, first), second)

    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.execute([*ctx.items("0"), *ctx.items("1")], replace_func=fused)
        run_rest(ctx)

    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    rules = [df.SplitModule("[012]")]
    _, plan = run_both(
        df.offload(model, "cpu"), (randn(4, 8),), Prefetch(Scheduler(schedule, rules), ahead=0), verify=True
    )
    assert any(task.replace for task in plan.tasks)


def test_choice_and_bucket_of_the_inner_scheduler_count() -> None:
    class Padded(Each):
        def bucket(self, batch_size: int) -> int:
            return 8

    def choice(ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        return Padded(split=2) if ctx.batch_size > 4 else df.Sequential()

    model = df.offload(Deep(), "cpu")
    fast = compiled(model, Prefetch(df.choose(choice)))
    with torch.no_grad():
        for batch, parts in ((7, 2), (8, 2), (3, 1)):
            x = randn(batch, 64)
            torch.testing.assert_close(fast(x), model(x))
            plan = fast.plan(x)
            assert len(plan.micro_batches) == parts and plan.batch_size == (8 if parts == 2 else batch)


def test_a_model_without_fetches_runs_as_the_inner_scheduler_says() -> None:
    assert run_both(Deep(), (randn(4, 64),), Prefetch())[1].sequential
    plan = run_both(Deep(), (randn(4, 64),), Prefetch(Each(split=2)))[1]
    assert len(plan.micro_batches) == 2 and {lane.name for lane in plan.lanes} == {"lane0"}


def test_the_uncut_graph_fetches_too() -> None:
    assert run_both(df.offload(Deep(), "cpu"), (randn(4, 64),), df.Sequential(), verify=True)[1].sequential


def test_nothing_can_be_fetched_after_its_use() -> None:
    with pytest.raises(df.ScheduleError, match="ahead=-1"):
        Prefetch(ahead=-1)


# What else can be fetched


def test_a_cache_on_the_host_is_fetched_in_parts() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            x = self.q(self.q(x))
            return x[:, None] @ torch.ops.dynaflow.fetch(keys, x.device).transpose(1, 2)

    fast, plan = run_both(
        df.offload(Attention(), "cpu"), (randn(4, 8), randn(4, 5, 8)), Prefetch(Each(split=2)), verify=True
    )
    assert parts_of(plan, "fetch") == [(0,), (1,)]
    assert most_alive(fast, plan) == 2


def test_an_activation_comes_back_when_it_has_been_made() -> None:
    class Skip(nn.Module):
        """Keeps its first activation on the host until the end."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            first = x = self.layers[0](x).relu()
            for layer in self.layers[1:]:
                x = layer(x).relu()
            return x + torch.ops.dynaflow.fetch(first, x.device)

    for inner in (None, Each(split=2)):
        fast, plan = run_both(df.offload(Skip(), "cpu"), (randn(4, 8),), Prefetch(inner), verify=True)
        assert plan.tasks[tasks_of(plan, "fetch")[0]].lane == "copy" and most_alive(fast, plan) == 2


def test_a_fetched_tensor_that_is_returned() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x).relu(), torch.ops.dynaflow.fetch(x, x.device)

    run_both(df.offload(Shows(), "cpu"), (randn(4, 8),), Prefetch(), verify=True)


def test_weights_that_are_used_twice_far_apart() -> None:
    """One fetch with two users: it stays in memory until the second, and the others go on."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(randn(8, 8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            kept = self.kept
            x = (x @ kept).relu()
            for layer in self.layers:
                x = layer(x).relu()
            return x @ kept

    for ahead in (0, 1):
        fast, plan = run_both(df.offload(Twice(), "cpu"), (randn(4, 8),), Prefetch(ahead=ahead), verify=True)
        assert len(fetches(fast)["fetch"]) == 2
        assert most_alive(fast, plan) == 2


# Training


def test_gradients_arrive_at_the_parameters() -> None:
    model, x = Stack(), randn(4, 8)
    model(x).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    fast = compiled(df.offload(model, "cpu"), Prefetch(Each(STACK_RULES, split=2)))
    fast(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])
    assert fast.stats.plain_graphs == 0
    df.restore(model)(x).sum().backward()
    torch.testing.assert_close(model.head.weight.grad, 2 * expected["head.weight"])
