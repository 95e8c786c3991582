"""Generation by transformers, under a schedule: the tokens of plain generate, and proof that it ran split."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dynaflow as df
from dynaflow import _torch
from dynaflow.api import engine_of
from dynaflow.strategies import Auto, NanoFlow
from tests.helpers import CUTS, Each, TwoBatches, lowered_of, pretend_graphs, scheduler_of, uneven
from tests.zoo import ZOO, left_padding, transformer

transformers = pytest.importorskip("transformers")
hf = df.integrations.transformers

STEPS = 32


class ThreeParts(Each):
    """Uneven, each on a lane of its own."""

    def __init__(self) -> None:
        super().__init__(CUTS, split=lambda rows: uneven(rows) if rows > 3 else None, lanes=3)


def build(name: str = "llama") -> Any:
    model: Any = ZOO[name].build()
    model.config.use_cache = True
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def prompts(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded at the left."""
    ids = torch.randint(4, 101, (batch, length), generator=torch.Generator().manual_seed(100 * batch + length))
    mask = left_padding(batch, length) if batch > 1 else torch.ones_like(ids)
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model: Any, batch: int, length: int, steps: int = STEPS, **options: Any) -> torch.Tensor:
    torch.manual_seed(batch)  # for those that sample
    return model.generate(**prompts(batch, length), max_new_tokens=steps, **{"do_sample": False, **options})


def parts(phase: Any) -> set[int]:
    """Into how many micro-batches the phase's present plans cut."""
    return {len(lowered.plan.micro_batches) for lowered in lowered_of(phase.compiled)}


def calls(model: Any) -> tuple[int, int]:
    """How often prefill and decode ran under a plan."""
    generation = hf.compiled(model)
    assert not generation.prefill.stats.plain_graphs + generation.decode.stats.plain_graphs
    return generation.prefill.stats.runs, generation.decode.stats.runs


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "deepseek_v3"])
def test_tokens(name: str) -> None:
    """Greedy and sampled, prompts of several lengths, one row and up to 16, in two and in three parts."""
    model = build(name)
    sizes = [(1, 9), (5, 12), (16, 7)]
    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 0}

    def run() -> list[torch.Tensor]:
        return [*(generated(model, *size) for size in sizes), generated(model, 5, 12, **sampled)]

    expected = run()
    assert len({tuple(row[-STEPS:].tolist()) for tokens in expected for row in tokens}) > 22, "the weights say nothing"
    assert hf.accelerate(model, operators="eager") is model
    generation = hf.compiled(model)
    for scheduler, count in ((NanoFlow(), 2), (ThreeParts(), 3)):
        generation.set_scheduler(scheduler)
        before = calls(model)
        found = run()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert parts(generation.prefill) == {1, count} and parts(generation.decode) == {1, count}
        assert calls(model) == (before[0] + len(found), before[1] + len(found) * (STEPS - 1)), "a call got past us"
    # A row alone or several, with a mask or without; once more where a number of the cache's turned out to vary.
    assert generation.prefill.stats.graphs <= 4 and generation.decode.stats.graphs <= 6
    # One for each batch and length, and twice where a window gets full.
    assert generation.decode.stats.plans <= 2 * 2 * len(sizes) + 2


def test_captures_are_bounded() -> None:
    """However many lengths and batches there are; and each call runs under a plan."""
    model = build()
    sizes = [(rows, length) for length in (12, 7, 30, 3, 44, 60) for rows in (6, 1, 11)]
    expected = [generated(model, *size, steps=4) for size in sizes]
    hf.accelerate(model, TwoBatches(), operators="eager")
    generation = hf.compiled(model)
    for number, (size, tokens) in enumerate(zip(sizes, expected, strict=True)):
        assert torch.equal(generated(model, *size, steps=4), tokens)
        if number == 8:
            captured = generation.prefill.stats.graphs, generation.decode.stats.graphs
    assert (generation.prefill.stats.graphs, generation.decode.stats.graphs) == captured
    assert captured[0] <= 4 and captured[1] <= 2
    assert calls(model) == (len(sizes), 3 * len(sizes))


def test_without_padding_and_a_cache_that_grows() -> None:
    """Then generate gives no mask, the model makes it as long as the cache, and Dynamo captures the second length."""
    model = build()
    ids = {length: torch.randint(4, 101, (4, length)) for length in (5, 9, 14, 20, 6)}
    expected = {length: model.generate(i, max_new_tokens=4, do_sample=False) for length, i in ids.items()}
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=64)
    for length, i in ids.items():
        assert torch.equal(model.generate(i, max_new_tokens=4, do_sample=False), expected[length])
    generation = hf.compiled(model)
    assert (generation.prefill.stats.graphs, generation.decode.stats.graphs) == (1, 1)
    assert generation.decode.stats.plans == 1, "one length of the cache: one plan"
    hf.accelerate(model, TwoBatches(), operators="eager")
    assert model.generation_config.max_cache_len is None
    model._previous_max_cache_length = -1
    for length, i in ids.items():
        assert torch.equal(model.generate(i, max_new_tokens=4, do_sample=False), expected[length])
    generation = hf.compiled(model)
    assert (generation.prefill.stats.graphs, generation.decode.stats.graphs) == (2, 1)
    assert parts(generation.prefill) == parts(generation.decode) == {2}


def test_compiled_operators_serve_all_lengths() -> None:
    fields: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 101}
    model: Any = transformer(
        "LlamaForCausalLM", "LlamaConfig", 1, **fields, num_attention_heads=4, num_key_value_heads=2,
        eos_token_id=None, pad_token_id=0,
    )()  # fmt: skip
    sizes = [(4, 12), (6, 9), (8, 17), (5, 30)]
    expected = [generated(model, *size, steps=6) for size in sizes]
    hf.accelerate(model, Each(), max_cache_len=64)
    generation = hf.compiled(model)
    compiled = []
    for size, tokens in zip(sizes, expected, strict=True):
        assert torch.equal(generated(model, *size, steps=6), tokens)
        compiled.append((generation.prefill.stats.operators_compiled, generation.decode.stats.operators_compiled))
    assert min(compiled[0]) > 0
    assert compiled[1] == compiled[2] == compiled[3]
    assert parts(generation.prefill) == parts(generation.decode) == {2}


def test_auto() -> None:
    model = build()
    expected = generated(model, 8, 12, steps=8)
    hf.accelerate(model, scheduler_options={"seconds": 0.3, "most": 1}, operators="eager")
    assert torch.equal(generated(model, 8, 12, steps=8), expected)
    assert calls(model) == (1, 7)
    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        explanation = hf.compiled(model).explain(**prompts(8, 12), past_key_values=cache, use_cache=True)
    assert "sequential" in str(explanation) and "predicted" in str(explanation)


def test_the_cache_has_its_memory_before_the_capture() -> None:
    """Else the graph would make it and hand it out, and CUDA graphs would not know that it stays where it is."""
    model = hf.accelerate(build("deepseek_v3"), TwoBatches(), operators="eager")  # keys and values differ in size
    with torch.no_grad():
        caches = [transformers.StaticCache(config=model.config, max_cache_len=length) for length in (20, 20)]
        results = model(**prompts(4, 12), past_key_values=caches[0], use_cache=True)
        plan = hf.compiled(model).plan(**prompts(4, 12), past_key_values=caches[1], use_cache=True)
    assert results.past_key_values is caches[0] and len(plan.micro_batches) == 2
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert layer.keys.shape == other.keys.shape and layer.values.shape == other.values.shape
        assert all(_torch.is_marked_static(t) for t in (layer.keys, layer.values, other.keys, other.values))
        assert layer.keys[:, :, :12].any() and not layer.keys[:, :, 12:].any() and not other.keys.any()
    assert hf.compiled(model).prefill.stats.graphs == 1


class Counted(Auto):
    """Tunes nothing, and notes when it would have."""

    def choose(self, ctx: df.ScheduleContext) -> df.OpSchedulerBase:
        self.__dict__.setdefault("asked", []).append((ctx.facts["phase"], ctx.facts["mine"]))
        return NanoFlow()


def test_auto_tunes_once_for_similar_sizes() -> None:
    model, tuner = build(), Counted()
    hf.accelerate(model, tuner, operators="eager", max_cache_len=64, facts={"mine": 1})
    for size in [(5, 20), (8, 32), (6, 17), (7, 31)]:
        generated(model, *size, steps=3)
    assert tuner.asked == [("prefill", 1), ("decode", 1)]  # type: ignore[attr-defined]
    assert hf.compiled(model).decode.stats.sequential_runs == 0
    generated(model, 9, 31, steps=3)
    generated(model, 8, 33, steps=3)
    # Another batch; and another prompt, but no other decoding.
    assert [phase for phase, _ in tuner.asked[2:]] == ["prefill", "decode", "prefill"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("options", "expected"), [({}, "plan"), ({"cudagraph": None}, None)])
def test_decoding_is_one_graph(options: dict[str, Any], expected: str | None) -> None:
    """Prompts never are; and models over several ranks only when they are asked to: see tests/distributed."""
    generation = hf.compiled(hf.accelerate(build(), "sequential", **options))
    modes = [engine_of(phase.compiled).planner.lowerer.cudagraph for phase in (generation.prefill, generation.decode)]
    assert modes == [None, expected]


def test_time_for_tuning() -> None:
    model = build()

    def seconds() -> float:
        chooser: Any = scheduler_of(hf.compiled(model).decode.compiled)
        return chooser.tuner.seconds

    hf.accelerate(model)
    assert seconds() == 15.0
    hf.compiled(model).set_scheduler("auto", seconds=3.0)
    assert seconds() == 3.0
    hf.accelerate(model, Auto())
    assert seconds() == Auto().seconds


def test_beams_and_embeddings() -> None:
    model = build()
    beams = generated(model, 3, 9, steps=6, num_beams=3)
    embeddings = model.get_input_embeddings()(prompts(4, 9)["input_ids"])
    embedded = model.generate(inputs_embeds=embeddings, max_new_tokens=6, do_sample=False)
    hf.accelerate(model, TwoBatches(), operators="eager")
    assert torch.equal(generated(model, 3, 9, steps=6, num_beams=3), beams)
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=6, do_sample=False), embedded)
    assert parts(hf.compiled(model).prefill) == parts(hf.compiled(model).decode) == {2}


# --- one memory for the caches of all calls ----------------------------------------------------------------


class Places:
    """Where the caches of an accelerated model's decoding steps lie: each entry once, in order."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, ...]] = []
        decode = hf.compiled(model).decode
        function = decode.function

        def look(args: Any, kwargs: Any) -> Any:
            layers = kwargs["past_key_values"].layers
            tensors = [t for layer in layers for t in (layer.keys, layer.values, layer.cumulative_length)]
            place = tuple(t.data_ptr() for t in tensors)
            if self.seen[-1:] != [place]:
                self.seen.append(place)
            return function(args, kwargs)

        decode.function = look


def in_the_way(model: Any) -> list[torch.Tensor]:
    """Takes the places that the allocator would give to the next cache."""
    storages = hf.compiled(model).memory.storages
    return [torch.empty(s.nbytes(), dtype=torch.uint8) for s in storages for _ in range(2)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_caches_stay_where_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So one capture serves all calls of a size; batches and lengths may change in between."""
    pretend_graphs(monkeypatch)
    model = build(name)
    sizes: list[tuple[int, int, dict[str, Any]]] = [
        (8, 12, {}), (4, 9, {}), (2, 9, {"num_beams": 3}), (5, 12, {"do_sample": True}), (1, 7, {})
    ]  # fmt: skip
    expected = [generated(model, batch, length, steps=20, **options) for batch, length, options in sizes]
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=64)
    generation, places = hf.compiled(model), Places(model)
    kept, captures, plans = [], [], []
    for _ in range(3):
        for (batch, length, options), tokens in zip(sizes, expected, strict=True):
            assert torch.equal(generated(model, batch, length, steps=20, **options), tokens)
            kept.append(in_the_way(model))
        captures.append(generation.decode.stats.captures)
        plans.append((generation.decode.stats.plans, generation.prefill.stats.plans))
    assert len(places.seen) == 1, "the largest came first: nothing had to grow"
    assert captures[0] == captures[1] == captures[2] > 0 and plans[0] == plans[1] == plans[2]
    assert generation.decode.stats.graph_replays > 2 * len(sizes) * 16
    assert not generation.decode.stats.capture_failures and not generation.prefill.stats.captures


def test_a_larger_cache_moves_once() -> None:
    model = build()
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=64)
    places, memory, kept = Places(model), hf.compiled(model).memory, []
    for batch in (4, 8, 4, 8, 4):
        generated(model, batch, 9, steps=3)
        kept.append(in_the_way(model))
    assert len(places.seen) == 2
    held = memory.nbytes
    generated(model, 9, 9, steps=3)
    assert held < memory.nbytes < 1.2 * held


def test_what_an_earlier_call_left_does_no_harm() -> None:
    model = build()
    expected = generated(model, 4, 9, steps=6)
    hf.accelerate(model, TwoBatches(), operators="eager")
    for _ in range(3):
        assert torch.equal(generated(model, 4, 9, steps=6), expected)
        for storage in hf.compiled(model).memory.storages[:2]:
            torch.empty(0).set_(storage).fill_(torch.nan)


def test_memory_serves_all_modes() -> None:
    """A tensor that is made in inference mode can't be written outside of it."""
    model = build()
    expected = generated(model, 4, 9, steps=4)
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=32)
    places = Places(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(generated(model, 4, 9, steps=4), expected)
    assert len(places.seen) == 1


@pytest.mark.parametrize("what", ["cache", "tensor"])
def test_a_cache_that_is_held_stays(what: str) -> None:
    model = build()
    expected = generated(model, 4, 9, steps=6)
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=64)
    places = Places(model)

    def hold() -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        made = generated(model, 4, 9, steps=6, return_dict_in_generate=True)
        assert torch.equal(made.sequences, expected)
        tensors = [layer.values for layer in made.past_key_values.layers]
        return made.past_key_values if what == "cache" else None, tensors, [t.clone() for t in tensors]

    held = [hold() for _ in range(3)]
    assert len(places.seen) == 3, "one had the memory of another"
    for _ in range(2):
        generated(model, 6, 12, steps=6)
        assert torch.equal(generated(model, 4, 9, steps=6), expected)
    assert len(places.seen) == 4, "and who holds nothing has one place"
    for cache, tensors, before in held:
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
        if cache is not None:
            assert [layer.cumulative_length.item() for layer in cache.layers] == [14] * len(cache.layers)
            other = copy.deepcopy(cache)
            other.reorder_cache(torch.tensor([3, 2, 1, 0]))
            assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
            assert torch.equal(other.layers[0].values, before[0].flip(0))


def test_going_on_from_a_cache_that_is_held() -> None:
    """Two conversations in turns, each with its own cache, and others in between."""
    model = build()
    ids = {seed: torch.randint(4, 101, (4, 24), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)}
    expected = {seed: model(i).logits for seed, i in ids.items()}
    hf.accelerate(model, TwoBatches(), operators="eager")
    with torch.no_grad():
        caches = {seed: transformers.StaticCache(config=model.config, max_cache_len=32) for seed in ids}
        for start, stop in ((0, 8), *((n, n + 1) for n in range(8, 24))):
            for seed, cache in caches.items():
                positions = torch.arange(start, stop)[None].expand(4, -1)
                found = model(ids[seed][:, start:stop], past_key_values=cache, use_cache=True, position_ids=positions)
                torch.testing.assert_close(found.logits, expected[seed][:, start:stop], rtol=1e-4, atol=1e-4)
            generated(model, 4, 9, steps=2)


def test_generate_within_generate() -> None:
    model = build()
    expected, inner = generated(model, 4, 9, steps=6), generated(model, 6, 7, steps=4)
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=64)

    def interrupt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert torch.equal(generated(model, 6, 7, steps=4), inner)
        return scores

    places = Places(model)
    for _ in range(2):
        assert torch.equal(generated(model, 4, 9, steps=6, logits_processor=[interrupt]), expected)
    assert len(set(places.seen)) <= 3


def test_threads_generate_at_once() -> None:
    model = build()
    sizes = [(4, 9), (6, 12), (4, 9)]
    expected = [generated(model, *size, steps=8) for size in sizes]
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=32)
    for size in sizes:
        generated(model, *size, steps=8)

    def work(which: int) -> bool:
        inputs = prompts(*sizes[which])
        for _ in range(6):
            found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            if not torch.equal(found, expected[which]):
                return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [True] * 3
    assert len(hf.compiled(model).memory.storages) <= 2 * 3 * model.config.num_hidden_layers


def test_release_lets_go_of_the_memory() -> None:
    model = build()
    hf.accelerate(model, TwoBatches(), operators="eager")
    generated(model, 4, 9, steps=2)
    generation = hf.compiled(model)
    assert generation.memory.nbytes > 4 * 10
    storages = [weakref.ref(storage) for storage in generation.memory.storages]
    hf.release(model)
    gc.collect()
    assert generation.memory.nbytes == 0 and not any(ref() for ref in storages)


def test_one_length_for_all_layers() -> None:
    """A number for each layer's values would be looked up in each step."""
    model = build()
    hf.accelerate(model, "sequential", operators="eager")
    generated(model, 4, 9, steps=3)
    for phase in (hf.compiled(model).prefill, hf.compiled(model).decode):
        (lowered,) = lowered_of(phase.compiled)
        values = [i.shape for i in lowered.graph.graph.inputs if i.shape is not None and i.name.endswith("values")]
        assert len(values) > 1 and len({shape.size[2] for shape in values}) == 1


# --- taking it back, and copies ----------------------------------------------------------------------------


def test_release() -> None:
    model = build()
    settings, attributes = model.generation_config.to_dict(), set(vars(model))
    expected = generated(model, 4, 9, steps=1)
    hf.accelerate(model, TwoBatches(), operators="eager", max_cache_len=99)
    first = hf.compiled(model)
    generated(model, 4, 9, steps=1)
    hf.accelerate(model, NanoFlow(), operators="eager")  # takes the first back
    generated(model, 4, 9, steps=1)
    assert first.prefill.stats.runs == hf.compiled(model).prefill.stats.runs == 1
    assert hf.release(model) is model
    assert "forward" not in vars(model) and model.generation_config.to_dict() == settings
    assert set(vars(model)) - attributes <= {"_previous_max_cache_length"}  # transformers' own
    assert torch.equal(generated(model, 4, 9, steps=1), expected)
    assert first.prefill.stats.runs == 1
    assert hf.release(model) is model  # once more does no harm
    with pytest.raises(df.DynaFlowError, match="not accelerated"):
        hf.compiled(model)


def test_a_copy_is_plain_and_has_weights_of_its_own() -> None:
    model = build()
    hf.accelerate(model, TwoBatches(), operators="eager")
    expected = generated(model, 4, 9, steps=4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(**prompts(4, 9)).logits.any()
    assert model(**prompts(4, 9)).logits.any()
    assert torch.equal(generated(model, 4, 9, steps=4), expected)


def test_other_calls_stay_plain() -> None:
    """Gradients, no cache, or another kind of cache; the last is told, since somebody may have meant it otherwise."""
    model = build()
    inputs = prompts(4, 9)
    expected, tokens = model(**inputs).logits, generated(model, 4, 9, steps=4)
    hf.accelerate(model, TwoBatches(), operators="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(**inputs).logits, expected)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    with pytest.warns(UserWarning, match="DynamicCache runs without a schedule"):
        assert torch.equal(generated(model, 4, 9, steps=4, cache_implementation="dynamic"), tokens)
    assert calls(model) == (0, 0)


# --- transformers' own ways in -----------------------------------------------------------------------------


class Seen(TwoBatches):
    """Notes into how many parts it cut. Transformers copies options: what was seen is the class's."""

    parts: list[int] = []

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        result = super().schedule(ctx)
        type(self).parts.append(len(ctx.micro_batches))
        return result


@pytest.fixture
def seen() -> Any:
    torch._dynamo.reset()  # what is compiled for a class serves all its models
    Seen.parts.clear()
    yield Seen.parts
    torch._dynamo.reset()


def on_cpu(**options: Any) -> Any:
    config = transformers.CompileConfig(backend="dynaflow", **options)
    config._compile_all_devices = True  # on a GPU it compiles by itself
    return config


@pytest.mark.parametrize("way", ["options", "configure", "environment"])
def test_compile_config(way: str, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` compiles decoding alone."""
    model = build()
    expected = generated(model, 5, 9, steps=6)
    split: dict[str, Any] = {"scheduler": Seen(), "operators": "eager"}
    config = on_cpu(mode=None, options=split) if way == "options" else on_cpu()
    if way == "environment":
        monkeypatch.setattr(df.strategies.nanoflow, "NanoFlow", Seen)
        monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflow")
        monkeypatch.setenv("DYNAFLOW_OPERATORS", "eager")
    with df.configure(**(split if way == "configure" else {})):
        found = generated(model, 5, 9, steps=6, cache_implementation="static", compile_config=config)
    assert torch.equal(found, expected)
    assert seen == [2]


def test_pipeline(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(101)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
    model, texts = build(), ["w5 w6 w7", "w8 w9", "w10 w11 w12 w13 w14", "w15"]

    def complete() -> Any:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=fast)
        return pipe(texts, batch_size=4, max_new_tokens=8, do_sample=False)

    expected = complete()
    hf.accelerate(model, TwoBatches(), operators="eager")
    assert complete() == expected
    assert parts(hf.compiled(model).prefill) == parts(hf.compiled(model).decode) == {2}


def trained(folder: Path, backend: str | None = None, model: Any = None, **arguments: Any) -> list[float]:
    data = [{"input_ids": t, "labels": t, "unused": 1} for t in prompts(16, 10)["input_ids"]]
    model = build().train() if model is None else model
    if backend:
        model.compile(backend=backend)
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, seed=0, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path: Path, seen: list[int]) -> None:
    """Both passes run split."""
    expected = trained(tmp_path)
    assert len(set(expected)) == 4
    with df.configure(scheduler=Seen(), operators="eager"):
        assert trained(tmp_path, "dynaflow") == pytest.approx(expected, abs=1e-4)
    assert seen == [2, 2]


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_takes_a_compiled_model(tmp_path: Path, seen: list[int], bf16: bool) -> None:
    """It reads the signature of its `forward`, wraps that for bf16, and saves it."""
    expected = trained(tmp_path, bf16=bf16)
    plain = build().train()
    fast: Any = df.compile(plain, Seen(), operators="eager")
    assert trained(tmp_path, model=fast, bf16=bf16) == pytest.approx(expected, abs=2e-2 if bf16 else 1e-4)
    assert seen == [2, 2]
    fast.save_pretrained(tmp_path / "saved")
    loaded = type(plain).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in plain.state_dict().items())


def test_trainer_by_name(tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate has a list of the backends: ours is in it inside of `trainer_backend()` alone."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # where transformers puts it, and leaves it
    expected = trained(tmp_path)
    with df.configure(scheduler=Seen(), operators="eager"), hf.trainer_backend():
        assert trained(tmp_path, torch_compile_backend="dynaflow") == pytest.approx(expected, abs=1e-4)
    assert seen == [2, 2]
    with pytest.raises(ValueError, match="NONSENSE"):
        trained(tmp_path, torch_compile_backend="nonsense")
    with pytest.raises(ValueError, match="DYNAFLOW"):
        trained(tmp_path, torch_compile_backend="dynaflow")


def test_continuous_batching(seen: list[int]) -> None:
    """Tokens of all requests are one row: they are split among them, and attention runs whole."""
    model = build()
    requests = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17], [20, 21]]
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def serve(config: Any) -> list[list[int]]:
        batching = transformers.ContinuousBatchingConfig(
            block_size=8, num_blocks=64, max_batch_tokens=64, q_padding_interval_size=16, kv_padding_interval_size=32,
            varlen_compile_config=config,
        )  # fmt: skip
        results = model.generate_batch(
            requests, generation_config=settings, continuous_batching_config=batching, progress_bar=False
        )
        assert [result.error for result in results.values()] == [None] * len(requests)
        return [results[name].generated_tokens for name in sorted(results)]

    plain = [model.generate(torch.tensor([r]), generation_config=settings)[0, len(r) :].tolist() for r in requests]
    assert serve(None) == plain
    assert serve(hf.packed(Seen(), operators="eager")) == plain
    assert seen and set(seen) == {2}


# --- options -----------------------------------------------------------------------------------------------


def test_configure() -> None:
    from dynaflow.options import defaults

    assert defaults() == {}
    with df.configure(scheduler="nanoflow", scheduler_options={"parts": 3}):
        with df.configure(operators="eager"):
            assert defaults() == {"scheduler": "nanoflow", "scheduler_options": {"parts": 3}, "operators": "eager"}
        with df.configure(scheduler="auto"):
            assert defaults() == {"scheduler": "auto"}, "a scheduler's options go with it"
        assert defaults() == {"scheduler": "nanoflow", "scheduler_options": {"parts": 3}}
    df.configure(cudagraph="plan")
    assert defaults() == {"cudagraph": "plan"}
    df.configure(cudagraph=None)
    assert defaults() == {}


def test_who_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow.options import combined, defaults

    monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflow")
    monkeypatch.setenv("DYNAFLOW_SCHEDULER_OPTIONS", '{"parts": 3}')
    monkeypatch.setenv("DYNAFLOW_VERIFY", "1")
    assert defaults() == {"scheduler": "nanoflow", "scheduler_options": {"parts": 3}, "verify": True}
    with df.configure(scheduler="branches"):
        assert defaults() == {"scheduler": "branches", "verify": True}
        assert combined(defaults(), {"verify": False}) == {"scheduler": "branches", "verify": False}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"scheduler": "nanoflwo"}, "did you mean 'nanoflow'"),
        ({"scheduler": "nanoflow", "scheduler_options": {"rows": 3}}, "its options are"),
        ({"scheduler": 3}, "3 is not a scheduler"),
        ({"cudagraph": "all"}, "say 'plan'"),
        ({"operators": "fast"}, "say 'inductor'"),
        ({"schedule": "nanoflow"}, "unknown option 'schedule'"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], what: str) -> None:
    with pytest.raises(df.DynaFlowError, match=what):
        df.configure(**options)
    with pytest.raises(df.DynaFlowError, match=what):
        hf.accelerate(build(), **options)
    with pytest.raises(df.DynaFlowError, match=what):
        torch.compile(lambda x: x + 1, backend="dynaflow", options=options)(torch.ones(3))


def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda x: x + 1, backend="dynaflow")(torch.ones(3))

    monkeypatch.setenv("DYNAFLOW_SCHEDULER_OPTIONS", "parts=3")
    with pytest.raises(df.DynaFlowError, match="DYNAFLOW_SCHEDULER_OPTIONS='parts=3' can't be read"):
        run()
    monkeypatch.delenv("DYNAFLOW_SCHEDULER_OPTIONS")
    monkeypatch.setenv("DYNAFLOW_SCHEDULER", "nanoflwo")
    with pytest.raises(df.ScheduleError, match="did you mean 'nanoflow'"):
        run()


def test_models_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(df.DynaFlowError, match="Linear does not generate"):
        hf.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(df.DynaFlowError, match="encoder and a decoder"):
        hf.accelerate(ZOO["t5"].build())
    with pytest.raises(df.DynaFlowError, match="pass the model itself"):
        hf.accelerate(df.compile(build()))
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(df.DynaFlowError, match=r"4\.57\.1 is too old\n.*transformers>=5\.17"):
        hf.accelerate(build())


def test_transformers_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, dynaflow as df; df.integrations.transformers.accelerate;"
        "sys.exit('transformers' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- several ranks -----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by their group")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_tensor_parallel(tmp_path: Path) -> None:
    from tests.distributed.launch import launch

    launch("generation", 2, tmp_path, seconds=150.0).check("llama", 2)
