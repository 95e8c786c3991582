"""A compiled model in the place of the model: as an nn.Module, copied, pickled, changed between calls, with hooks."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dynaflow as df
from tests.helpers import assert_equal, compiled, randn, scheduler_of

X = randn(6, 8)


class Net(nn.Module):
    """With a bit of everything that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
        self.register_buffer("shift", torch.zeros(8))
        self.scale = 1.0
        self._engine, self._model, self._df = "its own", "its own", "its own"

    def forward(self, x: Tensor, *, more: float = 0.0) -> Tensor:
        """Computes."""
        return self.last(self.norm(self.first(x))) * self.scale + self.shift + more

    def freeze(self) -> Net:
        return self.requires_grad_(False)

    @property
    def width(self) -> int:
        return self.first.out_features


class Halves(df.OpSchedulerBase):
    """Of the module's level, so that it can be pickled."""

    def schedule(self, ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)


def pair() -> tuple[Net, Any]:
    model = Net().eval()
    return model, df.compile(model, Halves(), operators="eager")


def check(fast: Any, model: Callable[..., Any], x: Tensor = X) -> None:
    """Called now, it gives what the model gives, under its schedule."""
    with torch.no_grad():
        runs = fast.stats.runs
        assert_equal(fast(x), model(x))
        assert fast.stats.runs == runs + 1
        assert len(fast.plan(x).micro_batches) == 2


# --- as a module ------------------------------------------------------------------------------------------


def test_it_is_a_module_of_the_models_class() -> None:
    model, fast = pair()
    assert isinstance(fast, nn.Module)
    assert isinstance(fast, Net)
    assert isinstance(fast, df.CompiledModel)
    assert fast.__class__ is Net
    assert vars(fast) is vars(model)
    assert {"first", "freeze", "plan", "stats", "state_dict"} <= set(dir(fast))
    assert {fast: 1}[fast] == 1 and fast != model


def test_attributes_are_the_models() -> None:
    model, fast = pair()
    check(fast, model)
    fast.scale = 3.0
    assert model.scale == 3.0
    check(fast, model)
    fast.shift = torch.ones(8)
    assert model.shift is fast.shift and "shift" in model._buffers
    check(fast, model)
    fast.shift.add_(1)
    fast.first = nn.Linear(8, 8)
    assert model.first is fast.first
    check(fast, model)
    model.scale = 0.5
    assert fast.scale == 0.5 and fast.width == 8
    check(fast, model)
    fast.new = 1
    assert model.new == 1
    del fast.new
    assert not hasattr(model, "new") and not hasattr(fast, "new")
    fast.register_buffer("other", torch.ones(1))
    fast.add_module("extra", nn.Linear(1, 1))
    assert model.other is fast.other and model.extra is fast.extra


def test_private_attributes_are_the_models_too() -> None:
    model, fast = pair()
    for name in "_engine", "_model", "_df":  # as ours once were, or might be
        assert getattr(fast, name) == "its own"
        setattr(fast, name, "changed")
        assert getattr(model, name) == "changed"
    check(fast, model)


@pytest.mark.parametrize("name", ["plan", "stats", "set_scheduler"])
def test_what_belongs_to_the_compiled_model_stays(name: str) -> None:
    _, fast = pair()
    with pytest.raises(df.DynaFlowError, match=f"'{name}' belongs to the compiled model"):
        setattr(fast, name, 1)
    with pytest.raises(df.DynaFlowError, match="on the model itself"):
        delattr(fast, name)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("eval", ()),
        ("train", ()),
        ("to", (torch.float64,)),
        ("half", ()),
        ("bfloat16", ()),
        ("double", ()),
        ("type", (torch.float32,)),
        ("cpu", ()),
        ("requires_grad_", (False,)),
        ("apply", (lambda module: None,)),
        ("share_memory", ()),
        ("freeze", ()),
    ],
)
def test_methods_that_return_the_model_return_the_compiled_model(name: str, args: tuple[Any, ...]) -> None:
    model, fast = pair()
    assert getattr(fast, name)(*args) is fast
    assert getattr(model, name)(*args) is model
    assert inspect.signature(getattr(fast, name)) == inspect.signature(getattr(model, name))


def test_types_and_training_change_between_calls() -> None:
    model, fast = pair()
    check(fast, model)
    check(fast.double(), model, X.double())
    check(fast.float(), model)
    fast.train()
    assert model.training and fast.training
    other = copy.deepcopy(model)
    assert_equal(fast(X), other(X))
    assert_equal(model.norm.running_mean, other.norm.running_mean)
    fast.training = False
    assert not model.training
    check(fast.eval(), model)


def test_state_has_the_models_keys() -> None:
    model, fast = pair()
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]
    assert fast.get_parameter("first.weight") is model.first.weight
    other = Net().eval()
    assert not fast.load_state_dict(other.state_dict()).missing_keys
    check(fast, other)
    other.load_state_dict(fast.state_dict())


def test_inside_of_another_module() -> None:
    model, fast = pair()
    outer = nn.Sequential(fast, nn.Linear(8, 2))
    plain = nn.Sequential(model, outer[1])
    assert outer[0] is fast
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    outer.load_state_dict(plain.state_dict())
    outer.train().double()
    assert model.training and model.first.weight.dtype == torch.float64
    outer.eval().float()
    assert_equal(outer(X), plain(X))
    assert fast.stats.runs == 1
    assert len(list(nn.ModuleList([model, fast]).parameters())) == len(list(model.parameters()))
    assert "dynaflow.compile(Net(" in repr(outer)


def test_containers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast: Any = df.compile(model, Halves(), operators="eager")
    assert len(fast) == 2 and fast[0] is model[0] and list(fast) == list(model)
    assert fast.append(nn.Linear(8, 8)) is fast
    check(fast, model)
    fast[1] = nn.Tanh()
    del fast[2]
    check(fast, model)
    fast += nn.Sequential(nn.Sigmoid())
    assert isinstance(fast, df.CompiledModel) and len(model) == 3
    check(fast, model)


def test_only_containers_are_containers() -> None:
    _, fast = pair()
    assert bool(fast)
    for function in (len, iter):
        with pytest.raises(TypeError):
            function(fast)


def test_forward_is_scheduled_too() -> None:
    model, fast = pair()
    runs = fast.stats.runs
    assert_equal(fast.forward(X), model(X))
    assert fast.stats.runs == runs + 1
    assert inspect.signature(fast.forward) == inspect.signature(fast) == inspect.signature(model.forward)
    assert fast.forward.__doc__ == "Computes."


def test_forward_is_wrapped_as_accelerate_does() -> None:
    model, fast = pair()
    usual = fast.forward
    fast._original_forward = usual
    fast.forward = types.MethodType(lambda self, *args, **kwargs: usual.__func__(self, *args, **kwargs) * 10, fast)
    for _ in range(2):
        assert_equal(fast(X), model(X) * 10)
    assert fast.stats.runs == 2
    fast.forward = types.MethodType(usual.__func__, fast)
    check(fast, model)
    del fast.forward
    check(fast, model)


def test_forward_of_the_model_changes() -> None:
    model = Net().eval()
    fast = compiled(model)
    check(fast, model)
    model.forward = lambda x: x * 3  # type: ignore[method-assign]
    check(fast, lambda x: x * 3)
    del model.forward
    check(fast, model)

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    fast = compiled(Plain(), fullgraph=True)
    check(fast, lambda x: x + 1)
    Plain.forward = lambda self, x: x + 2  # type: ignore[method-assign]
    check(fast, lambda x: x + 2)


def test_a_graph_module_is_recompiled() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    fast: Any = df.compile(model, Halves(), operators="eager")
    check(fast, model)
    (output,) = fast.graph.find_nodes(op="output")
    with fast.graph.inserting_before(output):
        output.args = (fast.graph.call_function(torch.neg, (output.args[0],)),)
    fast.recompile()
    assert (model(X) <= 0).all()
    check(fast, model)


def test_torch_replaces_the_models_class() -> None:
    model = nn.Linear(8, 8)
    fast: Any = df.compile(model, Halves(), operators="eager")
    check(fast, model)
    parametrizations.weight_norm(fast)
    assert type(model).__name__ == "ParametrizedLinear"
    check(fast, model)
    lazy = nn.LazyLinear(4)
    assert_equal(compiled(lazy)(X), lazy(X))


def test_functional_call_and_averages() -> None:
    model, fast = pair()
    doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
    expected = torch.func.functional_call(model, doubled, (X,))
    assert_equal(torch.func.functional_call(fast, doubled, (X,)), expected)
    check(fast, model)
    average = torch.optim.swa_utils.AveragedModel(fast)
    average.update_parameters(fast)
    assert_equal(average(X), model(X))
    assert isinstance(average.module, df.CompiledModel) and average.module is not fast


def test_optimizers_train_the_model() -> None:
    model = Net()
    fast, other = compiled(model), copy.deepcopy(model)
    for net in (fast, other):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)  # type: ignore[attr-defined]
        for _ in range(3):
            optimizer.zero_grad()
            net(X).square().sum().backward()
            optimizer.step()
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_export() -> None:
    model, fast = pair()
    assert_equal(torch.export.export(fast, (X,)).module()(X), model(X))


# --- copies -----------------------------------------------------------------------------------------------


def written(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, written, saved]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_compiled_anew(copied: Callable[[Any], Any]) -> None:
    model, fast = pair()
    check(fast, model)
    other = copied(fast)
    assert other.stats.runs == 0
    check(other, model)
    other.scale = 2.0
    other.first.weight.data.zero_()
    check(fast, model)
    assert model.scale == 1.0 and model.first.weight.any()


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_the_scheduler_of_the_moment(copied: Callable[[Any], Any]) -> None:
    fast = df.compile(Net().eval(), operators="eager")
    assert len(copied(fast).plan(X).micro_batches) == 1
    fast.set_scheduler(Halves())
    assert len(copied(fast).plan(X).micro_batches) == 2
    fast.set_scheduler("nanoflow", parts=3)
    assert scheduler_of(copied(fast)).parts == 3


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_what_holds_it(copied: Callable[[Any], Any]) -> None:
    model, fast = pair()
    twice = copied(nn.Sequential(fast, fast))
    assert twice[0] is twice[1] is not fast
    assert_equal(twice(X), model(model(X)))
    model.__dict__["fast"] = fast  # a model that knows its compiled self
    for other in (copied(fast), copied(model).fast):
        assert other.fast is other
        check(other, model)


def test_a_shallow_copy_shares_what_a_modules_does() -> None:
    model, fast = pair()
    other = copy.copy(fast)
    assert other.first is model.first
    other.scale = 2.0
    assert model.scale == 1.0
    check(other, lambda x: model(x) * 2)


def test_an_optimizers_steps_are_not_copied() -> None:
    model = Net()
    fast = compiled(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for copied in (copy.copy, *COPIES):
        with pytest.raises(df.DynaFlowError, match="optimizer="):
            copied(fast)


# --- hooks ------------------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[Net], Any]] = {
    "forward": lambda net: net.register_forward_hook(lambda module, args, out: out * 2),
    "forward, pre": lambda net: net.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "forward, kwargs": lambda net: net.register_forward_hook(lambda m, a, k, out: out * 2, with_kwargs=True),
    "inside": lambda net: net.last[1].register_forward_hook(lambda module, args, out: out * 2),
    "inside, pre": lambda net: net.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "everywhere": lambda net: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None
    ),
    "backward": lambda net: net.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
    "backward, inside": lambda net: net.last.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)),
    "backward, pre": lambda net: net.last.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,)),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("door", ["module", "function"])
def test_hooks_come_and_go(kind: str, door: str) -> None:
    model = Net().eval()
    fast = compiled(model if door == "module" else lambda x: model(x))

    def results(net: Callable[..., Any]) -> list[Tensor]:
        x = X.clone().requires_grad_()
        y = net(x)
        y.square().sum().backward()
        return [y.detach(), x.grad]  # type: ignore[list-item]

    without = results(model)
    assert_equal(results(fast), without)
    for _ in range(2):
        handle = HOOKS[kind](fast if door == "module" else model)
        try:
            expected = results(model)
            assert not all(torch.equal(a, b) for a, b in zip(expected, without, strict=True)), "the hook has no effect"
            assert_equal(results(fast), expected)
        finally:
            handle.remove()
        assert_equal(results(fast), without)
    graphs = fast.stats.graphs
    results(fast)
    assert fast.stats.graphs == graphs, "the capture without hooks is kept"


# --- functions --------------------------------------------------------------------------------------------


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    """Scales."""
    return torch.relu(x) * by


def test_a_function_looks_like_the_function() -> None:
    fast: Any = df.compile(scaled, Halves(), operators="eager")
    check(fast, scaled)
    assert not isinstance(fast, nn.Module)
    assert (fast.__name__, fast.__qualname__, fast.__module__) == ("scaled", "scaled", __name__)
    assert fast.__doc__ == "Scales." and fast.__wrapped__ is scaled
    assert inspect.signature(fast) == inspect.signature(scaled)
    fast.note = 1
    assert scaled.note == 1  # type: ignore[attr-defined]
    del scaled.note  # type: ignore[attr-defined]
    for copied in (copy.copy, *COPIES):
        check(copied(fast), scaled)


def test_a_method_gets_its_instance() -> None:
    class Owner:
        by = 3.0

        @df.compile
        def go(self, x: Tensor) -> Tensor:
            return x * self.by

    owner = Owner()
    assert_equal(owner.go(X), X * 3)
    owner.by = 4.0
    assert_equal(owner.go(X), X * 4)
    assert isinstance(Owner.go, df.CompiledModel) and Owner.go.__name__ == "go"


@pytest.mark.parametrize("thing", [3, None, "resnet", nn.Linear])
def test_only_what_can_be_called_is_compiled(thing: Any) -> None:
    with pytest.raises(df.DynaFlowError, match="pass a module, a function"):
        df.compile(thing)
