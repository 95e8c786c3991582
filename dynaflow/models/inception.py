"""Convolution networks whose blocks have branches: Inception v3, and a small one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Kernel = int | tuple[int, int]


class ConvNorm(nn.Sequential):
    """Keeps the size of the picture, unless `padding` says otherwise."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Kernel = 1, stride: int = 1, padding: int | None = None
    ) -> None:
        both = (kernel, kernel) if isinstance(kernel, int) else kernel
        around = (both[0] // 2, both[1] // 2) if padding is None else padding
        super().__init__(
            nn.Conv2d(inputs, outputs, both, stride, around, bias=False), nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU()
        )


class Fork(nn.Module):
    """Branches of one input that do not depend on each other; their results side by side."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.children()], dim=1)


def _chain(inputs: int, *convs: tuple[int, Kernel]) -> nn.Sequential:
    layers = []
    for outputs, kernel in convs:
        layers.append(ConvNorm(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*layers)


def _smaller(inputs: int, outputs: int) -> ConvNorm:
    return ConvNorm(inputs, outputs, 3, stride=2, padding=0)


def _pool(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNorm(inputs, outputs))


def _a(inputs: int, pool: int) -> Fork:
    return Fork(
        branch1x1=ConvNorm(inputs, 64),
        branch5x5=_chain(inputs, (48, 1), (64, 5)),
        branch3x3dbl=_chain(inputs, (64, 1), (96, 3), (96, 3)),
        branch_pool=_pool(inputs, pool),
    )


def _b(inputs: int) -> Fork:
    return Fork(
        branch3x3=_smaller(inputs, 384),
        branch3x3dbl=nn.Sequential(_chain(inputs, (64, 1), (96, 3)), _smaller(96, 96)),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def _c(inputs: int, width: int) -> Fork:
    across, down = (1, 7), (7, 1)
    return Fork(
        branch1x1=ConvNorm(inputs, 192),
        branch7x7=_chain(inputs, (width, 1), (width, across), (192, down)),
        branch7x7dbl=_chain(inputs, (width, 1), (width, down), (width, across), (width, down), (192, across)),
        branch_pool=_pool(inputs, 192),
    )


def _d(inputs: int) -> Fork:
    return Fork(
        branch3x3=nn.Sequential(ConvNorm(inputs, 192), _smaller(192, 320)),
        branch7x7x3=nn.Sequential(_chain(inputs, (192, 1), (192, (1, 7)), (192, (7, 1))), _smaller(192, 192)),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def _e(inputs: int) -> Fork:
    def ends(width: int) -> Fork:
        return Fork(a=ConvNorm(width, 384, (1, 3)), b=ConvNorm(width, 384, (3, 1)))

    return Fork(
        branch1x1=ConvNorm(inputs, 320),
        branch3x3=nn.Sequential(ConvNorm(inputs, 384), ends(384)),
        branch3x3dbl=nn.Sequential(_chain(inputs, (448, 1), (384, 3)), ends(384)),
        branch_pool=_pool(inputs, 192),
    )


class InceptionV3(nn.Module):
    """Without the second classifier, which only training has."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _smaller(3, 32), ConvNorm(32, 32, 3, padding=0), ConvNorm(32, 64, 3), nn.MaxPool2d(3, stride=2),
            ConvNorm(64, 80), ConvNorm(80, 192, 3, padding=0), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.blocks = nn.Sequential(
            _a(192, 32), _a(256, 64), _a(288, 64), _b(288),
            _c(768, 128), _c(768, 160), _c(768, 160), _c(768, 192), _d(768),
            _e(1280), _e(2048),
        )  # fmt: skip
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def example(self, batch: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, 3, 299, 299)}


class BranchCNN(nn.Module):
    """Two blocks of four branches."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 2 * width, 3, stride=2)
        self.block0 = _block(2 * width, width)
        self.block1 = _block(4 * width, width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.block0(self.stem(x)))
        return self.head(self.pool(x).flatten(1))

    def example(self, batch: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, 3, 20, 20)}


def _block(inputs: int, width: int) -> Fork:
    return Fork(
        branch1x1=ConvNorm(inputs, width),
        branch3x3=_chain(inputs, (width, 1), (width, 3)),
        branch5x5=_chain(inputs, (width, 1), (width, 5)),
        branch_pool=nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNorm(inputs, width)),
    )
