"""vLLM's batch, cut: the attention metadata, slot mappings and forward context of some of its tokens.

vLLM tells attention layers what to do by a context around the forward pass. A micro-batch has one of its own, built as
vLLM builds the whole one: the common metadata are cut, between requests or inside of a long prompt, and handed to a
metadata builder of the micro-batch's own, whose buffers nobody else writes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from dynaflow.capture.batch_analysis.signatures import by_name
from dynaflow.serving.host import RaggedBatch, wrap

CHUNK = 64  # a prompt may be cut at multiples of so many tokens
PARTS = 15  # into so many a step may be cut: each has builders of metadata of its own, beside vLLM's
UNKNOWN = "it is not known what its requests read"

_FIELDS = by_name(
    {
        "query_start_loc query_start_loc_cpu num_reqs num_actual_tokens slot_mapping block_table_tensor": "vLLM",
        "seq_lens _seq_lens_cpu seq_lens_cpu_upper_bound max_query_len max_seq_len": "vLLM",
        "positions": "tokens",
        "is_prefilling req_idx rswa_prefix_lens": "requests",
        "dcp_local_seq_lens dcp_local_seq_lens_cpu dcp_local_seq_lens_cpu_upper_bound": "whole requests",
        "causal": "same",
        "_num_computed_tokens_cpu _num_computed_tokens_cache _token_to_req_indices_cache": "found out when asked for",
    }
)
"""How common metadata are cut: by vLLM itself, as for micro-batches of its own; or here, by token or by request, and of
some fields nobody knows what parts of a request would have. If there is any other, the batch stays whole."""


class Step(RaggedBatch):
    """One forward pass of vLLM: what its context says, for the whole batch and for parts of it."""

    now: ClassVar[Step]  # as vLLM's forward context, a global, since lanes may run in threads of their own
    hazard: ClassVar[str] = UNKNOWN  # why the requests of this step can't be parted, if they can't; see `CacheBlocks`
    row_aware: ClassVar[set[str]] = set()  # layers whose operators are row-aware

    def __init__(self, context: Any, rows: int, why_whole: str = "") -> None:
        self.context = context
        self.size = getattr(context, "batch_descriptor", None)  # as vLLM calls what it captures
        layers = getattr(context, "attn_metadata", None)
        self.metadata = {id(m): m for m in layers.values()} if isinstance(layers, dict) else {}
        lengths, chunk = [], CHUNK
        if not (why := why_whole or self._why_whole()):
            built = [metadata._dynaflow_built for metadata in self.metadata.values()]
            starts = built[0][-1].query_start_loc_cpu.tolist()
            lengths = [b - a for a, b in itertools.pairwise(starts) if b > a]  # without requests that are padding, too
            chunk = CHUNK if all(_are_parted(group, common) for _, group, _, common in built) else rows
        super().__init__(rows, lengths, chunk=chunk, max_parts=PARTS, why_whole=why)

    def _why_whole(self) -> str:
        if not self.metadata:
            return "there is no attention metadata: a profile run"
        if getattr(self.context, "dp_metadata", None) is not None:
            return "ranks with other requests take part"
        for key, metadata in self.metadata.items():
            owner, *_, common = getattr(metadata, "_dynaflow_built", (0, None))
            if owner != key:  # it may be a copy, with something else in it
                return "attention metadata of unknown origin"
            if why := _uncuttable(common):
                return why
        for name in self.context.attn_metadata.keys() - Step.row_aware:
            if not getattr(self.context.no_compile_layers.get(name), "is_draft_layer", False):
                return f"no operator says that it uses {name}"
        return Step.hazard

    def part(self, start: int, stop: int) -> Any:
        made = {}
        for key, metadata in self.metadata.items():
            # In a capture all of this is captured, too: a replay cuts what vLLM has written to its buffers by then.
            _, group, build, common = metadata._dynaflow_built
            made[key] = build(group.get_metadata_builder(1 + len(self.parts)), cut(common, start, stop))
        changed: dict[str, Any] = {
            "attn_metadata": {name: made[id(m)] for name, m in self.context.attn_metadata.items()},
            "slot_mapping": {name: s[start:stop] for name, s in (self.context.slot_mapping or {}).items()},
        }
        if getattr(self.context, "is_padding", None) is not None:
            changed["is_padding"] = self.context.is_padding[start:stop]
        return dataclasses.replace(self.context, **changed)

    def enter(self, part: Any) -> Any:
        from vllm.forward_context import override_forward_context

        return override_forward_context(part)


Step.now = Step(None, 0)


def _fields(common: Any) -> Iterator[tuple[str, Any, str]]:
    """The fields that are set: name, value, and how it is cut; "" if nobody here knows."""
    for field in dataclasses.fields(common):
        if (value := getattr(common, field.name)) is not None:
            yield field.name, value, _FIELDS.get(field.name, "")


def _uncuttable(common: Any) -> str:
    """Which field of the common metadata nobody here knows how to cut; or that there is nothing to cut."""
    if not common.query_start_loc_cpu[-1]:
        return "there is no token but padding"
    if common.seq_lens_cpu_upper_bound is None:
        return "attention metadata have no seq_lens_cpu_upper_bound, without which vLLM does not cut them"
    strange = (n for n, value, way in _fields(common) if not way or (n == "causal" and isinstance(value, torch.Tensor)))
    return next((f"attention metadata have a {name}" for name in strange), "")


def _are_parted(group: Any, common: Any) -> bool:
    """Whether requests can be cut inside: all that is known of them can be cut, and a piece finds what layers keep of
    the pieces before. That is so of caches with a place for each token, and of states with one for each request; not
    of those whose place follows from how many tokens the request has in all ("align", with prefix caching)."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if any(way == "whole requests" for _, _, way in _fields(common)):
        return False
    if isinstance(spec := group.kv_cache_spec, MambaSpec):
        return getattr(spec, "mamba_cache_mode", "") == "none"
    return isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec))


def cut(common: Any, start: int, stop: int) -> Any:
    """Common attention metadata of the tokens from `start` to `stop`, and of the requests that these belong to."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    starts = common.query_start_loc_cpu.tolist()
    end = bisect.bisect_left(starts, stop) if stop < starts[-1] else common.num_reqs
    tokens, requests = slice(start, stop), slice(bisect.bisect_right(starts, start) - 1, end)
    (part,) = split_attn_metadata([UBatchSlice(requests, tokens)], common)
    taken = {"causal": common.causal, "num_actual_tokens": min(stop, common.num_actual_tokens) - start}
    for name, value, way in _fields(common):
        if way in ("tokens", "requests", "whole requests"):
            taken[name] = value[tokens if way == "tokens" else requests]
        elif way == "found out when asked for":
            taken[name] = None
    return dataclasses.replace(part, **taken)


def record_builds(group: Any) -> None:
    """From now on, metadata of a group of attention layers know how they were made: they themselves, the group, how to
    do it with another builder and other common metadata, and those that they were made from."""
    first = group.metadata_builders[0]
    for name in ("build", "build_for_cudagraph_capture", "update_block_table"):
        if hasattr(first, name):
            wrap(first, name, functools.partial(_built, group, name))


def _built(group: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made, given = method(*args, **kwargs), [*args, *kwargs.values()]
    common = next((a for a in given if hasattr(a, "query_start_loc_cpu")), None)

    def build(builder: Any, part: Any) -> Any:
        swapped = {k: part if v is common else v for k, v in kwargs.items()}
        return getattr(builder, name)(*(part if a is common else a for a in args), **swapped)

    with contextlib.suppress(AttributeError):  # what does not know how it was made is not cut
        if name == "update_block_table":  # made of the metadata of other layers, with this table and these slots
            other, table, slots = given
            *_, build, common = other._dynaflow_built
            common = dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots)
        elif common is None or any(isinstance(a, torch.Tensor) for a in given):
            return made  # of something that nobody here knows how to cut
        object.__setattr__(made, "_dynaflow_built", (id(made), group, build, common))
    return made


class CacheBlocks:
    """The cache's blocks by request; and whether a request of a step reads one that another writes in that step.

    With prefix caching vLLM takes a block for cached as soon as its tokens are scheduled, so a request that starts in
    the same step and begins alike reads it. The batch as a whole writes before it reads; parts of it would not.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes  # the tokens of a block, in each group of layers
        self.held: dict[str, list[list[int]]] = {}  # by request: its blocks in each group of layers

    def watch(self, runner: Any) -> None:
        """From now on, `Step.hazard` is right while vLLM's runner runs a step, and while it drafts behind it."""
        wrap(runner, "execute_model", self._execute)

    def _execute(self, method: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        Step.hazard = self.hazard(scheduler_output)
        return method(scheduler_output, *args, **kwargs)

    def hazard(self, step: Any) -> str:
        """Why a step can't be cut, if it can't, by what vLLM's scheduler says of it. Has to see all steps."""
        try:
            return "a request reads what another one writes" if self._has_hazard(step) else ""
        except (AttributeError, LookupError, TypeError, ValueError):
            self.held.clear()
            return UNKNOWN

    def _has_hazard(self, step: Any) -> bool:
        new, running = step.scheduled_new_reqs, step.scheduled_cached_reqs
        for request in step.finished_req_ids:
            self.held.pop(request, None)
        starting = {r.req_id for r in new} | running.resumed_req_ids
        others = zip(running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True)
        given = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in new] + [r for r in others if starting or r[1]]
        holders, written = Counter[int](), set[int]()
        for request, blocks, computed in given:
            if request in starting:
                self.held[request] = [list(group) for group in blocks]
            elif blocks is not None:
                for own, more in zip(self.held[request], blocks, strict=True):
                    own.extend(more)
            for i, own in enumerate(self.held[request] if starting else ()):  # the others have read it all before
                writes = own[computed // self.sizes[i] :]
                written.update(writes)
                holders.update(own if request in starting else writes)
        return any(block and holders[block] > 1 for block in written)  # block 0 is none
