"""Ranks, process groups and their store; DTensors and their sharding rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_STRATEGIES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
_MOST_PLACEMENTS = 300


def propagate_sharding(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim_of: Callable[[torch.Tensor], int | None],
) -> SimpleNamespace:
    """Asks DTensor's sharding rules. Returns `shards`, the dim on which each output is sharded (None if it is not, or
    not only), and `changes`, the arguments that DTensor would replace, each with its replacement. Seen on 2.11 and
    2.13."""
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.utils._python_dispatch import _disable_current_modes

    def spec(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dim = dim_of(value)
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            return DTensorSpec(mesh, (Replicate() if dim is None else Shard(dim),), tensor_meta=meta)
        if isinstance(value, list | tuple):
            return type(value)(spec(member) for member in value)
        return value

    def changes(before: Any, after: Any) -> list[tuple[Any, Any]]:
        if isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec):
            return [] if before.placements == after.placements else [(before, after)]
        nested = isinstance(before, list | tuple) and isinstance(after, list | tuple)
        nested = nested and len(before) == len(after)
        if nested and any(isinstance(member, DTensorSpec) for member in before):
            return [pair for b, a in zip(before, after, strict=True) for pair in changes(b, a)]
        same = (list(before) == list(after)) if nested else (before is after or before == after)
        return [] if same else [(before, after)]

    def placements(schema: Any) -> list[tuple[Any, ...]]:
        """The given placements, and all replicated."""
        given = tree_leaves([*schema.args_schema, *schema.kwargs_schema.values()])
        specs = [leaf if isinstance(leaf, DTensorSpec) else None for leaf in given]
        return [
            tuple(s and s.placements[0] for s in specs),
            tuple(s and Replicate() for s in specs),
        ]

    def shard(output: Any) -> int | None:
        (placement,) = output.placements
        return placement.dim if type(placement) is Shard else None

    # DTensor runs the call on fake tensors: hide that from the caller's modes.
    with _disable_current_modes():
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
        tables = DTensor._op_dispatcher.sharding_propagator
        propagator = type(tables)()
        for name, table in vars(tables).items():
            if isinstance(table, dict):
                setattr(propagator, name, dict(table))
        info = propagator.op_to_schema_info.get(func)
        if info is None:
            info = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(func)
        schema = OpSchema(func, spec(tuple(args)), {k: spec(v) for k, v in kwargs.items()}, schema_info=info)
        # DTensor tries all combinations of placements on an operator's decomposition, which takes hours for a list of
        # tensors. Restrict it to the given ones.
        decomposed: Any = getattr(propagator, "decomp_strategy", None)
        if decomposed is not None:
            decomposed._get_candidate_placements = placements
        elif not any(func in table for name, table in vars(propagator).items() if name in _STRATEGIES):  # torch 2.11
            count = prod(value.dim() + 1 for value in tree_leaves([*args, *kwargs.values()])
                         if isinstance(value, torch.Tensor))  # fmt: skip
            if count > _MOST_PLACEMENTS:
                raise NotImplementedError(f"there are {count} ways to shard its arguments")
        found = propagator.propagate_op_sharding_non_cached(schema)
    wanted = found.redistribute_schema
    pairs: list[tuple[Any, Any]] = []
    if wanted is not None:
        pairs = changes(schema.args_schema, wanted.args_schema) + changes(schema.op, wanted.op)
    elif found.needs_redistribute:
        pairs = [(schema, None)]
    outputs: Any = found.output_spec
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    return SimpleNamespace(shards=[shard(output) for output in outputs if output is not None], changes=pairs)


def rank() -> int:
    return torch.distributed.get_rank()


def ranks_of(groups: Sequence[str]) -> tuple[int, ...]:
    """The global ranks of process groups given by name ("*": all); empty if torch.distributed is not initialized.

    Seen on 2.11 and 2.13.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    if not (dist.is_available() and dist.is_initialized()):
        return ()
    found: set[int] = set()
    for name in groups:
        if name == "*":
            return tuple(range(dist.get_world_size()))
        found.update(dist.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]
    return tuple(sorted(found))


def exchange_texts(prefix: str, mine: int, ranks: Sequence[int], said: str, patience: timedelta) -> dict[int, str]:
    """Writes a text to the store of the default process group, and returns the texts that the ranks wrote in time.

    Seen on 2.11 and 2.13.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"{prefix}/{mine}", said)
    heard: dict[int, str] = {}
    for rank in ranks:
        with contextlib.suppress(torch.distributed.DistStoreError):  # timed out
            store.wait([f"{prefix}/{rank}"], patience)
            heard[rank] = store.get(f"{prefix}/{rank}").decode()
    return heard


def shard_of(tensor: Any) -> torch.Tensor | None:
    """The local shard of a DTensor; None for anything else. Seen on 2.11 and 2.13."""
    if type(tensor).__name__ not in ("DTensor", "Parameter") or not torch.distributed.is_available():
        return None
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, torch.Tensor) else None


def symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Symmetric memory, which other ranks can map. From 2.13's source; not run, as that takes several GPUs."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(nbytes, dtype=torch.uint8, device=device)


def rendezvous(buffer: torch.Tensor | None, group: str) -> torch.Tensor:
    """Maps the group's symmetric memory on each rank. From 2.13's source; not run."""
    import torch.distributed._symmetric_memory as symmetric

    assert buffer is not None
    symmetric.rendezvous(buffer, group)  # type: ignore[arg-type]
    return buffer
