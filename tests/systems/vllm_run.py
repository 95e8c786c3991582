"""Serves workloads with vLLM in a process of its own, and tells what was answered and how the steps ran.

`python -m tests.systems.vllm_run stock|scheduled|processes|ranks|experts FOLDER RESULT [SCHEDULERS]`: FOLDER has the
model, RESULT is the JSON file to write. SCHEDULERS is a JSON object of names, with vLLM's setting for each: vLLM starts
with the first, and the others take over one after the other. `others` has more models, each beside vLLM as it is:
`... vllm_run others FOLDER RESULT SCHEDULERS MODELS`, with the settings of each as a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.systems import vllm_model

vllm_model.prepare()

from dynaflow.integrations.hooks import wrap  # noqa: E402
from dynaflow.lower.compile_ops import Operators  # noqa: E402
from tests.helpers import Pinned, graph_of, graphs_of, notes_of, scheduler_of  # noqa: E402

Settings = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    name: str
    prompt: list[int]
    answer: int
    """So many tokens."""
    arrives: int = 0
    """Before this step of the engine."""
    aborted: int | None = None
    """Before this one; then nobody asks for its answer."""


def workloads() -> dict[str, list[Request]]:
    """The same in every process."""
    made = (prompts, long, queue, arrivals, prefix, twins)
    return {function.__name__: function() for function in made}


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, vllm_model.VOCABULARY), k=count)


def prompts() -> list[Request]:
    """Answers of one token: no step but reads prompts, of several requests or pieces of a long one."""
    lengths = [10, 30, 7, 200, 21, 50, 16, 3, 160, 40, 12, 28]
    return [Request(name=f"r{i}", prompt=tokens(n, 50 + i), answer=1) for i, n in enumerate(lengths)]


def long() -> list[Request]:
    """A prompt has whole steps for itself: parts are pieces of it."""
    return [Request(name=f"l{i}", prompt=tokens(480 - 70 * i, 70 + i), answer=4, arrives=10 * i) for i in range(3)]


def queue() -> list[Request]:
    """All at once, and three times as many as run at a time; some have a prompt of one token, some a long one."""
    lengths = [1, 200, 3, 17, 1, 64, 150, 5, 33, 1, 1, 90, 2, 120, 48, 7, 1, 199, 25, 11, 1, 70, 4, 16]
    return [Request(name=f"q{i}", prompt=tokens(n, i), answer=2 + (7 * i) % 23) for i, n in enumerate(lengths)]


def arrivals() -> list[Request]:
    """They come while others are answered, and some go before they are."""
    lengths = [9, 60, 1, 140, 22, 1, 180, 13, 35, 4, 75, 1]
    aborted = {1: 4, 3: 7, 6: 13, 8: 20}
    return [
        Request(name=f"a{i}", prompt=tokens(n, 100 + i), answer=12 + i, arrives=2 * i, aborted=aborted.get(i))
        for i, n in enumerate(lengths)
    ]


def prefix() -> list[Request]:
    """Later prompts begin like the first ones, so keys and values are there already: of 2 blocks, or of 1."""
    shared = tokens(2 * vllm_model.BLOCK, 200)
    return [
        Request(name=f"p{i}", prompt=shared[: (2 - i % 2) * vllm_model.BLOCK] + own, answer=6, arrives=i)
        for i, own in enumerate(tokens(1 + i, 201 + i) for i in range(10))
    ]


def twins() -> list[Request]:
    """Equal prompts of one step: with prefix caching, one reads what the other writes in that step.

    The second of the first pair comes when the first one's long prompt is half read, and gets the place before it that
    another request has left. So a part that has the reader runs before the one that has the writer.
    """
    prompt = tokens(400, 250)
    places = [
        Request(name="t0", prompt=tokens(5, 251), answer=3),
        Request(name="t1", prompt=tokens(5, 252), answer=20),
        Request(name="writer", prompt=prompt, answer=8, arrives=2),
        Request(name="reader", prompt=prompt, answer=8, arrives=3),
    ]
    pairs = [
        Request(name=f"pair{i}.{j}", prompt=tokens(75, 260 + i), answer=8, arrives=20 + 2 * i)
        for i in range(6)
        for j in range(2)
    ]
    return [*places, *pairs]


def mixture() -> list[Request]:
    """Prompts of one step and of several, alone and together, beside answers."""
    came = [(480, 0), (250, 4), (150, 4), (10, 5), (30, 5), (200, 7), (1, 7), (20, 7)]
    return [Request(name=f"m{i}", prompt=tokens(n, 80 + i), answer=3, arrives=at) for i, (n, at) in enumerate(came)]


def pool() -> list[Request]:
    """What the soak test asks for, again and again."""
    return [Request(name=f"s{i}", prompt=tokens(1 + (i * i * 7) % 400, 300 + i), answer=24) for i in range(80)]


@dataclasses.dataclass
class Served:
    answers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By request: its tokens, their logprobs, how far the next best were, and how much of the prompt was cached."""
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Of each forward pass under a schedule: tokens of its requests, and of the parts that attention was called for."""


def serve(llm: Any, requests: Sequence[Request]) -> Served:
    """Steps the engine until all are answered or aborted."""
    from dynaflow.integrations.vllm_batches import Step

    engine, served, step = llm.llm_engine, Served(), 0
    last, waiting = Step.now, list(requests)
    while waiting or engine.has_unfinished_requests():
        for request in [r for r in waiting if r.arrives <= step]:
            waiting.remove(request)
            engine.add_request(request.name, {"prompt_token_ids": request.prompt}, sampling(request.answer))
        engine.abort_request([r.name for r in requests if r.aborted == step])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                served.answers[output.request_id] = answer_of(output)
        if Step.now is not None and Step.now is not last:
            last = Step.now
            parts = [stop - start for start, stop in sorted(last.parts)]
            served.steps.append({"requests": last.requests, "parts": parts, "why_whole": last.why_whole})
        step += 1
    return served


def sampling(answer: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True, logprobs=2)


def answer_of(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    best = [sorted((p.logprob for p in at.values()), reverse=True) for at in answer.logprobs]
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)],
        "margin": min(first - second for first, second, *_ in best),
        "cached": output.num_cached_tokens,
    }


def run_stock(folder: str) -> dict[str, Any]:
    """vLLM with our plugin installed and nothing set."""
    from vllm import LLM

    llm = LLM(**vllm_model.settings(folder))
    found = {name: dataclasses.asdict(serve(llm, requests)) for name, requests in workloads().items()}
    llm.reset_prefix_cache()
    return {"served": found, "pool": serve(llm, pool()).answers}


def run_scheduled(folder: str, schedulers: Settings) -> dict[str, Any]:
    """vLLM under each scheduler; what the counters say of each is what it added. Pieces of the sequence are pinned."""
    from vllm import LLM

    from dynaflow.integrations import vllm as integration
    from tests.systems.vllm_schedulers import Uneven

    pinned = _pin_pieces()
    llm = LLM(**vllm_model.settings(folder, additional_config={"dynaflow": next(iter(schedulers.values()))}))
    (forward,) = integration.forwards()
    found = {}
    for name, setting in schedulers.items():
        _schedule_by(llm, setting)
        llm.reset_prefix_cache()
        before = dataclasses.replace(forward.stats)
        served = {workload: dataclasses.asdict(serve(llm, requests)) for workload, requests in workloads().items()}
        notes = notes_of(forward.engine)
        counters = ("runs", "sequential_runs", "plans", "scheduler_calls", "plain_graphs", "operators_compiled")
        found[name] = {
            "served": served,
            "stats": {counter: getattr(forward.stats, counter) - getattr(before, counter) for counter in counters},
            "lanes": sorted({lane.name for plan in forward.plans for lane in plan.lanes}),
            "tuned": [[tried.measured is not None for tried in note.tried] for note in notes if note],
        }
    stats = forward.stats
    return {
        "schedulers": found,
        "graphs": stats.graphs,
        "operators_compiled": stats.operators_compiled,
        "asked": sorted(Uneven.asked),
        "pinned": [pinned.pieces, pinned.replays],
    }


def run_processes(folder: str, schedulers: Settings) -> dict[str, Any]:
    """As a user has it: the engine in a process of vLLM's own. It starts twice."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    from vllm import LLM

    (setting,) = schedulers.values()
    asked = queue()
    prompts: list[Any] = [{"prompt_token_ids": request.prompt} for request in asked]
    starts = []
    for _ in range(2):
        llm = LLM(**vllm_model.settings(folder, additional_config={"dynaflow": setting}))
        outputs = llm.generate(prompts, [sampling(request.answer) for request in asked], use_tqdm=False)
        answers = {request.name: answer_of(output) for request, output in zip(asked, outputs)}
        starts.append({"answers": answers, "workers": llm.collective_rpc(_worker)})
        llm.llm_engine.engine_core.shutdown()
    return {"starts": starts}


def _worker(self: Any) -> dict[str, Any]:
    """Sent to vLLM's worker: what runs there?"""
    from vllm.compilation.counter import compilation_counter

    from dynaflow.integrations import vllm as integration

    (forward,) = integration.forwards()
    return {
        "process": os.getpid(),
        "runs": forward.stats.runs,
        "sequential_runs": forward.stats.sequential_runs,
        "graphs": [graph.identity for graph in graphs_of(forward.engine)],
        "traced": compilation_counter.num_aot_compiles,
        "kept": compilation_counter.num_aot_artifacts_saved,
        "read": compilation_counter.num_aot_artifacts_loaded,
    }


def run_ranks(folder: str, schedulers: Settings) -> dict[str, Any]:
    """The model spread over two ranks: by vLLM as it is, under each scheduler, and under the first once more."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    asked = {name: requests for name, requests in workloads().items() if name in ("prompts", "queue", "twins")}
    settings = vllm_model.settings(folder, tensor_parallel_size=2)
    llm = LLM(**settings, enforce_eager=True)  # stock vLLM does without its compiler: that is sooner ready
    stock = {name: serve(llm, requests).answers for name, requests in asked.items()}
    llm.llm_engine.engine_core.shutdown()
    ours = {**settings, "additional_config": {"dynaflow": next(iter(schedulers.values()))}}
    llm = LLM(**ours)
    found = {}
    for name, setting in schedulers.items():
        llm.collective_rpc(_schedule_by, args=(setting,))
        llm.reset_prefix_cache()
        answers = {workload: serve(llm, requests).answers for workload, requests in asked.items()}
        found[name] = {"answers": answers, "workers": llm.collective_rpc(_collectives)}
    declared = llm.collective_rpc(_declared)
    llm.llm_engine.engine_core.shutdown()
    llm = LLM(**ours)
    again = {"answers": serve(llm, asked["queue"]).answers, "workers": llm.collective_rpc(_worker)}
    return {"stock": stock, "schedulers": found, "declared": declared, "again": again}


def _pin_pieces() -> Pinned:
    """Compiled pieces of the sequence now read and write where they did at first, as in CUDA graphs."""
    pinned = Pinned()

    def with_pins(init: Any, self: Any, *args: Any) -> None:
        init(self, *args)
        self.captured = pinned

    wrap(Operators, "__init__", with_pins)
    return pinned


def _schedule_by(self: Any, setting: dict[str, Any]) -> None:
    """Here, or sent to vLLM's workers."""
    from dynaflow.integrations import vllm as integration

    (forward,) = integration.forwards()
    forward.engine.planner.set_scheduler(integration.in_vllm(setting["scheduler"], setting.get("scheduler_options")))


def _collectives(self: Any) -> dict[str, Any]:
    """Of a rank: the groups in which it meets others, its plans, and where its scheduler wants the collectives."""
    import torch

    from dynaflow import _torch, check
    from dynaflow.integrations import vllm as integration
    from dynaflow.schedule.context import ScheduleContext

    (forward,) = integration.forwards()
    graph, scheduler = graph_of(forward.engine), scheduler_of(forward.engine)
    meeting = {op.name for op in graph.ops if op.groups}
    tokens = [3, 3, 3, 3, 3]
    facts = {"whole": False, "num_tokens": tokens, "phase": "prefill"}
    device = torch.device("cpu")
    ctx = ScheduleContext(graph, batch_size=15, has_batch=True, device=device, facts=facts, sizes={})
    scheduler.inner.schedule(ctx)
    plan = ctx.finish()  # with lanes, and checked for them: on CPU they are joined to one
    check(plan, graph, 15, tokens)
    groups = sorted({group for op in graph.ops for group in op.groups})
    return {
        "groups": groups,
        "ranks": _torch.ranks_of(groups),
        "meeting": sorted(meeting),
        "lanes": {
            "network": sorted({t.lane for t in plan.tasks if t.items[0].op in meeting}),
            "others": sorted({t.lane for t in plan.tasks if t.items[0].op not in meeting}),
        },
        "plans": [tasks_of(made) for made in forward.plans],
        "runs": forward.stats.runs,
        "sequential_runs": forward.stats.sequential_runs,
    }


def tasks_of(plan: Any) -> dict[str, Any]:
    items = [[item.op, list(item.micro_batches), task.lane] for task in plan.tasks for item in task.items]
    return {"parts": len(plan.micro_batches), "items": items}


def _declared(self: Any) -> dict[str, Any]:
    """What is known of the collectives that vLLM has on CUDA, of which nothing runs here."""
    import torch
    from vllm.distributed import get_tp_group

    import dynaflow as df
    from dynaflow.integrations import vllm as integration

    group = get_tp_group()
    name, ops = group.unique_name, torch.ops.vllm

    def model(x: torch.Tensor) -> torch.Tensor:
        summed = ops.all_reduce(x * 2, group_name=name)
        wide = ops.all_gather(summed + 1, 1, 2, group_name=name)
        narrow = ops.reduce_scatter(wide + 1, -1, 2, group_name=name)
        return ops.reduce_scatter(ops.all_gather(narrow + 1, 0, 2, group_name=name) + 1, 0, 2, group_name=name)

    fast = df.compile(model, "comm_overlap", operators="eager")
    plan = fast.plan(torch.randn(6, 4))
    graph = graph_of(fast)
    lane = {item.op: task.lane for task in plan.tasks for item in task.items}
    return {
        "same_group": {integration.torch_group(name), group.device_group.group_name},
        "ops": [[op.functions[0], op.groups, op.splittable, lane[op.name]] for op in graph.ops if op.groups],
    }


def run_experts(folder: str, schedulers: Settings) -> dict[str, Any]:
    """A mixture of experts, by vLLM as it is, and under a scheduler."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from dynaflow.integrations import vllm as integration

    (setting,) = schedulers.values()
    pinned = _pin_pieces()
    llm = LLM(**vllm_model.settings(folder), enforce_eager=True)
    stock = serve(llm, queue())
    del llm
    cleanup_dist_env_and_memory()
    llm = LLM(**vllm_model.settings(folder, additional_config={"dynaflow": setting}))
    served = serve(llm, queue())
    (forward,) = integration.forwards()
    plans = [tasks_of(plan) for plan in forward.plans]
    _schedule_by(llm, {"scheduler": "sequential"})
    llm.reset_prefix_cache()
    before = pinned.replays
    return {
        "stock": dataclasses.asdict(stock),
        "served": dataclasses.asdict(served),
        "plans": plans,
        "in sequence": serve(llm, queue()).answers,
        "pinned": [pinned.pieces, pinned.replays - before],
    }


def run_others(folder: str, schedulers: Settings, models: Settings) -> dict[str, Any]:
    """Models that are known by their configurations, by vLLM as it is and under each scheduler."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from dynaflow.integrations import vllm as integration

    vllm_model.register_seeded()
    found = {}
    for name, more in models.items():
        place = vllm_model.configured_only(Path(folder).with_name(name), more.pop("config", name))
        settings = vllm_model.settings(place, load_format=vllm_model.SEEDED, block_size=None, **more)
        llm = LLM(**settings, enforce_eager=True)
        stock = serve(llm, mixture()).answers
        del llm
        cleanup_dist_env_and_memory()
        before = set(integration.forwards())
        llm = LLM(**settings, additional_config={"dynaflow": next(iter(schedulers.values()))})
        (forward,) = set(integration.forwards()) - before
        served = {}
        for scheduler, setting in schedulers.items():
            wanted = integration.in_vllm(setting["scheduler"], setting.get("scheduler_options"))
            forward.engine.planner.set_scheduler(wanted)
            llm.reset_prefix_cache()
            served[scheduler] = dataclasses.asdict(serve(llm, mixture()))
        (graph, *_) = graphs_of(forward.engine)
        found[name] = {
            "stock": stock,
            "served": served,
            "refusals": [op.refusal for op in graph.ops if op.refusal],
            "plain_reasons": forward.stats.plain_reasons,
        }
        del llm
        cleanup_dist_env_and_memory()
    return found


RUNS = {
    "stock": run_stock,
    "scheduled": run_scheduled,
    "processes": run_processes,
    "ranks": run_ranks,
    "experts": run_experts,
    "others": run_others,
}

if __name__ == "__main__":
    what, folder, result, *given = sys.argv[1:]
    made = RUNS[what](folder, *map(json.loads, given))
    Path(result).write_text(json.dumps({**made, "process": os.getpid()}, default=list))
