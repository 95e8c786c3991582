"""Generation by a model that transformers has spread over two ranks."""

from __future__ import annotations

from typing import Any

import torch

import dynaflow as df
from dynaflow.api import engine_of
from dynaflow.strategies import CommOverlap, NanoFlow
from tests.distributed.pretrained import llama, tokens
from tests.distributed.worker import Case
from tests.helpers import lowered_of

hf = df.integrations.transformers


def _llama() -> None:
    model: Any = llama()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)

    def run(batch: int) -> torch.Tensor:
        ids = tokens(batch, 9)
        mask = torch.arange(9) >= torch.arange(batch)[:, None] % 4
        return model.generate(ids, attention_mask=mask.long(), max_new_tokens=12, do_sample=False)

    expected = {batch: run(batch) for batch in (5, 8)}
    assert len({tuple(row.tolist()) for row in expected[8][:, 9:]}) == 8, "the weights say nothing"
    hf.accelerate(model, operators="eager")
    generation = hf.compiled(model)
    assert engine_of(generation.decode.compiled).planner.lowerer.cudagraph is None, "not tried with collectives"
    for scheduler, parts in [(CommOverlap(), 2), (NanoFlow(parts=3), 3)]:
        generation.set_scheduler(scheduler)
        for batch, one in expected.items():
            assert torch.equal(run(batch), one)
        for phase in (generation.prefill, generation.decode):
            plans = [lowered.plan for lowered in lowered_of(phase.compiled)]
            assert {len(plan.micro_batches) for plan in plans} == {parts}
            assert all("network" in {task.lane for task in plan.tasks} for plan in plans)
    assert generation.prefill.stats.runs == 4 and generation.decode.stats.runs == 4 * 11
    assert generation.prefill.stats.graphs == generation.decode.stats.graphs == 1


CASES: dict[str, Case] = {"llama": _llama}
