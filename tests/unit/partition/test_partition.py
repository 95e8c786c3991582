"""Cutting: which rule claims what, how operators are named and tagged, and that cuts respect memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import (
    STACK_RULES,
    Block,
    Each,
    Stack,
    assert_equal,
    compiled,
    graph_of,
    names,
    randn,
    run_both,
    whole,
)

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("dynaflow_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def gate(x: Tensor) -> Tensor:
    """Inlined by Dynamo: no node of the graph has it as its target."""
    y = torch.sigmoid(x)
    return x * y


def cut(model: nn.Module, rules: Any, *inputs: Tensor, **options: Any) -> dict[str, df.Op]:
    """The operators of a model under the rules, by name; the result is compared with the plain model's."""
    fast, plan = run_both(model, inputs or (X,), Each(rules), fullgraph=True, **options)
    assert set(names(plan)) == {op.name for op in graph_of(fast).ops}
    return graph_of(fast).by_name


def functions(op: df.Op) -> list[str]:
    return list(op.functions)


# --- modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "match", ["layers.*.mlp", re.compile(r"layers\.\d+\.mlp$"), nn.Sequential], ids=["glob", "regex", "class"]
)
def test_split_module(match: Any) -> None:
    ops = cut(Stack(), [df.SplitModule(match, tag="mlp")])
    assert [name for name, op in ops.items() if "mlp" in op.tags] == ["layers.0.mlp", "layers.1.mlp"]
    assert functions(ops["layers.0.mlp"]) == ["linear", "relu", "linear"]


def test_class_matches_subclasses() -> None:
    class Special(Block):
        pass

    model = Stack()
    model.layers[1] = Special()
    ops = cut(model, [df.SplitModule(Block, tag="block")])
    assert [name for name, op in ops.items() if "block" in op.tags] == ["layers.0", "layers.1"]


def test_glob_is_anchored_and_sees_case() -> None:
    with pytest.raises(df.PartitionError):
        cut(Stack(), [df.SplitModule("mlp")])
    with pytest.raises(df.PartitionError):
        cut(Stack(), [df.SplitModule("*.MLP")])


def test_unclaimed_becomes_operators_between() -> None:
    ops = cut(Stack(), STACK_RULES)
    between = [op for name, op in ops.items() if not op.tags]
    assert [functions(op) for op in between] == [["add"], ["add"], ["add"], ["add", "linear"]]


def test_no_rules_give_one_operator() -> None:
    assert len(cut(Stack(), [])) == 1


def test_unrelated_work_between_is_not_one_operator() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, y + 1

    assert len(cut(Branches(), [], X, X + 1)) == 2


def test_several_tags() -> None:
    ops = cut(Stack(), [df.SplitModule("*.mlp", tag=("mlp", "big")), df.SplitModule(nn.Sequential, tag="sequential")])
    assert ops["layers.0.mlp"].tags == {"mlp", "big", "sequential"}


def test_tags_reach_the_scheduler() -> None:
    seen: dict[str, frozenset[str]] = {}

    class Look(Each):
        def schedule(self, ctx: df.ScheduleContext) -> None:
            seen.update({item.name: item.tags for item in ctx.get_ready_ops()})
            super().schedule(ctx)

    run_both(Stack(), (X,), Look(STACK_RULES, split=None))
    assert seen == {"layers.0.attn": frozenset({"attention"})}


def test_nested_modules_innermost_names_outer_tags_stay() -> None:
    ops = cut(Stack(), [df.SplitModule(Block, tag="layer"), df.SplitModule("*.mlp", tag="mlp")])
    assert ops["layers.0.mlp"].tags == {"layer", "mlp"}
    assert ops["layers.0"].tags == {"layer"}
    # What is left of the layer lies before and behind the mlp: in one operator it would be a cycle.
    assert ops["layers.0#2"].tags == {"layer"}


def test_rules_in_any_order() -> None:
    rules = [df.SplitModule(Block, tag="layer"), df.SplitModule("*.mlp", tag="mlp")]
    assert list(cut(Stack(), rules)) == list(cut(Stack(), rules[::-1]))


class Twice(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        return self.lin(x.relu() if self.between else x)


@pytest.mark.parametrize("between", [True, False])
def test_same_module_called_twice(between: bool) -> None:
    ops = cut(Twice(between), [df.SplitModule("lin", tag="lin")])
    assert [name for name, op in ops.items() if "lin" in op.tags] == ["lin", "lin#2"]
    assert functions(ops["lin"]) == functions(ops["lin#2"]) == ["linear"]


def test_module_lists_and_dicts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])])
            self.named = nn.ModuleDict({"a_b": nn.Linear(8, 8)})
            self.sequence = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for module in self.items[0]:
                x = module(x)
            return self.sequence(self.named["a_b"](x))

    ops = cut(Net(), [df.SplitModule(nn.Linear, tag="linear")])
    assert list(ops) == ["items.0.0", "items.0.1", "named.a_b", "sequence.0", "sequence.1"]


def test_diffusers_like_paths() -> None:
    """diffusers reaches modules in ways that make Dynamo spell paths L['self'].__dict__['_modules'][...]."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for _, block in enumerate(self.__dict__["_modules"]["transformer_blocks"]):
                x = block.__dict__["_modules"]["attn"](x)
                x = block._modules["mlp"](x)
            return x

    ops = cut(Odd(), [df.SplitModule("transformer_blocks.*.attn", tag="attn"), df.SplitModule("*.mlp", tag="mlp")])
    wanted = [f"transformer_blocks.{i}.{part}" for i in range(2) for part in ("attn", "mlp")]
    assert list(ops) == wanted


def test_function_as_model() -> None:
    layer = Block()

    def model(x: Tensor) -> Tensor:
        return layer(x) + 1

    fast, _ = run_both(model, (X,), Each([df.SplitModule("mlp", tag="mlp")]))
    assert [op.name for op in graph_of(fast).ops if "mlp" in op.tags] == ["mlp"]


# --- functions -------------------------------------------------------------------------------------------


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.dynaflow_tests.double(x) - 1
        x = F.linear(x, self.w) + 1
        x = gate(x) - 2
        return F.softmax(x, dim=-1)


FUNCTION_RULES = {
    "packet": (lambda: torch.ops.dynaflow_tests.double, ["double"]),
    "overload": (lambda: torch.ops.dynaflow_tests.double.default, ["double"]),
    "functional": (lambda: F.linear, ["linear"]),
    "softmax": (lambda: F.softmax, ["softmax"]),
    "inlined": (lambda: gate, ["sigmoid", "mul"]),
    "pattern": (lambda: "*double*", ["double"]),
    "namespace": (lambda: "dynaflow_tests::*", ["double"]),
    "regex": (lambda: re.compile("^doub"), ["double"]),
    "short": (lambda: "linear", ["linear"]),
}


@pytest.mark.parametrize("case", FUNCTION_RULES)
def test_split_func(case: str) -> None:
    match, wanted = FUNCTION_RULES[case]
    ops = cut(Functions(), [df.SplitFunc(match(), tag="it")])
    (found,) = [op for op in ops.values() if "it" in op.tags]
    assert functions(found) == wanted


def test_other_overload_is_not_matched() -> None:
    with pytest.raises(df.PartitionError):
        cut(Functions(), [df.SplitFunc(torch.ops.aten.add.Scalar)])


def test_custom_op_runs_whole_unless_declared() -> None:
    fast, plan = run_both(Functions(), (X,), Each([df.SplitFunc(torch.ops.dynaflow_tests.double, tag="it")]))
    assert "double" in whole(plan)
    assert "splittable=True" in (graph_of(fast).by_name["double"].refusal or "")
    fast, plan = run_both(
        Functions(), (X,), Each([df.SplitFunc(torch.ops.dynaflow_tests.double, tag="it", splittable=True)])
    )
    assert whole(plan) == []


def test_method_by_function() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).tanh() * 2

    ops = cut(Net(), [df.SplitFunc(torch.Tensor.tanh, tag="it")])
    assert [functions(op) for op in ops.values() if "it" in op.tags] == [["tanh"]]


class Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gate(x)


def test_function_called_in_two_modules_gives_two_operators() -> None:
    ops = cut(nn.Sequential(Gated(), Gated()), [df.SplitFunc(gate, tag="gate")])
    gates = {name: functions(op) for name, op in ops.items()}
    assert gates == {"0.gate": ["sigmoid", "mul"], "1.gate": ["sigmoid", "mul"]}


def test_function_called_twice_gives_two_operators() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = gate(x)
            return gate(x)

    assert list(cut(Net(), [df.SplitFunc(gate, tag="gate")])) == ["gate", "gate#2"]


def test_function_called_in_a_loop_is_one_operator() -> None:
    """Dynamo's stack traces don't tell apart calls made from one line of one frame; marks are told apart."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = gate(x)
            return x

    assert list(cut(Net(), [df.SplitFunc(gate, tag="gate")])) == ["gate"]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return apply(self.lin, x) * 2


def apply(module: nn.Module, x: Tensor) -> Tensor:
    return module(x + 1).relu()


def test_function_that_calls_modules_is_one_operator() -> None:
    ops = cut(nn.Sequential(Around(), Around()), [df.SplitFunc(apply, tag="it")])
    assert {name: functions(op) for name, op in ops.items() if "it" in op.tags} == {
        "0.apply": ["add", "linear", "relu"],
        "1.apply": ["add", "linear", "relu"],
    }


@torch.library.custom_op("dynaflow_tests::relu", mutates_args=())
def other_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


@other_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operator_of_another_library_with_torchs_name() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + torch.ops.dynaflow_tests.relu(x)

    theirs = torch.ops.dynaflow_tests.relu
    ops = cut(Net(), [df.SplitFunc(theirs, tag="theirs"), df.SplitFunc(torch.relu, tag="torch's")])
    assert sorted(tuple(op.tags) for op in ops.values() if op.tags) == [("theirs",), ("torch's",)]


# --- marks -----------------------------------------------------------------------------------------------


@df.mark("scaled", tag="decorated")
def scaled(x: Tensor) -> Tensor:
    return x * 3


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x) + 1
        with df.mark("ffn", tag="feed"):
            x = self.fc2(F.relu(self.fc1(x)))
        return x - 1


def test_mark_makes_one_operator_of_its_region() -> None:
    ops = cut(Marked(), [])
    assert functions(ops["scaled"]) == ["mul"]
    assert ops["scaled"].tags == {"scaled", "decorated"}
    assert functions(ops["ffn"]) == ["linear", "relu", "linear"], "a region that calls modules is one operator as well"
    assert ops["ffn"].tags == {"ffn", "feed"}


def test_mark_leaves_the_graph_whole() -> None:
    fast = compiled(Marked(), Each(), fullgraph=True)
    with torch.no_grad():
        fast(X)
    assert fast.stats.graphs == 1
    assert fast.stats.graph_breaks == 0


def test_mark_does_nothing_in_eager() -> None:
    x = torch.ones(2)
    with df.mark("anything", tag="t", splittable=False) as entered:
        y = x * 3
    assert entered is None
    assert torch.equal(scaled(x), y)
    assert scaled.__name__ == "scaled"
    with pytest.raises(ZeroDivisionError), df.mark("errors pass"):
        _ = 1 / 0


def test_mark_per_instance() -> None:
    ops = cut(nn.Sequential(Marked(), Marked()), [])
    assert [name for name, op in ops.items() if "feed" in op.tags] == ["0.ffn", "1.ffn"]


def test_adjacent_marks_of_two_instances_stay_apart() -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("all"):
                return x.sin() + 1

    ops = cut(nn.Sequential(Only(), Only()), [])
    assert {name: functions(op) for name, op in ops.items()} == {"0.all": ["sin", "add"], "1.all": ["sin", "add"]}


def test_nested_marks_innermost_names_outer_tags_stay() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("outer", tag="o"):
                x = x * 2
                with df.mark("inner", tag="i"):
                    x = x.sin()
                return x + 1

    ops = cut(Net(), [])
    assert ops["inner"].tags == {"inner", "i", "outer", "o"}
    assert ops["outer"].tags == ops["outer#2"].tags == {"outer", "o"}


def test_module_inside_a_mark_is_the_inner_rule() -> None:
    ops = cut(Marked(), [df.SplitModule("fc1", tag="first")])
    assert ops["fc1"].tags == {"first", "feed", "ffn"}


def test_mark_inside_a_module_is_the_inner_rule() -> None:
    ops = cut(nn.Sequential(Marked(), nn.ReLU()), [df.SplitModule("0", tag="module")])
    assert ops["0.ffn"].tags == {"module", "feed", "ffn"}


def test_interleaved_marks_form_no_cycle() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("a"):
                p = x * 2
            with df.mark("b"):
                q = p + 1
            with df.mark("a"):
                r = q * p
            with df.mark("b"):
                return r - q

    ops = cut(Net(), [])
    assert list(ops) == ["a", "b", "a#2", "b#2"]
    for op in ops.values():
        assert all(before < op.index for before in op.after)


def test_mark_declares_splittable() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("kept", splittable=False):
                x = x * 2
            return x + 1

    _, plan = run_both(Net(), (X,), Each())
    assert whole(plan) == ["kept"]


# --- memory ----------------------------------------------------------------------------------------------


class KeyValueCache(nn.Module):
    """Writes in place, then reads through another view of the same memory."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        with df.mark("before"):
            old = cache.sum(1)
        with df.mark("write"):
            cache.index_copy_(1, at, x[:, None])
        with df.mark("read"):
            return cache.mean(1) + old


def test_in_place_cache_write_is_ordered() -> None:
    def inputs() -> tuple[Tensor, ...]:
        return X.clone(), torch.arange(4 * 5 * 8.0).view(4, 5, 8), torch.tensor([2])

    model = KeyValueCache()
    fast = compiled(model, Each(lanes=2), batch_dims={"x": 0, "cache": 0})
    mine, plain = inputs(), inputs()
    with torch.no_grad():
        assert_equal(fast(*mine), model(*plain))
        plan = fast.plan(*mine)
    assert_equal(mine[1], plain[1])
    ops = graph_of(fast).by_name
    assert ops["before"].index in ops["write"].after
    assert ops["write"].index in ops["read"].after
    assert whole(plan) == []


def test_view_written_later_is_ordered() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with df.mark("make"):
                y = x + 1
            view = y.view(-1, 2, 4)[:, 0]
            with df.mark("early"):
                early = view * 2
            with df.mark("write"):
                y.mul_(10)
            with df.mark("late"):
                return view + early + y[:, :4]

    ops = cut(Net(), [])
    assert ops["early"].index in ops["write"].after, "the view was read before the write"
    assert ops["write"].index in ops["late"].after, "and is read again behind it"


def test_inputs_that_share_memory_are_ordered() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with df.mark("write"):
                x.add_(1)
            with df.mark("read"):
                return y * 2

    model, base = Net(), torch.zeros(4, 8)
    expected = model(base, base[:, :4])
    base.zero_()
    fast = compiled(model, Each(lanes=2))
    with torch.no_grad():
        assert_equal(fast(base, base[:, :4]), expected)
    ops = graph_of(fast).by_name
    assert ops["write"].index in ops["read"].after


def test_result_that_aliases_an_input() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = x + 1
            return x, y, y[:, ::2]

    fast = compiled(Net())
    with torch.no_grad():
        x, y, view = fast(X)
    assert x is X
    assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert_equal((y, view), (X + 1, (X + 1)[:, ::2]))


# --- rules that match nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "near"),
    [
        (df.SplitModule("*.attention"), "layers.0.attn"),
        (df.SplitModule("*.mpl"), ".mlp"),
        (df.SplitModule(re.compile("mplx")), ".mlp"),
        (df.SplitModule(nn.LayerNorm), "Linear"),
        (df.SplitFunc("*linaer*"), "linear"),
        (df.SplitFunc(F.gelu), "relu"),
        (df.SplitFunc(torch.ops.aten.addmm), "add"),
    ],
    ids=str,
)
def test_rule_without_match_names_the_nearest(rule: Any, near: str) -> None:
    with pytest.raises(df.PartitionError) as caught:
        cut(Stack(), [rule])
    assert str(rule) in str(caught.value)
    assert near in caught.value.advice


def test_one_unmatched_rule_among_good_ones() -> None:
    with pytest.raises(df.PartitionError, match="nowhere"):
        cut(Stack(), [*STACK_RULES, df.SplitModule("nowhere.*")])


@pytest.mark.parametrize("breaks", ["print", "shape"])
def test_a_graph_that_breaks_inside_of_a_marked_region(breaks: str) -> None:
    def model(x: Tensor) -> Tensor:
        with df.mark("a"), df.mark("b"):
            y = x.sin()
            if breaks == "shape":
                y.unsqueeze_(1)
            else:
                print(end="")
            y = y.cos()
        return y * 2

    torch._dynamo.reset()
    fast = compiled(model, Each())
    for _ in range(2):
        assert_equal(fast(randn(6, 4)), model(randn(6, 4)))
    (reason,) = fast.stats.plain_reasons
    assert "not captured" in reason
