"""A collective, the additions to its result and the norm after it, fused into one call.

The call runs the graphs of these operators: no weight, epsilon or cast is guessed. On CUDA the all-reduce uses
symmetric memory where the group has it: each rank reads its neighbours' memory. The rest is compiled, to one kernel if
possible. This has not been run on several GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import dynaflow as df
from dynaflow import _torch
from dynaflow.lower.compile_ops import nameless

ADDING = frozenset(("copy_", "add", "add_", "iadd", "sub", "mul", "to", "float", "bfloat16", "half", "type_as"))
"""Calls that may be between a collective and its norm: a residual, a bias, a scale, a cast."""
_VIEWS = ("view", "reshape")
_SMALL = 256 * 1024
"""Bytes up to which the one-shot all-reduce is used: every rank reads all data; the two-shot one sums a share."""
_DTYPES = (torch.float32, torch.bfloat16)
_WORLDS = (2, 4, 8)
"""Group sizes that torch's symmetric-memory all-reduces support."""


def find_chains(ops: Sequence[df.Op], collective: str, norm: str) -> dict[str, tuple[df.Op, ...]]:
    """Returns for each collective, by name: itself, the additions to its result and the norm, if they can be fused.

    `collective`, `norm`: the tags of both.
    """
    found: dict[str, tuple[df.Op, ...]] = {}
    before: dict[int, set[int]] = {}
    for op in ops:
        before[op.index] = {a for direct in op.after for a in (direct, *before[direct])}
    for first in ops:
        chain = [first] if collective in first.tags and first.groups and _is_simple(first) else []
        while chain and norm not in chain[-1].tags:
            known = {*before[first.index], *(op.index for op in chain)}
            user = next((op for op in ops if chain[-1].index in op.after), None)
            if user is None or user.groups or not _is_simple(user) or not known.issuperset(user.after):
                chain = []  # another operator has to run before it
            elif norm in user.tags or ADDING.issuperset(user.functions):
                chain.append(user)
            else:
                chain = []
        if chain:
            found[first.name] = tuple(chain)
    return found


def _is_simple(op: df.Op) -> bool:
    """Whether it can be called with its values alone: sizes that it takes follow from their shapes."""
    nodes = list(op.module.graph.nodes)
    sizes = nodes[: len(op.symbols)]
    follows = all(_is_left_open(user, size) for size in sizes for user in size.users)
    return op.splittable and not op.serial_after and follows and not any(node.op == "get_attr" for node in nodes)


def _is_left_open(node: fx.Node, size: fx.Node) -> bool:
    """Whether the node is a view for which -1 in place of `size` is equivalent."""
    if node.op != "call_method" or node.target not in _VIEWS or node.kwargs:
        return False
    shape: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    others = [n for n in shape if n is not size]
    return len(others) == len(shape) - 1 and all(isinstance(n, int) and n > 0 for n in others)


class Fusions:
    """The fused calls of one scheduler, and the memory that they share with other ranks.

    `compiled`: compile what follows the collective; None: on CUDA only.
    """

    def __init__(self, *, compiled: bool | None = None) -> None:
        self.compiled = compiled
        self.link = Link()
        self._tails: dict[Any, Callable[..., Any]] = {}

    def make(self, ctx: df.ScheduleContext, chain: Sequence[df.Op]) -> ReducedNorm:
        items = [ctx.items(op)[0] for op in chain]
        named = {
            name: value for item in items for name, value in zip(ctx.signature([item])[1], item.op.writes, strict=True)
        }
        results = [named[name] for name in ctx.signature(items)[1]]
        return ReducedNorm(chain, results, self.link, self._tail)

    def _tail(self, tail: fx.GraphModule, device: torch.device) -> Callable[..., Any]:
        """Compiles the graph once for all equal layers."""
        if not (self.compiled or (self.compiled is None and device.type == "cuda")):
            return tail.forward
        key = nameless(tail)
        if key not in self._tails:
            self._tails[key] = torch.compile(tail, fullgraph=True)
        return self._tails[key]


class ReducedNorm:
    """The function that replaces a chain of operators: it has their signature, `ctx.signature`."""

    def __init__(
        self,
        chain: Sequence[df.Op],
        results: Sequence[int],
        link: Link,
        tail: Callable[[fx.GraphModule, torch.device], Callable[..., Any]],
    ) -> None:
        first, *rest = chain
        self.collective = first
        made = list(first.writes)
        self.reads = list(first.reads)
        for op in rest:
            self.reads += [v for v in op.reads if v not in made and v not in self.reads]
            made += op.writes
        self.given = [v for v in self.reads if any(v in op.reads for op in rest)]
        self._graph = _compose(rest, [*first.writes, *self.given], results)
        self._make_tail = tail
        self._tail: Callable[..., Any] | None = None
        self.link = link if self._is_sum() else None

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(self.reads, values, strict=True))
        given = [known[v] for v in self.collective.reads]
        reduced = self.link.sum(given[0], self.collective.groups[0]) if self.link else None
        summed = [reduced] if reduced is not None else self.collective.module(*_open_sizes(self.collective), *given)
        if self._tail is None:
            self._tail = self._make_tail(self._graph, given[0].device)
        results = self._tail(*summed, *(known[v] for v in self.given))
        if reduced is None:
            return results
        # The next all-reduce reuses this memory: results must not share it.
        shared = reduced.untyped_storage().data_ptr()
        return tuple(r.clone() if r.untyped_storage().data_ptr() == shared else r for r in results)

    def _is_sum(self) -> bool:
        """Whether it is an all-reduce (sum) of one tensor, which symmetric memory supports."""
        op = self.collective
        calls = [node for node in op.module.graph.nodes if node.op == "call_function"]
        return op.functions == ("all_reduce", "wait_tensor") and len(calls) == 2 and calls[0].args[1] == "sum"


def _open_sizes(op: df.Op) -> list[int]:
    return [-1] * len(op.symbols)


def _compose(ops: Sequence[df.Op], reads: Sequence[int], results: Sequence[int]) -> fx.GraphModule:
    """Returns one graph for consecutive operators."""
    out = fx.Graph()
    known = {v: out.placeholder(f"v_{i}") for i, v in enumerate(reads)}
    for op in ops:
        given: list[Any] = [*_open_sizes(op), *(known[v] for v in op.reads)]
        env: dict[fx.Node, Any] = {}
        for node in op.module.graph.nodes:
            if node.op == "placeholder":
                env[node] = given[len(env)]
            elif node.op == "output":
                made: Any = node.args[0]
                known |= {v: env[n] for v, n in zip(op.writes, made, strict=True)}
            else:
                env[node] = _copied(out, node, env)
    out.output(tuple(known[v] for v in results))
    return fx.GraphModule({}, out, class_name="Tail")


def _copied(out: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
    """Copies a node as `Graph.node_copy` does, but `env` may map nodes to constants."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    return out.create_node(node.op, node.target, args, kwargs)


class Link:
    """All-reduces through symmetric memory, where the group has it.

    There is one buffer per stream, which later calls on that stream reuse. All ranks make the same decision, because
    they agree on each step of allocating a buffer.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor | None] = {}

    def sum(self, x: Tensor, group: str) -> Tensor | None:
        """Returns the sum, in memory that the next call on this stream reuses; None if it is not possible."""
        differentiated = torch.is_grad_enabled() and x.requires_grad
        if x.device.type != "cuda" or x.dtype not in _DTYPES or not x.numel() or differentiated:
            return None
        nbytes = 1 << (x.nbytes - 1).bit_length()  # few sizes: few buffers
        key = (group, x.device, torch.cuda.current_stream(x.device).cuda_stream, nbytes)
        if key not in self._buffers:
            if torch.cuda.is_current_stream_capturing():  # ranks can't agree during a capture
                return None
            self._buffers[key] = _shared(nbytes, x.device, group)
        buffer = self._buffers[key]
        if buffer is None:
            return None
        mine = buffer[: x.nbytes].view(x.dtype).view(x.shape)
        mine.copy_(x)
        ops = torch.ops.symm_mem
        result: Tensor = (ops.one_shot_all_reduce if x.nbytes <= _SMALL else ops.two_shot_all_reduce_)(
            mine, "sum", group
        )
        return result


def _shared(nbytes: int, device: torch.device, group: str) -> Tensor | None:
    """Allocates memory that all ranks of the group can access. None on all ranks if it fails on one."""
    if len(_torch.ranks_of([group])) not in _WORLDS:
        return None
    buffer: Tensor | None = None
    for step in (lambda _: _torch.symmetric_memory(nbytes, device), lambda made: _torch.rendezvous(made, group)):
        try:
            buffer = step(buffer)
        except RuntimeError:
            buffer = None
        able = torch.tensor([buffer is not None], dtype=torch.int32, device=device)
        able = torch.ops._c10d_functional.all_reduce(able, "min", group)
        if not torch.ops._c10d_functional.wait_tensor(able).item():
            return None
    return buffer
