"""Where a plan's values live: in buffers of one arena, planned by happens-before.

A value whose maker can write into given memory gets a buffer. Parts that are made apart and used together get
slices of one buffer, so joining them costs nothing. Two buffers may share memory if every task that touches one is
certain to have ended before any task that writes the other starts, whichever lanes they run on. Results are not
for the arena, which the next call uses again: they get memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynaflow.capture.node_info import addresses_memory
from dynaflow.lower.fuse_tasks import Parts, Unit, are_neighbours
from dynaflow.lower.out_variants import is_product, result_node
from dynaflow.partition.op_graph import Op, OpGraph, Value

ALIGNMENT = 512
"""What the CUDA allocator gives, so that kernels find in an arena what they find elsewhere."""


@dataclass(slots=True, kw_only=True, eq=False)
class Buffer:
    """Memory for some micro-batches of a value."""

    name: str
    value: int
    parts: Parts
    own: bool
    """Memory of its own, made anew for each run, since it is handed out: to the caller, or to a user's function."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    nbytes: int = 0
    offset: int = 0
    """In the arena."""
    writers: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    """Steps that touch it, the writers included."""


def choose_buffers(units: Sequence[Unit], graph: OpGraph, everything: Parts) -> dict[int, list[Buffer]]:
    """For each value that lives in buffers: those that hold its micro-batches."""
    if graph.graph.grad:  # autograd wants results that it can follow
        return {}
    makers: dict[int, list[Unit]] = {}
    wanted: dict[int, list[Parts]] = {v: [everything] for v in graph.outputs}
    lent: set[int] = set()  # values whose memory may live on under another name
    elsewhere: set[int] = set()  # values of which a user's function makes a part, or all, in memory of its own
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
    # In training an arena would be there from the start of a pass, when the most is saved: what is made late waits.
    kept = graph.graph.phase == "inference"
    found: dict[int, list[Buffer]] = {}
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
            found[v] = [Buffer(name=f"b{v}", value=v, parts=everything, own=result or v in lent)]
        elif kept and not joined and not result and v not in lent and value.out_variant == "pointwise":
            found[v] = [
                Buffer(name=f"b{v}" + "".join(f"_{m}" for m in p if p != everything), value=v, parts=p, own=False)
                for p in pieces
            ]
    return found


def _addresses_memory(op: Op) -> bool:
    """Which would be that of another value, in an arena."""
    return any(map(addresses_memory, op.module.graph.nodes))


def _shared_storages(graph: OpGraph) -> set[int | None]:
    """Storages with several values over them: those must stay one memory."""
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


def plan_arena(buffers: Sequence[Buffer], before: Sequence[int]) -> int:
    """Gives each buffer its offset, the largest first, and returns the arena's size.

    `before[s]` is a bit mask of the steps that are certain to have ended when step s starts.
    """

    users = {buffer: sum(1 << u for u in buffer.users) for buffer in buffers}

    def ends_before(one: Buffer, other: Buffer) -> bool:
        return all(users[one] & ~before[w] == 0 for w in other.writers)

    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.nbytes):
        others = sorted(
            (b for b in placed if not ends_before(b, buffer) and not ends_before(buffer, b)), key=lambda b: b.offset
        )
        offset = 0
        for other in others:
            if offset + buffer.nbytes <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.nbytes))
        buffer.offset = offset
        placed.append(buffer)
    return max((b.offset + b.nbytes for b in placed), default=0)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
