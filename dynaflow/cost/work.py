"""What one execution of an operator does: arithmetic, memory traffic, copies, communication. Needs no device.

The operator runs on fake tensors with concrete sizes, and `kernels.Recorder` observes its aten calls. Equal operators
share one run.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from dynaflow import _torch
from dynaflow.capture.captured_graph import Shape, concrete
from dynaflow.core.fx_graphs import canonical
from dynaflow.cost.kernels import Kernel, Recorder
from dynaflow.partition.op_graph import Op, OpGraph

Sizes = dict[sympy.Symbol, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The kernels of one execution, in order, and sums over them for a roofline model."""

    parts: tuple[Kernel, ...] = ()
    guessed: bool = False
    """The operator could not run on fake tensors: only its inputs and outputs are counted."""

    @property
    def flops(self) -> int:
        return sum(p.flops for p in self.parts)

    @property
    def bytes(self) -> int:
        """Device memory traffic, with loops fused."""
        return sum(p.bytes for p in self.parts if p.kind not in ("copy_in", "copy_out", "collective"))

    @property
    def copied_in(self) -> int:
        """Bytes from the host to the device."""
        return sum(p.bytes for p in self.parts if p.kind == "copy_in")

    @property
    def copied_out(self) -> int:
        return sum(p.bytes for p in self.parts if p.kind == "copy_out")

    @property
    def collectives(self) -> tuple[tuple[str, int, str], ...]:
        """(name, bytes, group) of each collective."""
        return tuple((p.name, p.bytes, p.group) for p in self.parts if p.kind == "collective")

    @property
    def kernels(self) -> int:
        """Number of kernels to launch."""
        return len(self.parts)

    @property
    def dtype(self) -> str:
        """The widest dtype of the matmuls."""
        return max((p.dtype for p in self.parts if p.flops), key=lambda d: getattr(torch, d).itemsize, default="")

    @property
    def tiles(self) -> int:
        """Number of thread blocks of the largest kernel."""
        largest = max(self.parts, key=lambda p: (p.flops, p.bytes), default=None)
        return largest.blocks if largest else 0


def work_of(graph: OpGraph, op: Op, rows: int, sizes: Mapping[sympy.Symbol, int] | None = None) -> Work:
    """The work of `op` for `rows` rows of the batch. `sizes`: values of other symbols, where they differ from the
    capture."""
    known = _known.setdefault(graph, {})
    values = concrete_sizes(graph, rows, sizes)
    free = sorted({s for s in _symbols(graph, op) if s in values}, key=str)
    key = (operator_key(graph, op), tuple(values[s] for s in free))
    if key not in known:
        known[key] = _run(graph, op, values)
    return known[key]


_known: weakref.WeakKeyDictionary[OpGraph, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Keys and work of the operators of each graph that is alive."""


def concrete_sizes(graph: OpGraph, rows: int, sizes: Mapping[sympy.Symbol, int] | None = None) -> Sizes:
    """The value of each symbol for `rows` rows. Requests keep their mean length of the capture."""
    values = {**graph.graph.hints, **(sizes or {})}
    if not graph.batch_axes:
        return values
    before = max((values.get(s, rows) for s in graph.batch_axes[0]), default=rows)
    for axis in graph.batch_axes[1:]:
        values |= {s: max(1, round(values.get(s, 1) * rows / before)) for s in axis}
    return values | {s: rows for s in graph.batch_axes[0]}


def operator_key(graph: OpGraph, op: Op) -> str:
    """Equal for operators that compute the same on inputs of the same shapes, for any batch, and in any process."""
    known = _known.setdefault(graph, {})
    if op.index not in known:
        known[op.index] = hashlib.sha256(operator_text(graph, op).encode()).hexdigest()[:16]
    return known[op.index]


def operator_text(graph: OpGraph, op: Op) -> str:
    """The operator without its names: nodes by number, batch symbols by axis, other sizes as in the capture."""
    names = {s: sympy.Symbol(f"rows{i}") for i, axis in enumerate(graph.batch_axes) for s in axis}
    values = {s: sympy.Integer(n) for s, n in graph.graph.hints.items() if s not in names}

    def size(expr: sympy.Expr) -> str:
        return str(expr.xreplace({**values, **names})) if expr.free_symbols else str(expr)

    def shape(found: Shape | None) -> str:
        if found is None:
            return "number"
        sizes, strides = ",".join(map(size, found.size)), ",".join(map(size, found.stride))
        return f"{found.dtype} {found.device.type} [{sizes}] [{strides}]"

    lines = [f"takes {size(s)}" for s in op.symbols] + [f"reads {shape(graph.values[v].shape)}" for v in op.reads]
    nodes = canonical(op.module.graph, partial(_target, op.module))
    lines += [f"{kind} {target} {args}" for kind, target, args in nodes if kind != "placeholder"]
    return "\n".join(lines)


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "get_attr":  # a constant: only its size matters for the cost
        held: Any = module
        for name in str(target).split("."):
            held = getattr(held, name)
        return f"{held.dtype} {tuple(held.shape)}" if isinstance(held, torch.Tensor) else type(held).__name__
    if isinstance(target, str):
        return target
    if isinstance(target, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def _symbols(graph: OpGraph, op: Op) -> set[sympy.Symbol]:
    shapes = [shape for v in op.reads if (shape := graph.values[v].shape) is not None]
    sizes = [e for shape in shapes for e in (*shape.size, *shape.stride)]
    return {s for e in (*sizes, *op.symbols) for s in e.free_symbols}


# The run on fake tensors


def _run(graph: OpGraph, op: Op, values: Sizes) -> Work:
    grad = torch.is_grad_enabled()
    try:
        # In inference mode calls would not be decomposed.
        with torch.inference_mode(False), _torch.concrete_fake_mode(), torch.no_grad():
            given = [concrete(s, values) for s in op.symbols] + [_given(graph, v, values) for v in op.reads]
            recorder = Recorder([g for g in given if isinstance(g, torch.Tensor)])
            results = _Interpreter(op.module, recorder).run(*given)
            return Work(parts=recorder.kernels(results))
    except Exception:  # data-dependent sizes, a custom operator without a fake: count inputs and outputs
        return Work(parts=(_crossing(graph, op, values),), guessed=True)
    finally:
        torch.set_grad_enabled(grad)  # the operator may contain nodes that switch it


def _given(graph: OpGraph, value: int, values: Sizes) -> Any:
    shape = graph.values[value].shape
    if shape is None:
        given = graph.values[value].input
        symbol = graph.graph.inputs[given].symbol if given is not None else None
        return concrete(symbol, values) if symbol is not None else 1
    return shape.empty(values)


def _crossing(graph: OpGraph, op: Op, values: Sizes) -> Kernel:
    total = 0
    for v in (*op.reads, *op.writes):
        shape = graph.values[v].shape
        sizes = [concrete(s, values) for s in shape.size if s.free_symbols <= values.keys()] if shape else []
        count = 1
        for size in sizes:
            count *= size
        total += count * (shape.dtype.itemsize if shape else 0)
    return Kernel(kind="other", name=op.name, bytes=total, blocks=max(1, total // 4096))


class _Interpreter(fx.Interpreter):
    """Runs an operator. Linear layers and attention are recorded as the model calls them, not decomposed."""

    def __init__(self, module: fx.GraphModule, recorder: Any) -> None:
        super().__init__(module)
        self.recorder = recorder

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.recorder:
            return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _torch.LINEAR:
            return self.recorder.linear(lambda: target(*args, **kwargs), *args[:2])
        if target is torch.nn.functional.scaled_dot_product_attention:
            return self.recorder.attention(*args, **kwargs)
        return super().call_function(target, args, kwargs)
