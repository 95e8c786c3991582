"""vLLM on CPU under our plugin, beside vLLM as it is: `make test-vllm`.

A process of vLLM's takes its time to start, so each answers many questions: see vllm_run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynaflow.errors import DynaFlowError, ScheduleError
from tests.systems import vllm_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)
vllm_model.prepare()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from dynaflow.integrations import vllm as integration  # noqa: E402
from dynaflow.integrations.vllm_batches import PARTS, Step, cut, remember_builds, remember_new_tables  # noqa: E402

Results = dict[str, Any]

ATTENTION = "*attention*"
SCHEDULERS: dict[str, dict[str, Any]] = {
    "nanoflow in 2": {"scheduler": "nanoflow", "scheduler_options": {"parts": 2}},
    "nanoflow in 3": {"scheduler": "nanoflow", "scheduler_options": {"parts": 3}},
    "nanoflow in 4": {"scheduler": "nanoflow", "scheduler_options": {"parts": 4}},
    "sequential": {"scheduler": "sequential"},
    # There is no link to wait for in one process: attention stands in for what would use it.
    "comm_overlap": {"scheduler": "comm_overlap", "scheduler_options": {"parts": 3, "collectives": ATTENTION}},
    "uneven": {"scheduler": "tests.systems.vllm_schedulers:Uneven"},
}
MOST_PARTS = {
    "nanoflow in 2": 2,
    "nanoflow in 3": 3,
    "nanoflow in 4": 4,
    "sequential": 1,
    "comm_overlap": 3,
    "uneven": 3,
}


# Answers, beside those of vLLM as it is


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vllm_model.small_llama(tmp_path_factory.mktemp("vllm") / "model")


def run(*command: str, result: Path) -> Results:
    """A module of this folder, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment(), timeout=400
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return dict(json.loads(result.read_text()))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **vllm_model.ENVIRONMENT, **more}


@pytest.fixture(scope="module")
def stock_file(model: str) -> Path:
    return Path(model).parent / "stock.json"


@pytest.fixture(scope="module")
def stock(model: str, stock_file: Path) -> Results:
    return run("tests.systems.vllm_run", "stock", model, str(stock_file), result=stock_file)


@pytest.fixture(scope="module")
def scheduled(model: str) -> Results:
    result = Path(model).parent / "scheduled.json"
    return run("tests.systems.vllm_run", "scheduled", model, str(result), json.dumps(SCHEDULERS), result=result)


def assert_same(answers: Results, expected: Results) -> None:
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert answer["tokens"] == expected[name]["tokens"], name
        assert answer["logprobs"] == pytest.approx(expected[name]["logprobs"], abs=1e-4), name


def steps_of(found: Results) -> list[Results]:
    return [step for served in found["served"].values() for step in served["steps"]]


def phase(step: Results) -> str:
    lengths = step["requests"]
    return "decode" if max(lengths) == 1 else "mixed" if min(lengths) == 1 else "prefill"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("workload", ["prompts", "long", "queue", "arrivals", "prefix", "twins"])
def test_answers_are_those_of_stock_vllm(stock: Results, scheduled: Results, scheduler: str, workload: str) -> None:
    answers = scheduled["schedulers"][scheduler]["served"][workload]["answers"]
    assert_same(answers, stock["served"][workload]["answers"])


def test_the_workloads_are_what_they_are_meant_to_be(stock: Results, scheduled: Results) -> None:
    served = stock["served"]
    assert len(served["queue"]["answers"]) == 24
    assert len(served["arrivals"]["answers"]) == 8  # of 12: the others were aborted
    assert max(answer["cached"] for answer in served["prefix"]["answers"].values()) == 2 * vllm_model.BLOCK
    twins = served["twins"]["answers"]
    assert twins["reader"]["cached"] == 384 and [twins[f"pair{i}.1"]["cached"] for i in range(6)] == [64] * 6
    assert not stock["served"]["queue"]["steps"], "nothing was set, and yet it ran under a schedule"
    queue = scheduled["schedulers"]["sequential"]["served"]["queue"]["steps"]
    assert max(sum(step["requests"]) for step in queue) == vllm_model.STEP, "no prompt had to wait for the next step"
    assert len({answer["tokens"][0] for answer in served["queue"]["answers"].values()}) > 12, "a dull model"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_steps_run_in_as_many_parts_as_asked(scheduled: Results, scheduler: str) -> None:
    found, most = scheduled["schedulers"][scheduler], MOST_PARTS[scheduler]
    seen = {(phase(step), len(step["parts"]) or 1) for step in steps_of(found) if not step["why_whole"]}
    assert max(parts for _, parts in seen) == most
    for name in ("prefill", "mixed", "decode"):
        assert (name, most) in seen, f"no {name} step ran in {most}"
    for step in steps_of(found):
        assert not step["parts"] or sum(step["parts"]) == sum(step["requests"])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_counters_agree_with_what_attention_was_called_for(scheduled: Results, scheduler: str) -> None:
    found = scheduled["schedulers"][scheduler]
    steps, stats = steps_of(found), found["stats"]
    assert stats["runs"] == len(steps)
    assert stats["sequential_runs"] == sum(not step["parts"] for step in steps)
    assert stats["plain_graphs"] == 0
    assert scheduled["graphs"] == 1
    # vLLM's CPU kernels share a scratch buffer: side by side they would write to it at once.
    assert len(found["lanes"]) == (scheduler != "sequential")


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_plan_serves_all_batches_of_about_the_same_size(scheduled: Results, parts: int) -> None:
    found = scheduled["schedulers"][f"nanoflow in {parts}"]
    steps = [step for step in steps_of(found) if not step["why_whole"]]
    shapes = {tuple(step["requests"]) for step in steps}
    kinds = {(phase(step), min(len(step["requests"]), PARTS), sum(step["requests"]).bit_length()) for step in steps}
    wholes = any(step["why_whole"] for step in steps_of(found))
    assert found["stats"]["plans"] <= len(kinds) + wholes
    assert len(shapes) > 1.2 * len(kinds), "too few different batches to tell"


def test_a_long_prompt_is_parted(scheduled: Results) -> None:
    for scheduler, parts in (("nanoflow in 2", [128, 128]), ("nanoflow in 4", [64] * 4), ("uneven", [64, 64, 128])):
        steps = scheduled["schedulers"][scheduler]["served"]["long"]["steps"]
        assert parts in [step["parts"] for step in steps], scheduler


def test_the_one_that_cuts_unevenly(scheduled: Results) -> None:
    cuts = {tuple(step["parts"]) for step in steps_of(scheduled["schedulers"]["uneven"])}
    assert (1, 5, 2) in cuts
    assert {phase for phase, _ in scheduled["asked"]} == {"prefill", "mixed", "decode"}


def test_equal_prompts_of_one_step_are_not_parted(scheduled: Results) -> None:
    for found in scheduled["schedulers"].values():
        whys = {step["why_whole"] for step in found["served"]["twins"]["steps"]}
        assert whys == {"", "a request reads what another one writes"}
    everywhere = [step for found in scheduled["schedulers"].values() for step in steps_of(found)]
    assert sum(bool(step["why_whole"]) for step in everywhere) < len(everywhere) / 10


def test_the_engine_in_a_process_of_its_own(stock: Results, model: str) -> None:
    result = Path(model).parent / "processes.json"
    setting = {"nanoflow": {"scheduler": "nanoflow", "scheduler_options": {"parts": 3}}}
    found = run("tests.systems.vllm_run", "processes", model, str(result), json.dumps(setting), result=result)
    assert_same(found["answers"], stock["served"]["queue"]["answers"])
    (worker,) = found["workers"]
    assert worker["process"] != found["process"]
    assert worker["runs"] - worker["sequential_runs"] > 20


def test_soak(stock: Results, stock_file: Path, model: str) -> None:
    result = Path(model).parent / "soak.json"
    arguments = ["--seconds", "20", "--model", model, "--stock", str(stock_file), "--result", str(result)]
    found = run("tests.systems.vllm_soak", *arguments, result=result)
    assert not found["wrong"]
    assert found["answered"] > 50
    assert found["parts"] == [1, 2, 3]
    assert found["plans"] < found["shapes"] / 2


# What is refused, and what is left alone


def configured(model: str, **settings: Any) -> Any:
    return EngineArgs(**vllm_model.settings(model, **settings)).create_engine_config()


NANOFLOW = {"additional_config": {"dynaflow": {"scheduler": "nanoflow"}}}


def test_without_the_setting_vllm_is_untouched(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAFLOW_SCHEDULER", raising=False)
    code = (
        "from tests.systems.test_vllm import configured; import sys\n"
        "print('FOUND', configured(sys.argv[1]).compilation_config)"
    )
    without = subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, env=environment(VLLM_PLUGINS="none")
    )
    assert without.stdout.partition("FOUND ")[2].strip() == str(configured(model).compilation_config)
    assert integration.BACKEND not in without.stdout


def test_builders_of_micro_batches_are_made_only_where_we_are_wanted() -> None:
    class Group:
        def create_metadata_builders(self, vllm_config: str, device: str, num_metadata_builders: int = 1) -> None:
            self.metadata_builders = [SimpleNamespace(build=print) for _ in range(num_metadata_builders)]

    remember_builds(Group, lambda config: config == "ours")
    group: Any = Group()
    group.create_metadata_builders("theirs", "cpu")
    assert [b.build for b in group.metadata_builders] == [print]
    group.create_metadata_builders("ours", "cpu")
    assert len(group.metadata_builders) == 1 + PARTS
    assert group.metadata_builders[0].build is not print and group.metadata_builders[1].build is print


def test_with_the_setting_vllm_hands_us_its_graph(model: str, caplog: pytest.LogCaptureFixture) -> None:
    compilation = configured(model, **NANOFLOW).compilation_config
    assert (int(compilation.mode), compilation.backend) == (2, integration.BACKEND)
    assert "stays out" not in caplog.text


def test_the_environment_is_a_setting_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflow")
    monkeypatch.setenv("DYNAFLOW_SCHEDULER_OPTIONS", '{"parts": 4}')
    config = configured(model)
    assert config.compilation_config.backend == integration.BACKEND
    assert integration.options_of(config) == {"scheduler": "nanoflow", "scheduler_options": {"parts": 4}}


@pytest.mark.parametrize(
    ("settings", "version", "why"),
    [
        ({"enforce_eager": True}, None, "enforce_eager=True"),
        ({"compilation_config": {"mode": 2, "backend": "eager"}}, None, "another backend, 'eager'"),
        ({"compilation_config": {"mode": 0}}, None, "mode 0"),
        ({}, "0.99.1", "vLLM 0.99.1 is none of"),
    ],
    ids=["eager", "backend", "mode", "version"],
)
def test_where_we_stay_out_vllm_runs_as_it_is_and_says_why(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    version: str | None,
    why: str,
) -> None:
    if version:
        monkeypatch.setattr("vllm.__version__", version)
    plain = configured(model, **settings).compilation_config
    assert "stays out" not in caplog.text
    ours = configured(model, **settings, **NANOFLOW).compilation_config
    assert str(ours) == str(plain)
    assert re.search(f"dynaflow stays out.*{re.escape(why)}", caplog.text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheduler": "nanoflo"}, "did you mean 'nanoflow'"),
        ({"scheduler": "nanoflow", "scheduler_options": {"pats": 3}}, "its options are"),
        ({"scheduler": "nowhere.at_all:Mine"}, 'name a class as "package.module:Class"'),
        ({"schduler": "nanoflow"}, "unknown option 'schduler'"),
    ],
)
def test_what_is_misspelled_is_an_error_before_the_model_is_loaded(
    model: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(DynaFlowError, match=message):
        configured(model, additional_config={"dynaflow": given})


def test_a_class_of_ones_own_that_is_no_scheduler(model: str) -> None:
    with pytest.raises(ScheduleError, match="is no scheduler"):
        configured(model, additional_config={"dynaflow": {"scheduler": "collections:OrderedDict"}})


# Metadata, cut


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request in a step: the tokens it has, those it gets now, and a number that tells it from others."""

    computed: int
    tokens: int
    number: int


BATCH = [Asked(0, 5, 1), Asked(40, 1, 2), Asked(17, 9, 3), Asked(3, 1, 4), Asked(64, 4, 5)]
BLOCK = 16
REFUSED = {
    "logits_indices_padded": torch.arange(8),
    "num_logits_indices": 8,
    "max_logits_per_req": 3,
    "mm_req_doc_ranges": {0: [(1, 2)]},
    "encoder_seq_lens": torch.arange(5),
    "encoder_seq_lens_cpu": np.arange(5),
}
"""Fields that nobody knows how to cut: such a batch stays whole."""
CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


def metadata(batch: Sequence[Asked], *, optional: bool = True, padding: int = 0) -> Any:
    """What vLLM would make for these requests; `padding` more requests and tokens are none at all."""
    counts = [a.tokens for a in batch] + [0] * padding
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    ends = torch.tensor([a.computed + a.tokens for a in batch] + [0] * padding, dtype=torch.int32)
    numbers = torch.tensor([a.number for a in batch] + [0] * padding, dtype=torch.int32)
    positions = [a.computed + i for a in batch for i in range(a.tokens)]
    slots = [1000 * a.number + a.computed + i for a in batch for i in range(a.tokens)] + [-1] * padding
    more = {
        "dcp_local_seq_lens": numbers + 20,
        "dcp_local_seq_lens_cpu_upper_bound": numbers + 30,
        "positions": torch.tensor(positions + [0] * padding),
        "is_prefilling": numbers % 2 == 1,
        "seq_lens_cpu_upper_bound": ends.clone(),
        "req_idx": numbers.numpy() + 40,
        "rswa_prefix_lens": numbers + 50,
        "replayssm_decode_base_cpu": numbers + 60,
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
        **(more if optional else {}),
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


def test_a_cut_inside_of_requests_is_what_those_tokens_alone_would_have() -> None:
    whole = metadata(BATCH, optional=False)
    for start, stop in itertools.combinations(range(ENDS[-1] + 1), 2):
        assert_equal(cut(whole, start, stop), metadata(between(BATCH, start, stop), optional=False))


def test_padding_belongs_to_the_last_part() -> None:
    whole = metadata(BATCH, padding=3)
    assert_equal(cut(whole, 0, 6), metadata(BATCH[:2]))
    last = cut(whole, 6, 23)
    assert_equal(last, metadata(BATCH[2:], padding=3))


# Steps


class Builder:
    """Stands in for vLLM's: keeps what it was asked for."""

    def __init__(self, caching: bool) -> None:
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))

    def build(self, common_prefix_len: int, common: Any) -> Any:
        return SimpleNamespace(common=common, by=self)


@dataclasses.dataclass
class Context:
    attn_metadata: Any
    slot_mapping: Any


def step_of(common: Any, blocks: dict[int, list[int]] | None = None, caching: bool = True) -> Step:
    """A step of vLLM's with these metadata; requests have the blocks given, by number, or some of their own."""
    host = common.block_table_tensor.numpy().copy()
    for row, own in (blocks or {}).items():
        host[row, : len(own)] = own
    common.block_table_tensor._dynaflow_host = (host, None, BLOCK)
    builders = [Builder(caching) for _ in range(1 + PARTS)]
    group = SimpleNamespace(get_metadata_builder=lambda i: builders[i])
    made = SimpleNamespace(_dynaflow_built=(group, "build", common, {}))
    rows = common.num_actual_tokens
    return Step(Context({"layer": made}, {"layer": torch.arange(rows)}), rows)


def test_padding_is_no_request_of_its_own() -> None:
    decoding = [Asked(5, 1, 1), Asked(40, 1, 2), Asked(17, 1, 3)]
    step = step_of(metadata(decoding, padding=3))
    assert step.requests == [1, 1, 4] and step.phase == "decode"
    with step.entered(2, 6):
        (made,) = [context.attn_metadata["layer"].common for context in step.parts.values()]
    assert_equal(made, metadata(decoding[2:], padding=3))
    assert step_of(metadata(BATCH)).phase == "mixed" and step_of(metadata(BATCH[:1])).phase == "prefill"
    assert "padding" in step_of(metadata([], padding=2)).why_whole


def test_a_step_hands_out_contexts_of_its_parts() -> None:
    step = step_of(metadata(BATCH))
    assert step.requests == [5, 1, 9, 1, 4]
    assert not step.why_whole
    contexts = [step._part(0, 6), step._part(6, 20)]
    assert [c.slot_mapping["layer"].tolist() for c in contexts] == [list(range(6)), list(range(6, 20))]
    assert_equal(contexts[1].attn_metadata["layer"].common, metadata(BATCH[2:]))


def test_no_two_parts_share_a_builder_and_none_has_vllms_own() -> None:
    step = step_of(metadata(BATCH))
    own = step.context.attn_metadata["layer"]._dynaflow_built[0].get_metadata_builder(0)
    makers = []
    for start, stop in itertools.pairwise(ENDS):
        step.parts[start, stop] = step._part(start, stop)
        makers.append(step.parts[start, stop].attn_metadata["layer"].by)
    assert len({id(m) for m in (*makers, own)}) == 1 + len(BATCH)


def test_a_cut_inside_of_a_request_that_is_not_long_is_an_error() -> None:
    with pytest.raises(DynaFlowError, match="can't be cut into tokens 0 to 7"):
        step_of(metadata(BATCH))._part(0, 7)


def test_more_parts_than_builders_are_an_error() -> None:
    step = step_of(metadata([Asked(0, 1, i) for i in range(PARTS + 1)]))
    with pytest.raises(DynaFlowError, match=f"more than {PARTS} parts"):
        for i in range(PARTS + 1):
            step.parts[i, i + 1] = step._part(i, i + 1)


def test_a_profile_run_stays_whole() -> None:
    assert Step(Context(None, None), 8).why_whole
    assert Step(Context({"layer": SimpleNamespace()}, None), 8).why_whole == "attention metadata of unknown origin"


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


@pytest.mark.parametrize(("written", "entangled"), [(100, True), (101, False), (102, False)])
def test_a_request_may_not_read_what_another_writes(written: int, entangled: bool) -> None:
    """Request 2 has 17 tokens: its block 100 is full, and it writes to 101. Request 0 writes to its first."""
    blocks = {2: [100, 101], 0: [written]}
    assert bool(step_of(metadata(BATCH), blocks).why_whole) is entangled
    assert not step_of(metadata(BATCH), blocks, caching=False).why_whole


def test_a_step_of_answers_has_read_all_before() -> None:
    batch = [Asked(17, 1, 1), Asked(15, 1, 2)]
    common, shared = metadata(batch), {0: [100, 101], 1: [100]}
    assert step_of(common, shared).why_whole  # one of them is new: is_prefilling
    assert not step_of(dataclasses.replace(common, is_prefilling=torch.zeros(2, dtype=torch.bool)), shared).why_whole


def test_the_newer_runners_tables_are_copied() -> None:
    class Tables:
        """As vLLM has them: rows by request, in blocks of the kernels."""

        def __init__(self) -> None:
            self.block_tables = [SimpleNamespace(gpu=torch.zeros(4, 8))]
            self.num_blocks = SimpleNamespace(np=np.zeros((1, 4), dtype=np.int32))
            self.blocks_per_kv_block, self.block_sizes, self.cp_size = [2], [BLOCK], 1

        def append_block_ids(self, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
            start = 0 if overwrite else self.num_blocks.np[0, req_index]
            self.num_blocks.np[0, req_index] = start + 2 * len(new_block_ids[0])

    class Runner:
        def __init__(self) -> None:
            self.block_tables, self.pcp_manager = Tables(), None

        def prepare_attn(self, input_batch: Any) -> Any:
            return (torch.zeros(2, 8),), None

    remember_new_tables(Runner, Tables)
    remember_new_tables(Runner, Tables)  # vLLM may call plugins twice
    runner = Runner()
    runner.block_tables.append_block_ids(3, ([7, 8],), True)
    runner.block_tables.append_block_ids(1, ([5],), True)
    runner.block_tables.append_block_ids(3, ([9],), False)
    (table,), _ = runner.prepare_attn(SimpleNamespace(idx_mapping_np=np.array([3, 1])))
    host, rows, block = table._dynaflow_host
    assert host[rows][:, :3].tolist() == [[7, 8, 9], [5, 0, 0]]
    assert block == BLOCK
