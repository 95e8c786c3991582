"""Images keep their channels last across cuts, as inside an uncut graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dynaflow as df
from dynaflow.lower.layouts import image_layouts
from tests.helpers import Each, Scheduler, blocks_of, compiled, graph_of, randn, set_chains


class Net(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 3, padding=1)
        self.left = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.right = nn.Conv2d(8, 8, 1, groups=groups)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.stem(x))
        return torch.relu(self.left(h)) + self.right(h), self.left(h)


RULES = [df.SplitModule("left"), df.SplitModule("right"), df.SplitModule("stem")]


def layouts(model: nn.Module) -> dict[int, object]:
    fast = compiled(model, Each(RULES))
    with torch.no_grad():
        fast(randn(4, 4, 6, 6))
    return image_layouts(graph_of(fast))  # type: ignore[return-value]


def test_networks_of_grouped_convolutions_stay_as_they_are() -> None:
    assert layouts(Net()) and not layouts(Net(groups=8))


def test_pieces_hand_over_images_with_channels_last_and_results_as_the_model_has_them() -> None:
    model = Net()
    fast = df.compile(model, Each(RULES))
    set_chains(fast, False)
    x = randn(4, 4, 6, 6)
    with torch.no_grad():
        found, expected = fast(x), model(x)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e)
        assert f.stride() == e.stride()
    (block,) = blocks_of(fast).blocks(torch.device("cpu"))
    (views,) = block.views.values()
    images = [v for v in views if v.dim() == 4]
    assert images and all(v.is_contiguous(memory_format=torch.channels_last) for v in images)


def test_images_that_are_joined_by_copying_keep_it_too() -> None:
    def schedule(ctx: df.ScheduleContext) -> None:
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            right = [op for op in ops if op.name in ("add", "right")]
            ctx.execute(right if right and len(right) == 2 else ops[0])

    model = Net()
    fast = df.compile(model, Scheduler(schedule, RULES))
    x = randn(4, 4, 6, 6)
    with torch.no_grad():
        for f, e in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(f, e)
            assert f.stride() == e.stride()
        assert any(len(t.items[0].micro_batches) == 2 for t in fast.plan(x).tasks), "something ran merged"
    assert fast.stats.joined_bytes > 0, "a convolution can't write into given memory"
