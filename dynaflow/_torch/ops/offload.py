"""Copies between the host and the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaflow._torch.ops import library


def fetch(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made on the current stream. Always a copy: from host to host as well."""
    out = torch.empty_like(host, device=device)
    fetch_into(host, device, out)
    return out


def fetch_into(host: Tensor, device: torch.device, out: Tensor) -> None:
    """The same, into memory that is given."""
    out.copy_(host, non_blocking=host.is_cpu)


def store(x: Tensor) -> Tensor:
    """A copy in host memory, which is pinned if the tensor is on CUDA. It is made on the current stream: complete for
    what runs there later, such as a fetch, and for nobody else. Parts of it could only be joined by the host, which
    does not wait: so it is one operator for all rows."""
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return out.copy_(x, non_blocking=True)


# Element by element, says the tag: so a host tensor that carries the batch can be fetched in parts, and the result be
# written straight into memory that is given.
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
