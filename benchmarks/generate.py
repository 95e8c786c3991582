"""`generate` of transformers under a schedule, against its own: a static cache and compiled decoding, in the same run.

Both have the same weights and the same prompts. Each batch is compiled for itself on both sides. Decoding by greedy
choice soon parts at a tie, so results are compared along the baseline's tokens: ours is made to say the same ones.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dynaflow as df
from benchmarks.llama import BF16_LIMIT, FP32_LIMIT, FULL, build, label
from benchmarks.llama import TINY as SMALL
from benchmarks.measure import Figure, Timed, Trial, WrongResult, agree, figure, once, side_by_side, synchronize
from benchmarks.report import progress
from benchmarks.settings import Settings
from benchmarks.suite import Benchmark
from dynaflow.api import engine_of

OWN = "transformers' own compiled generate"
SCHEDULERS = ("auto", "sequential")
LIMIT = 1.0
ROUNDS = 3
ALIKE = 0.7
"""The share of tokens that must be the same. Of random weights in bfloat16, two right results choose differently about
once in ten times, where two tokens are as likely; what is mixed up never chooses the same."""
TUNING_TINY = {"seconds": 0.3, "most": 1}


@dataclass(frozen=True, kw_only=True)
class Work:
    batch: int
    prompt: int = 128
    new: int = 128

    @property
    def name(self) -> str:
        return f"generate {self.batch}"

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    @property
    def looks(self) -> frozenset[int]:
        """The steps that are compared: the prompt's, those in which graphs are made, and some up to the last."""
        return frozenset({0, 1, 2, 3, *(1 << n for n in range(2, self.new.bit_length())), self.new - 1})


WORKS = (Work(batch=64), Work(batch=256))
TINY = (Work(batch=6, prompt=8, new=8),)


class Watch:
    """A logits processor that keeps the logits of some steps; with `tokens`, it makes generate choose those."""

    def __init__(self, work: Work, tokens: Tensor | None = None) -> None:
        self.work, self.tokens = work, tokens
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.size(1) - self.work.prompt
        if step in self.work.looks:
            self.kept.append(scores.nan_to_num(neginf=0.0))  # a copy; tokens that are forbidden count for nothing
        if self.tokens is None:
            return scores
        wanted = self.tokens[:, input_ids.size(1), None]
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted, 0.0)


class Side:
    """One way to generate."""

    def __init__(self, name: str, model: Any, work: Work, prepare: Callable[[], None], **options: Any) -> None:
        self.name, self.model, self.work, self.prepare, self.options = name, model, work, prepare, options
        generator = torch.Generator(model.device).manual_seed(work.batch)
        shape = (work.batch, work.prompt)
        self.ids = torch.randint(3, model.config.vocab_size, shape, device=model.device, generator=generator)
        start = time.perf_counter()
        self.generate()
        synchronize()
        self.first = time.perf_counter() - start
        progress(f"  {name}: the first call took {self.first:.1f} s")

    def generate(self, watch: Watch | None = None) -> Tensor:
        new = self.work.new
        found: Tensor = self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, logits_processor=[watch] if watch else None, **self.options,
        )  # fmt: skip
        if found.shape != (self.work.batch, self.work.prompt + new):
            raise WrongResult(f"{self.name} made {tuple(found.shape)} tokens")
        return found


class Contest:
    """The baseline and ours for one batch: made, compared, and timed in turns."""

    def __init__(self, model: Any, work: Work, settings: Settings) -> None:
        self.work, self.settings = work, settings
        torch._dynamo.reset()
        self.own = self._own(sharing(model))
        self.ours, self.generation = self._ours(sharing(model))
        self.away, self.same = self._check()
        before = self.generation.decode.stats.captures
        runs = {s.name: Timed(run=s.generate, prepare=s.prepare) for s in (self.own, *self.ours.values())}
        self.times = side_by_side(runs, settings.rounds or ROUNDS)
        self.captures = self.generation.decode.stats.captures - before

    def close(self) -> None:
        self.__dict__.clear()
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _own(self, model: Any) -> Side:
        """On a GPU it compiles by itself; elsewhere it has to be told."""
        from transformers import CompileConfig

        config = None
        if not self.settings.cuda:
            eager = self.settings.operators == "eager"
            config = CompileConfig(backend="eager", mode=None) if eager else CompileConfig()  # type: ignore[arg-type]
            config._compile_all_devices = True
        counters = torch._dynamo.utils.counters
        graphs, skips = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            side = Side(OWN, model, self.work, lambda: None, cache_implementation="static", compile_config=config)
        if counters["stats"]["unique_graphs"] == graphs:
            raise RuntimeError("transformers compiled nothing: not the baseline it should be")
        self.skips = counters["inductor"]["cudagraph_skips"] - skips
        return side

    def _ours(self, model: Any) -> tuple[dict[str, Side], Any]:
        """One accelerated model under each scheduler in turn: what is captured and compiled is shared."""
        hf = df.integrations.transformers
        tuning = {"scheduler_options": TUNING_TINY} if self.settings.tiny else {}
        hf.accelerate(model, SCHEDULERS[0], operators=self.settings.operators, **tuning)
        generation = hf.compiled(model)
        engines = [engine_of(phase.compiled) for phase in (generation.prefill, generation.decode)]
        sides = {}
        for scheduler in SCHEDULERS:
            if scheduler != SCHEDULERS[0]:
                generation.set_scheduler(scheduler)
            schedules = [engine.planner.cache for engine in engines]

            def use(schedules: Sequence[Any] = schedules) -> None:
                for engine, mine in zip(engines, schedules, strict=True):
                    engine.planner.use(mine)

            sides[scheduler] = Side(scheduler, model, self.work, use)
        for stats in (engine.stats for engine in engines):
            if stats.plain_graphs or stats.graph_breaks:
                raise RuntimeError(f"ours does not run as one planned graph: {stats.plain_reasons}")
        if self.settings.cuda and not generation.decode.stats.graph_replays:
            raise RuntimeError(f"ours does not run as a CUDA graph: {generation.decode.stats.capture_failures}")
        return sides, generation

    def _check(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of each of ours: how far its logits are from the baseline's, and how often it would choose the same token."""
        limit = BF16_LIMIT if self.settings.cuda else FP32_LIMIT
        watch = Watch(self.work)
        tokens = self.own.generate(watch)
        if len(tokens[:, self.work.prompt].unique()) <= self.work.batch // 4:
            raise WrongResult("the weights say nothing: all prompts are answered alike")
        expected = watch.kept
        away, same = {}, {}
        for name, side in self.ours.items():
            side.prepare()
            watch = Watch(self.work, tokens)
            if not torch.equal(side.generate(watch), tokens):
                raise WrongResult(f"{name} was not led along the baseline's tokens")
            away[name] = agree(expected, watch.kept, limit)
            pairs = zip(expected, watch.kept, strict=True)
            same[name] = torch.stack([(e.argmax(1) == f.argmax(1)).float().mean() for e, f in pairs]).mean().item()
            if same[name] < ALIKE:
                raise WrongResult(f"{name} chooses the baseline's token in {same[name]:.0%} of all cases")
        return away, same

    # Figures

    def speed(self, scheduler: str) -> Figure:
        ours, own = self.times[scheduler], self.times[OWN]
        details: dict[str, Any] = {}
        if scheduler == "auto":
            details = {f"{name}_by": self._decision(name).chosen for name in ("prefill", "decode")}
        if self.skips and self.settings.cuda:
            details["graphs_that_the_baseline_left_out"] = self.skips
        return figure(
            [theirs / mine for mine, theirs in zip(ours, own, strict=True)],
            tokens_a_second=self.work.tokens / min(ours),
            baseline_tokens_a_second=self.work.tokens / min(own),
            difference=self.away[scheduler],
            same_tokens=self.same[scheduler],
            captures=self.captures,
            rounds=len(ours),
            **details,
        )

    def first(self) -> Figure:
        """Of `auto`, which came first: all is captured, compiled and tuned in it."""
        ours = self.ours[SCHEDULERS[0]].first
        stats = self.generation.prefill.stats, self.generation.decode.stats
        tuned = [self._decision(name) for name in ("prefill", "decode")]
        return figure(
            [ours / self.own.first],
            ours_seconds=ours,
            baseline_seconds=self.own.first,
            tuning_seconds=sum(decision.seconds for decision in tuned),
            situations=len(tuned),
            operators_compiled=sum(s.operators_compiled for s in stats),
        )

    def _decision(self, phase: str) -> Any:
        self.ours["auto"].prepare()
        (choice,) = engine_of(getattr(self.generation, phase).compiled).planner.cache.choices.values()
        return choice.note


def sharing(model: Any) -> Any:
    """Another model with the same weights: what is done to one leaves the other as it is."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def _model(settings: Settings) -> Any:
    model = build(settings)
    if settings.tiny:  # products then keep the size of what goes in, as they do in the large model
        for parameter in (p for p in model.parameters() if p.dim() > 1):
            parameter.mul_((FULL["hidden_size"] / SMALL["hidden_size"]) ** 0.5)
    model.config.use_cache = True
    model.generation_config.update(use_cache=True, pad_token_id=0)
    return model


def trials(settings: Settings) -> Iterator[Trial]:
    if not settings.can_hold_llama:
        return
    model = once(lambda: _model(settings))
    works = [w for w in WORKS if not settings.cells or w.name in settings.cells]
    for work in TINY if settings.tiny else works:
        contest = once(lambda work=work: Contest(model(), work, settings))  # type: ignore[misc]
        where = f"{label(work.name, settings)}, {work.prompt} in, {work.new} out"
        trial = Trial(what="", baseline=OWN, situation=where)
        for scheduler in SCHEDULERS:
            yield replace(
                trial,
                what=f"tokens a second with {scheduler}",
                limit=LIMIT,
                at_least=True,
                run=lambda s=scheduler, c=contest: c().speed(s),  # type: ignore[misc]
            )
        yield replace(trial, what="first call with auto", run=lambda c=contest: c().first())  # type: ignore[misc]
        try:
            contest().close()
        except Exception:  # never made: its rows tell why
            gc.collect()


BENCHMARK = Benchmark(
    name="generate",
    title="Llama-3-8B in transformers' generate: tokens a second against its own compiled generate, in turns.",
    suites=("systems",),
    trials=trials,
)
