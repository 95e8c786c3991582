"""A fusion: one function in place of two operators, for every micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dynaflow as df


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        with df.mark("residual"):
            total = x + self.mix(x)
        return self.norm(total)


def residual_and_norm(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """Stands for both operators; a kernel of your own would go here. ctx.signature(items) tells its arguments."""
    return nn.functional.rms_norm(x + nn.functional.linear(x, weight, bias), scale.shape, scale)


class Fused(df.OpSchedulerBase):
    def partition(self):
        return [df.SplitModule("*.norm", tag="norm")]

    def schedule(self, ctx):
        ctx.split(2)
        while ops := ctx.get_ready_ops():
            for op in ops:
                norm = ctx.items(op.name.replace("residual", "norm"))[op.micro_batch]
                if op == ops[0] and op.micro_batch == 0:
                    print(f"{op.name} + {norm.name}: gets {', '.join(ctx.signature([op, norm])[0])}")
                ctx.execute([op, norm], lane=f"lane{op.micro_batch}", replace_func=residual_and_norm)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32)).eval()
    x = torch.randn(6, 32)
    fast = df.compile(model, Fused(), operators="eager", verify=True)  # verify: compared with the plain model
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        print(fast.plan(x))


if __name__ == "__main__":
    main()
