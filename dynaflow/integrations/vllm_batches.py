"""Parts of vLLM's batch: the attention metadata, slot mappings and forward context of some of its tokens.

vLLM passes metadata to attention layers by a context around the forward pass. A micro-batch gets a context of its own,
made as vLLM makes that of the whole batch: the common metadata are cut, between requests or inside of a long prompt,
and passed to a metadata builder that only this micro-batch uses, so that nothing else writes its buffers.
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
from dynaflow.integrations.hooks import wrap
from dynaflow.serving.host import RaggedBatch

CHUNK = 64
"""A long prompt may be cut at multiples of this number of tokens."""
PARTS = 15
"""The most parts of a step: each needs metadata builders of its own, in addition to vLLM's."""
UNKNOWN = "it is not known what its requests read"

_FIELDS = by_name(
    {
        "query_start_loc query_start_loc_cpu num_reqs num_actual_tokens slot_mapping block_table_tensor": "vLLM",
        "seq_lens _seq_lens_cpu seq_lens_cpu_upper_bound max_query_len max_seq_len": "vLLM",
        "positions": "tokens",
        "is_prefilling req_idx rswa_prefix_lens": "requests",
        "dcp_local_seq_lens dcp_local_seq_lens_cpu dcp_local_seq_lens_cpu_upper_bound": "whole requests",
        "causal": "copied",
        "_num_computed_tokens_cpu _num_computed_tokens_cache _token_to_req_indices_cache": "computed on demand",
    }
)
"""How each field of common metadata is cut: by vLLM's own function for micro-batches; or here, by token or by request.
"whole requests": the value for a part of a request is not known. With any other field the batch is not split."""


class Step(RaggedBatch):
    """One forward pass of vLLM: the contents of its context, for the whole batch and for parts of it."""

    now: ClassVar[Step]
    """The current step: a global, as vLLM's forward context is, because lanes may run in threads of their own."""
    hazard: ClassVar[str] = UNKNOWN
    """Why the requests of the current step depend on each other; "" if they don't. `CacheBlocks` sets it."""
    row_aware: ClassVar[set[str]] = set()
    """Names of the layers whose operators are row-aware."""

    def __init__(self, context: Any, rows: int, why_whole: str = "") -> None:
        self.context = context
        self.size = getattr(context, "batch_descriptor", None)  # vLLM's key of captured graphs
        layers = getattr(context, "attn_metadata", None)
        self.metadata = {id(m): m for m in layers.values()} if isinstance(layers, dict) else {}
        lengths, chunk = [], CHUNK
        if not (why := why_whole or self._why_whole()):
            built = [metadata._dynaflow_built for metadata in self.metadata.values()]
            starts = built[0][-1].query_start_loc_cpu.tolist()
            lengths = [b - a for a, b in itertools.pairwise(starts) if b > a]  # without requests that are padding
            chunk = CHUNK if all(_can_cut_requests(group, common) for _, group, _, common in built) else rows
        super().__init__(rows, lengths, chunk=chunk, max_parts=PARTS, why_whole=why)

    def _why_whole(self) -> str:
        if not self.metadata:
            return "there is no attention metadata: a profile run"
        if getattr(self.context, "dp_metadata", None) is not None:
            return "ranks with other requests take part"
        for key, metadata in self.metadata.items():
            owner, *_, common = getattr(metadata, "_dynaflow_built", (0, None))
            if owner != key:  # it may be a copy with other contents
                return "attention metadata of unknown origin"
            if why := _why_uncuttable(common):
                return why
        for name in self.context.attn_metadata.keys() - Step.row_aware:
            if not getattr(self.context.no_compile_layers.get(name), "is_draft_layer", False):
                return f"no operator says that it uses {name}"
        return Step.hazard

    def part(self, start: int, stop: int) -> Any:
        made = {}
        for key, metadata in self.metadata.items():
            # During a CUDA graph capture this is captured as well: a replay cuts what vLLM's buffers hold by then.
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
    """Yields the fields that are set: name, value, and how it is cut; "" if that is not known."""
    for field in dataclasses.fields(common):
        if (value := getattr(common, field.name)) is not None:
            yield field.name, value, _FIELDS.get(field.name, "")


def _why_uncuttable(common: Any) -> str:
    """Why common metadata can't be cut: nothing to cut, or a field that is not known."""
    if not common.query_start_loc_cpu[-1]:
        return "there is no token but padding"
    if common.seq_lens_cpu_upper_bound is None:
        return "attention metadata have no seq_lens_cpu_upper_bound, without which vLLM does not cut them"
    unknown = (n for n, value, way in _fields(common) if not way or (n == "causal" and isinstance(value, torch.Tensor)))
    return next((f"attention metadata have a {name}" for name in unknown), "")


def _can_cut_requests(group: Any, common: Any) -> bool:
    """Whether a request may be cut inside.

    All its metadata have to be cuttable, and a chunk has to find what layers stored for the chunks before. That holds
    for caches with a slot for each token and for states with one slot for each request; not for states whose slot
    depends on the request's total number of tokens ("align", with prefix caching).
    """
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if any(way == "whole requests" for _, _, way in _fields(common)):
        return False
    if isinstance(spec := group.kv_cache_spec, MambaSpec):
        return getattr(spec, "mamba_cache_mode", "") == "none"
    return isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec))


def cut(common: Any, start: int, stop: int) -> Any:
    """Returns the common attention metadata of the tokens from `start` to `stop` and of their requests."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    starts = common.query_start_loc_cpu.tolist()
    end = bisect.bisect_left(starts, stop) if stop < starts[-1] else common.num_reqs
    tokens, requests = slice(start, stop), slice(bisect.bisect_right(starts, start) - 1, end)
    (part,) = split_attn_metadata([UBatchSlice(requests, tokens)], common)
    taken = {"causal": common.causal, "num_actual_tokens": min(stop, common.num_actual_tokens) - start}
    for name, value, way in _fields(common):
        if way in ("tokens", "requests", "whole requests"):
            taken[name] = value[tokens if way == "tokens" else requests]
        elif way == "computed on demand":
            taken[name] = None
    return dataclasses.replace(part, **taken)


def record_builds(group: Any, wrap: Callable[..., Any] = wrap) -> None:
    """From now on, attention metadata of a group of layers remember how they were built.

    `metadata._dynaflow_built` is: the id of the metadata, the group, a function that builds them again with another
    builder and other common metadata, and the common metadata that they were built from.
    """
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

    with contextlib.suppress(AttributeError):  # metadata without a record are not cut
        if name == "update_block_table":  # made from the metadata of other layers, with this table and these slots
            other, table, slots = given
            *_, build, common = other._dynaflow_built
            common = dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots)
        elif common is None or any(isinstance(a, torch.Tensor) for a in given):
            return made  # from arguments that we can't cut
        object.__setattr__(made, "_dynaflow_built", (id(made), group, build, common))
    return made


class CacheBlocks:
    """The cache blocks of each request; detects a step in which one request reads a block that another one writes.

    With prefix caching vLLM marks a block as cached as soon as its tokens are scheduled. So a request that starts in
    the same step with the same prefix reads it. The whole batch writes before it reads; parts of it would not.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes  # tokens per block, in each group of layers
        self.held: dict[str, list[list[int]]] = {}  # by request: its blocks in each group of layers

    def watch(self, runner: Any, wrap: Callable[..., Any] = wrap) -> None:
        """From now on, `Step.hazard` is right while vLLM's runner runs a step, and while it drafts after it."""
        wrap(runner, "execute_model", self._execute)

    def _execute(self, method: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        Step.hazard = self.hazard(scheduler_output)
        return method(scheduler_output, *args, **kwargs)

    def hazard(self, step: Any) -> str:
        """Why a step can't be split, by its scheduler output; "" if it can. Has to be called for every step."""
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
        return any(block and holders[block] > 1 for block in written)  # block 0 is the null block
