"""Each operator that dynaflow defines, against torch's own; and what torch checks of any custom operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow._torch  # noqa: F401, which defines them
from dynaflow._torch.ops.gradients import empty_like_each, gradients_of
from dynaflow._torch.ops.optimizer import register_step
from dynaflow._torch.ops.recurrent import RNNS
from tests.helpers import randn

ops = torch.ops.dynaflow


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("linear_out", (randn(2, 3, 4), randn(5, 4), None), F.linear(randn(2, 3, 4), randn(5, 4))),
        ("linear_out", (randn(3, 4), randn(5, 4), randn(5)), F.linear(randn(3, 4), randn(5, 4), randn(5))),
        ("linear_out", (randn(3, 0), randn(5, 0), None), torch.zeros(3, 5)),
        ("mm_out", (randn(3, 4), randn(4, 5)), randn(3, 4) @ randn(4, 5)),
        ("addmm_out", (randn(5), randn(3, 4), randn(4, 5)), torch.addmm(randn(5), randn(3, 4), randn(4, 5))),
        ("bmm_out", (randn(2, 3, 4), randn(2, 4, 5)), randn(2, 3, 4) @ randn(2, 4, 5)),
        ("fetch_out", (randn(3, 4), torch.device("cpu")), randn(3, 4)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_variants_write_what_they_are_given(name: str, args: Any, expected: Tensor, dtype: torch.dtype) -> None:
    """Into a part of other memory, in the dtype of that."""
    memory = torch.full((2, *expected.shape), 7.0, dtype=dtype)
    getattr(ops, name)(*args, memory[1])
    torch.testing.assert_close(memory[1].float(), expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-6)
    assert (memory[0] == 7).all()


def test_copies_between_host_and_device() -> None:
    x = randn(4, 6).t().requires_grad_()
    fetched, stored = ops.fetch(x, torch.device("cpu")), ops.store(x.detach())
    for made in fetched, stored:
        assert torch.equal(made, x) and made.stride() == x.stride() and made.data_ptr() != x.data_ptr()
    (gradient,) = torch.autograd.grad(fetched.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach())
    torch.library.opcheck(ops.fetch.default, (x, torch.device("cpu")))
    torch.library.opcheck(ops.store.default, (x.detach(),))


def test_steps_of_an_optimizer_are_called_by_number() -> None:
    class Step:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def step(self, weights: Any, gradients: Any) -> None:
            self.seen.append((weights, gradients))
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient)

    one, other = Step(), Step()
    numbers = [register_step(one), register_step(other)]
    weight, gradient = torch.ones(3), torch.full((3,), 0.25)
    ops.update([weight], [gradient], numbers[1])
    assert not one.seen and len(other.seen) == 1 and weight.tolist() == [0.75] * 3
    del other
    with pytest.raises(KeyError):
        ops.update([weight], [gradient], numbers[1])


@pytest.mark.parametrize("kind", RNNS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_and_their_gradients(kind: str, bidirectional: bool) -> None:
    modules: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
    more = {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn") else {}
    layer = modules[kind](3, 4, num_layers=2, bidirectional=bidirectional, **more)
    twin = copy.deepcopy(layer)
    x = randn(5, 2, 3).requires_grad_()
    hidden = [torch.zeros(2 * (1 + bidirectional), 2, 4) for _ in range(2 if kind == "lstm" else 1)]
    output, first, second = getattr(ops, kind)(x, hidden, list(layer.parameters()), True, 2, bidirectional, None)
    expected, states = twin(x)
    torch.testing.assert_close(output, expected)
    states = states if kind == "lstm" else (states,)
    torch.testing.assert_close((first, second)[: len(states)], states)
    found = torch.autograd.grad(output.square().sum() + first.sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum() + states[0].sum(), [x, *twin.parameters()])
    torch.testing.assert_close(found, wanted)


def test_gradients_by_calling_again() -> None:
    a, b, c = randn(3), randn(3) + 4, randn(3) + 9
    found = gradients_of(lambda given: (given[0] * given[1], given[0] + 1), [a, b, c], [True, False, True], [b, a])
    torch.testing.assert_close(found, [b * b + a, torch.zeros(3)])
    assert [t.shape for t in empty_like_each([a, b, c], [True, False, True])] == [(3,), (3,)]
