"""vLLM on CPU under our plugin, beside vLLM as it is: `make test-vllm`.

A process of vLLM's takes its time to start, so each answers many questions: see vllm_run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynaflow.errors import DynaFlowError, ScheduleError
from tests.helpers import graph_of
from tests.systems import vllm_model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)
vllm_model.prepare()

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402

from dynaflow.integrations import vllm as integration  # noqa: E402
from dynaflow.integrations.vllm_batches import PARTS, Step  # noqa: E402

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
    "auto": {"scheduler": "auto"},
    "auto that tunes": {"scheduler": "auto", "scheduler_options": {"seconds": 0.2, "most": 1}},
}
COMPILED: dict[str, dict[str, Any]] = {
    "sequential": {"scheduler": "sequential", "operators": "inductor"},
    "nanoflow in 2": {"scheduler": "nanoflow", "scheduler_options": {"parts": 2}},
}
"""In one process, where the first says that operators are compiled."""
RANKED: dict[str, dict[str, Any]] = {
    "nanoflow in 2": {"scheduler": "nanoflow", "scheduler_options": {"parts": 2}, "operators": "inductor"},
    "comm_overlap in 2": {"scheduler": "comm_overlap", "scheduler_options": {"parts": 2}},
    "comm_overlap in 3": {"scheduler": "comm_overlap", "scheduler_options": {"parts": 3}},
}
_OWN = "tests.systems.vllm_schedulers"
ORDERS: dict[str, dict[str, Any]] = {
    "last first": {"scheduler": f"{_OWN}:LastFirst"},
    "shuffled": {"scheduler": f"{_OWN}:Shuffled"},
    "shuffled again": {"scheduler": f"{_OWN}:Shuffled", "scheduler_options": {"parts": 4, "seed": 1}},
    "nanoflow": {"scheduler": "nanoflow", "scheduler_options": {"attention": "dynaflow_row_aware::*"}},
    "solver": {"scheduler": "solver", "scheduler_options": {"attention": "dynaflow_row_aware::*", "parts": 3}},
    "auto that tunes": {"scheduler": "auto", "scheduler_options": {"seconds": 0.2, "most": 1}},
}
"""Orders that nobody would choose, too: all have to be right."""
STATES: dict[str, dict[str, Any]] = {
    "delta net": {"dtype": "bfloat16", "enable_prefix_caching": False},
    "short convolutions": {"enable_prefix_caching": False},
    "state space": {"enable_prefix_caching": False},
    "short convolutions, cached": {"config": "short convolutions", "enable_prefix_caching": True},
}
"""Models that keep a state of each request, and their settings."""
BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "GPT-NeoX": {},
    "Llama": {"model_impl": "transformers"},
}
"""Models that vLLM runs with its Transformers backend."""
RUNS: dict[str, tuple[Any, ...]] = {
    "stock": ("stock",),
    "states": ("others", ORDERS, STATES),
    "by_transformers": ("others", ORDERS, BY_TRANSFORMERS),
    "scheduled": ("scheduled", SCHEDULERS),
    "compiled": ("scheduled", COMPILED),
    "ranks": ("ranks", RANKED),
    "experts": ("experts", {"dual_batch": {"scheduler": "dual_batch", "operators": "inductor"}}),
    "processes": ("processes", {"nanoflow": {**SCHEDULERS["nanoflow in 3"], "operators": "inductor"}}),
}
"""What each process does, and with which settings. What others wait for comes first, and then what takes longest."""
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


def result_of(name: str, model: str) -> Path:
    return Path(model).with_name(f"{name}.json")


@pytest.fixture(scope="module")
def runs(model: str, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Results]]]:
    """The processes that the chosen tests ask for, two at a time: most of them keep one core busy."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    experts = vllm_model.small_moe(Path(model).with_name("experts"))
    with ThreadPoolExecutor(2) as pool:
        started = {}
        for name in filter(asked.__contains__, RUNS):
            result, folder = result_of(name, model), experts if name == "experts" else model
            mode, *settings = RUNS[name]
            command = ("tests.systems.vllm_run", mode, folder, str(result), *map(json.dumps, settings))
            started[name] = pool.submit(run, *command, result=result)
        yield started
        pool.shutdown(cancel_futures=True)


def _found_by(name: str) -> Any:
    @pytest.fixture(scope="module", name=name)
    def found(runs: dict[str, Future[Results]]) -> Results:
        return runs[name].result()

    return found


stock, states, by_transformers, scheduled, compiled, ranks, experts, processes = map(_found_by, RUNS)


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


def test_soak(stock: Results, model: str) -> None:
    """The first of all: it takes a process of its own, while those of `runs` go on."""
    result, expected = result_of("soak", model), result_of("stock", model)
    arguments = ["--seconds", "20", "--model", model, "--stock", str(expected), "--result", str(result)]
    found = run("tests.systems.vllm_soak", *arguments, result=result)
    assert not found["wrong"]
    assert found["answered"] > 50
    assert found["parts"] == [1, 2, 3]
    assert found["plans"] < found["shapes"] / 2


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("workload", ["prompts", "long", "queue", "arrivals", "prefix", "twins"])
def test_answers_are_those_of_stock_vllm(stock: Results, scheduled: Results, scheduler: str, workload: str) -> None:
    answers = scheduled["schedulers"][scheduler]["served"][workload]["answers"]
    assert_same(answers, stock["served"][workload]["answers"])


@pytest.mark.parametrize("scheduler", COMPILED)
def test_compiled_operators_answer_as_stock_vllm_does(stock: Results, compiled: Results, scheduler: str) -> None:
    found = compiled["schedulers"][scheduler]
    for workload, served in found["served"].items():
        assert_same(served["answers"], stock["served"][workload]["answers"])
    cut = [step for step in steps_of(found) if len(step["parts"]) > 1]
    assert bool(cut) == (scheduler != "sequential")


def test_operators_are_compiled_once_for_all_layers_and_steps(compiled: Results) -> None:
    stats = compiled["schedulers"]["sequential"]["stats"]
    assert stats["runs"] > 100 and stats["operators_compiled"] == 0, "all were, when vLLM started"
    assert 0 < compiled["operators_compiled"] < 10


def test_pieces_of_the_sequence_may_be_captured(compiled: Results, scheduled: Results) -> None:
    """The answers above came from pieces that stay in the memory in which they first saw a size."""
    pieces, replays = compiled["pinned"]
    assert pieces == 4 and replays > 100, "three layers: before, between and behind their attention"
    assert scheduled["pinned"] == [0, 0], "where nothing is compiled there are none"


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


def test_auto_measures_nothing_unless_it_has_time(scheduled: Results) -> None:
    quick, tuned = (scheduled["schedulers"][name]["tuned"] for name in ("auto", "auto that tunes"))
    assert len(quick) > 3 and all(tried == [False] for tried in quick), "sequence, and nothing was measured"
    assert any(map(any, tuned))


@pytest.mark.parametrize("scheduler", MOST_PARTS)
def test_steps_run_in_as_many_parts_as_asked(scheduled: Results, scheduler: str) -> None:
    found, most = scheduled["schedulers"][scheduler], MOST_PARTS[scheduler]
    seen = {(phase(step), len(step["parts"]) or 1) for step in steps_of(found) if not step["why_whole"]}
    assert max(parts for _, parts in seen) == most
    for name in ("prefill", "mixed", "decode"):
        assert (name, most) in seen, f"no {name} step ran in {most}"
    for step in steps_of(found):
        assert not step["parts"] or sum(step["parts"]) == sum(step["requests"])


@pytest.mark.parametrize("scheduler", MOST_PARTS)
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


def test_the_engine_in_a_process_of_its_own(stock: Results, processes: Results) -> None:
    for start in processes["starts"]:
        assert_same(start["answers"], stock["served"]["queue"]["answers"])
        (worker,) = start["workers"]
        assert worker["process"] != processes["process"]
        assert worker["runs"] - worker["sequential_runs"] > 20


def test_what_a_start_has_captured_the_next_one_reads(processes: Results) -> None:
    (first,), (second,) = (start["workers"] for start in processes["starts"])
    assert (first["traced"], first["kept"], first["read"]) == (1, 1, 0)
    assert (second["traced"], second["kept"], second["read"]) == (0, 0, 1)
    assert first["graphs"] == second["graphs"]  # so plans and decisions of before are found again


# Several ranks, and experts


@pytest.mark.parametrize("scheduler", RANKED)
@pytest.mark.parametrize("workload", ["prompts", "queue", "twins"])
def test_answers_of_two_ranks_are_those_of_stock_vllm(ranks: Results, scheduler: str, workload: str) -> None:
    assert_same(ranks["schedulers"][scheduler]["answers"][workload], ranks["stock"][workload])


def test_ranks_read_what_they_have_captured_before(ranks: Results) -> None:
    assert_same(ranks["again"]["answers"], ranks["stock"]["queue"])
    assert [(worker["traced"], worker["read"]) for worker in ranks["again"]["workers"]] == [(0, 1)] * 2
    assert all(worker["runs"] > worker["sequential_runs"] for worker in ranks["again"]["workers"])


@pytest.mark.parametrize("scheduler", RANKED)
def test_collectives_are_split_and_have_the_lane_of_the_link(ranks: Results, scheduler: str) -> None:
    first, second = ranks["schedulers"][scheduler]["workers"]
    assert first == second  # the groups, all plans, and how often they ran
    assert len(first["groups"]) == 1 and first["ranks"] == [0, 1]
    assert len(first["meeting"]) == 7  # after the embedding, and after attention and MLP of three layers
    assert first["lanes"]["network"] == ["network"] and "network" not in first["lanes"]["others"]
    assert first["runs"] - first["sequential_runs"] > 30
    parts, seen = int(scheduler[-1]), set()
    for plan in first["plans"]:
        seen.add(plan["parts"])
        for op in first["meeting"]:
            found = [(micro_batches, lane) for name, micro_batches, lane in plan["items"] if name == op]
            assert found == ([([i], "main") for i in range(plan["parts"])] if plan["parts"] > 1 else [])
    assert max(seen) == parts


def test_collectives_of_vllm_on_cuda_are_known(ranks: Results) -> None:
    for rank in ranks["declared"]:
        (group,) = rank["same_group"]
        assert rank["ops"] == [
            ["all_reduce", [group], True, "network"],
            ["all_gather", [group], True, "network"],
            ["reduce_scatter", [group], True, "network"],
            ["all_gather", [group], False, "network"],  # along the rows
            ["reduce_scatter", [group], False, "network"],
        ]


def test_experts_run_in_two_parts(experts: Results) -> None:
    assert not experts["stock"]["steps"], "it ran under a schedule"
    assert_same(experts["served"]["answers"], experts["stock"]["answers"])
    assert len({answer["tokens"][0] for answer in experts["stock"]["answers"].values()}) > 12, "a dull model"
    steps = experts["served"]["steps"]
    assert sum(len(step["parts"]) == 2 for step in steps) > 30
    for plan in experts["plans"]:
        each = [micro_batches for op, micro_batches, _ in plan["items"] if op.endswith(".experts")]
        if plan["parts"] > 1:
            assert sorted(each) == [[0]] * 3 + [[1]] * 3, "not every layer's experts, in two parts"
    assert max(plan["parts"] for plan in experts["plans"]) == 2
    assert_same(experts["in sequence"], experts["stock"]["answers"])
    pieces, replays = experts["pinned"]
    assert pieces == 4 and replays > 20, "experts are captured with what is around them"


# Models with a state of each request, and others that vLLM runs by other means


def assert_same_as_stock(found: Results, order: str) -> None:
    assert_same(found["served"][order]["answers"], found["stock"])
    tokens = {answer["tokens"][0] for answer in found["stock"].values()}
    assert len(tokens) > 4, "a dull model"
    assert not found["plain_reasons"]


def cuts_inside(found: Results, order: str) -> int:
    """How often a prompt that had a step for itself was cut."""
    steps = found["served"][order]["steps"]
    return sum(step["requests"][:2] == [64, 64] and step["parts"][:1] in ([64], [128]) for step in steps)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_", STATES)
def test_pieces_of_a_prompt_leave_their_state_to_the_next(states: Results, model_: str, order: str) -> None:
    found = states[model_]
    assert_same_as_stock(found, order)
    if order == "auto that tunes":  # it may not: what runs twice would go on from its own state
        return
    cut = [step for step in found["served"][order]["steps"] if step["parts"]]
    assert len(cut) > 3
    if model_.endswith("cached"):  # the place of a state follows from all tokens of the request
        assert max(max(step["requests"]) for step in cut) > 128 and not cuts_inside(found, order)
    else:
        assert cuts_inside(found, order) > 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_", BY_TRANSFORMERS)
def test_models_of_the_transformers_backend_are_cut(by_transformers: Results, model_: str, order: str) -> None:
    found = by_transformers[model_]
    assert_same_as_stock(found, order)
    assert order == "auto that tunes" or cuts_inside(found, order) > 1
    assert not found["refusals"], "something runs whole"


@torch.library.custom_op("vllm::dynaflow_tests_ask", mutates_args=())
def ask(x: torch.Tensor, layer_name: str) -> torch.Tensor:
    return x + 1


@ask.register_fake
def _(x: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("vllm::dynaflow_tests_fill", mutates_args=())
def fill(x: torch.Tensor, prefix: str) -> torch.Tensor:
    return x.new_empty(0)


@torch.library.custom_op("vllm::dynaflow_tests_look", mutates_args=())
def look(x: torch.Tensor, prefix: str, kv_cache_dummy_dep: torch.Tensor | None = None) -> torch.Tensor:
    return x + 1


fill.register_fake(lambda x, prefix: x.new_empty(0))
look.register_fake(lambda x, prefix, kv_cache_dummy_dep=None: torch.empty_like(x))


class Keeps(AttentionLayerBase):
    """A layer that keeps something of each request."""

    def get_attn_backend(self) -> Any: ...

    def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...


def test_operators_with_a_state_are_found_by_the_layers_that_they_name(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by their own names, nor by those of their arguments."""
    config = configured(model, **NANOFLOW)
    config.compilation_config.static_forward_context.update(
        {"cached": Keeps(), "recurrent": Keeps(), "experts": SimpleNamespace()}
    )
    monkeypatch.setattr(Step, "row_aware", set())

    def layers(x: torch.Tensor) -> torch.Tensor:
        x = look(x * 2, "cached", fill(x + 1, "cached"))
        return look(ask(look(x * 2, "recurrent") * 2, "experts") * 2, "experts")

    before = set(integration.forwards())
    torch._dynamo.reset()
    fast = torch.compile(layers, backend=handed_to(config), dynamic=True)
    x = torch.randn(8, 4)
    torch.testing.assert_close(fast(x), layers(x))
    (forward,) = set(integration.forwards()) - before
    assert Step.row_aware == {"cached", "recurrent", "experts"} and not forward.why_whole
    forward.engine.planner.set_scheduler(integration.in_vllm("tests.systems.vllm_schedulers:LastFirst"))
    fast(x)
    graph = graph_of(forward.engine)
    found = {op.name: [graph.ops[a].name for a in op.serial_after] for op in graph.ops if "dynaflow_tests" in op.name}
    assert found == {
        "dynaflow_tests_fill": [],  # who looks waits for it
        "dynaflow_tests_look": ["dynaflow_tests_fill"],
        "dynaflow_tests_look#2": ["dynaflow_tests_look#2"],
        "dynaflow_tests_ask": [],
        "dynaflow_tests_look#3": ["dynaflow_tests_look#3"],  # it has a state elsewhere
    }


def test_a_layer_that_is_told_by_counting_calls_keeps_batches_whole(model: str) -> None:
    backend, before = handed_to(configured(model, **NANOFLOW)), set(integration.forwards())
    torch._dynamo.reset()
    torch.compile(lambda x: ask(x * 2, "from_forward_context"), backend=backend, dynamic=True)(torch.ones(8, 4))
    (forward,) = set(integration.forwards()) - before
    assert "'from_forward_context'" in forward.why_whole and Step.now.why_whole == forward.why_whole


def test_a_graph_of_which_no_operator_asks_stays_whole(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's, say, after a step of the language model: the requests of that are none of its."""
    backend, before = handed_to(configured(model, **NANOFLOW)), set(integration.forwards())
    step = SimpleNamespace(facts={"whole": False, "num_tokens": [4, 4], "phase": "prefill"})
    monkeypatch.setattr(Step, "now", step)
    torch._dynamo.reset()
    x, fast = torch.randn(8, 4), torch.compile(lambda x: x.softmax(0) + x, backend=backend, dynamic=True)
    torch.testing.assert_close(fast(x), x.softmax(0) + x)
    assert set(integration.forwards()) == before


def handed_to(config: Any) -> Any:
    """The backend that vLLM finds for a configuration."""
    return config.compilation_config.init_backend(config)


def test_a_second_model_of_the_process_asks_the_same_operators(model: str) -> None:
    """One that drafts tokens, or another LLM."""
    backend = handed_to(configured(model))
    for width in (4, 6):
        torch._dynamo.reset()
        fast = torch.compile(lambda x: ask(x * 2, "layer"), backend=backend, dynamic=True)
        x = torch.randn(8, width)
        torch.testing.assert_close(fast(x), x * 2 + 1)


def test_operators_are_compiled_with_what_vllm_says_to_its_compiler(model: str) -> None:
    wanted = {"compilation_config": {"inductor_compile_config": {"max_fusion_size": 7}}}
    config = configured(model, additional_config={"dynaflow": {"operators": "inductor"}}, **wanted)
    backend = handed_to(config)
    torch._dynamo.reset()
    torch.compile(lambda x: ask(x * 2, "layer"), backend=backend)(torch.ones(8, 4))
    found = [forward.engine.operators.settings for forward in integration.forwards()]
    (ours,) = [settings for settings in found if settings.get("max_fusion_size") == 7]
    assert ours["enable_auto_functionalized_v2"], "nobody here runs the passes that want the other"


# CUDA graphs, as far as they can be seen without a GPU

MODES = CUDAGraphMode
SHOWN, AFTER = MODES.FULL_DECODE_ONLY, MODES.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("asked", "operators", "shown", "after"),
    [
        (None, "inductor", SHOWN, AFTER),
        (MODES.FULL_AND_PIECEWISE, "inductor", SHOWN, AFTER),
        (MODES.FULL, "inductor", SHOWN, AFTER),
        (None, "eager", SHOWN, SHOWN),
        (MODES.FULL_DECODE_ONLY, "inductor", SHOWN, SHOWN),
        (MODES.NONE, "inductor", MODES.NONE, MODES.NONE),
    ],
)
@pytest.mark.parametrize("dropped", [False, True])
def test_prompts_are_captured_by_pieces(
    monkeypatch: pytest.MonkeyPatch, asked: Any, operators: str, shown: Any, after: Any, dropped: bool
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    compilation = SimpleNamespace(cudagraph_mode=asked, mode=None, backend="")
    seen = []

    def post_init(config: Any) -> None:
        seen.append(config.compilation_config.cudagraph_mode)
        if dropped:  # vLLM may have reasons of its own
            config.compilation_config.cudagraph_mode = MODES.NONE

    integration.take_over(SimpleNamespace(compilation_config=compilation), operators, post_init)
    assert seen == [shown] and compilation.cudagraph_mode == (MODES.NONE if dropped else after)


def test_vllm_takes_our_pieces_for_pieces(model: str) -> None:
    assert configured(model, **NANOFLOW).compilation_config.is_attention_compiled_piecewise()
    assert not configured(model).compilation_config.is_attention_compiled_piecewise()


class Graphs:
    """In the place of vLLM's: captures whatever it is called for, as that does, if only once."""

    made: list[Graphs] = []

    def __init__(self, call: Any, config: Any, mode: Any, options: Any) -> None:
        assert mode == MODES.PIECEWISE
        self.call, self.options = call, options
        self.concrete_cudagraph_entries: dict[Any, Any] = {}
        self.made.append(self)

    def __call__(self, args: list[Any]) -> Any:
        size = Step.now.size
        if size not in self.concrete_cudagraph_entries:
            self.concrete_cudagraph_entries[size] = "replayed"
            return self.call(args)
        return self.concrete_cudagraph_entries[size]


def test_a_piece_is_captured_in_runs_without_metadata_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.compilation.cuda_graph.CUDAGraphWrapper", Graphs)
    monkeypatch.setattr(Graphs, "made", [])
    monkeypatch.setattr(Step, "now", Step.now)
    first, second = integration.captured_pieces("config", [lambda args: "run", lambda args: "run"])
    assert [(g.options.gc_disable, g.options.weak_ref_output) for g in Graphs.made] == [(False, False), (True, True)]

    def at(size: str, *, real: bool) -> list[str]:
        metadata = {"layer": SimpleNamespace()} if real else None
        Step.now = Step(SimpleNamespace(batch_descriptor=size, attn_metadata=metadata), 8)
        return [first([]), second([])]

    assert at("eight", real=False) == ["run", "run"], "and captured"
    assert at("eight", real=True) == ["replayed", "replayed"]
    assert at("nine", real=True) == ["run", "run"] == at("nine", real=True), "nothing is captured while serving"


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


@pytest.mark.parametrize(("operators", "own"), [("inductor", "none"), ("eager", "all"), (None, "all")])
def test_with_the_setting_vllm_hands_us_its_graph(
    model: str, caplog: pytest.LogCaptureFixture, operators: str | None, own: str
) -> None:
    given = {"scheduler": "nanoflow", **({"operators": operators} if operators else {})}
    compilation = configured(model, additional_config={"dynaflow": given}).compilation_config
    assert (int(compilation.mode), compilation.backend) == (2, integration.BACKEND)
    assert own in compilation.custom_ops, "kernels of vLLM's own, where nothing is compiled"
    assert "stays out" not in caplog.text


def test_the_environment_is_a_setting_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflow")
    monkeypatch.setenv("DYNAFLOW_SCHEDULER_OPTIONS", '{"parts": 4}')
    config = configured(model)
    assert config.compilation_config.backend == integration.BACKEND
    expected = {"scheduler": "nanoflow", "scheduler_options": {"parts": 4}, "operators": "eager"}
    assert integration.options_of(config) == expected


@pytest.mark.parametrize(
    ("settings", "version", "why"),
    [
        ({"enforce_eager": True}, None, "enforce_eager=True"),
        ({"compilation_config": {"mode": 2, "backend": "eager"}}, None, "backend 'eager'"),
        ({"compilation_config": {"mode": 0}}, None, "mode 0"),
        ({}, "0.99.1", "vLLM 0.99.1 is none of"),
        ({"runner": "pooling"}, None, "not tried with a pooler"),
        ({"hf_overrides": {"index_topk": 8}}, None, "not tried with an indexer"),
        ({"hf_overrides": {"is_encoder_decoder": True}, "max_model_len": 256}, None, "not tried with an encoder"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, None, "a KV connector"),
        ({"all2all_backend": "deepep_high_throughput"}, None, "DeepEP's kernels for throughput"),
        ({"enable_lora": True}, None, "not tried with LoRA"),
    ],
    ids=["eager", "backend", "mode", "version", "pooler", "indexer", "encoder", "connector", "DeepEP", "LoRA"],
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
        ({"scheduler": "nowhere.at_all:Mine"}, "pass package.module:name"),
        ({"schduler": "nanoflow"}, "unknown option 'schduler'"),
        ("nanoflow", r'pass \{"dynaflow": \{"scheduler": "nanoflow"\}\}'),
        (["nanoflow"], r'pass \{"dynaflow": \{"scheduler": "nanoflow"\}\}'),
        (3, r'pass \{"dynaflow": \{"scheduler": "nanoflow"\}\}'),
        ({"scheduler": "nanoflow", "scheduler_options": ["parts"]}, r"(?s)scheduler_options=.*options by name"),
        ({"scheduler": "nanoflow", "scheduler_options": 3}, r"(?s)scheduler_options=.*options by name"),
        ({"scheduler": "nanoflow", "scheduler_options": {"parts": 0}}, "pass 1 or more"),
        ({"scheduler": "nanoflow", "scheduler_options": {"parts": "2"}}, "parts='2' is not an int"),
        ({"scheduler": ["nanoflow"]}, "is not a scheduler"),
        ({"scheduler": 0}, "is not a scheduler"),
        ({"scheduler": "nanoflow", "batch_dims": {"x": 1}}, "option 'batch_dims' is not for vLLM"),
        ({"scheduler": "nanoflow", "facts": {"phase": "decode"}}, "option 'facts' is not for vLLM"),
    ],
)
def test_what_is_misspelled_is_an_error_before_the_model_is_loaded(model: str, given: Any, message: str) -> None:
    with pytest.raises(DynaFlowError, match=message):
        configured(model, additional_config={"dynaflow": given})


def test_none_is_no_setting(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflow")
    assert configured(model, additional_config={"dynaflow": None}).compilation_config.backend != integration.BACKEND


def test_where_vllm_turns_its_compilation_off_we_say_so(caplog: pytest.LogCaptureFixture) -> None:
    compilation = SimpleNamespace(cudagraph_mode=None, mode=None, backend="")

    def post_init(config: Any) -> None:
        config.compilation_config.mode = 0

    integration.take_over(SimpleNamespace(compilation_config=compilation), "eager", post_init)
    assert compilation.backend != integration.BACKEND
    assert "dynaflow stays out" in caplog.text and "mode 0" in caplog.text


def test_a_class_of_ones_own_that_is_no_scheduler(model: str) -> None:
    with pytest.raises(ScheduleError, match="is not a scheduler"):
        configured(model, additional_config={"dynaflow": {"scheduler": "collections:OrderedDict"}})
