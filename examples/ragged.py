"""Packed requests of different lengths, cut at their boundaries; attention inside each request only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dynaflow as df


class Packed(nn.Module):
    """Tokens of all requests in one dim; `lengths` has one entry per request."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).chunk(3, -1)
        # A token looks at its own request alone: every part that ends at a boundary can be computed by itself.
        # dynaflow can't see that from the operators, so it is declared; verify=True checks it.
        with df.mark("attention", splittable=True):
            ends = lengths.cumsum(0)
            owner = torch.bucketize(torch.arange(tokens.shape[0], device=tokens.device), ends, right=True)
            mask = owner[:, None] == owner[None, :]
            mixed = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return tokens + self.out(mixed)


class ByRequests(df.OpSchedulerBase):
    def schedule(self, ctx):
        ctx.split(3)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, lane=f"lane{op.micro_batch % 2}")


def main() -> None:
    torch.manual_seed(0)
    model = Packed(16).eval()
    fast = df.compile(model, ByRequests(), operators="eager", verify=True)
    with torch.no_grad():
        for lengths in ([5, 3, 8, 2], [1, 9, 4], [2, 2, 2, 2, 2, 7]):
            tokens = torch.randn(sum(lengths), 16)
            facts = {"num_tokens": lengths}
            found = fast(tokens, torch.tensor(lengths), facts=facts)
            torch.testing.assert_close(found, model(tokens, torch.tensor(lengths)))
            parts = fast.plan(tokens, torch.tensor(lengths), facts=facts).micro_batches
            print(lengths, "->", [f"{m.size} tokens of requests {m.requests[0]}-{m.requests[1] - 1}" for m in parts])


if __name__ == "__main__":
    main()
