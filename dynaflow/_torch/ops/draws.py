"""Random numbers from a seed, and a copy that no compiler removes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dynaflow._torch.ops import library


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


def _random(size: Sequence[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    draw = getattr(torch, mode)
    return cast("torch.Tensor", draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float))


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


library.define("random(SymInt[] size, Tensor seed, str mode) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
library.impl("random", _random, "CompositeExplicitAutograd")
library.define(
    "randint(SymInt low, SymInt high, SymInt[] size, Tensor seed) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
library.impl("randint", _randint, "CompositeExplicitAutograd")


def _fake_random(size: Sequence[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.float)


def _fake_randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.empty(size, device=seed.device, dtype=torch.int64)


library.define("copy(Tensor x) -> Tensor")  # opaque to compilers, so never removed
library.impl("copy", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("dynaflow::copy", torch.clone, lib=library)
torch.library.register_fake("dynaflow::random", _fake_random, lib=library)
torch.library.register_fake("dynaflow::randint", _fake_randint, lib=library)
