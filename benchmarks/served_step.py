"""Host time of a step in a system that serves requests: ours, beside the operators.

A server in small stands for vLLM: its operators look at a global for what belongs to the rows they get, and each step
brings other requests, so no step finds the plan of an earlier one as it is. The step is timed from the lengths of its
requests to its results. Beside it the same operators are called by hand, on parts cut beforehand; the difference is
ours.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dynaflow as df
from benchmarks.measure import Figure, Timed, Trial, agree, figure, side_by_side
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from dynaflow import api
from dynaflow.serving.host import HostedGraph, RaggedBatch, SerializableGraph, inject_row_ranges
from dynaflow.serving.scheduler import serving

LIMIT = 150.0
"""Microseconds, for the largest step."""
REQUESTS = (128, 256, 512)
LAYERS, WIDTH, MOST, ROUNDS, WARM = 4, 16, 4, 60, 20


class Server:
    """What operators look at, and who says so."""

    numbers: Tensor
    step: Step


@torch.library.custom_op("dynaflow_bench::served", mutates_args=())
def served(x: Tensor, layer_name: str) -> Tensor:
    return x * Server.numbers


@served.register_fake
def _(x: Tensor, layer_name: str) -> Tensor:
    return torch.empty_like(x)


class Step(RaggedBatch):
    def __init__(self, rows: int, lengths: Sequence[int]) -> None:
        super().__init__(rows, lengths, chunk=64, max_parts=MOST)
        self.numbers = Server.numbers

    def part(self, start: int, stop: int) -> Tensor:
        return self.numbers[start:stop]

    @contextlib.contextmanager
    def enter(self, part: Tensor) -> Iterator[None]:
        Server.numbers = part
        try:
            yield
        finally:
            Server.numbers = self.numbers


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = served(layer(x), "layer")
        return x


class Parts(df.OpSchedulerBase):
    """Every operator by itself, micro-batches in turn."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def partition(self) -> list[df.SplitModule | df.SplitFunc]:
        return [df.SplitModule(nn.Linear), df.SplitFunc("dynaflow_row_aware*")]

    def schedule(self, ctx: df.ScheduleContext) -> None:
        if self.parts > 1:
            ctx.split(self.parts)
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)


class Stand:
    """The model as the server runs it, under a scheduler."""

    def __init__(self, parts: int, settings: Settings) -> None:
        self.device = settings.device
        self.hosted: Any = None
        self.given: list[Any] = []
        """What the graph was called with at first."""
        self.parts, self.random = parts, random.Random(0)
        self.model = Layers().eval().to(settings.device)
        self.compiled = torch.compile(self.model, backend=lambda gm, _: Graph.captured(gm, self), dynamic=True)

    def next(self, requests: int) -> None:
        """The requests of the next step: most decode, some bring a prompt."""
        self.lengths = [1 if self.random.random() < 0.7 else self.random.randint(2, 48) for _ in range(requests)]
        rows = sum(self.lengths)
        self.x = torch.rand(rows, WIDTH, device=self.device)
        Server.numbers = torch.rand(rows, 1, device=self.device)

    def first(self) -> Tensor:
        """A step by way of torch.compile."""
        Server.step = Step(len(self.x), self.lengths)
        result: Tensor = self.compiled(self.x)
        return result

    def run(self) -> Callable[[], Tensor]:
        """A step as the server calls the captured graph: what Dynamo does before would come without us, too."""
        rows, weights = len(self.x), {id(p) for p in self.model.parameters()}
        args = [g if id(g) in weights else self.x if isinstance(g, Tensor) else rows for g in self.given]

        def run() -> Tensor:
            Server.step = Step(rows, self.lengths)
            (result,) = self.hosted(*args)
            return result

        return run

    def by_hand(self) -> Callable[[], Tensor]:
        """The operators of the latest step."""
        numbers, layers = Server.numbers, list(self.model.layers)
        rows = sorted(Server.step.parts) or [(0, len(self.x))]
        given = [(self.x[start:stop], numbers[start:stop]) for start, stop in rows]

        def run() -> Tensor:
            parts = [x for x, _ in given]
            for layer in layers:
                for i, (_, own) in enumerate(given):
                    Server.numbers = own
                    parts[i] = served(layer(parts[i]), "layer")
            Server.numbers = numbers
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return run


class Graph(SerializableGraph):
    def scheduled(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> HostedGraph:
        stand: Stand = self.host
        stand.given = list(inputs)
        source = inject_row_ranges(gm, inputs, lambda op, given: op.namespace == "dynaflow_bench", _within)
        assert source is not None
        options = {"scheduler": serving(Parts(stand.parts), MOST), "operators": "eager"}
        engine = api.new_engine(None, {**options, "facts": lambda: Server.step.facts, "batch_dims": source.dims})
        stand.hosted = HostedGraph(engine.backend(gm, inputs), source, engine)
        return stand.hosted


def _within(start: int, stop: int) -> Any:
    return Server.step.within(start, stop)


def trials(settings: Settings) -> Iterator[Trial]:
    for parts, requests in itertools.product((1, 2), (8,) if settings.tiny else REQUESTS):
        yield Trial(
            what=f"a step in {parts} micro-batch{'es' if parts > 1 else ''}",
            baseline="the same operators by hand",
            situation=f"{requests} requests, {LAYERS} layers",
            limit=LIMIT if requests == max(REQUESTS) else None,
            unit="us",
            run=lambda parts=parts, requests=requests: _beside(parts, requests, settings),
        )


def _beside(parts: int, requests: int, settings: Settings) -> Figure:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stand, times = Stand(parts, settings), list[tuple[float, float]]()
    try:
        for turn in range(WARM + (settings.rounds or ROUNDS)):
            stand.next(requests)
            if turn < WARM:  # new sizes, until every phase and size has its plan
                agree([stand.model(stand.x)] * 2, [stand.first(), stand.run()()], 1e-5)
                continue
            # Timed once, since the second time it would be a known batch: so the hand's one time stands beside it.
            ours = side_by_side({"ours": Timed(run=stand.run())}, 1, "return")["ours"][0]
            hand = side_by_side({"hand": Timed(run=stand.by_hand())}, 3, "return")["hand"]
            times.append((ours, statistics.median(hand)))
    finally:
        torch.set_num_threads(threads)
    hosted = stand.hosted
    if hosted.stats.plain_graphs or (hosted.stats.sequential_runs == hosted.stats.runs and parts > 1):
        raise RuntimeError(f"the step was not cut: {hosted.stats}")
    found = [(ours - hand) * 1e6 for ours, hand in times]
    each = {"step_us": 0, "by_hand_us": 1}
    return figure(found, **{name: statistics.median(t[i] for t in times) * 1e6 for name, i in each.items()})


BENCHMARK = Benchmark(
    name="served_step",
    title="Host time of a step of a server, beside its operators: from the requests' lengths until the call returns.",
    suites=("core", "fast"),
    trials=trials,
)
