"""Generation by transformers under a schedule: one line more, the same tokens, prefill and decode split in two.

`python examples/generate.py` on any device.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynaflow as df


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=512, initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    lengths = torch.tensor([12, 7, 9, 12, 5, 10, 8, 11], device=device)  # of eight prompts, padded at the left
    mask = (torch.arange(12, device=device) >= 12 - lengths[:, None]).long()
    prompts = torch.randint(1, 512, (8, 12), device=device) * mask

    def generate() -> torch.Tensor:
        return model.generate(prompts, attention_mask=mask, max_new_tokens=24, do_sample=False)

    expected = generate()
    # "auto" would measure, and find that so small a model has nothing to overlap.
    df.integrations.transformers.accelerate(model, "nanoflow", operators="eager")
    assert torch.equal(generate(), expected)

    generation = df.integrations.transformers.compiled(model)
    for name, phase in (("prefill", generation.prefill), ("decode", generation.decode)):
        stats = phase.stats
        print(f"{name}: {stats.graphs} graph, {stats.plans} plan, {stats.runs} runs, {stats.sequential_runs} unsplit")
    print("the same tokens as plain generate; the first row:", expected[0, 12:].tolist())
    df.integrations.transformers.release(model)


if __name__ == "__main__":
    main()
