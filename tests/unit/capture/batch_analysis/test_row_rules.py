"""The rules for splitting ATen calls along the batch, held against what the operators do.

Each call of the corpus is a function of the batch size. It is put to `follow_rows` on fake tensors at a
probe size; a legal one is then run on real data, for a whole batch and for ranges of its rows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dynaflow.capture.batch_analysis import dtensor_rules
from dynaflow.capture.batch_analysis.row_rules import Refusal, follow_rows
from dynaflow.capture.batch_analysis.signatures import Call

aten = torch.ops.aten

PROBE = 2 * 10007
BATCH = 6
RANGES = ((0, 2), (2, 3), (3, 6))


@dataclass(frozen=True)
class T:
    """A tensor argument to be made: its shape, the dim on which it carries the batch, and its data."""

    shape: tuple[int, ...]
    dim: int | None = None
    data: str | int = "normal"
    dtype: torch.dtype = torch.float32

    def fake(self) -> torch.Tensor:
        kinds: dict[str | int, torch.dtype] = {"bool": torch.bool, "distinct": torch.int64}
        dtype = torch.int64 if isinstance(self.data, int) else kinds.get(self.data, self.dtype)
        return torch.empty(self.shape, dtype=dtype)

    def real(self) -> torch.Tensor:
        if isinstance(self.data, int):
            return torch.randint(self.data, self.shape)
        if self.data == "bool":
            return torch.rand(self.shape) > 0.5
        if self.data == "unit":
            return torch.rand(self.shape) * 0.9 + 0.05
        if self.data == "sorted":
            return torch.randn(self.shape).sort(-1).values
        if self.data == "distinct":
            return torch.randperm(self.shape[-1])
        if self.data == "spd":
            return torch.eye(self.shape[-1]) * 3 + torch.rand(self.shape)
        return torch.randn(self.shape, dtype=self.dtype)


def R(*shape: int, dim: int = 0, data: str | int = "normal", dtype: torch.dtype = torch.float32) -> T:
    """A tensor that carries the batch."""
    return T(shape, dim, data, dtype)


def S(*shape: int, data: str | int = "normal", dtype: torch.dtype = torch.float32) -> T:
    """A tensor shared by all rows."""
    return T(shape, None, data, dtype)


@dataclass(frozen=True)
class Entry:
    op: Any
    make: Callable[[int], tuple[Any, ...]]
    expect: tuple[int | None, ...] | None
    kwargs: Callable[[int], dict[str, Any]] = lambda b: {}


def ask(entry: Entry, rows: int = PROBE, oracle_only: bool = False) -> Any:
    """The answer for a call at the probe's size."""
    dims: dict[int, int | None] = {}

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, T):
            made = leaf.fake()
            dims[id(made)] = leaf.dim
            keep.append(made)
            return made
        return leaf

    keep: list[torch.Tensor] = []
    with FakeTensorMode():
        args, kwargs = tree_map(fake, (entry.make(rows), entry.kwargs(rows)))
        outs = [t for t in tree_flatten(entry.op(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]

        def dim_of(t: torch.Tensor) -> int | None:
            return dims.get(id(t))

        if oracle_only:
            return dtensor_rules.ask(Call.bind(entry.op, args, kwargs, outs, rows, dim_of), args, kwargs)
        return follow_rows(entry.op, args, kwargs, outs, rows, dim_of)


def check_numbers(entry: Entry, dims: list[int | None]) -> None:
    """Runs the call whole and for ranges of rows, and compares."""
    torch.manual_seed(0)
    specs, spec = tree_flatten((entry.make(BATCH), entry.kwargs(BATCH)))
    whole = [leaf.real() if isinstance(leaf, T) else leaf for leaf in specs]

    def run(leaves: list[Any]) -> list[torch.Tensor]:
        args, kwargs = tree_unflatten([v.clone() if isinstance(v, torch.Tensor) else v for v in leaves], spec)
        out = entry.op(*args, **kwargs)
        return [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    expected = run(whole)
    for lo, hi in RANGES:
        part = tree_flatten((entry.make(hi - lo), entry.kwargs(hi - lo)))[0]
        assert len(part) == len(specs)
        for i, leaf in enumerate(specs):
            if isinstance(leaf, T):
                part[i] = whole[i]
                if leaf.dim is not None:
                    c = leaf.shape[leaf.dim] // BATCH
                    part[i] = whole[i].narrow(leaf.dim, lo * c, (hi - lo) * c)
        for dim, got, want in zip(dims, run(part), expected, strict=True):
            if dim is not None:
                c = want.shape[dim] // BATCH
                want = want.narrow(dim, lo * c, (hi - lo) * c)
            if "empty" in str(entry.op):
                assert got.shape == want.shape
            else:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


CORPUS: dict[str, Entry] = {}


def legal(
    name: str, op: Any, make: Callable[[int], tuple[Any, ...]], *expect: int | None, **kwargs: Any
) -> None:
    assert name not in CORPUS, name
    CORPUS[name] = Entry(op, make, expect, kwargs.get("kwargs", lambda b: {}))


def refused(name: str, op: Any, make: Callable[[int], tuple[Any, ...]], **kwargs: Any) -> None:
    assert name not in CORPUS, name
    CORPUS[name] = Entry(op, make, None, kwargs.get("kwargs", lambda b: {}))


# --- views and shapes
legal("view-merge", aten.view.default, lambda b: (R(b, 16), [b * 16]), 0)
legal("view-minus-one", aten.view.default, lambda b: (R(b, 16), [-1, 4]), 0)
legal("view-split", aten.view.default, lambda b: (R(b * 4, 6), [b, 4, 6]), 0)
legal("view-regroup", aten.view.default, lambda b: (R(b, 4, 6), [b * 2, 12]), 0)
legal("view-behind", aten.view.default, lambda b: (R(3, b, 4, dim=1), [3, b * 2, 2]), 1)
legal("view-front-merge", aten.view.default, lambda b: (R(3, 2, b, 4, dim=2), [6, b, 4]), 1)
legal("view-front-split", aten.view.default, lambda b: (R(6, b, dim=1), [2, 3, b, 1]), 2)
refused("view-swap", aten.view.default, lambda b: (R(b, 16), [16, b]))
refused("view-merge-before", aten.view.default, lambda b: (R(3, b, dim=1), [3 * b]))
refused("view-uneven", aten.view.default, lambda b: (R(b, 6), [b * 3 // 2, 4]))
refused("view-front-taken", aten.view.default, lambda b: (R(b, 4), [2, b * 2]))
legal("view-dtype", aten.view.dtype, lambda b: (R(b, 4), torch.int32), 0)
legal("view-dtype-narrow", aten.view.dtype, lambda b: (R(b, 4), torch.int16), 0)
legal("view-dtype-last", aten.view.dtype, lambda b: (R(3, b, dim=1), torch.int16), 1)
refused("view-dtype-wide", aten.view.dtype, lambda b: (R(3, b, dim=1), torch.int64))
legal("unsafe-view", aten._unsafe_view.default, lambda b: (R(b * 5, 8), [b, 5, 8]), 0)
legal("reshape-alias", aten._reshape_alias.default, lambda b: (R(b, 6), [b, 2, 3], [6, 3, 1]), 0)
legal("view-copy", aten.view_copy.default, lambda b: (R(b, 6), [b, 2, 3]), 0)
legal("expand", aten.expand.default, lambda b: (R(b, 1, 4), [b, 3, 4]), 0)
legal("expand-front", aten.expand.default, lambda b: (R(b, 4), [3, b, 4]), 1)
legal("expand-minus-one", aten.expand.default, lambda b: (R(b, 1), [-1, 4]), 0)
legal("expand-shared", aten.expand.default, lambda b: (S(1, 4), [b, 4]), 0)
legal("expand-shared-new", aten.expand.default, lambda b: (S(4), [2, b, 4]), 1)
refused("expand-square", aten.expand.default, lambda b: (R(b, 1), [b, b]))
legal("repeat", aten.repeat.default, lambda b: (R(b, 4), [1, 3]), 0)
legal("repeat-front", aten.repeat.default, lambda b: (R(b, 4), [2, 1, 3]), 1)
legal("repeat-shared", aten.repeat.default, lambda b: (S(3, 4), [b, 1]), 0)
legal("repeat-shared-twice", aten.repeat.default, lambda b: (S(4), [2 * b, 2]), 0)
refused("repeat-batch", aten.repeat.default, lambda b: (R(b, 4), [2, 1]))
refused("repeat-half", aten.repeat.default, lambda b: (S(2, 4), [b // 2, 1]))
legal("permute", aten.permute.default, lambda b: (R(b, 3, 4), [2, 0, -2]), 1)
legal("transpose", aten.transpose.int, lambda b: (R(b, 3, 4), 0, -1), 2)
legal("t", aten.t.default, lambda b: (R(b, 3),), 1)
legal("t-vector", aten.t.default, lambda b: (R(b),), 0)
legal("unsqueeze", aten.unsqueeze.default, lambda b: (R(b, 3), 0), 1)
legal("unsqueeze-last", aten.unsqueeze.default, lambda b: (R(b, 3), -1), 0)
legal("squeeze-dim", aten.squeeze.dim, lambda b: (R(1, b, 3, dim=1), 0), 0)
legal("squeeze-dims", aten.squeeze.dims, lambda b: (R(1, b, 1, dim=1), [0, -1]), 0)
legal("squeeze-many", aten.squeeze.default, lambda b: (R(1, b * 2, dim=1),), 0)
refused("squeeze-all", aten.squeeze.default, lambda b: (R(b, 1, 3),))
refused("squeeze-batch", aten.squeeze.dim, lambda b: (R(b, 3), 0))
legal("select", aten.select.int, lambda b: (R(b, 3, 4), 1, -1), 0)
legal("select-front", aten.select.int, lambda b: (R(3, b, 4, dim=1), 0, 1), 0)
refused("select-batch", aten.select.int, lambda b: (R(b, 3), 0, 0))
legal("slice", aten.slice.Tensor, lambda b: (R(b, 8), 1, 2, -1, 2), 0)
legal("slice-all", aten.slice.Tensor, lambda b: (R(b, 8), 0, 0, sys.maxsize), 0)
legal("slice-to-batch", aten.slice.Tensor, lambda b: (R(b * 2, 8), 0, 0, 2 * b), 0)
refused("slice-batch", aten.slice.Tensor, lambda b: (R(b, 8), 0, 1, sys.maxsize))
refused("slice-half", aten.slice.Tensor, lambda b: (R(b, 8), 0, 0, b // 2))
refused("slice-bounded", aten.slice.Tensor, lambda b: (R(b, 8), 0, 0, 10**6))
refused("slice-at-batch", aten.slice.Tensor, lambda b: (R(b, 8), 1, 0, b))
refused("slice-shared-at-batch", aten.slice.Tensor, lambda b: (S(8, 8), 0, 0, b))
legal("split", aten.split.Tensor, lambda b: (R(b, 8), 3, -1), 0, 0, 0)
legal("split-sizes", aten.split_with_sizes.default, lambda b: (R(b, 8), [2, 6], 1), 0, 0)
legal("split-one", aten.split.Tensor, lambda b: (R(b, 8), b, 0), 0)
refused("split-batch", aten.split.Tensor, lambda b: (R(b, 8), b // 2, 0))
refused("split-at-batch", aten.split.Tensor, lambda b: (R(b, 8), b, 1))
legal("unbind", aten.unbind.int, lambda b: (R(2, b, dim=1), 0), 0, 0)
legal("unfold", aten.unfold.default, lambda b: (R(b, 8), 1, 3, 2), 0)
refused("unfold-batch", aten.unfold.default, lambda b: (R(b, 8), 0, 2, 2))
refused("as-strided", aten.as_strided.default, lambda b: (R(b, 8), [b, 8], [8, 1]))
legal("alias", aten.alias.default, lambda b: (R(b, 8),), 0)
legal("detach", aten.detach.default, lambda b: (R(2, b, dim=1),), 1)
legal("clone", aten.clone.default, lambda b: (R(b, 8),), 0)
legal("to-copy", aten._to_copy.default, lambda b: (R(b, 8),), 0, kwargs=lambda b: {"dtype": torch.float64})
legal("diagonal", aten.diagonal.default, lambda b: (R(b, 4, 4), 0, -2, -1), 0)
refused("diagonal-batch", aten.diagonal.default, lambda b: (R(b, 4),))
legal("diag-embed", aten.diag_embed.default, lambda b: (R(b, 4), 0, 0, 1), 2)
legal("cat", aten.cat.default, lambda b: ([R(b, 3), R(b, 5)], 1), 0)
legal("cat-empty", aten.cat.default, lambda b: ([S(0), R(b, 5)], -1), 0)
refused("cat-batch", aten.cat.default, lambda b: ([R(b, 3), R(b, 3)], 0))
refused("cat-batch-shared", aten.cat.default, lambda b: ([R(b, 3), S(1, 3)], 0))
refused("cat-crossed", aten.cat.default, lambda b: ([R(b, 3), T((b, 2), None)], 1))
legal("stack", aten.stack.default, lambda b: ([R(b, 3), R(b, 3)], 0), 1)
legal("stack-last", aten.stack.default, lambda b: ([R(b, 3), R(b, 3)], -1), 0)
legal("flip", aten.flip.default, lambda b: (R(b, 3), [1]), 0)
refused("flip-batch", aten.flip.default, lambda b: (R(b, 3), [0]))
legal("roll", aten.roll.default, lambda b: (R(b, 3), [1], [-1]), 0)
refused("roll-batch", aten.roll.default, lambda b: (R(b, 3), [1], [0]))
refused("roll-flat", aten.roll.default, lambda b: (R(b, 3), [1]))
legal("pad", aten.constant_pad_nd.default, lambda b: (R(b, 3), [1, 1, 0, 0], 2.0), 0)
refused("pad-batch", aten.constant_pad_nd.default, lambda b: (R(b, 3), [0, 0, 1, b - 1]))
legal("reflection-pad", aten.reflection_pad2d.default, lambda b: (R(b, 2, 5, 5), [1, 1, 2, 2]), 0)
legal("view-as-complex", aten.view_as_complex.default, lambda b: (R(b, 3, 2),), 0)
legal("view-as-real", aten.view_as_real.default, lambda b: (R(2, b, dim=1, dtype=torch.complex64),), 1)

# --- factories
legal("zeros", aten.zeros.default, lambda b: ([b, 4],), 0)
legal("zeros-behind", aten.zeros.default, lambda b: ([4, b * 3],), 1)
legal("full", aten.full.default, lambda b: ([b, 4], 2.5), 0)
legal("empty", aten.empty.memory_format, lambda b: ([b, 4],), 0)
legal("new-zeros", aten.new_zeros.default, lambda b: (R(b, 4), [b, 7]), 0)
legal("new-ones-fixed", aten.new_ones.default, lambda b: (R(b, 4), [7]), None)
legal("new-full-shared", aten.new_full.default, lambda b: (S(4), [b, 7], 1.0), 0)
legal("zeros-like", aten.zeros_like.default, lambda b: (R(3, b, dim=1),), 1)
legal("zeros-like-shared", aten.zeros_like.default, lambda b: (S(3),), None)
legal("arange-fixed", aten.arange.default, lambda b: (7,), None)
legal("scalar-tensor", aten.scalar_tensor.default, lambda b: (2.0,), None)
legal("add-shared", aten.add.Tensor, lambda b: (S(3), S(3)), None)
legal("fill-shared", aten.fill_.Scalar, lambda b: (S(3), 2.0), None)
refused("zeros-square", aten.zeros.default, lambda b: ([b, b],))
refused("zeros-half", aten.zeros.default, lambda b: ([b // 2],))
refused("full-of-size", aten.full.default, lambda b: ([b, 4], b))
refused("full-scalar-of-size", aten.full.default, lambda b: ([], b))
refused("scalar-tensor-of-size", aten.scalar_tensor.default, lambda b: (b,))
refused("arange", aten.arange.default, lambda b: (b,))
refused("arange-start", aten.arange.start, lambda b: (0, b))
refused("eye", aten.eye.m, lambda b: (b, 4))
refused("linspace", aten.linspace.default, lambda b: (0, 1, b))
refused("tril-indices", aten.tril_indices.default, lambda b: (b, 2))
refused("rand", aten.rand.default, lambda b: ([b, 4],))
refused("rand-fixed", aten.rand.default, lambda b: ([4],))
refused("bernoulli", aten.bernoulli.default, lambda b: (R(b, 4, data="unit"),))
refused("normal-in-place", aten.normal_.default, lambda b: (R(b, 4),))
refused("dropout", aten.native_dropout.default, lambda b: (R(b, 4), 0.5, True))
legal("dropout-eval", aten.native_dropout.default, lambda b: (R(b, 4), 0.5, False), 0, 0)

# --- pointwise
legal("add", aten.add.Tensor, lambda b: (R(b, 4), R(b, 4)), 0)
legal("add-bias", aten.add.Tensor, lambda b: (R(b, 4), S(4)), 0)
legal("add-broadcast", aten.add.Tensor, lambda b: (R(b, 1, 4), S(5, 1)), 0)
legal("add-ones", aten.add.Tensor, lambda b: (S(1, 4), R(b, 4)), 0)
legal("add-right-aligned", aten.add.Tensor, lambda b: (R(b, 4), R(3, b, 4, dim=1)), 1)
legal("mul-many", aten.mul.Tensor, lambda b: (R(b * 3, 4), R(b * 3, 1)), 0)
legal("mul-scalar", aten.mul.Tensor, lambda b: (R(b, 4), 3.0), 0)
legal("gelu", aten.gelu.default, lambda b: (R(b, 4),), 0)
legal("where", aten.where.self, lambda b: (R(b, 1, data="bool"), R(b, 4), S(4)), 0)
legal("masked-fill", aten.masked_fill.Scalar, lambda b: (R(b, 4), R(b, 4, data="bool"), 0.0), 0)
legal("masked-fill-tensor", aten.masked_fill.Tensor, lambda b: (R(b, 4), S(4, data="bool"), S()), 0)
legal("masked-fill-in-place", aten.masked_fill_.Scalar, lambda b: (R(b, 4), S(4, data="bool"), 0.0), 0)
legal("frexp", aten.frexp.Tensor, lambda b: (R(b, 4),), 0, 0)
legal("add-in-place", aten.add_.Tensor, lambda b: (R(b, 4), S(4)), 0)
legal("eq-in-place", aten.eq_.Tensor, lambda b: (R(b, 4), R(b, 4)), 0)
legal("copy-in-place", aten.copy_.default, lambda b: (R(b, 4), R(b, 1)), 0)
legal("fill-in-place", aten.fill_.Scalar, lambda b: (R(b, 4), 1.0), 0)
legal("add-out", aten.add.out, lambda b: (R(b, 4), S(4)), 0, kwargs=lambda b: {"out": R(b, 4)})
legal("log-sigmoid", aten.log_sigmoid_forward.default, lambda b: (R(b, 4),), 0, 0)
legal("lerp", aten.lerp.Tensor, lambda b: (R(b, 4), S(4), R(b, 1)), 0)
legal("mse-none", aten.mse_loss.default, lambda b: (R(b, 4), R(b, 4), 0), 0)
refused("mse-mean", aten.mse_loss.default, lambda b: (R(b, 4), R(b, 4), 1))
refused("add-outer", aten.add.Tensor, lambda b: (R(b, 1), R(1, b, dim=1)))
refused("add-square", aten.add.Tensor, lambda b: (R(b, 1), T((b, b))))
refused("add-square-alone", aten.add.Tensor, lambda b: (T((b, b)), T((b, b))))
refused("add-misaligned", aten.add.Tensor, lambda b: (R(b, 1), R(b)))
refused("div-by-size", aten.div.Tensor, lambda b: (R(b, 4), b))
refused("mul-by-mean", aten.mul.Tensor, lambda b: (R(b, 4), 1 / b))
refused("write-shared", aten.index_add_.default, lambda b: (S(3, 4), 0, R(b, data=3), R(b, 4)))
refused("write-size-to-shared", aten.fill_.Scalar, lambda b: (S(3), b))
refused("unsqueeze-in-place", aten.unsqueeze_.default, lambda b: (R(b, 4), 0))

# --- matrix products
legal("mm", aten.mm.default, lambda b: (R(b, 4), S(4, 5)), 0)
legal("mm-right", aten.mm.default, lambda b: (S(5, 4), R(4, b, dim=1)), 1)
legal("mm-many", aten.mm.default, lambda b: (R(b * 3, 4), S(4, 5)), 0)
refused("mm-inner", aten.mm.default, lambda b: (R(4, b, dim=1), R(b, 5)))
refused("mm-outer", aten.mm.default, lambda b: (R(b, 4), R(4, b, dim=1)))
legal("addmm", aten.addmm.default, lambda b: (S(5), R(b, 4), S(4, 5)), 0)
legal("addmm-residual", aten.addmm.default, lambda b: (R(b, 5), R(b, 4), S(4, 5)), 0)
legal("addmm-row", aten.addmm.default, lambda b: (S(1, 5), R(b, 4), S(4, 5)), 0)
legal("bmm", aten.bmm.default, lambda b: (R(b * 2, 3, 4), R(b * 2, 4, 5)), 0)
legal("bmm-left", aten.bmm.default, lambda b: (R(2, b, 4, dim=1), S(2, 4, 5)), 1)
legal("bmm-right", aten.bmm.default, lambda b: (S(2, 3, 4), R(2, 4, b, dim=2)), 2)
refused("bmm-inner", aten.bmm.default, lambda b: (R(2, 3, b, dim=2), R(2, b, 4, dim=1)))
legal("baddbmm", aten.baddbmm.default, lambda b: (S(1, 3, 5), R(b, 3, 4), R(b, 4, 5)), 0)
legal("mv", aten.mv.default, lambda b: (R(b, 4), S(4)), 0)
refused("dot", aten.dot.default, lambda b: (R(b), R(b)))
legal("cdist", aten._cdist_forward.default, lambda b: (R(b, 4), S(3, 4), 2.0, None), 0)
refused("cdist-all", aten._cdist_forward.default, lambda b: (R(b, 4), R(b, 4), 2.0, None))

# --- attention
legal(
    "sdpa-cpu",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: (R(b, 2, 5, 8), R(b, 2, 7, 8), R(b, 2, 7, 8)),
    0,
    0,
)
legal(
    "sdpa-cpu-heads",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: tuple(R(2, b, 5, 8, dim=1) for _ in range(3)),
    1,
    1,
)
legal(
    "sdpa-cpu-mask",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: tuple(R(b, 2, 5, 8) for _ in range(3)),
    0,
    0,
    kwargs=lambda b: {"attn_mask": R(b, 1, 5, 5)},
)
legal(
    "sdpa-cpu-mask-shared",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: tuple(R(b, 2, 5, 8) for _ in range(3)),
    0,
    0,
    kwargs=lambda b: {"attn_mask": S(1, 1, 5, 5)},
)
refused(
    "sdpa-cpu-dropout",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: (*(R(b, 2, 5, 8) for _ in range(3)), 0.1),
)
refused(
    "sdpa-cpu-keys",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda b: (S(1, 2, 5, 8), R(1, 2, b, 8, dim=2), R(1, 2, b, 8, dim=2)),
)

legal(
    "multi-head-attention",
    aten._native_multi_head_attention.default,
    lambda b: (*(R(b, 5, 8) for _ in range(3)), 8, 2, S(24, 8), S(24), S(8, 8), S(8)),
    0,
    0,
)

# --- images
legal(
    "conv2d",
    aten.convolution.default,
    lambda b: (R(b, 3, 6, 6), S(4, 3, 3, 3), S(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    0,
)
legal(
    "conv1d-many",
    aten.convolution.default,
    lambda b: (R(b * 2, 3, 6), S(4, 3, 3), None, [1], [1], [1], False, [0], 1),
    0,
)
refused(
    "conv1d-along",
    aten.convolution.default,
    lambda b: (R(2, 3, b, dim=2), S(4, 3, 3), None, [1], [1], [1], False, [0], 1),
)
legal(
    "batch-norm",
    aten._native_batch_norm_legit_no_training.default,
    lambda b: (R(b, 3, 4, 4), S(3), S(3), S(3), S(3, data="unit"), 0.1, 1e-5),
    0,
    None,
    None,
)
legal(
    "batch-norm-eval",
    aten.native_batch_norm.default,
    lambda b: (R(b, 3, 4), S(3), S(3), S(3), S(3, data="unit"), False, 0.1, 1e-5),
    0,
    None,
    None,
)
legal(
    "batch-norm-legit-eval",
    aten._native_batch_norm_legit.default,
    lambda b: (R(b, 3, 4), S(3), S(3), S(3), S(3, data="unit"), False, 0.1, 1e-5),
    0,
    None,
    None,
)
refused(
    "batch-norm-training",
    aten.native_batch_norm.default,
    lambda b: (R(b, 3, 4), S(3), S(3), S(3), S(3, data="unit"), True, 0.1, 1e-5),
)
refused(
    "batch-norm-legit-training",
    aten._native_batch_norm_legit.default,
    lambda b: (R(b, 3, 4), S(3), S(3), S(3), S(3, data="unit"), True, 0.1, 1e-5),
)
legal(
    "instance-norm",
    aten.native_batch_norm.default,
    lambda b: (R(1, b * 3, 4, dim=1), R(b * 3), R(b * 3), None, None, True, 0.1, 1e-5),
    1,
    0,
    0,
)
legal("max-pool2d", aten.max_pool2d_with_indices.default, lambda b: (R(b, 3, 6, 6), [2, 2]), 0, 0)
legal("max-pool3d", aten.max_pool3d_with_indices.default, lambda b: (R(b, 3, 4, 4, 4), [2, 2, 2]), 0, 0)
legal("avg-pool2d", aten.avg_pool2d.default, lambda b: (R(b, 3, 6, 6), [2, 2]), 0)
legal("avg-pool2d-channels", aten.avg_pool2d.default, lambda b: (R(3, b, 6, 6, dim=1), [2, 2]), 1)
refused("avg-pool2d-along", aten.avg_pool2d.default, lambda b: (R(3, 2, 6, b, dim=3), [1, 2]))
legal("avg-pool3d", aten.avg_pool3d.default, lambda b: (R(b, 3, 4, 4, 4), [2, 2, 2]), 0)
legal("adaptive-avg-pool2d", aten._adaptive_avg_pool2d.default, lambda b: (R(b, 3, 6, 6), [2, 2]), 0)
legal("adaptive-avg-pool3d", aten._adaptive_avg_pool3d.default, lambda b: (R(b, 3, 4, 4, 4), [2, 2, 2]), 0)
legal("adaptive-max-pool2d", aten.adaptive_max_pool2d.default, lambda b: (R(b, 3, 6, 6), [2, 2]), 0, 0)
legal("upsample-nearest", aten.upsample_nearest2d.default, lambda b: (R(b, 3, 4, 4), [8, 8]), 0)
legal("upsample-bilinear", aten.upsample_bilinear2d.default, lambda b: (R(b, 3, 4, 4), [8, 8], False), 0)
legal("upsample-linear1d", aten.upsample_linear1d.default, lambda b: (R(b, 3, 4), [8], False), 0)
legal("pixel-shuffle", aten.pixel_shuffle.default, lambda b: (R(b, 4, 3, 3), 2), 0)
legal("im2col", aten.im2col.default, lambda b: (R(b, 3, 6, 6), [2, 2], [1, 1], [0, 0], [1, 1]), 0)
legal("col2im", aten.col2im.default, lambda b: (R(b, 12, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]), 0)
legal("grid-sampler", aten.grid_sampler_2d.default, lambda b: (R(b, 3, 6, 6), R(b, 4, 4, 2), 0, 0, False), 0)
legal(
    "group-norm",
    aten.native_group_norm.default,
    lambda b: (R(b, 4, 9), S(4), S(4), b, 4, 9, 2, 1e-5),
    0,
    0,
    0,
)

# --- norms, softmax, scans, orders
legal("layer-norm", aten.native_layer_norm.default, lambda b: (R(b, 3, 4), [4], S(4), S(4), 1e-5), 0, 0, 0)
legal(
    "layer-norm-many", aten.native_layer_norm.default, lambda b: (R(b * 3, 4), [4], S(4), None, 1e-5), 0, 0, 0
)
refused("layer-norm-batch", aten.native_layer_norm.default, lambda b: (R(b, 4), [b, 4], None, None, 1e-5))
if hasattr(aten, "_fused_rms_norm"):
    legal("rms-norm", aten._fused_rms_norm.default, lambda b: (R(3, b, 4, dim=1), [4], S(4), 1e-5), 1, 1)
legal("softmax", aten._softmax.default, lambda b: (R(b, 4), -1, False), 0)
refused("softmax-batch", aten._softmax.default, lambda b: (R(b, 4), 0, False))
legal("log-softmax", aten._log_softmax.default, lambda b: (R(4, b, dim=1), 0, False), 1)
legal("cumsum", aten.cumsum.default, lambda b: (R(b, 4), 1), 0)
refused("cumsum-batch", aten.cumsum.default, lambda b: (R(b, 4), 0))
legal("cummax", aten.cummax.default, lambda b: (R(b, 4), -1), 0, 0)
legal("topk", aten.topk.default, lambda b: (R(b, 8), 3), 0, 0)
refused("topk-batch", aten.topk.default, lambda b: (R(8, b, dim=1), 3))
legal("sort", aten.sort.default, lambda b: (R(b, 8),), 0, 0)
legal("sort-stable", aten.sort.stable, lambda b: (R(b, 8),), 0, 0, kwargs=lambda b: {"stable": True})
refused("sort-batch", aten.sort.default, lambda b: (R(b, 8), 0))
legal("glu", aten.glu.default, lambda b: (R(b, 8), -1), 0)
refused("glu-batch", aten.glu.default, lambda b: (R(b * 2, 8), 0))
legal("fft", aten._fft_r2c.default, lambda b: (R(b, 8), [1], 0, True), 0)
legal("tril", aten.tril.default, lambda b: (R(b, 4, 4),), 0)
refused("tril-batch", aten.tril.default, lambda b: (R(b, 4),))

# --- reductions
legal("sum", aten.sum.dim_IntList, lambda b: (R(b, 4, 5), [1]), 0)
legal("sum-front", aten.sum.dim_IntList, lambda b: (R(4, b, dim=1), [0]), 0)
legal("mean-keepdim", aten.mean.dim, lambda b: (R(b, 4), [-1], True), 0)
legal("amax", aten.amax.default, lambda b: (R(b, 4, 2), [1, 2]), 0)
legal("any", aten.any.dim, lambda b: (R(b, 4, data="bool"), 1), 0)
legal("all", aten.all.dim, lambda b: (R(b, 4, data="bool"), 1, True), 0)
legal("argmax", aten.argmax.default, lambda b: (R(b, 4), -1), 0)
legal("max-dim", aten.max.dim, lambda b: (R(2, b, 4, dim=1), 0), 0, 0)
legal("min-dim", aten.min.dim, lambda b: (R(b, 4), 1, True), 0, 0)
legal("max-other", aten.max.other, lambda b: (R(b, 4), S(4)), 0)
legal("var", aten.var.correction, lambda b: (R(b, 4), [1]), 0)
legal(
    "var-mean", aten.var_mean.correction, lambda b: (R(b, 4), [1]), 0, 0, kwargs=lambda b: {"keepdim": True}
)
legal("vector-norm", aten.linalg_vector_norm.default, lambda b: (R(b, 4), 2.0, [-1], True), 0)
legal("logsumexp", aten.logsumexp.default, lambda b: (R(b, 4), [1]), 0)
legal("median", aten.median.dim, lambda b: (R(b, 5), 1), 0, 0)
legal("prod", aten.prod.dim_int, lambda b: (R(b, 4), 1), 0)
refused("sum-all", aten.sum.default, lambda b: (R(b, 4),))
refused("sum-batch", aten.sum.dim_IntList, lambda b: (R(b, 4), [0]))
refused("sum-no-dims", aten.sum.dim_IntList, lambda b: (R(b, 4), []))
refused("mean-many", aten.mean.dim, lambda b: (R(b * 2, 4), [0]))
refused("argmax-all", aten.argmax.default, lambda b: (R(b, 4),))
refused("vector-norm-all", aten.linalg_vector_norm.default, lambda b: (R(b, 4),))

# --- look-ups and indexing
legal("embedding", aten.embedding.default, lambda b: (S(9, 4), R(b, 3, data=9)), 0)
legal("embedding-behind", aten.embedding.default, lambda b: (S(9, 4), R(3, b, dim=1, data=9)), 1)
refused("embedding-of-batch", aten.embedding.default, lambda b: (R(b, 4), S(3, data=2)))
legal("index", aten.index.Tensor, lambda b: (R(b, 4, 5), [None, S(3, data=4)]), 0)
legal("index-by-rows", aten.index.Tensor, lambda b: (S(9, 4), [R(b, 3, data=9)]), 0)
legal("index-pair", aten.index.Tensor, lambda b: (S(9, 4, 5), [R(b, 1, data=9), S(3, data=4)]), 0)
legal("index-apart", aten.index.Tensor, lambda b: (R(4, b, 5, dim=1), [S(2, data=4), None, S(2, data=5)]), 1)
legal("index-inside", aten.index.Tensor, lambda b: (S(5, 9, 4), [None, R(b, data=9)]), 1)
refused("index-batch", aten.index.Tensor, lambda b: (R(b, 4), [S(3, data=2)]))
refused("index-both", aten.index.Tensor, lambda b: (R(b, 4), [None, R(b, data=4)]))
legal("index-select", aten.index_select.default, lambda b: (R(b, 4), 1, S(3, data=4)), 0)
legal("index-select-by-rows", aten.index_select.default, lambda b: (S(4, 9), 1, R(b, data=9)), 1)
refused("index-select-batch", aten.index_select.default, lambda b: (R(b, 4), 0, S(3, data=2)))
legal("gather", aten.gather.default, lambda b: (R(b, 6), 1, R(b, 3, data=6)), 0)
legal("gather-shared", aten.gather.default, lambda b: (S(6, 3), 0, R(b, 3, data=6)), 0)
refused("gather-batch", aten.gather.default, lambda b: (R(b, 6), 0, R(b, 6, data=2)))
refused("gather-first-row", aten.gather.default, lambda b: (R(b, 6), 1, S(1, 3, data=6)))
refused("gather-aligned", aten.gather.default, lambda b: (S(30000, 6), 1, R(b, 3, data=6)))
legal("scatter-value", aten.scatter.value, lambda b: (R(b, 6), 1, R(b, 2, data=6), 1.0), 0)
legal("scatter-src", aten.scatter.src, lambda b: (R(b, 6), 1, R(b, 1, data=6), R(b, 1)), 0)
legal("scatter-add", aten.scatter_add_.default, lambda b: (R(b, 6), 1, R(b, 2, data=6), R(b, 2)), 0)
refused("scatter-batch", aten.scatter.value, lambda b: (R(b, 6), 0, R(b, 6, data=2), 1.0))
refused("scatter-first-row", aten.scatter.value, lambda b: (R(b, 6), 1, S(1, 2, data=6), 1.0))
legal("index-add", aten.index_add.default, lambda b: (R(b, 6), 1, S(2, data=6), R(b, 2)), 0)
refused("index-add-batch", aten.index_add.default, lambda b: (R(b, 6), 0, R(b, data=2), R(b, 6)))
legal(
    "index-copy",
    aten.index_copy_.default,
    lambda b: (R(b, 2, 6, 3), 2, S(2, data="distinct"), R(b, 2, 2, 3)),
    0,
)
legal("index-fill", aten.index_fill.int_Scalar, lambda b: (R(b, 6), 1, S(2, data=6), 1.0), 0)
legal("index-put", aten.index_put.default, lambda b: (R(b, 6), [None, S(2, data="distinct")], R(b, 2)), 0)
legal(
    "index-put-shared", aten.index_put_.default, lambda b: (R(b, 6), [None, S(2, data="distinct")], S(2)), 0
)
legal("index-put-mask", aten.index_put_.default, lambda b: (R(b, 6), [R(b, 6, data="bool")], S()), 0)
legal(
    "index-put-mask-column", aten.index_put.default, lambda b: (R(b, 6), [None, S(6, data="bool")], S(1)), 0
)
refused("index-put-batch", aten.index_put.default, lambda b: (R(b, 6), [S(2, data=2)], S(2, 6)))
refused("index-put-cache", aten.index_put_.default, lambda b: (S(9, 4), [R(b, data=9)], R(b, 4)))
legal("slice-scatter", aten.slice_scatter.default, lambda b: (R(b, 6), R(b, 2), 1, 1, 3), 0)
legal("select-scatter", aten.select_scatter.default, lambda b: (R(b, 6, 2), R(b, 2), 1, 3), 0)
legal("take", aten.take.default, lambda b: (S(4, 5), R(b, 3, data=20)), 0)
legal("searchsorted", aten.searchsorted.Tensor, lambda b: (S(8, data="sorted"), R(b, 3)), 0)
legal("searchsorted-own", aten.searchsorted.Tensor, lambda b: (R(b, 8, data="sorted"), R(b, 3)), 0)
refused("searchsorted-batch", aten.searchsorted.Tensor, lambda b: (R(b, data="sorted"), S(3)))
legal("bucketize", aten.bucketize.Tensor, lambda b: (R(b, 3), S(8, data="sorted")), 0)
legal("isin", aten.isin.Tensor_Tensor, lambda b: (R(b, 3, data=5), S(2, data=5)), 0)
refused("isin-batch", aten.isin.Tensor_Tensor, lambda b: (S(3, data=5), R(b, data=5)))
refused("histc", aten.histc.default, lambda b: (R(b),))
legal("nll-none", aten.nll_loss_forward.default, lambda b: (R(b, 5), R(b, data=5), None, 0, -100), 0, None)
refused("nll-mean", aten.nll_loss_forward.default, lambda b: (R(b, 5), R(b, data=5), None, 1, -100))

# --- stacks of matrices
legal("det", aten._linalg_det.default, lambda b: (R(b, 3, 3, data="spd"),), 0, 0, 0)
legal("slogdet", aten._linalg_slogdet.default, lambda b: (R(2, b, 3, 3, dim=1, data="spd"),), 1, 1, 1, 1)
legal("inverse", aten.linalg_inv_ex.default, lambda b: (R(b, 3, 3, data="spd"),), 0, 0)
legal("qr", aten.linalg_qr.default, lambda b: (R(b, 4, 3),), 0, 0)
legal("svd", aten._linalg_svd.default, lambda b: (R(b, 4, 3),), 0, 0, 0)
legal("eigh", aten._linalg_eigh.default, lambda b: (R(b, 3, 3, data="spd"),), 0, 0)
refused("svd-one", aten._linalg_svd.default, lambda b: (R(b, 3),))
refused("qr-inside", aten.linalg_qr.default, lambda b: (R(2, b, 3, dim=1),))

# --- left to DTensor
legal("foreach-exp", aten._foreach_exp.default, lambda b: ([R(b, 4), R(3, b, dim=1)],), 0, 1)
legal("foreach-add", aten._foreach_add.List, lambda b: ([R(b, 4), R(b, 3)], [R(b, 4), S(3)]), 0, 0)
legal("foreach-add-in-place", aten._foreach_add_.List, lambda b: ([R(b, 4), R(b, 3)], [R(b, 4), S(3)]))
refused("foreach-norm", aten._foreach_norm.Scalar, lambda b: ([R(b, 4)],))
legal(
    "softmax-backward", aten._softmax_backward_data.default, lambda b: (R(b, 4), R(b, 4), 1, torch.float32), 0
)
if torch.__version__ >= "2.13":  # DTensor has no rule before
    legal("cross", aten.linalg_cross.default, lambda b: (R(b, 3), R(b, 3)), 0)
    legal(
        "cross-behind",
        aten.linalg_cross.default,
        lambda b: (R(3, b, dim=1), R(3, b, dim=1)),
        1,
        kwargs=lambda b: {"dim": 0},
    )
refused("renorm", aten.renorm.default, lambda b: (R(b, 3), 2.0, 1, 1.0))
refused("trace", aten.trace.default, lambda b: (R(b, 4),))
refused(
    "embedding-bag",
    aten._embedding_bag_forward_only.default,
    lambda b: (S(9, 4), R(b * 2, data=9), R(b, data=1)),
)


@pytest.mark.parametrize("name", CORPUS)
def test_answer(name: str) -> None:
    entry = CORPUS[name]
    answer = ask(entry)
    if entry.expect is None:
        assert isinstance(answer, Refusal), answer
        assert str(entry.op.overloadpacket) in answer.reason
        return
    assert answer == list(entry.expect)
    check_numbers(entry, list(entry.expect))


def test_smaller_probe() -> None:
    """The probe's size is not built in: where a model bounds its batch, a smaller one must do."""
    for name in ("view-merge", "sdpa-cpu-mask", "group-norm", "foreach-exp", "view-swap"):
        small = ask(CORPUS[name], rows=2 * 101)
        assert (None if isinstance(small, Refusal) else tuple(small)) == CORPUS[name].expect


# --- operators for CUDA, which only the shapes of their results are known of here
CUDA_ATTENTION = [
    (aten._scaled_dot_product_flash_attention.default, 3, ()),
    (aten._scaled_dot_product_efficient_attention.default, 3, (None, True)),
    (aten._scaled_dot_product_cudnn_attention.default, 3, (None, True)),
    (aten._scaled_dot_product_fused_attention_overrideable.default, 3, ()),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("op", "count", "rest"), CUDA_ATTENTION, ids=lambda v: str(v) if callable(v) else "")
def test_attention_for_cuda(op: Any, count: int, rest: tuple[Any, ...], dim: int) -> None:
    rows = PROBE
    shape = (rows, 2, 5, 8) if dim == 0 else (2, rows, 5, 8)
    with FakeTensorMode():
        qkv = tuple(torch.empty(shape, dtype=torch.float16) for _ in range(count))
        seed, whole = torch.empty((), dtype=torch.int64), torch.empty(shape)
        outs = [whole, whole[..., 0], seed, seed, torch.empty(0)]

        def dim_of(t: torch.Tensor) -> int | None:
            return dim if any(t is x for x in qkv) else None

        assert follow_rows(op, (*qkv, *rest), {}, outs, rows, dim_of) == [dim, dim, None, None, None]
        assert follow_rows(op, (*qkv, *rest), {"dropout_p": 0.1}, outs, rows, dim_of) == Refusal(
            f"{op.overloadpacket} draws random numbers"
        )


def test_same_tensor_twice() -> None:
    """One tensor may be row-wise as one argument and mixed as another."""
    with FakeTensorMode():
        x = torch.empty(PROBE, dtype=torch.int64)
        answer = follow_rows(aten.isin.Tensor_Tensor, (x, x), {}, [torch.empty(PROBE)], PROBE, lambda t: 0)
    assert isinstance(answer, Refusal)


def test_value_read_from_the_batch() -> None:
    with FakeTensorMode():
        x = torch.empty(PROBE, 4)
        assert isinstance(follow_rows(aten.equal.default, (x, x), {}, [], PROBE, lambda t: 0), Refusal)
        for silent in (aten._assert_tensor_metadata.default, torch.ops.prim.device.default):
            assert follow_rows(silent, (x,), {}, [], PROBE, lambda t: 0) == []


def test_out_must_carry_the_rows_alike() -> None:
    with FakeTensorMode():
        x, out = torch.empty(PROBE, 4), torch.empty(PROBE, 4)

        def dim_of(t: torch.Tensor) -> int | None:
            return 0 if t is x else None

        answer = follow_rows(aten.exp.out, (x,), {"out": out}, [out], PROBE, dim_of)
    assert answer == Refusal("aten.exp writes state shared by all rows")


def test_custom_operator_is_refused() -> None:
    @torch.library.custom_op("dynaflow_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    opaque.register_fake(torch.empty_like)
    answer = ask(Entry(torch.ops.dynaflow_test.opaque.default, lambda b: (R(b, 4),), None))
    assert isinstance(answer, Refusal)
    assert "no rule for dynaflow_test.opaque" in answer.reason
    assert "splittable=True" in answer.reason


def test_refusals_are_needed() -> None:
    """A refused call that could be split after all stands in this list, with what speaks against it."""
    cautious = {
        "slice-bounded": "cuts a batch that is larger than the bound",
        "squeeze-batch": "keeps the dimension of many rows, drops that of one",
        "as-strided": "is right only where the rows lie as they did",
        "renorm": "has no rule",
        "add-square-alone": "is shared by all rows, in whichever way the caller means that",
        "unsqueeze-in-place": "leaves its argument with the batch on another dimension than before",
    }
    needless = set()
    for name, entry in CORPUS.items():
        if entry.expect is not None or torch.Tag.nondeterministic_seeded in entry.op.tags:
            continue
        try:
            out = entry.op(*tree_map(lambda v: v.real() if isinstance(v, T) else v, entry.make(BATCH)))
        except (RuntimeError, IndexError, TypeError):
            continue  # at this small size, or without its keywords, the call makes no sense
        shape = out.shape if isinstance(out, torch.Tensor) else None
        for dim in [None, *range(len(shape or ()))]:
            try:
                check_numbers(entry, [dim])
                needless.add(name)
            except (AssertionError, RuntimeError, IndexError, ValueError):
                pass
    assert needless <= set(cautious)


# --- DTensor, as a second opinion and as the oracle
DIFFERENCES = {
    # DTensor calls these legal. It is asked about one split in halves, of a call that is what it is; we ask
    # about every range of rows, with the batch's size recomputed.
    "expand-square": "halves the first dimension only, but the second one has the batch's size too",
    "slice-bounded": "keeps a slice that cuts nothing off at this size",
    "slice-at-batch": "does not know that the bound follows the batch",
    "split-at-batch": "does not know that the split size follows the batch",
    "div-by-size": "does not know that the number follows the batch",
    "mul-by-mean": "does not know that the number follows the batch",
    "bernoulli": "keeps the random state of the shards in step by itself",
    "normal-in-place": "keeps the random state of the shards in step by itself",
    "dropout": "keeps the random state of the shards in step by itself",
    "view-dtype-wide": "keeps the dimension, though its elements now lie across two rows",
    "sum-no-dims": "takes an empty list of dims to reduce nothing, where ATen reduces all",
    # DTensor calls these illegal, or has no rule.
    "view-minus-one": "writes the -1 out, and we see only that the size changed",
    "expand-minus-one": "writes the -1 out, and we see only that the size changed",
    "squeeze-dim": "rewrites the operator, so as not to squeeze a shard of one row",
    "squeeze-dims": "rewrites the operator, so as not to squeeze a shard of one row",
    "squeeze-many": "rewrites the operator, so as not to squeeze a shard of one row",
    "split-one": "splits along no sharded dimension, not even into one piece",
    "unfold": "no rule",
    "multi-head-attention": "no rule",
    "diagonal": "gathers first",
    "diag-embed": "gathers first",
    "cat-empty": "wants the empty tensor sharded too",
    "reflection-pad": "no rule",
    "new-zeros": "makes the new tensor whole on every device",
    "new-ones-fixed": "the same, which we accept from our own rule only",
    "add-out": "its rules do not look at keyword arguments",
    "sdpa-cpu-mask": "its rules do not look at keyword arguments",
    "cdist": "no rule",
    "batch-norm": "shards channels only",
    "batch-norm-eval": "shards channels only",
    "batch-norm-legit-eval": "shards channels only",
    "im2col": "no rule",
    "col2im": "no rule",
    "tril": "gathers first",
    "qr": "gathers first",
    "svd": "gathers first",
    "eigh": "gathers first",
    "index-put-mask": "has no rule for masks",
    "searchsorted": "no rule",
    "searchsorted-own": "no rule",
    "nll-none": "has one output whole, which we accept from our own rule only",
}


def carries(entry: Entry) -> bool:
    leaves = tree_flatten((entry.make(BATCH), entry.kwargs(BATCH)))[0]
    return any(isinstance(leaf, T) and leaf.dim is not None for leaf in leaves)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the differences were explained for 2.13"
)
def test_dtensor_agrees() -> None:
    found = set()
    for name, entry in CORPUS.items():
        if not carries(entry):
            continue
        ours, theirs = ask(entry), ask(entry, oracle_only=True)
        if isinstance(ours, Refusal) and isinstance(theirs, Refusal):
            continue
        if ours != theirs:
            found.add(name)
    assert found == set(DIFFERENCES)


def test_oracle_leaves_nothing_behind() -> None:
    from torch.distributed.tensor import DTensor

    shared = DTensor._op_dispatcher.sharding_propagator
    before = {name: dict(table) for name, table in vars(shared).items() if isinstance(table, dict)}
    state, tracker = torch.get_rng_state(), _rng_tracker()
    dtensor_rules.answers.clear()
    for entry in list(CORPUS.values())[::3]:
        if carries(entry):
            ask(entry, oracle_only=True)
    assert not torch.distributed.is_initialized()
    assert torch.equal(state, torch.get_rng_state())
    assert _rng_tracker() is tracker
    assert before == {name: dict(table) for name, table in vars(shared).items() if isinstance(table, dict)}
    assert shared.propagate_op_sharding.cache_info().currsize == 0


def _rng_tracker() -> object:
    import torch.distributed.tensor._random as random

    return random._rng_tracker


def test_oracle_beside_a_process_group() -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        dtensor_rules.answers.clear()
        assert ask(CORPUS["foreach-exp"]) == [0, 1]
        assert distributed.group.WORLD is group
        assert distributed.get_world_size() == 1
    finally:
        distributed.destroy_process_group()
    assert not distributed.is_initialized()


def test_oracle_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    dtensor_rules.answers.clear()
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", None)
    answer = ask(CORPUS["foreach-exp"])
    dtensor_rules.answers.clear()
    assert isinstance(answer, Refusal)
    assert "torch.distributed is not available" in answer.reason


def test_oracle_answers_once() -> None:
    dtensor_rules.answers.clear()
    for _ in range(3):
        ask(CORPUS["foreach-exp"])
    assert len(dtensor_rules.answers) == 1


def test_oracle_in_threads() -> None:
    dtensor_rules.answers.clear()
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(CORPUS["foreach-exp"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[0, 1]] * 4
