"""The zoo itself: its models run, are captured as one graph, and have the modules that its cuts name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.zoo import DECODE, SHARED_INPUTS, ZOO, Entry, decode_setup, mark_batch, tensors, to

# Not 1, which Dynamo specialises.
BATCH, OTHER_BATCH = 3, 6

ENTRIES = [
    pytest.param(
        entry,
        id=name,
        marks=pytest.mark.skipif(not entry.available, reason=f"{entry.requires} is not installed"),
    )
    for name, entry in ZOO.items()
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@functools.cache
def _model(name: str) -> nn.Module:
    return ZOO[name].build()


def _capture(model: nn.Module) -> tuple[Callable[..., Any], list[fx.GraphModule]]:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    # A function of its own per model: models that share a forward share its recompile limit, too.
    def call(**kwargs: Any) -> Any:
        return model(**kwargs)

    return torch.compile(call, backend=backend, fullgraph=True), graphs


def _has_batch(node: fx.Node) -> bool:
    """Whether dim 0 of the node is a symbol."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def _assert_symbolic_batch(graph: fx.GraphModule, marked: list[Tensor]) -> None:
    carriers = [node for node in graph.graph.find_nodes(op="placeholder") if _has_batch(node)]
    assert len(carriers) == len(marked), "an input was specialised on its batch"
    (output,) = graph.graph.find_nodes(op="output")
    assert all(_has_batch(node) for node in output.all_input_nodes), "an output was specialised on its batch"


def _assert_equal(actual: Any, expected: Any) -> None:
    assert len(tensors(actual)) == len(tensors(expected)) > 0
    for got, wanted in zip(tensors(actual), tensors(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def _assert_rows_differ(output: Tensor) -> None:
    assert output.shape[0] == BATCH
    assert output.isfinite().all()
    for first in range(BATCH):
        for second in range(first):
            assert (output[first] - output[second]).abs().max() > 1e-2


@pytest.mark.parametrize("entry", ENTRIES)
def test_rows_differ(entry: Entry) -> None:
    model = _model(entry.name)
    assert not model.training
    for output in tensors(model(**entry.inputs(BATCH))):
        _assert_rows_differ(output)


@pytest.mark.parametrize("entry", ENTRIES)
def test_rows_are_independent(entry: Entry) -> None:
    """A split by rows gives the same output: the property that micro-batches rely on."""
    model = _model(entry.name)
    kwargs = entry.inputs(BATCH)

    def part(rows: slice) -> Mapping[str, Any]:
        return {
            name: value[rows] if isinstance(value, Tensor) and name not in SHARED_INPUTS else value
            for name, value in kwargs.items()
        }

    whole = tensors(model(**kwargs))
    parts = [tensors(model(**part(rows))) for rows in (slice(0, 1), slice(1, BATCH))]
    for expected, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_build_and_inputs_are_seeded(entry: Entry) -> None:
    first, second = _model(entry.name), entry.build()
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    for one, other in zip(tensors(entry.inputs(BATCH)), tensors(entry.inputs(BATCH)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_graph_for_every_batch(entry: Entry) -> None:
    model = _model(entry.name)
    compiled, graphs = _capture(model)
    for batch in (BATCH, OTHER_BATCH):
        kwargs = entry.inputs(batch)
        expected = model(**kwargs)
        marked = mark_batch(kwargs)
        assert all(tensor.shape[0] == batch for tensor in marked)
        _assert_equal(compiled(**kwargs), expected)
        assert len(graphs) == 1, "captured again"
        _assert_symbolic_batch(graphs[0], marked)


@pytest.mark.parametrize("entry", ENTRIES)
def test_cuts_name_modules(entry: Entry) -> None:
    paths = [path for path, _ in _model(entry.name).named_modules()]
    for glob, tag in entry.cuts:
        assert any(fnmatchcase(path, glob) for path in paths), f"{glob} ({tag}) matches no module"


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str) -> None:
    pytest.importorskip("transformers")
    setup = decode_setup(name, BATCH)
    compiled, graphs = _capture(setup.model)
    # The second size reuses the model and the function, as a server whose load changes does.
    for batch in (BATCH, OTHER_BATCH):
        at_batch = decode_setup(name, batch)
        reference, cache = at_batch.cache(), at_batch.cache()
        _assert_equal(cache, reference)
        for step in range(at_batch.steps):
            expected = setup.model(**at_batch.step(step, reference))
            kwargs = at_batch.step(step, cache)
            marked = mark_batch(kwargs)
            assert all(tensor.shape[0] == batch for tensor in marked)
            output = compiled(**kwargs)
            _assert_equal(output.logits, expected.logits)
            _assert_equal(cache, reference)
            assert len(graphs) == 1, "captured again"
            _assert_symbolic_batch(graphs[0], marked)
            if batch == BATCH:
                _assert_rows_differ(output.logits)


@pytest.mark.parametrize("name", DECODE)
def test_decode_agrees_with_prefill(name: str) -> None:
    """The cache holds what a prefill of the whole sequence would compute."""
    pytest.importorskip("transformers")
    setup = decode_setup(name, BATCH)
    cache = setup.cache()
    steps = [setup.step(index, cache) for index in range(setup.steps)]
    decoded = torch.cat([setup.model(**kwargs).logits for kwargs in steps], dim=1)

    whole = setup.model(**setup.whole()).logits
    torch.testing.assert_close(whole[:, -setup.steps :], decoded, rtol=1e-4, atol=1e-4)


def test_to_moves_floating_tensors_only() -> None:
    pytest.importorskip("transformers")
    moved = to("cpu", torch.float64, ZOO["llama"].inputs(BATCH) | {"nested": [torch.zeros(1)]})
    assert moved["input_ids"].dtype == torch.int64
    assert moved["use_cache"] is False
    assert moved["nested"][0].dtype == torch.float64

    setup = decode_setup("llama", BATCH)
    cache = to("cpu", torch.float64, setup.cache())
    to("cpu", torch.float64, setup.model)
    assert cache.layers[0].cumulative_length.dtype == torch.int64
    _assert_equal(cache, setup.cache())
    assert setup.model(**setup.step(0, cache)).logits.dtype == torch.float64
