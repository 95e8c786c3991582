"""Training steps: forward, backward and the optimizer's step, against torch.compile; with activations in host memory;
and with the optimizer's step beside the backward pass."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks.measure import Figure, Timed, Trial, agree, figure, once, ratio, rounds_for, side_by_side, synchronize
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from benchmarks.variants import own_code

PLAIN, OURS, SAVED = "torch.compile", "sequential", "torch.compile, copies when saved and when used"
HOST, PART, BESIDE = "all activations on the host", "a part of the activations on the host", "optimizer_beside"
BOTH, MICRO = "two micro-batches, a part on the host", "two micro-batches, all on the device"
AT_LEAST = 1 << 20
"""Bytes: what is smaller stays on the device."""
MOST = 3 << 30
"""Bytes that go to the host as a part: about as many as do while the forward pass computes."""
SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to make a step against another: by its time, or by its peak of memory."""

    cell: str
    mine: str
    baseline: str
    peak: bool = False
    faster: bool = False
    """How many times faster, in place of how much of the time."""
    limit: float | None = None

    @property
    def what(self) -> str:
        return f"{self.mine}: {'peak of a step' if self.peak else 'times faster' if self.faster else 'time of a step'}"


ROWS = (
    Row(cell="sequential", mine=OURS, baseline=PLAIN, limit=1.01),
    Row(cell="sequential", mine=OURS, baseline=PLAIN, peak=True),
    Row(cell="part", mine=PART, baseline=OURS, peak=True),
    Row(cell="part", mine=PART, baseline=OURS, limit=1.05),
    Row(cell="both", mine=BOTH, baseline=OURS, peak=True, limit=0.6),
    Row(cell="both", mine=BOTH, baseline=OURS, limit=1.05),
    Row(cell="both", mine=BOTH, baseline=SAVED, faster=True, limit=1.5),
    Row(cell="micro", mine=MICRO, baseline=OURS, peak=True),
    Row(cell="micro", mine=MICRO, baseline=OURS),
    Row(cell="host", mine=HOST, baseline=OURS, peak=True),
    Row(cell="host", mine=HOST, baseline=OURS),
    Row(cell="host", mine=HOST, baseline=SAVED, faster=True, limit=1.5),
    Row(cell="beside", mine=BESIDE, baseline=PLAIN, limit=1.0),
    Row(cell="beside", mine=BESIDE, baseline=PLAIN, peak=True),
)
WORKS = tuple(dict.fromkeys(row.cell for row in ROWS))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One model and optimizer, and ways to make a step with them, each made and checked when it is first asked for."""

    model: Any
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Tensor]
    settings: Settings
    _ways: dict[str, Callable[[], None]] = field(default_factory=dict)

    def step(self, name: str) -> None:
        self._way(name)()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak(self, name: str) -> tuple[float, float]:
        """GiB: of all that is allocated during a step, and of what was not before."""
        for _ in range(2):
            self.step(name)
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(name)
        synchronize()
        most = torch.cuda.max_memory_allocated()
        return most / 2**30, (most - before) / 2**30

    def _way(self, name: str) -> Callable[[], None]:
        if name not in self._ways:
            way = self._make(name)
            expected = self._gradients(lambda: self._back(self.model))
            found = self._gradients(way)
            if name == BESIDE:  # unit tests compare its steps
                if found:
                    raise RuntimeError("gradients were left over by the steps beside the backward pass")
            else:
                away = agree(expected, found, 0.1 if self.settings.cuda else 1e-3)
                progress(f"  {name}: gradients differ by {away:.1e}")
            self._ways[name] = way
        return self._ways[name]

    def _make(self, name: str) -> Callable[[], None]:
        operators, at_least = self.settings.operators, 1 if self.settings.tiny else AT_LEAST
        if name in (BOTH, MICRO):
            less: dict[str, Any] = {"offload_saved": at_least, "offload_most": MOST // 2} if name == BOTH else {}
            how: dict[str, Any] = {"micro_batches": 2, "in_flight": 1, "operators": operators}
            step = df.TrainStep(self.model, "prefetch" if less else "sequential", **how, **less)
            return _with_gradients(lambda: step(**self.inputs))
        if name in (PLAIN, SAVED):
            plain = torch.compile(own_code(self.model), backend="inductor" if operators == "inductor" else "eager")
            if name == PLAIN:
                return lambda: self._back(plain)
            weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

            def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
                """What torch's save_on_cpu does, but with the strides that compiled code expects, and not weights."""
                if tensor.untyped_storage().data_ptr() in weights:
                    return tensor.device, tensor
                like = {"dtype": tensor.dtype, "pin_memory": tensor.is_cuda}
                host = torch.empty_strided(tensor.size(), tensor.stride(), **like)
                return tensor.device, host.copy_(tensor)

            def saved() -> None:
                back = lambda packed: packed[1].to(packed[0], non_blocking=True)  # noqa: E731
                with torch.autograd.graph.saved_tensors_hooks(to_host, back):
                    self._back(plain)

            return saved
        options: dict[str, Any] = {"scheduler": "sequential"}
        if name in (HOST, PART):
            most = MOST if name == PART else None
            options = {"scheduler": "prefetch", "offload_saved": at_least, "offload_most": most}
        elif name == BESIDE:
            options = {"scheduler": BESIDE, "optimizer": self.optimizer}
        fast = df.compile(self.model, operators=operators, **options)

        def ours() -> None:
            self._back(fast)
            if fast.stats.plain_graphs or fast.stats.graph_breaks or fast.stats.runs < 2:
                raise RuntimeError(f"not two planned passes: {fast.stats}")

        return ours

    def _back(self, model: Callable[..., Any]) -> None:
        _with_gradients(lambda: model(**self.inputs).loss.backward())()

    def _gradients(self, way: Callable[[], None]) -> list[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        way()
        # As one row each: rows of a weight are no samples, and some of them hardly have a gradient.
        found = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None and p.dim() > 1]
        self.optimizer.zero_grad(set_to_none=True)
        return found


def _with_gradients(call: Callable[[], Any]) -> Callable[[], None]:
    """Elsewhere benchmarks have no use for gradients."""

    def run() -> None:
        with torch.enable_grad():
            call()

    return run


def trials(settings: Settings) -> Iterator[Trial]:
    if not settings.can_hold_llama:
        return
    steps = once(lambda: _make(settings))
    where = "tiny Llama" if settings.tiny else "Llama-3-1B, batch 8 x 2048"
    where += f", {settings.layers} layers" if settings.layers else ""
    for row in ROWS:
        if settings.cells and row.cell not in settings.cells:
            continue
        measure = _peaks if row.peak else _times
        yield Trial(
            what=row.what, baseline=row.baseline, situation=where, limit=row.limit, at_least=row.faster,
            skip="memory is counted on CUDA" if row.peak and not settings.cuda else "",
            run=lambda row=row, measure=measure: measure(steps(), row),  # type: ignore[misc]
        )  # fmt: skip


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
    # Steps that do not move: all ways are then checked, and measured, with the weights of the first.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=settings.cuda or None)
    inputs = {"input_ids": tokens, "labels": tokens}
    return Steps(model=model, optimizer=optimizer, inputs=inputs, settings=settings)


def _times(steps: Steps, row: Row) -> Figure:
    settings = steps.settings
    runs = {name: Timed(run=lambda name=name: steps.step(name)) for name in (row.mine, row.baseline)}  # type: ignore[misc]
    side_by_side(runs, 2)
    times = side_by_side(runs, settings.rounds or rounds_for(runs, settings.seconds))
    found = ratio(times[row.mine], times[row.baseline])
    if row.faster:
        pairs = zip(times[row.mine], times[row.baseline], strict=True)
        return figure([theirs / mine for mine, theirs in pairs], **found.details)
    return found


def _peaks(steps: Steps, row: Row) -> Figure:
    gc.collect()
    (ours, ours_more), (theirs, theirs_more) = steps.peak(row.mine), steps.peak(row.baseline)
    return figure([ours / theirs], ours_GiB=ours, baseline_GiB=theirs, beyond_weights=ours_more / theirs_more)


BENCHMARK = Benchmark(
    name="training",
    title="Training steps: forward, backward and AdamW; with saved activations in host memory; with AdamW beside.",
    suites=("training",),
    trials=trials,
)
