"""From aten calls to kernels: what Inductor would launch for an operator, without compiling it.

*Contract.* `Recorder` observes the aten calls of one run on fake tensors, and `kernels` returns what would be launched,
in order. The run itself is not changed. Calls that are more than a loop over elements stay kernels of their own. Loops
are fused if one uses the other's result and no kernel lies between them. A fused kernel's traffic is what it reads from
outside, and those of its results that are used outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from dynaflow import _torch
from dynaflow.capture.batch_analysis.aten_calls import tensors_in, written_tensors
from dynaflow.capture.collectives import NAMESPACES
from dynaflow.capture.op_registry import collective_of

Kind = Literal[
    "matmul", "convolution", "attention", "masked_attention", "loop", "other", "copy_in", "copy_out", "collective"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, copy or collective."""

    kind: Kind
    name: str = ""
    flops: int = 0
    """Of matmuls; other arithmetic is hidden by memory traffic."""
    bytes: int = 0
    """Device memory traffic; for a copy or a collective, the bytes that are copied or reduced."""
    dtype: str = ""
    blocks: int = 1
    """Number of thread blocks that can run concurrently."""
    shape: tuple[int, int, int, int] | None = None
    """Of a matmul: (batch, m, n, k)."""
    group: str = ""
    """Of a collective: its process group."""


_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "wait_tensor",
         "detach", "alias", "lift_fresh", "lift", "sym_size", "sym_stride", "sym_numel"}  # fmt: skip
"""Calls that launch nothing, though their schema marks no view."""

_GATHERS = {"embedding", "index", "index_select", "gather", "take", "take_along_dim"}
"""Loops that read as much of their table as they return."""

_SCATTERS = {"index_copy_", "index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_",
             "index_fill_", "masked_scatter_"}  # fmt: skip
"""Loops that write parts of an argument. Readers of the result can't be fused with them."""

_ROWWISE = {"_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "_fused_rms_norm", "rms_norm",
            "native_group_norm", "cumsum", "cumprod"}  # fmt: skip
"""Loops that need a whole row per thread block."""

_KERNELS = {"sort", "topk", "argsort", "nonzero", "unique", "_unique2", "histc", "bincount", "searchsorted",
            "multinomial", "masked_select", "upsample_bilinear2d", "upsample_nearest2d",
            "max_pool2d_with_indices"}  # fmt: skip
"""Calls that are never part of a loop."""

_CONVOLUTIONS = {"convolution", "_convolution", "cudnn_convolution", "convolution_overrideable"}
_GROUPED = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback", "_scaled_grouped_mm"}

_INLINED = 64
"""Loops with at most this many elements are recomputed in the loops that use them."""

Describe = Callable[..., Kernel | tuple[Kernel, ...]]
_Tensors = list[torch.Tensor]

_described: dict[str, Describe] = {}


def describe(operator: Any, how: Describe) -> None:
    """Describes a custom operator: `how` takes (args, kwargs, result) and returns its kernels.

    An operator without a description counts as one kernel that reads its arguments and writes its results.
    """
    overload = operator if isinstance(operator, _torch.OpOverload) else getattr(operator, operator.overloads()[0])
    _described[_torch.schema_of(overload).name] = how


@dataclass(slots=True, kw_only=True)
class _Call:
    """One aten call that launches something."""

    kernels: tuple[Kernel, ...] = ()
    """Empty for a loop, which may be fused."""
    reads: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes."""
    writes: dict[int, int] = field(default_factory=dict)
    size: int = 0
    """Number of elements that it iterates over."""
    rows: int | None = None
    """Number of rows, where elements are not independent."""
    closes: bool = False
    """Users of its result can't be fused with it."""
    level: int = 0
    group: int = -1


class Recorder(_torch.TorchDispatchMode):
    """Records the calls of a fake run, and turns them into kernels."""

    supports_higher_order_operators = True

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._alive = list(inputs)  # so that the ids of storages are not reused
        self._outside = {_torch.storage_id(t) for t in inputs}
        self._sizes = {_torch.storage_id(t): t.untyped_storage().nbytes() for t in inputs}
        self._muted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._muted:
            self._note(func, args, kwargs, out)
        return out

    # Calls that are recorded as a whole

    def linear(self, call: Callable[[], Any], x: torch.Tensor, weight: torch.Tensor) -> Any:
        self._muted = True
        try:
            out = call()
        finally:
            self._muted = False
        shape = (1, prod(x.shape[:-1]), weight.shape[0], weight.shape[1])
        self._add([x, weight], [out], _product("matmul", shape, x.dtype, "linear"))
        return out

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The result has the layout of fused attention: position before head."""
        self._muted = True
        try:
            *lead, positions, width = (*q.shape[:-1], v.shape[-1])
            out = torch.empty((*lead[:-1], positions, lead[-1], width), dtype=q.dtype, device=q.device)
            out = out.transpose(-2, -3) if len(lead) > 1 else out.reshape(*lead, positions, width)
            bias = attn_mask if attn_mask is None or attn_mask.dtype != torch.bool else attn_mask.to(q.dtype)
        finally:
            self._muted = False
        if bias is not attn_mask and attn_mask is not None and bias is not None:
            self._add([attn_mask], [bias], None)
        heads = prod(lead)
        flops = 2 * heads * positions * k.shape[-2] * (q.shape[-1] + width)
        kernel = Kernel(
            kind="attention" if attn_mask is None else "masked_attention",
            name="scaled_dot_product_attention",
            flops=flops // 2 if is_causal and positions > 1 else flops,
            dtype=_name(q.dtype),
            # With a single query flash attention splits the keys; the kernel that takes masks does not.
            blocks=heads * -(-positions // 64) * (-(-k.shape[-2] // 512) if attn_mask is None else 1),
            shape=(heads, positions, k.shape[-2], q.shape[-1]),
        )
        self._add([q, k, v, *([bias] if bias is not None else [])], [out], kernel)
        return out

    # All other calls

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given, made = tensors_in((args, kwargs)), tensors_in(out)
        schema = _torch.schema_of(func)
        if schema is None:  # a higher-order operator
            self._add(given, made, Kernel(kind="other", name=str(func), blocks=_blocks(made)))
            return
        library, _, name = schema.name.partition("::")
        if library == "prim" or name in _FREE or _torch.is_view(schema) or not (made or given):
            self._keep(made)
            return
        written = written_tensors(schema, args, kwargs)
        if (how := _described.get(schema.name)) is not None:
            self._add_all(given, made, how(args, kwargs, out))
        elif library in (*NAMESPACES, "c10d_functional") or collective_of(func) is not None:
            self._add(given, made or written, _collective(name, given, args, kwargs))
        elif name in ("_to_copy", "copy_", "fetch", "store") and _crosses(given, made or written):
            target = (made or written)[0]
            kind: Kind = "copy_out" if target.device.type == "cpu" else "copy_in"
            self._add(given, [target], Kernel(kind=kind, name=name, bytes=_bytes(target)))
        elif (kernel := _kernel(func, name, args, kwargs, out)) is not None:
            self._add([t for t in given if all(t is not w for w in written)], made + written, kernel)
        elif name in _KERNELS or library not in ("aten", "prims"):
            self._add(given, made + written, Kernel(kind="other", name=name, blocks=_blocks(made + written)))
        else:
            self._loop(name, given, made, written)

    def _loop(self, name: str, given: _Tensors, made: _Tensors, written: _Tensors) -> None:
        """A loop over elements, which may be fused."""
        targets = [t for t in made if all(t is not w for w in written)] + written
        if not targets:
            return
        call = self._call(given, targets)
        largest = max((t.numel() for t in targets), default=0)
        if name in _GATHERS and given:
            call.reads[_torch.storage_id(given[0])] = sum(map(_bytes, targets))
        elif name in _SCATTERS and written:
            base = _torch.storage_id(written[0])
            largest = max((t.numel() for t in given if _torch.storage_id(t) != base), default=0)
            call.writes[base] = largest * written[0].element_size()
            call.reads.pop(base, None)
            call.closes = True
        elif name in ("copy_", "fill_", "zero_"):
            call.reads.pop(_torch.storage_id(written[0]), None)
        else:
            source = max((_spread(t) for t in given), default=0)
            if name in _ROWWISE:
                call.rows = largest // max(targets[0].shape[-1] if targets[0].dim() else 1, 1)
            elif source > largest:
                call.rows = largest
            largest = max(largest, source)
        call.size = largest

    def _add(self, given: _Tensors, made: _Tensors, kernel: Kernel | None) -> None:
        call = self._call(given, made)
        call.size = max((t.numel() for t in made), default=0)
        if kernel is None:
            return
        if kernel.kind not in ("copy_in", "copy_out", "collective") and not kernel.bytes:
            table = kernel.shape[0] if kernel.name in _GROUPED and kernel.shape else None
            kernel = _with_bytes(kernel, call, _used_share(kernel, given) if table else 1.0, given)
        call.kernels = (kernel,)

    def _add_all(self, given: _Tensors, made: _Tensors, found: Any) -> None:
        call = self._call(given, made)
        call.kernels = (found,) if isinstance(found, Kernel) else tuple(found)

    def _call(self, given: _Tensors, made: _Tensors) -> _Call:
        call = _Call()
        seen: set[Any] = set()
        for t in given:
            place = _torch.storage_id(t)
            view = (place, t.storage_offset(), tuple(t.shape), t.stride())
            if view not in seen:
                seen.add(view)
                call.reads[place] = call.reads.get(place, 0) + _bytes(t)
        for t in made:
            call.writes[_torch.storage_id(t)] = _bytes(t)
        self._keep([*given, *made])
        self._calls.append(call)
        return call

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            self._sizes.setdefault(_torch.storage_id(t), t.untyped_storage().nbytes())
        self._alive += tensors

    # From calls to kernels

    def kernels(self, results: Any) -> tuple[Kernel, ...]:
        """The kernels, in order. `results` are those of the operator."""
        calls, inputs_of = self._calls, self._connect()
        wanted = {_torch.storage_id(t) for t in tensors_in(results)} | self._outside
        users: list[set[int]] = [set() for _ in calls]
        for i, makers in enumerate(inputs_of):
            for m in makers.values():
                users[m].add(i)
        used = self._needed(users, wanted)
        found: list[Kernel] = []
        groups: dict[int, list[int]] = {}
        for i, call in enumerate(calls):
            if i in used and not call.kernels:
                groups.setdefault(call.group, []).append(i)
        for i, call in enumerate(calls):
            if call.kernels:
                found += call.kernels
            elif i in used and i == groups[call.group][-1]:
                found += self._fused(groups[call.group], inputs_of, users, wanted)
        return tuple(found)

    def _connect(self) -> list[dict[int, int]]:
        """For each call, storage -> the call that made it. Groups loops that can be fused."""
        maker: dict[int, int] = {}
        inputs: list[dict[int, int]] = []
        for i, call in enumerate(self._calls):
            touched = call.reads.keys() | (call.writes.keys() if call.closes else set())
            found = {s: maker[s] for s in sorted(touched) if s in maker}
            befores = [self._calls[m] for m in found.values()]
            call.level = max((b.level + bool(b.kernels or b.closes) for b in befores), default=0)
            call.group = i
            for before in befores:
                if not (call.kernels or before.kernels or before.closes) and before.level == call.level:
                    self._calls[self._first(call.group)].group = self._first(before.group)
            inputs.append(found)
            maker |= dict.fromkeys(call.writes, i)
        for call in self._calls:
            call.group = self._first(call.group)
        return inputs

    def _first(self, i: int) -> int:
        """The representative of a call's group."""
        while self._calls[i].group != i:
            i = self._calls[i].group
        return i

    def _needed(self, users: list[set[int]], wanted: set[int]) -> set[int]:
        """Calls whose results are used: a compiler removes the others."""
        used: set[int] = set()
        for i in range(len(self._calls) - 1, -1, -1):
            call = self._calls[i]
            if call.kernels or call.writes.keys() & wanted or users[i] & used:
                used.add(i)
        return used

    def _fused(
        self, members: list[int], inputs_of: list[dict[int, int]], users: list[set[int]], wanted: set[int]
    ) -> list[Kernel]:
        inside, largest = set(members), max(self._calls[i].size for i in members)
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        sizes = set()
        for i in members:
            call = self._calls[i]
            for storage, count in call.reads.items():
                if inputs_of[i].get(storage) not in inside:
                    reads[storage] = min(reads.get(storage, 0) + count, self._sizes[storage])
            used = {s: n for s, n in call.writes.items() if s in wanted or users[i] - inside}
            writes |= used
            sizes |= {call.size} if used else set()
        by_kernels = any(self._calls[u].kernels for i in members for u in users[i])
        if not writes or (largest <= _INLINED and not writes.keys() & wanted and not by_kernels):
            return []
        # Results of different sizes need separate kernels, as queries and keys under rotary embedding do.
        count = max(1, len(sizes))
        rows = [r for i in members if (r := self._calls[i].rows) is not None]
        blocks = max(min(rows), largest // 65536) if rows else -(-largest // 1024)
        total = sum(reads.values()) + sum(writes.values())
        return [Kernel(kind="loop", bytes=total // count, blocks=max(1, blocks))] * count


def _kernel(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Kernel | None:
    """Matmuls, convolutions and attention; None for other calls."""
    if name in _GROUPED:
        a, b = args[0], args[1]
        (length, n), groups, m = b.shape[-2:], b.shape[0] if b.dim() == 3 else 1, a.shape[-2]
        used = max(1, min(groups, m))
        return _product("matmul", (used, -(-m // used), n, length), a.dtype, name, flops=2 * m * n * length)
    count = flop_registry.get(getattr(func, "overloadpacket", func))
    if count is None:
        return None
    flops = int(count(*args, **kwargs, out_val=out))
    first = tensors_in((args, kwargs))[0]
    if name in _CONVOLUTIONS:
        weight, result = args[1], tensors_in(out)[0]
        groups = flops and max(1, result.numel() * weight[0].numel() * 2 // flops) if args[6] else args[8]
        groups = max(1, int(groups))
        outs = result.shape[1]
        shape = (groups, result.numel() // outs, outs // groups, max(1, flops // (2 * result.numel())))
        return _product("convolution", shape, first.dtype, name, flops=flops)
    if "attention" in name:
        q, k = args[0], args[1]
        heads = prod(q.shape[:-2])
        return Kernel(
            kind="attention", name=name, flops=flops, dtype=_name(q.dtype), blocks=heads * -(-q.shape[-2] // 64),
            shape=(heads, q.shape[-2], k.shape[-2], q.shape[-1]),
        )  # fmt: skip
    a, b = [t for t in args[:3] if isinstance(t, torch.Tensor)][-2:] if name in ("addmm", "baddbmm") else args[:2]
    if a.shape[-1] == 1:  # an outer product is a pointwise loop
        return None
    many = a.shape[0] if a.dim() == 3 else 1
    return _product("matmul", (many, a.shape[-2], b.shape[-1], a.shape[-1]), a.dtype, name, flops=flops)


def _product(
    kind: Kind, shape: tuple[int, int, int, int], dtype: torch.dtype, name: str, flops: int | None = None
) -> Kernel:
    many, m, n, k = shape
    side = 64 if kind == "convolution" else 128  # a convolution has few channels, so small tiles
    tiles = many * -(-m // side) * -(-n // side)
    flops = 2 * many * m * n * k if flops is None else flops
    return Kernel(kind=kind, name=name, flops=flops, dtype=_name(dtype), blocks=tiles, shape=shape)


def _collective(name: str, given: list[torch.Tensor], args: Any, kwargs: Any) -> Kernel:
    words = [a for a in (*args, *kwargs.values()) if isinstance(a, str)]
    return Kernel(
        kind="collective",
        name=name.rstrip("_").removesuffix("_coalesced"),
        bytes=sum(map(_bytes, given)),
        dtype=_name(given[0].dtype) if given else "",
        group=words[-1] if words else "",
    )


def _with_bytes(kernel: Kernel, call: _Call, share: float, given: list[torch.Tensor]) -> Kernel:
    reads = dict(call.reads)
    if share < 1.0:  # experts without rows are not read
        table = _torch.storage_id(given[1])
        reads[table] = int(reads[table] * share)
    return replace(kernel, bytes=sum(reads.values()) + sum(call.writes.values()))


def _used_share(kernel: Kernel, given: list[torch.Tensor]) -> float:
    assert kernel.shape is not None
    return kernel.shape[0] / max(given[1].shape[0], 1)


def _crosses(given: _Tensors, made: _Tensors) -> bool:
    """Whether data moves between host and device. A scalar tensor on the host is passed as a kernel argument."""
    places = {t.device.type == "cpu" for t in (*given, *made)}
    return len(places) == 2 and any(t.dim() for t in made)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes in memory: an expanded dim counts once."""
    return _spread(tensor) * tensor.element_size()


def _spread(tensor: torch.Tensor) -> int:
    return prod(int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)


def _blocks(tensors: list[torch.Tensor]) -> int:
    return max(1, max((t.numel() for t in tensors), default=1) // 1024)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
