"""Memory planning: which values get buffers, and where the buffers lie in one arena.

A value gets a buffer if its operator can write into given memory. Micro-batches that are made separately and used
together get slices of one buffer, so joining them costs nothing. Two buffers may share memory if every task that
accesses one is certain to have ended before any task that writes the other starts, on whichever lanes they run.
Results get memory of their own, since the next call uses the arena again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import NamedTuple

from dynaflow.capture.node_info import addresses_memory
from dynaflow.lower.fuse_tasks import Parts, Unit, are_neighbours
from dynaflow.lower.ir import Buffer, Call, Instruction, New, Program, Var
from dynaflow.lower.out_variants import is_product, result_node
from dynaflow.partition.op_graph import Op, OpGraph, Value

ALIGNMENT = 512
"""The alignment of the CUDA allocator, which kernels may rely on."""


class BufferChoice(NamedTuple):
    """The buffers of a value."""

    parts: list[Parts]
    """For each buffer, its micro-batches."""
    own: bool


def choose_buffers(units: Sequence[Unit], graph: OpGraph, everything: Parts) -> dict[int, BufferChoice]:
    """The values that get buffers."""
    if graph.graph.grad:  # autograd must see what makes a result
        return {}
    makers: dict[int, list[Unit]] = {}
    wanted: dict[int, list[Parts]] = {v: [everything] for v in graph.outputs}
    lent: set[int] = set()  # values that may be aliased by others
    elsewhere: set[int] = set()  # values that a user's function makes, at least in part
    for unit in units:
        for op in unit.ops:
            if unit.fused:
                elsewhere.update(op.writes)
                lent.update(op.reads)
            elif not all(graph.values[v].fresh for v in op.writes) or _addresses_memory(op):
                lent.update(op.reads)
        if not unit.fused:
            for v in unit.writes:
                makers.setdefault(v, []).append(unit)
            for v in unit.reads:
                wanted.setdefault(v, []).append(unit.parts)
    shared = _shared_storages(graph)
    # Not in training: an arena would be allocated at the start of a pass, when saved activations use the most memory.
    use_arena = graph.graph.phase == "inference"
    found: dict[int, BufferChoice] = {}
    for v, made_by in makers.items():
        value = graph.values[v]
        if v in elsewhere or value.storage in shared or not _can_be_given(value, made_by):
            continue
        pieces = [unit.parts for unit in made_by]
        if not all(map(are_neighbours, pieces)):
            continue
        joined = any(sum(bool(set(p) & set(parts)) for p in pieces) > 1 for parts in wanted.get(v, []))
        result = v in graph.outputs
        if joined and value.carries_batch:
            found[v] = BufferChoice([everything], own=result or v in lent)
        elif use_arena and not joined and not result and v not in lent and value.out_variant == "pointwise":
            found[v] = BufferChoice(pieces, own=False)
    return found


def _addresses_memory(op: Op) -> bool:
    """Whether it uses memory outside of its tensor, which in an arena belongs to other values."""
    return any(map(addresses_memory, op.module.graph.nodes))


def _shared_storages(graph: OpGraph) -> set[int | None]:
    """Storages of several values, which must stay in one memory."""
    seen: set[int | None] = set()
    return {value.storage for value in graph.values if value.storage in seen or seen.add(value.storage)}  # type: ignore[func-returns-value]


def _can_be_given(value: Value, made_by: list[Unit]) -> bool:
    if value.shape is None or value.out_variant is None or value.merged:
        return False
    if sum(dim is not None for dim in value.dims) > 1:
        return False
    if value.shape.requires_grad:  # a region of the model has gradients on
        return False
    if value.out_variant == "matmul":  # its out-variant wants rows in one block
        products = all(is_product(result_node(u.module, u.writes.index(value.index))) for u in made_by)
        return products and all(dim in (0, None) for dim in value.dims)
    return True


def place_buffers(program: Program) -> Program:
    """Third pass of lowering: assigns memory to buffers.

    Contract
        Takes a Program with liveness; returns it with memory for every buffer and slice of one:
        an allocation in the code, or a view of the arena. Nothing else changes.
        Two buffers share bytes of the arena only if all users of one are certain to have ended before any writer of
        the other starts (`plan_arena`).
    """
    users: dict[Var, set[int]] = {}
    writers: dict[Var, set[int]] = {}
    for s, step in enumerate(program.steps):
        for var in step.reads:
            users.setdefault(var.root, set()).add(s)
        for call in step.needs:
            if isinstance(call, Call):
                for var in call.into:
                    writers.setdefault(var.root, set()).add(s)
    for buffer in program.buffers:
        if buffer.own:
            program = _allocate(program, buffer, writers[buffer.var])
    inner = [b for b in program.buffers if not b.own]
    uses = [Use(b.nbytes, frozenset(writers[b.var]), frozenset(users[b.var])) for b in inner]
    offsets, nbytes = plan_arena(uses, program.happens_before)
    views = {b.var: replace(b.view, offset=offset) for b, offset in zip(inner, offsets, strict=True)}
    for narrow in program.buffer_slices:
        if narrow.base in views:
            view = views[narrow.base]
            for dim, start, length in narrow.cuts:
                assert isinstance(start, int) and isinstance(length, int), "elastic programs have no buffers"
                view = view.narrow(dim, start, length)
            views[narrow.out] = view
    return replace(program, views=tuple(views.items()), arena_bytes=nbytes)


def _allocate(program: Program, buffer: Buffer, writers: set[int]) -> Program:
    """Memory of its own: allocated as late as is safe, to keep the peak low."""
    slices = [narrow for narrow in program.buffer_slices if narrow.base is buffer.var]
    made: tuple[Instruction, ...] = (New(out=buffer.var, new=buffer.new), *slices)
    if program.partitioned or any(program.steps[w].lane != program.lanes[0] for w in writers):
        # The allocator may reuse what the caller's lane has just freed: another lane must not write to it yet.
        return replace(program, start=made + program.start)
    steps = list(program.steps)
    first = min(writers)
    steps[first] = replace(steps[first], before=made + steps[first].before)
    return replace(program, steps=tuple(steps))


class Use(NamedTuple):
    """A buffer to be placed in the arena, and the steps that touch it."""

    nbytes: int
    writers: frozenset[int]
    users: frozenset[int]
    """The writers included."""


def plan_arena(buffers: Sequence[Use], before: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each buffer, and the arena's size. The largest are placed first, each at the first gap that fits.

    `before[s]` is a bit mask of the steps that are certain to have ended when step s starts.
    """
    users = [sum(1 << u for u in buffer.users) for buffer in buffers]
    # What has ended before any of its writers starts.
    ended = [reduce(and_, (before[w] for w in buffer.writers)) for buffer in buffers]

    def ends_before(one: int, other: int) -> bool:
        return users[one] & ~ended[other] == 0

    offsets = [0] * len(buffers)
    placed: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i].nbytes):
        alive = [j for j in placed if not ends_before(j, i) and not ends_before(i, j)]
        for j in sorted(alive, key=offsets.__getitem__):
            if offsets[i] + buffers[i].nbytes <= offsets[j]:
                break
            offsets[i] = max(offsets[i], _aligned(offsets[j] + buffers[j].nbytes))
        placed.append(i)
    return offsets, max((offset + b.nbytes for offset, b in zip(offsets, buffers, strict=True)), default=0)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
