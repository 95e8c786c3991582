"""The compiled forms of one case. Each is made once and serves every row that needs it."""

from __future__ import annotations

import functools
import gc
import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks.llama import Case
from benchmarks.measure import Figure, Timed, Until, agree, ratio, rounds_for, side_by_side, synchronize
from benchmarks.report import progress
from benchmarks.schedulers import OneLane, TwoBatches
from benchmarks.settings import Settings
from dynaflow.api import engine_of

_numbers = itertools.count()


class Variant:
    """One way to run the case."""

    def __init__(self, case: Case, name: str, call: Callable[..., Any], fast: df.CompiledModel | None = None) -> None:
        self.case, self.name, self.call, self.fast = case, name, call, fast
        self.schedules: Any = None
        """The scheduler with its plans, if the compiled model serves several."""

    def prepare(self) -> None:
        self.case.reset()
        if self.schedules is not None and self.fast is not None:
            engine_of(self.fast).planner.use(self.schedules)
        torch.compiler.cudagraph_mark_step_begin()  # results of the last call may be written over

    def run(self) -> Any:
        return self.call(**self.case.inputs)

    @property
    def timed(self) -> Timed:
        return Timed(run=self.run, prepare=self.prepare)

    def results(self) -> list[Tensor]:
        self.prepare()
        output = self.run()
        synchronize()
        return self.case.results(output)

    def warm_up(self) -> None:
        """Three calls: compile, record, replay."""
        start = time.perf_counter()
        for _ in range(3):
            self.prepare()
            self.run()
            synchronize()
        progress(f"  {self.name} is warm after {time.perf_counter() - start:.1f} s")


class Variants:
    """Made on demand. `close` before the next case: graphs and caches are large."""

    def __init__(self, case: Case, settings: Settings, cuts: tuple[df.SplitModule, ...] | None = None) -> None:
        self.case, self.settings = case, settings
        self.cuts = cuts
        self._models: dict[str | None, df.CompiledModel] = {}
        self._variants: dict[Any, Variant] = {}
        self.expected = functools.cache(self._expected)
        torch._dynamo.reset()

    def close(self) -> None:
        self._models.clear()
        self._variants.clear()
        self.expected = functools.cache(self._expected)
        torch._dynamo.reset()
        gc.collect()
        if self.settings.cuda:
            torch.cuda.empty_cache()

    # Ours

    def ours(
        self,
        scheduler: df.OpSchedulerBase,
        name: str,
        cudagraph: str | None = None,
        chains: bool = True,
        tries: bool = False,
    ) -> Variant:
        """Under this scheduler; `name` must tell it from others. One capture serves all with the same `cudagraph`.

        `tries`: it tries other schedulers, some of which may fail to be captured.
        """
        title = f"{name}{', one graph' if cudagraph else ''}{'' if chains else ', kept apart'}"
        if title not in self._variants:
            fast = self._models.get(cudagraph)
            if fast is None:
                fast = self._models[cudagraph] = self.fresh(scheduler, cudagraph)
            # Schedulers take turns in the rounds: their plans have to stay.
            fast.set_scheduler(scheduler)
            variant = Variant(self.case, title, fast, fast)
            variant.schedules = engine_of(fast).planner.cache
            lowerer = engine_of(fast).planner.lowerer
            usual = getattr(lowerer, "chains", True)
            lowerer.chains = chains and usual  # read when the plan is made, which is now
            try:
                self._warm_ours(variant, cudagraph, tries)
            finally:
                lowerer.chains = usual
            self._variants[title] = variant
        return self._variants[title]

    def sequential(self, cudagraph: str | None = None) -> Variant:
        return self.ours(df.Sequential(), "sequential", cudagraph)

    def one_lane(self, cudagraph: str | None = None, *, chains: bool) -> Variant:
        return self.ours(OneLane(self.cuts) if self.cuts else OneLane(), "cut, one lane", cudagraph, chains)

    def two_batches(self, cudagraph: str | None = None, lanes: int = 2) -> Variant:
        return self.ours(TwoBatches(lanes), "two micro-batches" + ("" if lanes > 1 else ", one lane"), cudagraph)

    def fresh(self, scheduler: df.OpSchedulerBase, cudagraph: str | None = None) -> df.CompiledModel:
        """A compiled model that no other row uses."""
        return df.compile(self.case.model, scheduler, cudagraph=cudagraph, operators=self.settings.operators)  # type: ignore[arg-type]

    def _warm_ours(self, variant: Variant, cudagraph: str | None, tries: bool) -> None:
        fast = variant.fast
        assert fast is not None
        stats = fast.stats
        captures, failures, runs = stats.captures, len(stats.capture_failures), stats.runs
        variant.warm_up()
        if stats.plain_graphs or stats.graph_breaks or stats.runs == runs:
            raise RuntimeError(f"{variant.name} does not run as one planned graph: {stats.plain_reasons}")
        failed = len(stats.capture_failures) > failures and not tries
        if cudagraph and self.settings.cuda and (stats.captures == captures or failed):
            raise RuntimeError(f"{variant.name} does not run as a CUDA graph: {stats.capture_failures[failures:]}")

    # The baselines

    def eager(self) -> Variant:
        return Variant(self.case, "eager", self.case.model)

    def baseline(self, mode: str | None = None) -> Variant:
        """torch.compile(model), with a mode or without."""
        name = "torch.compile" + (f"({mode})" if mode else "")
        if name not in self._variants:
            counters = torch._dynamo.utils.counters
            graphs = counters["stats"]["unique_graphs"]
            skips = counters["inductor"]["cudagraph_skips"]
            if self.settings.operators == "eager":
                compiled = torch.compile(own_code(self.case.model), backend="eager")
            else:
                compiled = torch.compile(own_code(self.case.model), mode=mode)
            variant = Variant(self.case, name, compiled)
            # Past the recompile limit Dynamo would run the plain model, with a line in the log and no more.
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                variant.warm_up()
            if counters["stats"]["unique_graphs"] == graphs:
                raise RuntimeError(f"{name} compiled nothing")
            if mode == "reduce-overhead" and counters["inductor"]["cudagraph_skips"] != skips:
                raise RuntimeError(f"{name} left out its CUDA graphs: not the baseline it should be")
            self._variants[name] = variant
        return self._variants[name]

    # Measuring

    def _expected(self) -> list[Tensor]:
        return self.eager().results()

    def check(self, ours: Variant, baseline: Variant) -> float:
        """Raises unless the baseline agrees with the plain model, and ours with the baseline."""
        known = baseline.results()
        agree(self.expected(), known, self.case.limit)
        return agree(known, ours.results(), self.case.limit)

    def compare(self, ours: Variant, baseline: Variant, until: Until = "idle") -> Figure:
        """Ours to the baseline, after the check."""
        away = self.check(ours, baseline)
        runs = {"ours": ours.timed, "baseline": baseline.timed}
        rounds = self.settings.rounds or rounds_for(runs, self.settings.seconds)
        times = side_by_side(runs, rounds, until)
        return ratio(times["ours"], times["baseline"], difference=away)


def own_code(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model behind a code object of its own: Dynamo counts recompiles by code, and never forgets sizes there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_filename=f"<baseline {next(_numbers)}>")
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)
