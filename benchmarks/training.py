"""Training steps: forward, backward and the optimizer's step, against torch.compile; with activations in host memory;
and with the optimizer's step beside the backward pass."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks.measure import Figure, Timed, Trial, agree, figure, once, ratio, rounds_for, side_by_side, synchronize
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import own_code

BESIDE = "optimizer_beside"
PLAIN, OURS, HOST, SAVED = "torch.compile", "sequential", "prefetch, activations on the host", "save_on_cpu"
AT_LEAST = 1 << 20
"""Bytes: what is smaller stays on the device."""
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One model and optimizer, and ways to make a step with them."""

    model: Any
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Tensor]
    calls: dict[str, Callable[..., Any]]

    def step(self, name: str) -> None:
        self.loss(name).backward()
        self.optimizer.step()

    def loss(self, name: str) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        where = contextlib.nullcontext()
        if name == SAVED:
            where = torch.autograd.graph.save_on_cpu(pin_memory=self.inputs["input_ids"].is_cuda)  # type: ignore[assignment]
        with where, torch.enable_grad():  # elsewhere benchmarks have no use for gradients
            loss: Tensor = self.calls[name](**self.inputs).loss
        return loss

    def gradients(self, name: str) -> list[Tensor]:
        self.loss(name).backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None and p.dim() > 1]

    def peak(self, name: str) -> tuple[float, float]:
        """GiB: of all that is allocated during a step, and of what was not before."""
        self.step(name)
        self.optimizer.zero_grad(set_to_none=True)
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(name)
        synchronize()
        most = torch.cuda.max_memory_allocated()
        return most / 2**30, (most - before) / 2**30


def trials(settings: Settings) -> Iterator[Trial]:
    if not settings.can_hold_llama:
        return
    steps = once(lambda: _make(settings))
    no_peak = "" if settings.cuda else "memory is counted on CUDA"
    where = "tiny Llama" if settings.tiny else "Llama-3-1B, batch 8 x 2048"
    yield Trial(what="sequential: time of a step", baseline=PLAIN, situation=where, limit=1.01,
                run=lambda: _compare(steps(), OURS, PLAIN, settings))  # fmt: skip
    yield Trial(what="activations on the host: peak of a step", baseline="on the device", situation=where, limit=0.6,
                skip=no_peak, run=lambda: _peaks(steps(), HOST, OURS))  # fmt: skip
    yield Trial(what="activations on the host: time of a step", baseline="on the device", situation=where, limit=1.05,
                run=lambda: _compare(steps(), HOST, OURS, settings))  # fmt: skip
    yield Trial(what="activations on the host: how many times faster", baseline="torch's save_on_cpu", situation=where,
                limit=1.5, at_least=True, run=lambda: _compare(steps(), SAVED, HOST, settings))  # fmt: skip
    yield Trial(what="optimizer beside backward: time of a step", baseline="torch.compile + fused AdamW",
                situation=where, limit=1.0, run=lambda: _compare(steps(), BESIDE, PLAIN, settings))  # fmt: skip
    yield Trial(what="optimizer beside backward: peak of a step", baseline="torch.compile + fused AdamW",
                situation=where, skip=no_peak, run=lambda: _peaks(steps(), BESIDE, PLAIN))  # fmt: skip


def _make(settings: Settings) -> Steps:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = TINY if settings.tiny else SHAPE | ({"num_hidden_layers": settings.layers} if settings.layers else {})
    with torch.device(settings.device):
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).train()
        tokens = torch.randint(0, shape["vocab_size"], (4, 16) if settings.tiny else (8, 2048))
    if settings.cuda:
        model = model.bfloat16()
    own = torch.compile(own_code(model), backend="inductor" if settings.operators == "inductor" else "eager")
    host = df.compile(model, "prefetch", operators=settings.operators, offload_saved=1 if settings.tiny else AT_LEAST)
    ours = df.compile(model, operators=settings.operators)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=settings.cuda or None)
    beside = df.compile(model, BESIDE, operators=settings.operators, optimizer=optimizer)
    steps = Steps(
        model=model,
        optimizer=optimizer,
        inputs={"input_ids": tokens, "labels": tokens},
        calls={PLAIN: own, OURS: ours, HOST: host, SAVED: own, BESIDE: beside},
    )
    expected = [g.clone() for g in steps.gradients(PLAIN)]
    for name in (OURS, HOST, SAVED):
        away = agree(expected, steps.gradients(name), 0.1 if settings.cuda else 1e-3)
        progress(f"  {name}: gradients differ by {away:.1e}")
    if steps.gradients(BESIDE):
        raise RuntimeError("gradients were left over by the steps beside the backward pass")
    for fast in (ours, host, beside):
        if fast.stats.plain_graphs or fast.stats.graph_breaks or fast.stats.runs < 2:
            raise RuntimeError(f"not two planned passes: {fast.stats}")
    del expected
    gc.collect()
    return steps


def _compare(steps: Steps, ours: str, baseline: str, settings: Settings) -> Figure:
    runs = {name: Timed(run=lambda name=name: steps.step(name)) for name in (ours, baseline)}  # type: ignore[misc]
    side_by_side(runs, 2)
    times = side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds))
    return ratio(times[ours], times[baseline])


def _peaks(steps: Steps, mine: str, baseline: str) -> Figure:
    (ours, ours_more), (theirs, theirs_more) = steps.peak(mine), steps.peak(baseline)
    return figure([ours / theirs], ours_GiB=ours, baseline_GiB=theirs, beyond_weights=ours_more / theirs_more)


BENCHMARK = Benchmark(
    name="training",
    title="Training steps: forward, backward and AdamW; with saved activations in host memory; with AdamW beside.",
    suites=("training",),
    trials=trials,
)
