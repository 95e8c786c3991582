"""One vLLM in a process of its own, which serves workloads when it is told to: `python -m benchmarks.vllm_server JSON`.

JSON has `model` (a folder), `scheduler` (null: stock vLLM) and what else LLM() takes under `options`. A workload is a
line on stdin, `[requests, tokens in, tokens out, seed]`, with a seed of its own, since vLLM remembers prompts; the
answer is a line on stdout that begins with ANSWER, JSON again.
Weights are drawn by the process itself: those that vLLM makes up are so alike that a wrong schedule would go unnoticed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ANSWER = "ANSWER "
ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are handed to the process that has the model
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(setting: dict[str, Any]) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    start = time.perf_counter()
    if setting["scheduler"]:
        setting["options"]["additional_config"] = {"dynaflow": {"scheduler": setting["scheduler"]}}
    from vllm import LLM

    imported = time.perf_counter() - start
    llm = LLM(model=setting["model"], load_format="dummy", skip_tokenizer_init=True, **setting["options"])
    ready = time.perf_counter() - start
    llm.apply_model(draw_weights)
    if setting["scheduler"] and not all(llm.apply_model(ran)):
        raise RuntimeError("vLLM runs without dynaflow: is its plugin installed? (pip install --no-deps -e .)")
    _say({"ready": ready, "imported": imported})
    for line in sys.stdin:
        _say(serve(llm, *json.loads(line)))
        if setting["scheduler"]:
            print(*llm.apply_model(ran), sep="\n", file=sys.stderr)


def draw_weights(model: Any) -> None:
    import torch

    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def ran(model: Any) -> str:
    from dynaflow.integrations.vllm import forwards

    return "\n".join(str(forward.stats) for forward in forwards())


def serve(llm: Any, requests: int, tokens_in: int, tokens_out: int, seed: int) -> dict[str, Any]:
    """Seconds for all of them, and the probabilities of the first tokens."""
    import random

    from vllm import SamplingParams

    dice = random.Random(seed)
    prompts = [{"prompt_token_ids": [dice.randrange(3, 1000) for _ in range(tokens_in)]} for _ in range(requests)]
    few = 0 if tokens_out == 1 else None  # one token each is for the comparison
    params = SamplingParams(max_tokens=tokens_out, temperature=0, detokenize=False, ignore_eos=True, logprobs=few)
    start = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = [answer.outputs[0] for answer in answers]
    if any(len(out.token_ids) != tokens_out for out in made):
        raise RuntimeError("an answer is too short")
    first = [next(iter(out.logprobs[0].values())).logprob for out in made] if few == 0 else []
    return {"seconds": seconds, "tokens": requests * (tokens_in + tokens_out), "first": first}


def _say(answer: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    from benchmarks import vllm_server  # by its name: under the other one its functions reach no other process

    vllm_server.main(json.loads(sys.argv[1]))
