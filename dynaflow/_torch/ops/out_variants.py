"""Out-variants of matmuls and fetches, which write into given memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynaflow._torch.ops import library
from dynaflow._torch.ops.offload import fetch_into

# Autocast does not know these operators, so they cast their arguments to the type of the result.


def _linear_out(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    count = x.shape[:-1].numel()  # not -1, which is ambiguous where a row is empty
    rows, flat = x.reshape(count, x.shape[-1]), out.view(count, out.shape[-1])
    if bias is None:
        _mm_out(rows, weight.t(), flat)
    else:
        _addmm_out(bias, rows, weight.t(), flat)


def _mm_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _addmm_out(c: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.addmm(c.to(out.dtype), a.to(out.dtype), b.to(out.dtype), out=out)


def _bmm_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)


_VARIANTS: dict[str, tuple[str, Callable[..., None]]] = {
    "linear_out": ("(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()", _linear_out),
    "mm_out": ("(Tensor a, Tensor b, Tensor(a!) out) -> ()", _mm_out),
    "addmm_out": ("(Tensor c, Tensor a, Tensor b, Tensor(a!) out) -> ()", _addmm_out),
    "bmm_out": ("(Tensor a, Tensor b, Tensor(a!) out) -> ()", _bmm_out),
    "fetch_out": ("(Tensor host, Device device, Tensor(a!) out) -> ()", fetch_into),
}


for _name, (_signature, _function) in _VARIANTS.items():
    library.define(_name + _signature, tags=(torch.Tag.needs_fixed_stride_order,))
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _function, _device)
    library.impl(_name, lambda *args: None, "Meta")
