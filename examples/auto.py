"""Leaves the choice to the tuner, and asks why it chose so.

`python examples/auto.py` on any device; on a GPU with CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dynaflow as df


class Branch(nn.Module):
    """Convolutions of several sizes side by side, as in GoogLeNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(channels, channels // 4, 1)
        self.branch3 = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.branch5 = nn.Conv2d(channels, channels // 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.cat([self.branch1(x), self.branch3(x), self.branch5(x)], dim=1))


def main() -> None:
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    model = nn.Sequential(*(Branch(64) for _ in range(6))).to("cuda" if cuda else "cpu").eval()
    images = torch.randn(2, 64, 28, 28, device="cuda" if cuda else "cpu")
    fast = df.compile(
        model,
        "auto",
        scheduler_options={"seconds": 20.0, "most": 2},
        operators="inductor" if cuda else "eager",
        cudagraph="plan" if cuda else None,
    )
    with torch.no_grad():
        torch.testing.assert_close(fast(images), model(images), rtol=1e-3, atol=1e-3)  # the first call tunes
        print(fast.explain(images))


if __name__ == "__main__":
    main()
