"""vLLM's batch, cut: the attention metadata, slot mappings and forward context of some of its tokens.

vLLM tells its attention layers what to do by a context around the forward pass, for the batch as a whole. A micro-batch
needs one of its own. It is built as vLLM builds the whole one: the common metadata are cut field by field, between
requests or inside of a long prompt, and handed to a metadata builder of the micro-batch's own, whose buffers nobody
else writes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from dynaflow.errors import DynaFlowError

PIECE = 64
"""A prompt may be cut wherever so many of its tokens are complete."""
PARTS = 15
"""Into so many a step may be cut: each has builders of metadata of its own, beside vLLM's."""

_STARTS = ("query_start_loc", "query_start_loc_cpu")
_BY_TOKEN = ("slot_mapping", "positions")
_CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
"""What the metadata work out for themselves when they are asked."""
_KEPT = ("max_seq_len", "causal")
"""Bounds, and what is the same for all requests."""
_SET = ("num_reqs", "num_actual_tokens", "max_query_len")
_LENGTHS = ("seq_lens", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")
"""What a request has with the tokens of this step: less, if some of them are in a later part."""
_COMPUTED = ("_num_computed_tokens_cpu",)
"""What it had before: more, if some tokens are in an earlier part."""
_UNPARTED = ("is_prefilling", "block_table_tensor", "req_idx", "rswa_prefix_lens", *_CACHES)
"""The same for all parts of a request. Of a field that is none of these, parts of a request are not known."""

_BY_REQUEST = (
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "dcp_local_seq_lens_cpu_upper_bound",
    "replayssm_decode_base_cpu",
)
"""One entry a request, and who knows what for parts of it."""

_Built = tuple[Any, str, Any, dict[str, Any]]
"""The group of layers whose builder made some metadata, how, from which common metadata, and with what else."""


def remember_builds(group_class: Any, wanted: Callable[[Any], bool]) -> None:
    """From now on, where a configuration wants us, groups of attention layers have builders for micro-batches, and
    metadata know what made them."""
    create = group_class.create_metadata_builders
    if getattr(create, "_dynaflow", False):
        return

    def create_metadata_builders(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not wanted(vllm_config):
            create(self, vllm_config, *args, **kwargs)
            return
        kwargs["num_metadata_builders"] = max(1 + PARTS, kwargs.get("num_metadata_builders", 1))
        create(self, vllm_config, *args, **kwargs)
        first = self.metadata_builders[0]
        for name in ("build", "build_for_cudagraph_capture"):
            if hasattr(first, name):
                setattr(first, name, _noting(getattr(first, name), name, self))

    create_metadata_builders._dynaflow = True  # type: ignore[attr-defined]
    group_class.create_metadata_builders = create_metadata_builders


def remember_tables(table_class: Any) -> None:
    """From now on, block tables on the device know their copy on the host, its rows, and the tokens of a block."""
    get = table_class.get_device_tensor
    if getattr(get, "_dynaflow", False):
        return

    def get_device_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        table = get(self, *args, **kwargs)
        ranks = getattr(self, "dcp_world_size", 1) * getattr(self, "pcp_world_size", 1)
        table._dynaflow_host = (self.get_numpy_array(), None, self.block_size * ranks)
        return table

    get_device_tensor._dynaflow = True  # type: ignore[attr-defined]
    table_class.get_device_tensor = get_device_tensor


def remember_new_tables(runner_class: Any, tables_class: Any) -> None:
    """The same for vLLM's newer runner. It has its tables on the device alone: a copy is kept beside them."""
    append, prepare = tables_class.append_block_ids, runner_class.prepare_attn
    if getattr(prepare, "_dynaflow", False):
        return

    def append_block_ids(self: Any, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        if not hasattr(self, "_dynaflow_hosts"):
            self._dynaflow_hosts = [np.zeros(tuple(table.gpu.shape), dtype=np.int32) for table in self.block_tables]
        for i, (host, blocks) in enumerate(zip(self._dynaflow_hosts, new_block_ids)):
            # vLLM 0.26 counts the blocks of its kernels, of which one of the cache's may have several.
            each = self.blocks_per_kv_block[i] if hasattr(self, "blocks_per_kv_block") else 1
            start = 0 if overwrite else int(self.num_blocks.np[i, req_index]) // each
            host[req_index, start : start + len(blocks)] = blocks
        append(self, req_index, new_block_ids, overwrite)

    def prepare_attn(self: Any, input_batch: Any) -> Any:
        tables, slots = prepare(self, input_batch)
        own = self.block_tables
        if self.pcp_manager is None and hasattr(own, "_dynaflow_hosts"):
            for table, host, block in zip(tables, own._dynaflow_hosts, own.block_sizes):
                table._dynaflow_host = (host, input_batch.idx_mapping_np, block * own.cp_size)
        return tables, slots

    prepare_attn._dynaflow = True  # type: ignore[attr-defined]
    tables_class.append_block_ids, runner_class.prepare_attn = append_block_ids, prepare_attn


def _noting(build: Any, name: str, group: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        made = build(*args, **kwargs)
        common = next((a for a in (*args, *kwargs.values()) if hasattr(a, "query_start_loc_cpu")), None)
        others = {k: v for k, v in kwargs.items() if k not in ("common_prefix_len", "common_attn_metadata")}
        with contextlib.suppress(AttributeError):  # without it, the batch stays whole
            object.__setattr__(made, "_dynaflow_built", (group, name, common, others))
        return made

    return noted


class Step:
    """One forward pass of vLLM: what its context says, for the whole batch and for parts of it."""

    now: ClassVar[Step | None] = None
    """The one under way: as vLLM's forward context, a global, since lanes may run in threads of their own."""

    def __init__(self, context: Any, rows: int) -> None:
        self.context, self.rows = context, rows
        self.why_whole = ""
        """Why this batch can't be cut, if it can't."""
        self.requests: list[int] = []
        """The number of tokens of each, or of each piece of a long one; the last has the padding, too."""
        self.phase = ""
        """"prefill", "decode" or "mixed", if it can be cut."""
        self.parts: dict[tuple[int, int], Any] = {}
        """By first and last token: the forward contexts of the parts that were asked for."""
        self._lock = threading.RLock()
        self._built = self._find_built()
        if not self.why_whole:
            starts = self._common.query_start_loc_cpu.tolist()
            longest = PIECE if all(_can_part(common) for _, _, common, _ in self._built.values()) else rows
            lengths = [b - a for a, b in itertools.pairwise(starts) if b > a]  # without requests that are padding, too
            self.phase = "decode" if max(lengths) == 1 else "mixed" if min(lengths) == 1 else "prefill"
            self.requests = [n for length in lengths for n in _pieces(length, longest)]
            self.requests[-1] += rows - starts[-1]

    def _find_built(self) -> dict[int, _Built]:
        """By metadata: how they were built."""
        layers = getattr(self.context, "attn_metadata", None)
        if not layers or not isinstance(layers, dict):
            self.why_whole = "there is no attention metadata: a profile run"
            return {}
        found = {id(m): getattr(m, "_dynaflow_built", None) for m in layers.values()}
        if any(built is None for built in found.values()):
            self.why_whole = "attention metadata of unknown origin"
            return {}
        built = {key: b for key, b in found.items() if b is not None}
        for group, _, common, _ in built.values():
            self.why_whole = self.why_whole or _uncuttable(common) or _entangled(common, group)
        return built

    @property
    def _common(self) -> Any:
        return next(iter(self._built.values()))[2]

    @contextlib.contextmanager
    def entered(self, start: int, stop: int) -> Iterator[None]:
        """vLLM's forward context is that of these tokens. One thread at a time: it is a global of vLLM's."""
        if (start, stop) == (0, self.rows):
            yield
            return
        from vllm.forward_context import override_forward_context

        with self._lock:
            if (start, stop) not in self.parts:
                self.parts[start, stop] = self._part(start, stop)
            with override_forward_context(self.parts[start, stop]):
                yield

    def _part(self, start: int, stop: int) -> Any:
        ends = [0, *itertools.accumulate(self.requests)]
        if start not in ends or stop not in ends:
            raise DynaFlowError(
                f"vLLM's batch can't be cut into tokens {start} to {stop}: requests end at {ends[1:]}",
                advice="cut at request boundaries: ctx.split(n) does",
            )
        builder = 1 + len(self.parts)
        if builder > PARTS:
            raise DynaFlowError(f"vLLM's batch is cut into more than {PARTS} parts", advice="split it into fewer")
        made: dict[int, Any] = {}
        for key, (group, how, common, others) in self._built.items():
            # In a capture all of this is captured, too: a replay cuts what vLLM has written to its buffers by then.
            part = cut(common, start, stop)
            build = getattr(group.get_metadata_builder(builder), how)
            made[key] = build(0, part, **others) if how == "build" else build(part)
        return dataclasses.replace(
            self.context,
            attn_metadata={name: made[id(m)] for name, m in self.context.attn_metadata.items()},
            slot_mapping={name: s[start:stop] for name, s in (self.context.slot_mapping or {}).items()},
        )


def _pieces(tokens: int, longest: int) -> list[int]:
    """A request of so many tokens, as pieces between which it may be cut."""
    count = max(1, tokens // longest)
    return [longest] * (count - 1) + [tokens - longest * (count - 1)]


def _can_part(common: Any) -> bool:
    """Is it known how to cut inside of a request?"""
    known = (*_STARTS, *_BY_TOKEN, *_KEPT, *_SET, *_LENGTHS, *_COMPUTED, *_UNPARTED)
    return all(getattr(common, f.name) is None or f.name in known for f in dataclasses.fields(common))


def _uncuttable(common: Any) -> str:
    """Which field of the common metadata nobody here knows how to cut; or that there is nothing to cut."""
    if not common.query_start_loc_cpu[-1]:
        return "there is no token but padding"
    known = (*_STARTS, *_BY_TOKEN, *_KEPT, *_SET, *_LENGTHS, *_COMPUTED, *_UNPARTED, *_BY_REQUEST)
    for field in dataclasses.fields(common):
        value = getattr(common, field.name)
        by_request = field.name in _KEPT and isinstance(value, torch.Tensor)
        if value is not None and (field.name not in known or by_request):
            return f"attention metadata have a {field.name}"
    return ""


def _entangled(common: Any, group: Any) -> str:
    """Whether a request reads keys and values that another one writes in this very step.

    vLLM takes a block for cached as soon as its tokens are scheduled, so a request that comes in the same step and
    begins alike reads it. The batch as a whole writes before it reads; parts of it would not.
    """
    fresh = common.is_prefilling is not None and bool(common.is_prefilling.any())
    if common.max_query_len == 1 and not fresh:
        return ""  # all are being answered: what they read was there before
    if not group.get_metadata_builder(0).vllm_config.cache_config.enable_prefix_caching:
        return ""
    host, rows, block = getattr(common.block_table_tensor, "_dynaflow_host", (None, None, 1))
    if host is None or common.seq_lens_cpu_upper_bound is None:
        return "block tables of unknown origin"
    lengths = common.query_start_loc_cpu.diff().numpy()
    rows = np.arange(len(lengths)) if rows is None else rows
    lengths = lengths[: len(rows), None]
    ends = common.seq_lens_cpu_upper_bound.numpy()[: len(rows), None]
    first = (ends - lengths) // block
    columns = np.arange(-(-int(ends.max()) // block))
    table = host[rows, : len(columns)]
    written = np.zeros(int(table.max()) + 1, dtype=bool)
    written[table[(columns >= first) & (columns * block < ends) & (lengths > 0)]] = True
    return "a request reads what another one writes" if written[table[columns < first]].any() else ""


def cut(common: Any, start: int, stop: int) -> Any:
    """Common attention metadata of the tokens from `start` to `stop`, and of the requests that these belong to."""
    starts = common.query_start_loc_cpu.tolist()
    first = bisect.bisect_right(starts, start) - 1
    end = bisect.bisect_left(starts, stop) if stop < starts[-1] else common.num_reqs
    earlier, later = start - starts[first], max(0, starts[end] - stop)
    taken: dict[str, Any] = {}
    for field in dataclasses.fields(common):
        value = getattr(common, field.name)
        if value is None or field.name in _KEPT or field.name in _SET:
            continue
        if field.name in _CACHES:
            taken[field.name] = None
        elif field.name in _STARTS:
            found = value[first : end + 1]
            taken[field.name] = (found.clamp(start, stop) if earlier or later else found) - start
        elif field.name in _BY_TOKEN:
            taken[field.name] = value[start:stop]
        elif field.name in _LENGTHS and later:
            taken[field.name] = _added(value[first:end], -1, -later)
        elif field.name in _COMPUTED and earlier:
            taken[field.name] = _added(value[first:end], 0, earlier)
        else:
            taken[field.name] = value[first:end]
    lengths = taken["query_start_loc_cpu"].diff()
    taken |= {
        "num_reqs": end - first,
        "num_actual_tokens": min(stop, common.num_actual_tokens) - start,
        "max_query_len": int(lengths.max()),
    }
    return dataclasses.replace(common, **taken)


def _added(value: torch.Tensor, place: int, number: int) -> torch.Tensor:
    changed = value.clone()
    changed[place] += number
    return changed
