"""Copies between the host and the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaflow._torch.ops import library


def fetch(host: Tensor, device: torch.device) -> Tensor:
    """Copies to the device on the current stream. Always copies, from host to host too."""
    out = torch.empty_like(host, device=device)
    fetch_into(host, device, out)
    return out


def fetch_into(host: Tensor, device: torch.device, out: Tensor) -> None:
    """The same, into given memory."""
    out.copy_(host, non_blocking=host.is_cpu)


def store(x: Tensor) -> Tensor:
    """Copies to host memory, pinned if the tensor is on CUDA, on the current stream: complete only for later work on
    that stream, such as a fetch. Only the host could join parts of the copy, and it does not wait: so the operator
    can't be split."""
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)


# The pointwise tag makes it splittable, and lets a compiler write the result straight into given memory.
library.define("fetch(Tensor host, Device device) -> Tensor", tags=(torch.Tag.pointwise,))
library.impl("fetch", fetch, "CompositeExplicitAutograd")
library.define("store(Tensor x) -> Tensor")
library.impl("store", store, "CompositeExplicitAutograd")


def _fake_fetch(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[0].device


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.to(ctx.place), None


def _fake_store(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


torch.library.register_fake("dynaflow::fetch", _fake_fetch, lib=library)
torch.library.register_fake("dynaflow::store", _fake_store, lib=library)
torch.library.register_autograd("dynaflow::fetch", _gradient, setup_context=_keep_place, lib=library)
