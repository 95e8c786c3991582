"""torch.func, operators that take graphs, and nested tensors: split where the rules allow, or plain with a reason."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import dynaflow as df
from tests.fuzz.steps.called import Picky
from tests.helpers import Each, assert_equal, compiled, graph_of, randn, uneven, whole

LINEAR = nn.Linear(4, 4)


def per_sample(x: Tensor) -> Tensor:
    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return (row @ weight).tanh().sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(LINEAR.weight, x)


def directional(x: Tensor) -> Any:
    return torch.func.jvp(torch.tanh, (x,), (x.cos(),))


def functional(x: Tensor) -> Tensor:
    weights = {name: p * 2 for name, p in LINEAR.named_parameters()}
    return torch.func.functional_call(LINEAR, weights, (x,)).tanh()


class Doubled(torch.autograd.Function):
    """With a backward of its own, which nothing else would come up with."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 100


SPLIT: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: torch.func.vmap(lambda row: (row * row.sum()).sin())(x) * 2,
    "vmap over columns": lambda x: torch.func.vmap(torch.sin, in_dims=1, out_dims=1)(x),
    "per-sample gradients": per_sample,
    "jvp": directional,
    "functional_call": functional,
    "checkpoint": lambda x: checkpoint(lambda y: LINEAR(y).tanh(), x, use_reentrant=False) * 2,
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("split", [2, uneven])
def test_transforms_are_split(name: str, split: Any) -> None:
    model, x = SPLIT[name], randn(7, 4)
    fast = compiled(model, Each(split=split))
    with torch.no_grad():
        assert_equal(fast(x), model(x))
        assert whole(fast.plan(x)) == []
    assert not fast.stats.plain_graphs


LOOPS: dict[str, Callable[[Tensor], Any]] = {
    "scan": lambda x: scan(lambda a, b: (a + b, a * b), torch.zeros_like(x[0]), x * 2),
    "while_loop": lambda x: while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_run_whole_and_as_before_elsewhere(name: str) -> None:
    """Dynamo traces them by calls of its own, with keywords."""
    model, x = LOOPS[name], randn(6, 4)
    fast = compiled(model, "sequential")
    with torch.no_grad():
        for rows in (6, 5):
            assert_equal(fast(randn(rows, 4)), model(randn(rows, 4)))
        assert_equal(torch.compile(model, backend="eager")(x), model(x))
    assert fast.stats.graphs


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("later", [False, True])
def test_functions_that_want_none_for_gradients_of_zeros(used: int, later: bool) -> None:
    def model(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [y * 2 if later else y for y in Picky.apply(x * a, x * b)]

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        x, a, b = randn(6, 4), torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        function(x, a, b)[used].sum().backward()
        return [a.grad, b.grad]

    torch.testing.assert_close(gradients(compiled(model, Each(split=2), batch_dims={"x": 0})), gradients(model))


class Remembering(nn.Module):
    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.last = deque[Tensor](maxlen=most)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        self.last.append(y.detach().mean())
        return y - sum(self.last) / len(self.last)


@pytest.mark.parametrize("grad", [False, True])
def test_deques_that_have_a_longest_length(grad: bool) -> None:
    """Dynamo forgets it, of those made before."""
    model, plain = Remembering(2), Remembering(2)
    fast = compiled(model, Each())
    with torch.set_grad_enabled(grad):
        for rows in (6, 6, 5, 6):
            x = (randn(rows, 4) * rows).requires_grad_(grad)
            assert_equal(fast(x), plain(x))
        assert list(model.last) == list(plain.last)
        model.last, plain.last = deque(model.last, maxlen=1), deque(plain.last, maxlen=1)
        assert_equal(fast(randn(6, 4)), plain(randn(6, 4)))
    assert len(model.last) == 1
    assert fast.stats.graphs


def test_what_fails_on_fake_tensors_breaks_the_graph() -> None:
    """A jvp of a slice, whose strides are symbols."""
    called = []

    def model(x: Tensor) -> Tensor:
        y = (x * 2)[:, 1:]
        called.append(1) if not torch.compiler.is_compiling() else torch._dynamo.graph_break()
        return torch.func.jvp(torch.sin, (y,), (torch.ones_like(y),))[1] + 1

    fast, x = compiled(model), randn(6, 4)
    with torch.no_grad():
        assert_equal(fast(x), model(x))
    assert fast.stats.graphs
    assert len(called) == 1


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": lambda y: torch.matmul(y, torch.ones(7, 3)),
    "a method": lambda y: y.view(5, 5),
    "an operator": lambda y: y @ torch.ones(7, 3),
    "in place": lambda y: y.add_(torch.ones(7)),
    "an index": lambda y: y[:, 9],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_model_is_eagers(name: str) -> None:
    def model(x: Tensor) -> Tensor:
        return MISTAKES[name](x + 1)

    def forgiving(x: Tensor) -> Tensor:
        y = x + 1
        try:
            return MISTAKES[name](y)
        except (RuntimeError, IndexError):
            return y * 2

    x = randn(6, 4)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        model(x)
    with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
        compiled(model)(x)
    torch.testing.assert_close(compiled(forgiving)(x), forgiving(x))


def test_sizes_that_depend_on_floats() -> None:
    """From the second call on Dynamo takes what `item` gives for a symbol."""

    def model(x: Tensor) -> Tensor:
        y = x.sin()
        return y[:, : int(x.abs().sum().item()) % 3 + 1] * 2

    fast = compiled(model)
    for n in range(4):
        torch.testing.assert_close(fast(randn(6, 4) * n), model(randn(6, 4) * n))


@pytest.mark.parametrize("grad", [False, True])
def test_sizes_that_depend_on_data(grad: bool) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return LINEAR(x)[(x[:, 0] > 0).nonzero().squeeze(-1)], x + 1

    fast = compiled(model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.set_grad_enabled(grad):
        for rows in (6, 5):
            torch.testing.assert_close(fast(randn(rows, 4)), model(randn(rows, 4)))
    assert "depends on" in fast.stats.plain_reasons[0]


def test_dual_tensors() -> None:
    """AOTAutograd's function knows nothing of forward-mode AD."""
    fast, x = compiled(LINEAR, "sequential"), randn(6, 4)
    torch.testing.assert_close(fast(x), LINEAR(x))
    with fwAD.dual_level():
        found, expected = (fwAD.unpack_dual(call(fwAD.make_dual(x, x.cos()))) for call in (fast, LINEAR))
        torch.testing.assert_close(found.tangent, expected.tangent)


def test_errors_of_linalg_are_raised_in_training() -> None:
    """AOTAutograd of torch 2.11 drops them."""

    def model(x: Tensor) -> Tensor:
        return torch.linalg.inv(x[:2, :2] * 0).sum() + LINEAR(x)

    with pytest.raises(torch.linalg.LinAlgError):
        compiled(model, "sequential")(randn(6, 4))


def test_gradients_of_a_mapped_function_are_its_own() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.func.vmap(Doubled.apply)(x.sin()).cos()

    fast = compiled(model, Each(split=uneven))
    one, other = randn(7, 4).requires_grad_(), randn(7, 4).requires_grad_()
    for call, x in (model, one), (fast, other):
        call(x).sum().backward()
    torch.testing.assert_close(other.grad, one.grad)


def test_a_region_that_turns_gradients_on() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x.detach().requires_grad_() * 2).sin()

    fast, x = compiled(model), randn(6, 4)
    with torch.no_grad():
        found, wanted = fast(x), model(x)
    assert_equal(found.detach(), wanted.detach())
    assert found.requires_grad == wanted.requires_grad
    assert found.requires_grad is False or fast.stats.plain_reasons


def heads(x: Tensor) -> list[Tensor]:
    return [(x * scale).view(-1, 2, 4, 8).sin() for scale in (1.0, 2.0, 3.0)]


def test_flex_attention_is_split() -> None:
    def model(x: Tensor) -> Tensor:
        return flex_attention(*heads(x), score_mod=lambda score, b, h, q, k: score + (q - k) + h) * 2

    fast, x = compiled(model, Each(split=uneven)), randn(7, 64)
    with torch.no_grad():
        assert_equal(fast(x), model(x))
        assert not [op for op in whole(fast.plan(x)) if "flex" in op]


@pytest.mark.parametrize("by_row", [True, False])
def test_flex_attention_with_a_mask(by_row: bool) -> None:
    lengths = torch.arange(7) % 4 + 1

    def model(x: Tensor, mask: Any) -> Tensor:
        return flex_attention(*heads(x), block_mask=mask) * 2

    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < lengths[b] if by_row else k <= q

    mask = create_block_mask(is_seen, 7 if by_row else None, None, 4, 4, device="cpu")
    fast, x = compiled(model, Each(split=uneven), batch_dims={"x": 0}), randn(7, 64)
    with torch.no_grad():
        assert_equal(fast(x, mask), model(x, mask))
        assert [op for op in whole(fast.plan(x, mask)) if "flex" in op] == (["flex_attention"] if by_row else [])


def test_a_scan_runs_whole() -> None:
    def model(x: Tensor) -> Tensor:
        return associative_scan(lambda a, b: a + b, x.sin(), dim=0, combine_mode="generic") * 2

    fast, x = compiled(model), randn(6, 4)
    with torch.no_grad():
        assert_equal(fast(x), model(x))
    assert fast.stats.plain_reasons or any(not op.splittable for op in graph_of(fast).ops)


def test_a_branch_on_data_runs_whole() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)) * 2

    fast, x = compiled(model), randn(6, 4)
    with torch.no_grad():
        for given in x, -x:
            assert_equal(fast(given), model(given))


def test_nested_tensors_run_plainly() -> None:
    def model(x: Tensor) -> Tensor:
        return LINEAR(x).tanh()

    given = torch.nested.nested_tensor([randn(3, 4), randn(2, 4)], layout=torch.jagged)
    fast = compiled(model)
    with torch.no_grad():
        assert_equal(fast(given).values(), model(given).values())
    assert any("nested" in reason for reason in fast.stats.plain_reasons)


def test_why_a_model_was_not_captured() -> None:
    @torch.compiler.disable
    def model(x: Tensor) -> Tensor:
        return x.sin()

    fast, x = compiled(lambda x: model(x)), randn(6, 4)
    with torch.no_grad():
        assert_equal(fast(x), x.sin())
    assert [reason for reason in fast.stats.plain_reasons if reason.startswith("not captured: ")]
    with pytest.raises(df.PlanError, match="no graph to plan"):
        fast.plan(x)
