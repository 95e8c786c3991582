"""Blocks of diffusion transformers, by themselves: what is before and after them takes little of a step's time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow as df


class Stream(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class TwoStreams(nn.Module):
    """Text and image attend to each other and are otherwise on their own, as in Flux."""

    def __init__(self, width: int, heads: int, blocks: int, words: int = 512, patches: int = 4096) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (words, patches, width)
        self.text: Any = nn.ModuleList(Stream(width) for _ in range(blocks))
        self.image: Any = nn.ModuleList(Stream(width) for _ in range(blocks))

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        for one, two in zip(self.text, self.image, strict=True):
            pairs = []
            for stream, x in ((one, text), (two, image)):
                with df.mark("project", tag="branch"):
                    normed = F.layer_norm(x, x.shape[-1:])
                    split = (*x.shape[:2], self.heads, -1)
                    pairs.append([f(normed).view(split).transpose(1, 2) for f in (stream.q, stream.k, stream.v)])
            q, k, v = (torch.cat([a, b], dim=2) for a, b in zip(*pairs, strict=True))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            made = []
            for stream, x, y in zip(
                (one, two), (text, image), mixed.split([text.size(1), image.size(1)], 1), strict=True
            ):
                with df.mark("rest", tag="branch"):
                    x = x + stream.out(y)
                    made.append(x + stream.down(F.gelu(stream.up(F.layer_norm(x, x.shape[-1:])), approximate="tanh")))
            text, image = made
        return image

    def example(self, batch: int) -> dict[str, Tensor]:
        words, patches, width = self.sizes
        return {"text": torch.randn(batch, words, width), "image": torch.randn(batch, patches, width)}


class Attention(nn.Module):
    """Of the first to the second, which may be the first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(seen)), self.v(seen)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ModulatedBlock(nn.Module):
    """Attention to the video, then to the text, then a feed-forward part; shifted and scaled by the time."""

    def __init__(self, width: int, heads: int, inside: int) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(width, heads), Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, inside), nn.GELU(approximate="tanh"), nn.Linear(inside, width))
        self.modulation = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (time + self.modulation).unsqueeze(2).unbind(1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + self.attn1(normed, normed) * gate1
        x = x + self.attn2(self.norm(x), text)
        return x + self.ffn(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2) * gate2


class VideoBlocks(nn.Module):
    """As in Wan, without the positions."""

    def __init__(
        self, width: int, heads: int, inside: int, blocks: int, words: int = 512, patches: int = 32760
    ) -> None:
        super().__init__()
        self.sizes = (words, patches, width)
        self.blocks = nn.ModuleList(ModulatedBlock(width, heads, inside) for _ in range(blocks))

    def forward(self, video: Tensor, text: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            video = block(video, text, time)
        return video

    def example(self, batch: int) -> dict[str, Tensor]:
        words, patches, width = self.sizes
        return {
            "video": torch.randn(batch, patches, width),
            "text": torch.randn(batch, words, width),
            "time": torch.randn(batch, 6, width),
        }
