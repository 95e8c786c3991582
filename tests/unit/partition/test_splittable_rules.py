"""A rule that says splittable=True, and values whose rows that does not explain: right, or whole with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df
from tests.helpers import Each, compiled, graph_of, randn


class Linears(nn.Module):
    """Row by row, but with the batch merged behind the sequence: (s, b, h) is viewed as (s*b, h)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(randn(8, 16)), nn.Parameter(randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(torch.tanh(x) @ self.one) @ self.two)


class Sorted(nn.Module):
    """Row by row, but sorted by what a gate says, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights = nn.Parameter(randn(8)), nn.Parameter(randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        expert = (flat @ self.gate).abs().mul(7).long() % 3
        order = expert.argsort(stable=True)
        y = torch.bmm(torch.tanh(flat[order])[:, None], self.weights[expert[order]])[:, 0]
        return torch.empty_like(y).index_copy(0, order, torch.sin(y)).view_as(x)


class Normed(nn.Module):
    """A declaration that is wrong of the gradient: each row by itself, but weights are shared by all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.lin(self.norm(x)))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return x


CASES = {
    "merged": (Linears, (5, 6, 8), {"x": 1}),
    "merged, batch first": (Linears, (6, 5, 8), None),
    "sorted": (Sorted, (6, 5, 8), None),
    "sorted rows": (Sorted, (6, 8), None),
    "sorted, batch second": (Sorted, (5, 6, 8), {"x": 1}),
    "weights": (Normed, (6, 8), None),
}


@pytest.mark.parametrize("phases", [("forward",), ("backward",), ("forward", "backward")])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_declared_region(case: str, phases: tuple[str, ...]) -> None:
    kind, shape, dims = CASES[case]

    class Some(Each):
        def schedule(self, ctx: df.ScheduleContext) -> Any:
            return super().schedule(ctx) if ctx.phase in phases else ctx.sequential()

    net, x = Net(kind).double(), randn(*shape).double()
    weight = randn(*shape).double()

    def step(call: Any) -> list[Tensor]:
        net.zero_grad()
        given = x.clone().requires_grad_()
        result = call(given)
        (result * weight).sum().backward()
        return [result.detach(), given.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]

    expected = step(net)
    fast = compiled(net, Some([df.SplitModule("layers.*", splittable=True)], split=[4, 2]), batch_dims=dims)
    for found, wanted in zip(step(fast), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_true_declaration_still_splits(case: str) -> None:
    kind, shape, dims = CASES[case]
    net, x = Net(kind), randn(*shape)
    fast = compiled(net, Each([df.SplitModule("layers.*", splittable=True)], split=[4, 2]), batch_dims=dims)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
    ops = [op for op in graph_of(fast).ops if op.name.startswith("layers.")]
    assert ops and all(op.splittable for op in ops) == (case != "sorted, batch second"), [op.refusal for op in ops]


def test_a_result_without_rows_is_no_affair_of_a_declaration() -> None:
    def mean(x: Tensor) -> Tensor:
        with df.mark("mean", splittable=True):
            scale = torch.exp(x).mean()
        return x * scale

    x = randn(6, 8)
    fast = compiled(mean, Each(split=[4, 2]))
    torch.testing.assert_close(fast(x), mean(x))
    assert "without rows" in (graph_of(fast).by_name["mean"].refusal or "")


def test_a_region_in_pieces_promises_nothing_of_what_is_between_them() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x.flip(0))).flip(0)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = Turned()

        def forward(self, x: Tensor) -> Tensor:
            return self.turned(x.sin()) * 2

    net, x = Around(), randn(6, 8)
    for rules in ([], [df.SplitModule("turned.lin")], [df.SplitFunc(torch.tanh)]):
        fast = compiled(net, Each([df.SplitModule("turned", splittable=True), *rules], split=[1, 3, 2]))
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x))
        split = [op.splittable for op in graph_of(fast).ops if op.name.startswith("turned")]
        assert all(split) if not rules else split.count(False) == 2


@pytest.mark.parametrize("turned", [True, False])
def test_a_result_that_is_written_later_is_promised_as_it_is_in_the_end(turned: bool) -> None:
    """As the sum over ranks in a layer of experts: what is between the pieces is the result already, or not."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = x.flip(0).clone() if turned else x.flip(0).tanh().flip(0)
            z = self.lin(y)
            return y.copy_(z.flip(0) if turned else z)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.written = Written()

        def forward(self, x: Tensor) -> Tensor:
            return self.written(x.sin()) * 2

    net, x = Around(), randn(6, 8)
    rules = [df.SplitModule("written", splittable=True), df.SplitModule("written.lin")]
    fast = compiled(net, Each(rules, split=[1, 3, 2]))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
    assert [op.splittable for op in graph_of(fast).ops if op.name.startswith("written")] == (
        [False, True, False] if turned else [True] * 3
    )


def test_a_view_that_mixes_rows_is_not_undone_by_another_view() -> None:
    class Turned(nn.Module):
        """The batch comes second, is merged with the first dim, and turned around with it."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x.flatten(0, 1).flip(0))).flip(0).view_as(x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = Turned()

        def forward(self, x: Tensor) -> Tensor:
            return self.turned(x.sin()).unsqueeze(0)

    net, x = Around(), randn(3, 6, 8)
    fast = compiled(net, Each([df.SplitModule("turned", splittable=True)], split=[4, 2]), batch_dims={"x": 1})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))


def test_what_others_do_with_a_promised_result_is_not_promised() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x.flip(0)).flip(0)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = Turned()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.turned(x)
            return y * 2, y[0] + 1

    net, x = Around(), randn(6, 8)
    fast = compiled(net, Each([df.SplitModule("turned", splittable=True)], split=[4, 2]))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x))
    assert graph_of(fast).by_name["turned"].splittable


def test_a_region_that_addresses_memory_runs_whole() -> None:
    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[1]
            return torch.tanh(x.as_strided((rows, 4), (1, rows)))  # x.T

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Strided()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.sin(x)) * 2

    model, x = Model(), randn(4, 6)
    fast = compiled(model, Each([df.SplitModule("inner", splittable=True)], split=[4, 2]), batch_dims={"x": 1})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert "addresses memory" in (graph_of(fast).by_name["inner"].refusal or "")


def test_a_view_that_a_region_is_given_is_not_promised() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.tanh(x * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x)
            return self.inner(y, y[1]) * 2

    model, x = Model(), randn(6, 4)
    fast = compiled(model, Each([df.SplitModule("inner", splittable=True)], split=[4, 2]))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert "outside of its region" in (graph_of(fast).by_name["inner"].refusal or "")
