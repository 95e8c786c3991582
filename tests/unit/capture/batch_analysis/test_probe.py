"""The batch: where it is, how it is followed, which operators may be split along it, and ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import (
    STACK_RULES,
    Each,
    Scheduler,
    Stack,
    assert_equal,
    compiled,
    graph_of,
    names,
    parts_of,
    randn,
    run_both,
    run_rest,
    whole,
)


def sizes(plan: df.Plan) -> list[int]:
    return [m.size for m in plan.micro_batches]


# --- where it is -----------------------------------------------------------------------------------------


def test_default_is_dim_0() -> None:
    _, plan = run_both(Stack(), (randn(6, 8),), Each(STACK_RULES))
    assert sizes(plan) == [3, 3]
    assert whole(plan) == []


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, table: Tensor, y: Tensor) -> Tensor:
        with df.mark("first"):
            x = x @ table
        with df.mark("second"):
            return x + y


def test_default_is_the_size_that_inputs_share() -> None:
    fast, plan = run_both(TwoInputs(), (randn(6, 8), randn(8, 4), randn(6, 4)))
    assert sizes(plan) == [3, 3]
    assert whole(plan) == []
    assert all(not v.carries_batch for v in graph_of(fast).values if v.name == "table")


def test_two_inputs_with_a_symbol_each() -> None:
    """Nothing in the first two operators says that x and y are equally long."""

    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with df.mark("x"):
                x = x.sin() + 1
            with df.mark("y"):
                y = y.cos() - 1
            return x, y

    fast = compiled(Net(), Each(split=[1, 4]))
    inputs = randn(5, 3), randn(5, 2)
    with torch.no_grad():
        assert_equal(fast(*inputs), Net()(*inputs))
        plan = fast.plan(*inputs)
    assert whole(plan) == []
    assert len(graph_of(fast).batch_axes[0]) == 2, "each input has its own symbol"


class Megatron(nn.Module):
    """Sequence first, [s, b, h]: the batch is dim 1 between the layers, and dim 0 of batch*heads inside attention."""

    def __init__(self, hidden: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.attention = _MegatronAttention(hidden, heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.attention(self.norm(hidden_states))
        return x + self.mlp(x)


class _MegatronAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        q, k, v = self.qkv(x).view(s, b, self.heads, 3 * h // self.heads).chunk(3, dim=-1)
        q, k, v = (t.reshape(s, b * self.heads, h // self.heads).transpose(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(q.new_zeros(1), q, k.transpose(1, 2), beta=0.0, alpha=(h // self.heads) ** -0.5)
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        context = torch.bmm(scores.masked_fill(causal, -1e4).softmax(-1), v)
        return self.proj(context.transpose(0, 1).reshape(s, b, h))


@pytest.mark.parametrize("split", [2, [1, 4, 2]])
def test_batch_on_dim_1(split: Any) -> None:
    rules = [df.SplitModule("attention", tag="attention"), df.SplitModule("mlp", tag="mlp")]
    fast, plan = run_both(Megatron(), (randn(5, 7, 16),), Each(rules, split, lanes=2), batch_dims={"hidden_states": 1})
    assert plan.batch_size == 7
    assert whole(plan) == [], {op.name: op.refusal for op in graph_of(fast).ops}


def test_batch_dims_for_one_of_two_inputs() -> None:
    """The other input has the same size by chance, and is shared."""

    class Net(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x @ w

    fast, plan = run_both(Net(), (randn(6, 6), randn(6, 6)), Each(), batch_dims={"x": 0})
    assert whole(plan) == []
    assert {v.name: v.carries_batch for v in graph_of(fast).values if v.input is not None} == {"x": True, "w": False}


def test_batch_dims_negative_and_none() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y[0, 0]

    _, plan = run_both(Net(), (randn(3, 6), randn(3, 3)), Each(), batch_dims={"x": -1, "y": None})
    assert plan.batch_size == 6
    assert whole(plan) == []


def test_batch_dims_reach_into_structures() -> None:
    class Net(nn.Module):
        def forward(self, data: dict[str, list[Tensor]]) -> Tensor:
            return data["a"][1] * 2 + data["a"][0].sum()

    _, plan = run_both(Net(), ({"a": [randn(6), randn(6, 2)]},), Each(), batch_dims={"data.a.1": 0})
    assert plan.batch_size == 6
    assert whole(plan) != names(plan)


def test_batch_dims_of_an_input_that_the_graph_does_not_use() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x.relu()

    _, plan = run_both(Net(), (randn(6, 2), randn(6)), Each(), batch_dims={"x": 0, "unused": 0})
    assert len(plan.micro_batches) == 2


@pytest.mark.parametrize("batch_dims", [{"nothing": 0}, {"x": 2}, {"x": -3}])
def test_wrong_batch_dims(batch_dims: dict[str, int]) -> None:
    fast = compiled(Stack(), batch_dims=batch_dims)
    with pytest.raises(df.SplitError) as caught:
        fast(randn(4, 8))
    assert next(iter(batch_dims)) in str(caught.value)
    assert caught.value.advice


def test_derived_sizes() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("flat"):
                flat = x.reshape(x.shape[0] * 16, -1) + 1  # 16*B rows
            with df.mark("work"):
                flat = flat.softmax(-1)
            with df.mark("back"):
                return flat.view(x.shape[0], 16, -1).sum(1)

    fast, plan = run_both(Net(), (randn(5, 16, 4),), Each(split=[2, 1, 2], lanes=3))
    assert whole(plan) == []
    flat = graph_of(fast).by_name["work"].reads[0]
    assert str(graph_of(fast).values[flat].shape.size[0]).startswith("16*")  # type: ignore[union-attr]


def test_static_batch_is_an_error() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[0] == 4
            return x + 1

    fast = compiled(Net())
    with pytest.raises(df.SplitError) as caught:
        fast(randn(4, 3))
    assert "no batch" in str(caught.value)
    assert "sequential" in caught.value.advice
    assert "batch_dims" in caught.value.advice


def test_batch_of_one_row() -> None:
    """Dynamo takes a size of 1 as a constant: the plan for it can't be split, and need not be."""

    class Maybe(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            return ctx.sequential() if ctx.batch_size < 2 else super().schedule(ctx)

    model = Stack()
    fast = compiled(model, Maybe(STACK_RULES))
    with torch.no_grad():
        for batch in (1, 6, 1, 2):
            x = randn(batch, 8)
            assert_equal(fast(x), model(x))
            assert fast.plan(x).sequential == (batch == 1)


# --- operators that mix the batch ------------------------------------------------------------------------


class Mixing(nn.Module):
    """Row-wise, then a softmax over the batch, then row-wise again."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with df.mark("mix"):
            x = x.softmax(0)
        return self.after(x)


MIXING_RULES = (df.SplitModule("before"), df.SplitModule("after"))


@pytest.mark.parametrize("lanes", [1, 2])
def test_mixing_operator_runs_whole_and_its_neighbours_split(lanes: int) -> None:
    fast, plan = run_both(Mixing(), (randn(6, 8),), Each(MIXING_RULES, lanes=lanes))
    assert whole(plan) == ["mix"]
    op = graph_of(fast).by_name["mix"]
    assert "softmax" in (op.refusal or "")
    assert op.line is not None and "test_probe.py" in op.line


def test_a_refusal_names_the_rows() -> None:
    """And not the number that stood for them."""

    def model(x: Tensor) -> Tensor:
        with df.mark("mixed"):
            return x.transpose(0, 1).reshape(4, -1)

    fast = compiled(model, Each([], split=None))
    with torch.no_grad():
        fast(randn(6, 5, 4))
    assert "from (5, rows, 4) to (4, 5*rows) does not keep" in str(graph_of(fast).by_name["mixed"].refusal)


MIXERS = {
    "sum": lambda x: x.sum(0, keepdim=True) + x,
    "sort": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "slice": lambda x: x - x[:1],
    "transpose": lambda x: x @ x.t() @ x,
    "permute rows": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "position": lambda x: x * torch.arange(x.shape[0])[:, None],
    "mean": lambda x: x - x.mean(),
    "size as a number": lambda x: x / x.shape[0],
    "size as a power": lambda x: x * 0.5 ** x.shape[0],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "reshape": lambda x: x.reshape(-1).view(8, -1).t() + 1,
    "argmax": lambda x: x * x.argmax(0),
    "view across rows": lambda x: x.view(2, -1, 8).sum(0).repeat(2, 1),
    "unique sizes": lambda x: x + x.view(-1)[: x.shape[0]].view(-1, 1),
}


@pytest.mark.parametrize("case", MIXERS)
def test_mixers(case: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("before"):
                x = x + 1
            with df.mark("mix"):
                x = MIXERS[case](x)
            with df.mark("after"):
                return x * 2

    _, plan = run_both(Net(), (randn(6, 8),), Each(split=[1, 3, 2]))
    assert "mix" in whole(plan)
    assert "before" not in whole(plan)


def test_mixed_result_is_split_again() -> None:
    """After the whole run of `mix` its result is cut again, by view."""
    _, plan = run_both(Mixing(), (randn(6, 8),), Each(MIXING_RULES, split=3))
    assert parts_of(plan, "after") == [(0,), (1,), (2,)]
    assert parts_of(plan, "mix") == [(0, 1, 2)]


def test_shared_counter_is_bumped_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            x = self.lin(x)
            count.add_(1)
            return x + count

    model = Net()
    fast = compiled(model, Each([df.SplitModule("lin")], split=3, lanes=3))
    x, mine, plain = randn(6, 8), torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for _ in range(4):
            assert_equal(fast(x, mine), model(x, plain))
            assert_equal(mine, plain)
        plan = fast.plan(x, mine)
    assert parts_of(plan, "lin") == [(0,), (1,), (2,)]
    assert mine == 4, "and making the plan ran nothing"


def test_counter_read_before_and_after_the_bump() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            with df.mark("before"):
                y = x + self.count
            with df.mark("bump"):
                y = y * 2
                self.count += 1
            with df.mark("behind"):
                return y + self.count

    mine, plain = Net(), Net()
    fast = compiled(mine, Each(split=2, lanes=2))
    x = randn(4, 2)
    with torch.no_grad():
        for _ in range(3):
            assert_equal(fast(x), plain(x))
        assert_equal(mine.count, plain.count)
        plan = fast.plan(x)
    for name in ("before", "bump", "behind"):
        assert parts_of(plan, name) == [(0,), (1,)], "only the counter itself runs once"


def test_running_statistics() -> None:
    """Training-mode batch norm mixes rows and writes state: whole, and once."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()

    mine, plain = make(), make()
    fast = compiled(mine, Each([df.SplitModule(nn.Linear), df.SplitModule(nn.BatchNorm1d)], lanes=2))
    x = randn(6, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_equal(fast(x), plain(x))
        assert_equal(mine.state_dict(), plain.state_dict())
        plan = fast.plan(x)
    assert "1" in whole(plan)
    assert parts_of(plan, "0") == parts_of(plan, "2") == [(0,), (1,)]


def test_random_numbers_are_drawn_as_the_model_draws_them() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("a"):
                x = F.dropout(x, 0.5, training=True)
            with df.mark("b"):
                x = x * 2
            with df.mark("c"):
                return x + torch.rand_like(x)

    model = Net()
    fast = compiled(model, Each(lanes=2))
    x = randn(6, 8)
    with torch.no_grad():
        fast.plan(x)
        torch.manual_seed(7)
        expected = model(x)
        torch.manual_seed(7)
        assert_equal(fast(x), expected)


# --- declared --------------------------------------------------------------------------------------------


class SortedExperts(nn.Module):
    """Sorts its tokens by expert and back: every row is treated by itself, which no rule can see."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        expert = flat.sum(-1).abs().mul(7).long() % 3
        order = expert.argsort(stable=True)
        y = torch.bmm(flat[order][:, None], self.w[expert[order]])[:, 0]
        return torch.empty_like(y).index_copy(0, order, y).view_as(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.experts = nn.Linear(8, 8), SortedExperts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.lin(x)) + x


@pytest.mark.parametrize("splittable", [None, True, False])
def test_splittable_declaration(splittable: bool | None) -> None:
    rules = [df.SplitModule("lin"), df.SplitModule("experts", splittable=splittable)]
    _, plan = run_both(Experts(), (randn(6, 5, 8),), Each(rules, split=[1, 3, 2], lanes=2), verify=True)
    assert ("experts" in whole(plan)) == (splittable is not True)
    assert "lin" not in whole(plan)


# --- how it is split -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 8))
def test_any_number_of_parts(count: int) -> None:
    _, plan = run_both(Stack(), (randn(7, 8),), Each(STACK_RULES, split=count, lanes=2))
    assert len(plan.micro_batches) == count
    assert max(sizes(plan)) - min(sizes(plan)) <= 1
    assert sum(sizes(plan)) == 7


@pytest.mark.parametrize("split", [[6, 1], [1, 6], [1, 5, 1], [1] * 7, [3, 4], (2, 2, 3)])
def test_given_sizes(split: Any) -> None:
    _, plan = run_both(Stack(), (randn(7, 8),), Each(STACK_RULES, split=split, lanes=3))
    assert sizes(plan) == list(split)


def test_split_is_by_view() -> None:
    seen: list[int] = []

    @torch.library.custom_op("dynaflow_tests::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return x + 1

    look.register_fake(lambda x: torch.empty_like(x))

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return look(x)

    x = randn(6, 8)
    fast = compiled(Net(), Each([df.SplitFunc("*look", splittable=True)], split=[2, 4]))
    fast(x)
    assert seen == [x.data_ptr(), x[2:].data_ptr()]


def test_outputs_keep_structure_and_layout() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            with df.mark("rows"):
                y = x.transpose(1, 2).contiguous().transpose(1, 2) * 2
            with df.mark("all"):
                total = y.sum()
            return {"y": y, "none": None, "pair": (x, 3), "rows": x.shape[0], "sum": total}

    model = Net()
    fast = compiled(model, Each())
    x = randn(4, 3, 5)
    with torch.no_grad():
        expected, found = model(x), fast(x)
    assert_equal(found, expected)
    assert found["y"].stride() == expected["y"].stride()


# --- ragged ----------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Tokens of several requests in a row: per token but for a scale that each request has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.b(self.a(x).relu())
        with df.mark("requests"):
            lens = lens * 2 + 1
        return x, lens


TOKENS = [3, 1, 4, 2]
PACKED_RULES = (df.SplitModule("a"), df.SplitModule("b"))


def packed() -> tuple[Tensor, Tensor]:
    return randn(sum(TOKENS), 8), torch.tensor(TOKENS)


@pytest.mark.parametrize("given", ["compile", "call"])
@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (2, [(0, 2), (2, 4)]),
        (4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([1, 3], [(0, 1), (1, 4)]),  # requests
        ([8, 2], [(0, 3), (3, 4)]),  # tokens
    ],
    ids=str,
)
def test_ragged_batch(split: Any, wanted: list[tuple[int, int]], given: str) -> None:
    facts = {"num_tokens": TOKENS}
    model = Packed()
    fast = compiled(model, Each(PACKED_RULES, split, lanes=2), facts=facts if given == "compile" else None)
    call = {"facts": facts} if given == "call" else {}
    with torch.no_grad():
        assert_equal(fast(*packed(), **call), model(*packed()))
        plan = fast.plan(*packed(), **call)
    assert [m.requests for m in plan.micro_batches] == wanted
    assert sizes(plan) == [sum(TOKENS[a:b]) for a, b in wanted]
    assert whole(plan) == [], "the input of length R is split as well, at the same requests"


def test_ragged_batch_uses_requests_in_one_operator() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, lens: Tensor) -> Tensor:
            with df.mark("work"):
                x = x * 2
            with df.mark("spread"):
                return x * torch.repeat_interleave(lens, lens, output_size=x.shape[0])[:, None]

    fast = compiled(Net(), Each(split=2, lanes=2), facts={"num_tokens": TOKENS})
    with torch.no_grad():
        assert_equal(fast(*packed()), Net()(*packed()))
        plan = fast.plan(*packed())
    assert "work" not in whole(plan)


def test_ragged_batch_from_call_to_call() -> None:
    model = Packed()
    fast = compiled(model, Each(PACKED_RULES, 2))
    with torch.no_grad():
        for tokens in ([3, 1, 4, 2], [5, 5], [1, 1, 1, 9], [2, 3, 4, 5, 6], [3, 1, 4, 2]):
            x, lens = randn(sum(tokens), 8), torch.tensor(tokens)
            facts = {"num_tokens": tokens}
            assert_equal(fast(x, lens, facts=facts), model(x, lens))
            plan = fast.plan(x, lens, facts=facts)
            ends = {sum(tokens[:i]) for i in range(len(tokens) + 1)}
            assert {m.stop for m in plan.micro_batches} <= ends


def test_own_key_does_not_lose_the_requests() -> None:
    class OneKey(Each):
        def key(self, ctx: df.ScheduleContext) -> str:
            return "always"

    model = Packed()
    fast = compiled(model, OneKey(PACKED_RULES, 2))
    with torch.no_grad():
        for tokens in ([3, 1, 4, 2], [1, 1, 7, 1]):
            x, lens = randn(10, 8), torch.tensor(tokens)
            assert_equal(fast(x, lens, facts={"num_tokens": tokens}), model(x, lens))
            ends = {sum(tokens[:i]) for i in range(5)}
            assert {m.stop for m in fast.plan(x, lens, facts={"num_tokens": tokens}).micro_batches} <= ends


def test_plan_for_other_requests_is_refused() -> None:
    model = Packed()
    fast = compiled(model, Each(PACKED_RULES, 2))
    with torch.no_grad():
        text = fast.plan(*packed(), facts={"num_tokens": TOKENS}).to_json()
    again = compiled(model, Scheduler(lambda ctx: df.Plan.from_json(text), PACKED_RULES))
    with torch.no_grad():
        assert_equal(again(*packed(), facts={"num_tokens": TOKENS}), model(*packed()))
        with pytest.raises(df.SplitError, match="not those of its requests"):
            again(*packed(), facts={"num_tokens": [1, 1, 1, 7]})


def test_facts_may_be_a_function() -> None:
    now = {"num_tokens": [4, 6]}
    fast = compiled(Packed(), Each(PACKED_RULES, 2), facts=lambda: now)
    x = randn(10, 8)
    with torch.no_grad():
        assert sizes(fast.plan(x, torch.tensor([4, 6]))) == [4, 6]
        now = {"num_tokens": [7, 3]}
        assert sizes(fast.plan(x, torch.tensor([7, 3]))) == [7, 3]


@pytest.mark.parametrize(
    ("split", "tokens", "says"),
    [
        (5, TOKENS, "5"),
        ([5, 5], TOKENS, "boundaries"),
        (2, [3, 1, 4], "adds up to 8"),
        ([1, 1], [0, 10], "no token"),
    ],
)
def test_ragged_mistakes(split: Any, tokens: list[int], says: str) -> None:
    fast = compiled(Packed(), Each(PACKED_RULES, split), facts={"num_tokens": tokens})
    with pytest.raises(df.SplitError, match=says) as caught:
        fast(*packed())
    assert caught.value.advice


def test_model_with_a_parameter_named_facts_keeps_it() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, facts: Tensor) -> Tensor:
            return x + facts

    x = randn(4, 2)
    assert_equal(compiled(Net())(x, facts=x), x + x)


# --- sizes -----------------------------------------------------------------------------------------------


def test_changing_batch_sizes_need_one_capture() -> None:
    model = Stack()
    fast = compiled(model, Each(STACK_RULES))
    with torch.no_grad():
        for batch in (6, 2, 7, 3, 6):
            x = randn(batch, 8)
            assert_equal(fast(x), model(x))
    assert fast.stats.graphs == 1
    assert fast.stats.partitions == 1
    assert fast.stats.plans == 4


def test_context_says_the_batch() -> None:
    seen: list[Any] = []

    def schedule(ctx: df.ScheduleContext) -> None:
        seen.append((ctx.batch_size, ctx.device, dict(ctx.facts)))
        run_rest(ctx)

    fast = compiled(Stack(), Scheduler(schedule), facts={"phase": "decode"})
    fast(randn(5, 8))
    assert seen == [(5, torch.device("cpu"), {"phase": "decode"})]


class Sorted(nn.Module):
    """Row by row as a whole, by a way that mixes them: sorts, does something to the sorted rows, sorts back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = x[order]
        y = y + torch.flip(torch.flip(y, [0]), [0])
        return y[order.argsort()]


class AroundSorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Sorted()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x * 2) + 1


def test_a_promise_holds_for_the_whole_region_only() -> None:
    """An operator cut out of a region that is declared splittable mixes rows: then the region can't be split either."""
    declared = df.SplitModule("experts", splittable=True)
    _, plan = run_both(AroundSorted(), (randn(6, 8),), Each([declared]), verify=True)
    assert parts_of(plan, "experts") == [(0,), (1,)]
    fast, plan = run_both(AroundSorted(), (randn(6, 8),), Each([declared, df.SplitFunc(torch.flip)]), verify=True)
    assert all(op.refusal for op in graph_of(fast).ops if op.name.startswith("experts"))


@pytest.mark.parametrize("way", ["view", "view_as", "written"])
def test_a_row_that_lies_in_memory_as_no_view_can_show(way: str) -> None:
    """`reshape` copies several rows, and of one makes a view."""

    def model(x: Tensor) -> Tensor:
        y = torch.sin(x).reshape(x.shape[0] * 4, 2)
        y = y * y
        z = y.view_as(torch.empty(x.shape[0] * 8)) if way == "view_as" else y.view(-1)
        return z.mul_(2) if way == "written" else z + 1

    x = randn(3, 2, 4).transpose(1, 2)
    fast = compiled(model, Each(split=[2, 1]))
    if way == "written":  # eager refuses that row, too
        with pytest.raises(df.SplitError, match="view may fail on a single row"):
            fast(x)
    else:
        assert_equal(fast(x), model(x))
