"""The simulator against published speed-ups, each on the hardware that it was published for. Needs no GPU.

The settings are ours: the publications measure serving systems under load, with batches that mix phases; here one batch
of one kind is simulated. So this shows whether the model of the device is in the right range, not a reproduction. More
than 2x, as published for a slow link, can't come from overlap alone: the sum of two over the larger is 2 at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.measure import Figure, Trial
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from dynaflow.cli import plan_for_device
from dynaflow.core.device import device_named
from dynaflow.cost.costs import Costs
from dynaflow.cost.simulate import simulate
from dynaflow.models.build import Workload, build, inputs
from dynaflow.strategies import make

LAYERS = 6
"""Equal layers gain alike; more take longer to capture."""


@dataclass(frozen=True, kw_only=True)
class Published:
    what: str
    speed_up: float
    least: float | None = None
    """Where it was published as a range: from here up to `speed_up`. The nearest figure in it counts."""
    model: str
    device: str
    strategy: str
    batch: int
    prompt: int = 0
    context: int = 1024
    tp: int = 1
    ep: int = 1
    link: float | None = None
    """GB/s each way, where it is not the device's own."""

    @property
    def settings(self) -> str:
        shared = f", tp {self.tp}" if self.tp > 1 else f", ep {self.ep}" if self.ep > 1 else ""
        what = f"{self.batch}x{self.prompt}" if self.prompt else f"{self.batch} decoding at {self.context}"
        link = f", link {self.link:g} GB/s" if self.link else ""
        return f"{self.strategy}: {self.model}{shared}, {self.device}{link}, {what}"


FIGURES = (
    Published(what="NanoFlow in vLLM, up to", speed_up=1.29, model="llama-3-70b", device="b200", tp=8,
              strategy="nanoflow", batch=8, prompt=1024),
    Published(what="NanoFlow in vLLM, up to", speed_up=1.29, model="llama-3-70b", device="b200", tp=8,
              strategy="comm_overlap", batch=8, prompt=1024),
    Published(what="a naive split on light load, 0.35 to", least=0.35, speed_up=0.56, model="llama-3-70b",
              device="b200", tp=8, strategy="nanoflow", batch=16),
    Published(what="TokenWeave in vLLM", speed_up=1.21, model="llama-3-8b", device="h100", tp=4,
              strategy="token_weave", batch=8, prompt=1024),
    Published(what="communication overlap, up to", speed_up=1.15, model="llama-3-8b", device="h100", tp=4,
              strategy="comm_overlap", batch=8, prompt=1024),
    Published(what="dual-batch overlap in vLLM", speed_up=1.14, model="deepseek-v2-lite", device="h100", ep=4,
              strategy="dual_batch", batch=8, prompt=1024),
    Published(what="dual-batch overlap on a slow link", speed_up=2.06, model="deepseek-v2-lite", device="h100", ep=4,
              strategy="dual_batch", batch=8, prompt=1024, link=50.0),
)  # fmt: skip


def trials(settings: Settings) -> Iterator[Trial]:
    for figure in FIGURES:
        yield Trial(
            what=f"{figure.what} {figure.speed_up}: simulated",
            baseline="published",
            situation=figure.settings,
            run=lambda f=figure: _simulated(f),  # type: ignore[misc]
        )


def _simulated(figure: Published) -> Figure:
    device = device_named(figure.device, max(figure.tp, figure.ep))
    if figure.link:
        assert device.link is not None
        device = replace(device, link=replace(device.link, bandwidth=figure.link * 1e9))
    model = build(figure.model, tp=figure.tp, ep=figure.ep, layers=LAYERS)
    situation = Workload(batch=figure.batch, prompt=figure.prompt, context=figure.context)
    graph, plan = plan_for_device.capture(model, make(figure.strategy), inputs(model, situation), device)
    costs = Costs(graph, device)
    before = simulate(plan_for_device.in_sequence(plan), graph, costs, device, cudagraph=True)
    after = simulate(plan, graph, costs, device, cudagraph=True)
    found = before.seconds / after.seconds
    return Figure(
        value=found / min(max(found, figure.least or figure.speed_up), figure.speed_up),
        details={"simulated": found, "sequence_ms": before.seconds * 1e3, "strategy_ms": after.seconds * 1e3,
                 "limited_by": after.limit, "layers": LAYERS},
    )  # fmt: skip


BENCHMARK = Benchmark(
    name="published",
    title="Speed-ups that the simulator finds, against published ones on the same hardware.",
    suites=("strategies",),
    trials=trials,
)
