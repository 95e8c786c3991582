"""How a batch of vLLM's is cut, and when it must not be: with vLLM's own data, and without any process of it."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynaflow.errors import DynaFlowError
from tests.systems import vllm_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)
vllm_model.prepare()

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: E402

from dynaflow.integrations import vllm as integration  # noqa: E402
from dynaflow.integrations.hooks import wrap  # noqa: E402
from dynaflow.integrations.vllm_batches import PARTS, UNKNOWN, CacheBlocks, Step, cut, record_builds  # noqa: E402

# Metadata, cut


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request in a step: the tokens it has, those it gets now, and a number that tells it from others."""

    computed: int
    tokens: int
    number: int


def of_this_version(fields: dict[str, Any]) -> dict[str, Any]:
    """Those that vLLM's metadata have: versions differ."""
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return {name: value for name, value in fields.items() if name in known}


BATCH = [Asked(0, 5, 1), Asked(40, 1, 2), Asked(17, 9, 3), Asked(3, 1, 4), Asked(64, 4, 5)]
BLOCK = 16
REFUSED = of_this_version(
    {
        "logits_indices_padded": torch.arange(8),
        "num_logits_indices": 8,
        "max_logits_per_req": 3,
        "mm_req_doc_ranges": {0: [(1, 2)]},
        "encoder_seq_lens": torch.arange(5),
        "encoder_seq_lens_cpu": np.arange(5),
        "replayssm_decode_base_cpu": torch.arange(5),
    }
)
"""Fields that nobody knows how to cut: such a batch stays whole."""
CACHES = of_this_version(
    dict.fromkeys(("_num_computed_tokens_cpu", "_num_computed_tokens_cache", "_token_to_req_indices_cache"))
)


PARTED = ("positions", "is_prefilling", "req_idx", "rswa_prefix_lens")
"""Optional fields with which requests can still be cut inside."""


def metadata(batch: Sequence[Asked], *, optional: bool | Sequence[str] = True, padding: int = 0) -> Any:
    """What vLLM would make for these requests; `padding` more requests and tokens are none at all.

    `optional`: whether it has the fields that vLLM may leave out, or which of them.
    """
    counts = [a.tokens for a in batch] + [0] * padding
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    ends = torch.tensor([a.computed + a.tokens for a in batch] + [0] * padding, dtype=torch.int32)
    numbers = torch.tensor([a.number for a in batch] + [0] * padding, dtype=torch.int32)
    positions = [a.computed + i for a in batch for i in range(a.tokens)]
    slots = [1000 * a.number + a.computed + i for a in batch for i in range(a.tokens)] + [-1] * padding
    more = {
        "dcp_local_seq_lens": numbers + 20,
        "dcp_local_seq_lens_cpu": numbers + 30,
        "dcp_local_seq_lens_cpu_upper_bound": numbers + 30,
        "_seq_lens_cpu": ends.clone(),
        "positions": torch.tensor(positions + [0] * padding),
        "is_prefilling": numbers % 2 == 1,
        "req_idx": numbers.numpy() + 40,
        "rswa_prefix_lens": numbers + 50,
    }
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=ends,
        num_reqs=len(counts),
        num_actual_tokens=len(slots),
        max_query_len=max(counts),
        max_seq_len=int(ends.max()),
        block_table_tensor=numbers[:, None] * 10 + torch.arange(6, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        seq_lens_cpu_upper_bound=ends.clone(),
        **of_this_version({n: v for n, v in more.items() if optional is True or (optional and n in optional)}),
    )


def between(batch: Sequence[Asked], start: int, stop: int) -> list[Asked]:
    """The same requests with the tokens from `start` to `stop` only."""
    found, at = [], 0
    for asked in batch:
        skipped, end = max(0, start - at), min(asked.tokens, stop - at)
        if end > skipped:
            found.append(Asked(asked.computed + skipped, end - skipped, asked.number))
        at += asked.tokens
    return found


def assert_equal(made: Any, expected: Any) -> None:
    for field in dataclasses.fields(expected):
        found, wanted = getattr(made, field.name), getattr(expected, field.name)
        if field.name == "max_seq_len":
            assert found >= wanted  # a bound, as it is in vLLM
        elif isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), field.name
        elif isinstance(wanted, np.ndarray):
            assert np.array_equal(found, wanted), field.name
        else:
            assert found == wanted, field.name


def test_every_field_is_known() -> None:
    """A field that is new in vLLM comes up here, before anybody's answers do."""
    common = metadata(BATCH)
    left = {f.name for f in dataclasses.fields(common) if getattr(common, f.name) is None}
    assert left == {*REFUSED, *CACHES}


ENDS = [0, *itertools.accumulate(a.tokens for a in BATCH)]


@pytest.mark.parametrize(("start", "stop"), itertools.combinations(ENDS, 2))
def test_a_cut_at_requests_is_what_those_requests_alone_would_have(start: int, stop: int) -> None:
    whole = metadata(BATCH)
    whole.compute_num_computed_tokens()  # it keeps the result, which must not be handed on
    made = cut(whole, start, stop)
    assert_equal(made, metadata(between(BATCH, start, stop)))
    assert torch.equal(
        made.compute_num_computed_tokens(),
        torch.tensor([a.computed for a in between(BATCH, start, stop)], dtype=torch.int32),
    )
    assert_equal(dataclasses.replace(whole, _num_computed_tokens_cache=None), metadata(BATCH))  # it was not changed


@pytest.mark.parametrize("optional", [False, PARTED], ids=["little", "all that can be"])
def test_a_cut_inside_of_requests_is_what_those_tokens_alone_would_have(optional: Any) -> None:
    whole = metadata(BATCH, optional=optional)
    whole.compute_num_computed_tokens()
    for start, stop in itertools.combinations(range(ENDS[-1] + 1), 2):
        alone = metadata(between(BATCH, start, stop), optional=optional)
        made = cut(whole, start, stop)
        # By these a recurrent layer knows whether, and from where, it goes on.
        assert torch.equal(made.compute_num_computed_tokens(), alone.compute_num_computed_tokens())
        assert_equal(made, alone)


def test_padding_belongs_to_the_last_part() -> None:
    whole = metadata(BATCH, padding=3)
    assert_equal(cut(whole, 0, 6), metadata(BATCH[:2]))
    last = cut(whole, 6, 23)
    assert_equal(last, metadata(BATCH[2:], padding=3))


# Steps


class Builder:
    """Stands in for vLLM's: keeps what it was asked for."""

    def build(self, common_prefix_len: int, common: Any, draft: Any = None) -> Any:
        return SimpleNamespace(common=common, by=self, draft=draft)

    def update_block_table(self, made: Any, table: Any, slots: Any) -> Any:
        updated = copy.copy(made)
        updated.common = dataclasses.replace(made.common, block_table_tensor=table, slot_mapping=slots)
        return updated


@dataclasses.dataclass
class Context:
    attn_metadata: Any
    slot_mapping: Any
    is_padding: Any = None
    dp_metadata: Any = None
    no_compile_layers: Any = dataclasses.field(default_factory=dict)


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run here was seen to be harmless, and all operators are told their rows, unless a test says otherwise."""
    monkeypatch.setattr(Step, "hazard", "")
    monkeypatch.setattr(Step, "row_aware", {"layer", "other"})


PAGED = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)


def group_of_layers(spec: Any = PAGED) -> Any:
    builders = [Builder() for _ in range(1 + PARTS)]
    group = SimpleNamespace(
        metadata_builders=builders, get_metadata_builder=lambda i: builders[i], kv_cache_spec=spec
    )
    record_builds(group)
    return group


def step_of(common: Any, spec: Any = PAGED, **more: Any) -> Step:
    """A step of vLLM's with these metadata."""
    made = group_of_layers(spec).get_metadata_builder(0).build(0, common)
    rows = common.num_actual_tokens
    return Step(Context({"layer": made}, {"layer": torch.arange(rows)}, **more), rows)


def test_padding_is_no_request_of_its_own() -> None:
    decoding = [Asked(5, 1, 1), Asked(40, 1, 2), Asked(17, 1, 3)]
    step = step_of(metadata(decoding, padding=3))
    assert step.requests == [1, 1, 4] and step.phase == "decode"
    with step.within(2, 6):
        (made,) = [context.attn_metadata["layer"].common for context in step.parts.values()]
    assert_equal(made, metadata(decoding[2:], padding=3))
    assert step_of(metadata(BATCH)).phase == "mixed" and step_of(metadata(BATCH[:1])).phase == "prefill"
    assert "padding" in step_of(metadata([], padding=2)).why_whole


def test_a_step_hands_out_contexts_of_its_parts() -> None:
    step = step_of(metadata(BATCH), is_padding=torch.arange(20) > 17)
    assert step.requests == [5, 1, 9, 1, 4]
    assert not step.why_whole
    contexts = [step.part(0, 6), step.part(6, 20)]
    assert [c.slot_mapping["layer"].tolist() for c in contexts] == [list(range(6)), list(range(6, 20))]
    assert_equal(contexts[1].attn_metadata["layer"].common, metadata(BATCH[2:]))
    assert [c.is_padding.tolist() for c in contexts] == [[False] * 6, [False] * 12 + [True] * 2]
    assert [c.is_padding for c in [step_of(metadata(BATCH)).part(0, 6)]] == [None]


def test_no_two_parts_share_a_builder_and_none_has_vllms_own() -> None:
    step = step_of(metadata(BATCH))
    makers = [step.context.attn_metadata["layer"].by]
    for start, stop in itertools.pairwise(ENDS):
        with step.within(start, stop), step.within(start, stop):  # the second time it is there
            makers.append(step.parts[start, stop].attn_metadata["layer"].by)
    assert len({id(m) for m in makers}) == 1 + len(BATCH) == 1 + len(step.parts)


def test_operators_find_their_part_and_then_the_whole_again() -> None:
    from vllm.forward_context import get_forward_context, override_forward_context

    step = step_of(metadata(BATCH))
    with override_forward_context(step.context):
        with step.within(0, 20):
            assert get_forward_context() is step.context and not step.parts
        with step.within(6, 15):
            assert get_forward_context() is step.parts[6, 15]
        assert get_forward_context() is step.context


def test_a_cut_inside_of_a_request_that_is_not_long_is_an_error() -> None:
    with pytest.raises(DynaFlowError, match="can't be cut into tokens 0 to 7"), step_of(metadata(BATCH)).within(0, 7):
        pass


def test_more_parts_than_builders_are_an_error() -> None:
    step = step_of(metadata([Asked(0, 1, i) for i in range(PARTS + 1)]))
    for i in range(PARTS):
        with step.within(i, i + 1):
            pass
    with pytest.raises(DynaFlowError, match=f"more than {PARTS} parts"), step.within(PARTS, PARTS + 1):
        pass


def test_requests_are_cut_inside_only_where_all_that_is_known_of_them_can_be() -> None:
    long = [Asked(3, 150, 1), Asked(0, 70, 2)]
    step = step_of(metadata(long, optional=False))
    assert step.requests == [64, 86, 70]
    assert_equal(step.part(0, 64).attn_metadata["layer"].common, metadata([Asked(3, 64, 1)], optional=False))
    assert step_of(metadata(long)).requests == [150, 70]


def recurrent(mode: str) -> MambaSpec:
    """A state for each request, in one block or, with prefix caching, in that of its last token."""
    return MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=16)
STRANGE = AttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("spec", "parted"),
    [(PAGED, True), (WINDOW, True), (recurrent("none"), True), (recurrent("align"), False), (STRANGE, False)],
    ids=["paged", "window", "state", "states by block", "unknown"],
)
def test_requests_are_cut_inside_only_where_pieces_find_what_layers_keep(spec: Any, parted: bool) -> None:
    long = [Asked(3, 150, 1), Asked(0, 70, 2)]
    step = step_of(metadata(long, optional=PARTED), spec)
    assert step.requests == ([64, 86, 70] if parted else [150, 70])
    assert step.part(0, 150).attn_metadata["layer"].common.is_prefilling.tolist() == [True]


def test_a_layer_that_no_operator_names_keeps_the_batch_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "row_aware", {"other"})
    assert step_of(metadata(BATCH)).why_whole == "no operator says that it uses layer"
    known = {"layer": SimpleNamespace(is_draft_layer=False)}
    assert step_of(metadata(BATCH), no_compile_layers=known).why_whole
    drafts = {"layer": SimpleNamespace(is_draft_layer=True)}  # another graph's
    assert not step_of(metadata(BATCH), no_compile_layers=drafts).why_whole


def test_a_graph_may_have_reasons_of_its_own() -> None:
    context = step_of(metadata(BATCH)).context
    assert Step(context, 20, "it counts its calls").facts == {"whole": True}


def test_a_profile_run_stays_whole() -> None:
    assert Step(Context(None, None), 8).why_whole
    assert Step(Context({"layer": SimpleNamespace()}, None), 8).why_whole == "attention metadata of unknown origin"


def test_metadata_of_several_groups_of_layers() -> None:
    """vLLM makes those of a second group from the first's, with a table of blocks of its own."""
    common, second = metadata(BATCH), group_of_layers()
    step = step_of(common)
    first = step.context.attn_metadata["layer"]
    table, slots = common.block_table_tensor + 500, common.slot_mapping + 500
    updated = second.get_metadata_builder(0).update_block_table(first, table, slots)
    step = Step(dataclasses.replace(step.context, attn_metadata={"layer": first, "other": updated}), 20)
    assert not step.why_whole
    made = step.part(6, 15).attn_metadata
    assert made["other"].by is second.get_metadata_builder(1) is not made["layer"].by
    assert_equal(made["layer"].common, metadata(BATCH[2:3]))
    expected = metadata(BATCH[2:3])
    expected.block_table_tensor += 500
    expected.slot_mapping += 500
    assert_equal(made["other"].common, expected)


def test_copies_of_metadata_and_what_was_made_of_more_stay_whole() -> None:
    first = step_of(metadata(BATCH)).context.attn_metadata["layer"]
    drafted = group_of_layers().get_metadata_builder(0).build(0, metadata(BATCH), draft=torch.arange(5))
    for made in (copy.copy(first), drafted):
        assert Step(Context({"layer": made}, None), 20).why_whole == "attention metadata of unknown origin"


def test_where_ranks_have_requests_of_their_own_the_batch_stays_whole() -> None:
    assert "ranks" in step_of(metadata(BATCH), dp_metadata=object()).why_whole


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_nobody_can_cut_keep_the_batch_whole(field: str) -> None:
    assert field in step_of(dataclasses.replace(metadata(BATCH), **{field: REFUSED[field]})).why_whole


def test_a_field_that_is_new_keeps_the_batch_whole() -> None:
    newer = dataclasses.make_dataclass("Newer", [("surprise", Any, None)], bases=(CommonAttentionMetadata,))
    common = metadata(BATCH)
    values = {f.name: getattr(common, f.name) for f in dataclasses.fields(common)}
    assert not step_of(newer(**values)).why_whole
    assert "surprise" in step_of(newer(**values, surprise=torch.arange(5))).why_whole


def test_causal_by_request_keeps_the_batch_whole() -> None:
    assert "causal" in step_of(dataclasses.replace(metadata(BATCH), causal=torch.ones(5))).why_whole


def test_without_lengths_the_batch_stays_whole() -> None:
    common = dataclasses.replace(metadata(BATCH), seq_lens_cpu_upper_bound=None)
    assert "seq_lens_cpu_upper_bound" in step_of(common).why_whole


# Who reads what another one writes


Table = tuple[list[int], ...]
"""The blocks of a request in each group of layers."""


def said(
    new: dict[str, tuple[Table, int]] | None = None,
    running: dict[str, tuple[Table | None, int]] | None = None,
    resumed: Sequence[str] = (),
    finished: Sequence[str] = (),
) -> SchedulerOutput:
    """What vLLM's scheduler says of a step: new blocks of each request, and its tokens that are in the cache."""
    output = SchedulerOutput.make_empty()
    for name, (blocks, computed) in (new or {}).items():
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=name,
                prompt_token_ids=None,
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=blocks,
                num_computed_tokens=computed,
                lora_request=None,
            )
        )
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(running or {}),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[blocks for blocks, _ in (running or {}).values()],
        num_computed_tokens=[computed for _, computed in (running or {}).values()],
        num_output_tokens=[0] * len(running or {}),
    )
    output.finished_req_ids = set(finished)
    return output


ENTANGLED = "a request reads what another one writes"


@pytest.mark.parametrize(("written", "why"), [(100, ENTANGLED), (102, "")])
def test_a_request_may_not_read_what_another_writes(written: int, why: str) -> None:
    """The second has 17 tokens: its block 100 is full, and it writes to 101. The first writes to its first."""
    for order in (1, -1):
        new = {"first": (([written],), 0), "second": (([100, 101],), 17)}
        assert CacheBlocks([BLOCK]).hazard(said(dict(list(new.items())[::order]))) == why


def test_a_request_may_read_what_was_written_before() -> None:
    blocks = CacheBlocks([BLOCK])
    assert not blocks.hazard(said({"writer": (([1, 2, 3],), 0)}))
    # By now 40 tokens are there: block 3 is partly filled, and gets more though nothing new is given.
    assert not blocks.hazard(said({"early": (([1, 2, 9],), 32)}, {"writer": (None, 40)}))
    assert blocks.hazard(said({"late": (([1, 2, 3, 8],), 48)}, {"writer": (None, 40)})) == ENTANGLED
    assert not blocks.hazard(said({"later": (([1, 2, 3, 7],), 48)}, {"writer": (([4],), 48), "late": (None, 50)}))
    assert blocks.hazard(said({"last": (([1, 2, 3, 4, 6],), 64)}, {"writer": (None, 63)})) == ENTANGLED
    assert not blocks.hazard(said({}, {"writer": (([5],), 64), "last": (None, 65)}))


def test_a_request_that_is_resumed_has_other_blocks() -> None:
    blocks = CacheBlocks([BLOCK])
    assert not blocks.hazard(said({"a": (([1, 2],), 0), "b": (([3],), 0)}))
    again = {"a": (([3, 5],), 16)}
    assert blocks.hazard(said({}, {"b": (None, 15), **again}, resumed=["a"])) == ENTANGLED
    assert blocks.held["a"] == [[3, 5]]
    assert not blocks.hazard(said({}, {"b": (([6],), 16), "a": (None, 20)}))
    # The newer runner is told of it as of a new one.
    assert blocks.hazard(said({"a": (([3, 6, 7],), 32)}, {"b": (None, 20)})) == ENTANGLED


def test_groups_of_layers_have_blocks_of_their_own_sizes() -> None:
    for computed, why in ((31, ""), (32, ENTANGLED)):
        blocks = CacheBlocks([2 * BLOCK, BLOCK])
        writer = {"writer": (([1], [11, 12]), 0)}
        reader = {"reader": (([1 if computed == 32 else 2], [0, 14]), computed)}
        assert blocks.hazard(said(writer | reader)) == why
    blocks = CacheBlocks([BLOCK, BLOCK])  # 0 is no block: it stands where none is needed any more
    assert not blocks.hazard(said({"a": (([1], [0]), 0), "b": (([2, 3], [0, 4]), 16)}))


def test_of_requests_that_are_gone_nothing_is_kept() -> None:
    blocks = CacheBlocks([BLOCK])
    for i in range(100):
        assert not blocks.hazard(said({f"{i}": (([i + 1],), 0)}, finished=[f"{i - 1}", "never seen"]))
    assert list(blocks.held) == ["99"]


@pytest.mark.parametrize(
    "step",
    [
        SimpleNamespace(finished_req_ids=set()),
        said({}, {"nobody knows": (([1],), 5)}),
        said({"a": (([1], [2], [3]), 5)}),
        said({"a": (None, 5)}),  # type: ignore[dict-item]
        said({"a": (([1],), None)}),  # type: ignore[dict-item]
    ],
    ids=["no lists", "unknown", "groups", "no blocks", "no number"],
)
def test_what_is_other_than_expected_keeps_a_step_whole(step: Any) -> None:
    blocks = CacheBlocks([BLOCK, BLOCK])
    assert blocks.hazard(step) == UNKNOWN
    assert not blocks.hazard(said({"b": (([4], [5]), 0)}))


def test_judgements_are_those_of_a_cache_that_is_looked_at() -> None:
    """Requests at random that begin alike, in a cache as vLLM has it; some are driven out and come back."""
    found = Counter[str]()
    for seed in range(40):
        cache = Cache(random.Random(seed))
        blocks = CacheBlocks([cache.BLOCK])
        for _ in range(60):
            output, entangled = cache.step()
            assert blocks.hazard(output) == (ENTANGLED if entangled else ""), seed
            assert blocks.held.keys() == cache.requests.keys()
            found[f"{entangled}"] += 1
    assert min(found["True"], found["False"]) > 400


class Cache:
    """CacheBlocks by what is in them, from the moment that this is scheduled."""

    BLOCK = 4

    @dataclasses.dataclass
    class Request:
        tokens: list[int]
        blocks: list[int] = dataclasses.field(default_factory=list)
        computed: int = 0
        runs: bool = False

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.count, self.topic = dice, itertools.count(1), 0
        self.requests: dict[str, Cache.Request] = {}
        self.by_content: dict[tuple[int, ...], int] = {}

    def step(self) -> tuple[SchedulerOutput, bool]:
        finished = [name for name in self.requests if self.dice.random() < 0.3]
        for name in finished:
            del self.requests[name]
        while len(self.requests) < 4:
            self.topic += self.dice.random() < 0.3
            beginning = [self.topic] * 24
            own = [self.dice.randrange(2) for _ in range(self.dice.randint(1, 12))]
            self.requests[f"{next(self.count)}"] = Cache.Request(beginning[: self.dice.randrange(25)] + own)
        for request in self.requests.values():
            if request.runs and self.dice.random() < 0.1:
                request.runs = False  # driven out
        new: dict[str, Any] = {}
        running: dict[str, Any] = {}
        resumed, reads, writes = [], {}, {}
        for name, request in self.requests.items():
            come_back = not request.runs and bool(request.blocks)
            if not request.runs:
                request.runs, request.blocks = True, self.cached(request.tokens)
                request.computed = len(request.blocks) * self.BLOCK
                reads[name] = set(request.blocks)
            had = 0 if name in reads else len(request.blocks)
            new_blocks = self.schedule(request, self.dice.randint(1, 10))
            writes[name] = {request.blocks[at // self.BLOCK] for at in range(*new_blocks)}
            given = (([*request.blocks[had:]],) if request.blocks[had:] else None, new_blocks[0])
            if name in reads and not (come_back and self.dice.random() < 0.5):
                new[name] = given
            else:
                running[name] = given
                resumed += [name] * (name in reads)
        entangled = any(reads[a] & writes[b] for a in reads for b in writes if a != b)
        return said(new, running, resumed, finished), entangled

    def cached(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        for end in range(self.BLOCK, len(tokens), self.BLOCK):  # never all of them: the last is computed
            if tuple(tokens[:end]) not in self.by_content:
                break
            found.append(self.by_content[tuple(tokens[:end])])
        return found

    def schedule(self, request: Request, tokens: int) -> tuple[int, int]:
        """From which token to which it computes now; from then on, what it fills is there for others."""
        start = request.computed
        stop = request.computed = start + tokens
        while len(request.tokens) < stop:
            request.tokens.append(self.dice.randrange(2))
        while len(request.blocks) * self.BLOCK < stop:
            request.blocks.append(next(self.count))
        for i in range(start // self.BLOCK, stop // self.BLOCK):
            self.by_content.setdefault(tuple(request.tokens[: (i + 1) * self.BLOCK]), request.blocks[i])
        return start, stop


class Runner:
    """Stands in for vLLM's: what is seen of the step, in each of its methods."""

    def __init__(self) -> None:
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK // 2))]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.seen: list[str] = []

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None, fails: bool = False) -> str:
        self.seen.append(step_of(metadata(BATCH)).why_whole)
        if fails:
            raise RuntimeError
        return "made"

    def sample_tokens(self, grammar_output: Any) -> str:
        self.seen.append(step_of(metadata(BATCH)).why_whole)
        return "sampled"

    def dummy_run(self) -> None:
        self.seen.append(step_of(metadata(BATCH)).why_whole)


class Worker:
    def __init__(self, config: Any) -> None:
        warm_up = lambda: "warm"  # noqa: E731
        self.vllm_config = config
        self.worker = SimpleNamespace(model_runner=Runner(), compile_or_warm_up_model=warm_up)

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass


BAD = said({"first": (([100],), 0), "second": (([100, 101],), 17)})
GOOD = said({}, {"second": (None, 20)})


def test_a_step_is_judged_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "hazard", UNKNOWN)
    runner: Any = worker_of(config_with(integration.BACKEND)).worker.model_runner
    runner.dummy_run()
    assert runner.execute_model(BAD) == "made"
    assert runner.sample_tokens(None) == "sampled"  # the same step, in which tokens may be drafted
    runner.execute_model(GOOD)
    runner.dummy_run()
    with pytest.raises(RuntimeError):
        runner.execute_model(scheduler_output=BAD, fails=True)
    assert runner.seen == ["", ENTANGLED, ENTANGLED, "", "", ENTANGLED]


def worker_of(config: Any) -> Any:
    kind = type("Kind", (Worker,), {})
    wrap(kind, "initialize_from_config", integration.with_blocks)
    worker = kind(config)
    worker.initialize_from_config([])
    return worker


def test_a_model_of_which_no_graph_came_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for layers, named in (({"layer": 1, "others": 2}, False), ({"others": 2}, True), ({}, True)):
        caplog.clear()
        worker = worker_of(config_with(integration.BACKEND, layers=layers)).worker
        assert worker.compile_or_warm_up_model() == "warm"
        assert ("dynaflow stays out" in caplog.text) is named
    worker = worker_of(config_with("inductor", layers={})).worker
    caplog.clear()
    assert worker.compile_or_warm_up_model() == "warm" and not caplog.text


def test_where_nothing_is_shared_steps_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "hazard", UNKNOWN)
    assert step_of(metadata(BATCH)).why_whole == UNKNOWN  # nobody has set anything up
    runner = worker_of(config_with("inductor")).worker.model_runner
    assert "execute_model" not in vars(runner) and Step.hazard == UNKNOWN
    runner = worker_of(config_with(integration.BACKEND, caching=False)).worker.model_runner
    runner.execute_model(BAD)
    assert runner.seen == [""]


def test_vllms_workers_and_runners_have_what_is_wrapped_once() -> None:
    from vllm.v1.worker import cpu_worker, gpu_model_runner, gpu_worker
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    for worker in (cpu_worker.CPUWorker, gpu_worker.Worker):
        assert worker.compile_or_warm_up_model
    for kind in (gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner):
        assert list(inspect.signature(kind.execute_model).parameters)[1] == "scheduler_output"
        assert kind.sample_tokens
    integration.plugin()
    integration.plugin()  # vLLM may call it, too
    wrapped = WorkerWrapperBase.initialize_from_config.__wrapped__
    assert list(inspect.signature(wrapped).parameters) == ["self", "kv_cache_configs"]
    assert not hasattr(wrapped, "__wrapped__")
    integration.unplug()
    assert WorkerWrapperBase.initialize_from_config is wrapped
    integration.plugin()


# Where we are wanted


def test_builders_of_micro_batches_are_made_only_where_we_are_wanted() -> None:
    class Group:
        def create_metadata_builders(self, vllm_config: Any, device: str, num_metadata_builders: int = 1) -> None:
            self.metadata_builders = [SimpleNamespace(build=print) for _ in range(num_metadata_builders)]

    wrap(Group, "create_metadata_builders", integration.with_builders)
    group: Any = Group()
    group.create_metadata_builders(config_with("inductor"), "cpu")
    assert [b.build for b in group.metadata_builders] == [print]
    group.create_metadata_builders(vllm_config=config_with(integration.BACKEND), device="cpu")  # both runners do either
    assert len(group.metadata_builders) == 1 + PARTS
    assert group.metadata_builders[0].build is not print and group.metadata_builders[1].build is print


def config_with(backend: str, caching: bool = True, layers: Any = ()) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(backend=backend, static_forward_context=layers),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
    )
