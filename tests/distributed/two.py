"""Cases for two ranks: every strategy over tensor parallel, expert parallel and sequence parallel models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dynaflow as df
from dynaflow.strategies.comet import Comet
from dynaflow.strategies.fused import Link
from dynaflow.strategies.token_weave import TokenWeave
from tests.distributed import library, pretrained
from tests.distributed.models import (
    STRATEGIES,
    AddNorm,
    Block,
    ExpertModel,
    SequenceModel,
    compare,
    exchanged,
    in_double,
    is_merged,
    is_split,
    lanes_of,
    numbers,
    tensor_parallel,
    whole_numbers,
)
from tests.helpers import Each, graph_of


def llama_prefill() -> None:
    """All strategies, on batches that divide and that don't; a single row stays in sequence."""
    model = pretrained.llama()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in STRATEGIES:
        fast.set_scheduler(name)
        for batch in (6, 7) if name in ("token_weave", "comet") else (7,):
            plan = compare(model, fast, input_ids=pretrained.tokens(batch))
            assert lanes_of(plan, ".all_reduce") == {"network"}, plan
            assert is_split(plan, ".all_reduce"), plan
            fused = [task for task in plan.tasks if task.replace]
            if name == "token_weave":
                assert len(plan.micro_batches) == 2
                assert len(fused) == 2 * 4, plan  # two halves, two sums in each of two layers
                assert all(len(task.items) == 3 for task in fused)
            if name == "comet":
                assert len(plan.micro_batches) == 4
                for part in ("o_proj", "down_proj"):
                    assert is_split(plan, f"layers.1.{'mlp' if part == 'down_proj' else 'self_attn'}.{part}.all_reduce")
                    first = [t for t in plan.tasks if t.items[0].op.endswith(f".{part}")]
                    assert len(first) == 2 * 4, plan  # in chunks, like its sum
                assert is_merged(plan, ":add")
    assert fast.stats.graphs == 1
    for name in STRATEGIES:
        fast.set_scheduler(name)
        plan = compare(model, fast, input_ids=pretrained.tokens(1))
        assert len(plan.micro_batches) == 1
        assert plan.sequential or name == "dual_batch"  # which has lanes for shared experts as well


def llama_decode() -> None:
    """One step with a static cache, whose heads are spread over the ranks too."""
    from transformers import StaticCache

    model = pretrained.llama()
    model.config.use_cache = True
    prompt, following = pretrained.tokens(5, 4), pretrained.tokens(5, 1)

    def caches() -> Any:
        cache = StaticCache(config=model.config, max_cache_len=8)
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, use_cache=True)
        return cache

    expected_cache = caches()
    with torch.no_grad():
        expected = model(input_ids=following, past_key_values=expected_cache, use_cache=True).logits
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in STRATEGIES:
        fast.set_scheduler(name)
        cache = caches()
        with torch.no_grad():
            found = fast(input_ids=following, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-5)
        assert not fast.stats.sequential_runs


def moe(make: Callable[[], nn.Module]) -> None:
    model = make()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in STRATEGIES:
        fast.set_scheduler(name)
        plan = compare(model, fast, input_ids=pretrained.tokens(5))
        assert lanes_of(plan, "experts.all_reduce") == {"network"}
        if name in ("dual_batch", "token_weave", "comet"):
            assert all(
                len(item.micro_batches) == 1 for t in plan.tasks for item in t.items if item.op.endswith(".experts")
            ), plan
        if name == "token_weave":
            fused = [task for task in plan.tasks if task.replace]
            assert len(fused) == 2 * 2
            assert all("norm" in task.items[-1].op for task in fused)
        if name == "comet":
            assert is_merged(plan, ":add")


def experts_exchanged() -> None:
    """Each rank has tokens of its own. Nothing is rounded, so all must be equal to the last bit."""
    model = ExpertModel()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in STRATEGIES:
        fast.set_scheduler(name)
        for batch in (8, 5):
            plan = compare(model, fast, numbers(batch, 3, 8, seed=100 * dist.get_rank()), exact=True)
            assert is_split(plan, "all_to_all_single")
            assert lanes_of(plan, "all_to_all_single") == {"network"}
            if name == "comet":
                assert is_split(plan, ".experts")
                order = [str(task.items[0]) for task in plan.tasks if "layers.0." in str(task)]
                there = [n for n, item in enumerate(order) if ".all_to_all_single[" in item]
                back = [n for n, item in enumerate(order) if ".all_to_all_single#2[" in item]
                inside = [n for n, item in enumerate(order) if ".experts[" in item]
                assert len(there) == len(back) == len(inside) == 4, plan
                assert there[1] < inside[0] < back[0] < inside[1] < back[1], plan
                merged = [task for task in plan.tasks if len(task.items[0].micro_batches) == 4]
                assert {task.lane for task in merged} == {"compute"}
        plan = compare(model, fast, numbers(1, 3, 8, seed=dist.get_rank()), exact=True)
        assert plan.sequential or name == "dual_batch"


def chunks_by_choice() -> None:
    """Comet's options: experts alone, or row-parallel layers alone, and how many chunks."""
    model = ExpertModel()
    fast = df.compile(model, Comet(parts=3), operators="eager")
    x = numbers(7, 3, 8, seed=dist.get_rank())
    assert len(compare(model, fast, x, exact=True).micro_batches) == 3
    fast.set_scheduler(Comet(parts=16))
    assert len(compare(model, fast, x, exact=True).micro_batches) == 7
    fast.set_scheduler(Comet(parts=4, min_rows=3))
    assert len(compare(model, fast, x, exact=True).micro_batches) == 2
    fast.set_scheduler(Comet(experts=None))
    assert compare(model, fast, x, exact=True).sequential  # there is nothing else to overlap with
    rows = tensor_parallel()
    fast = df.compile(rows, Comet(experts=None), operators="eager")
    plan = compare(rows, fast, numbers(6, 8))
    assert is_split(plan, "down_proj") and is_merged(plan, "up_proj" if "up_proj" in str(plan) else ":linear")
    fast.set_scheduler(Comet(gemms=None))
    assert compare(rows, fast, numbers(6, 8)).sequential


def rows_exchanged() -> None:
    """Rows of the batch go from rank to rank: such an exchange stays whole, and nothing else has to."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(exchanged(self.up(x)))

    model = whole_numbers(Shuffled(), seed=0)
    fast = df.compile(model, "comm_overlap", operators="eager")
    plan = compare(model, fast, numbers(6, 8, seed=dist.get_rank()), exact=True)
    assert is_merged(plan, "all_to_all_single")
    assert not is_merged(plan, ":linear")


def sequence_parallel() -> None:
    """The sequence is gathered and scattered along dim 0; the batch is on dim 1."""
    x = numbers(3, 7, 8, seed=100 * dist.get_rank())
    for norm in (False, True):
        model = SequenceModel(norm)
        fast = df.compile(model, operators="eager", batch_dims={"x": 1}, fullgraph=True)
        for name in STRATEGIES:
            fast.set_scheduler(name)
            plan = compare(model, fast, x, exact=not norm)
            assert is_split(plan, "reduce_scatter_tensor"), plan
            fused = [task for task in plan.tasks if task.replace]
            assert len(fused) == (2 * 2 if norm and name == "token_weave" else 0), plan
            if name == "comet":
                assert is_split(plan, "down_proj") and is_merged(plan, "all_gather_into_tensor")


def spread_between_operators() -> None:
    """A cut between operators of DTensor's: its rows are not followed there, so the neighbours run whole, and right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            part = DTensor.from_local(self.down(torch.relu(self.up(x))), mesh, [Partial()], run_check=False)
            return torch.relu(part.redistribute(placements=[Replicate()]).to_local())

    model = whole_numbers(Spread(), seed=dist.get_rank())
    for rule in (df.SplitFunc("*redistribute"), df.SplitFunc("relu")):
        fast = df.compile(model, Each([df.SplitModule("up"), rule]), operators="eager")
        plan = compare(model, fast, numbers(5, 8), exact=True)
        assert is_split(plan, "up")


class Straight(nn.Module):
    """The sum is normed as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        return x + self.norm(summed)


class Handed(AddNorm):
    """The sum itself is a result of the model as well."""

    def forward(self, summed: Tensor, x: Tensor) -> Any:  # type: ignore[override]
        return summed, super().forward(summed, x)


class CastBack(nn.Module):
    """A cast that may be none: what it gives is then the sum itself, and others use it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        cast = summed.to(x.dtype)
        return self.norm(cast * 2.0) + cast


class OldNorm(nn.Module):
    """Written out, as transformers does, with a scale on the residual and shapes that follow the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.final_norm = WrittenOut()

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        total = x.view(x.shape[0], 4, 2) + summed.view(x.shape[0], 4, 2) * 0.5
        return self.final_norm(total).view(x.shape[0], 8)


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.tensor([0.3, -2.0])), 0.7

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Turned(nn.Module):
    """The norm hands out a copy of the sum as well; for a single row that is no copy, but the sum itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAndCopy()

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        normed, copy = self.norm(summed)
        return normed + copy.transpose(0, 1) + x


class NormAndCopy(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.normalize(x, dim=1), x.transpose(0, 1).contiguous()


class Multiplied(AddNorm):
    """A product comes before the norm: nothing that belongs to the link."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + self.proj(summed))


class Late(AddNorm):
    """What is added need not be there when the sum could begin."""

    def __init__(self) -> None:
        super().__init__()
        self.side_norm = nn.LayerNorm(8)

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.side_norm(x) + summed)


class Sized(nn.Module):
    """The norm makes something of the batch's size, which a fused call is not told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = NormAndNoise()

    def forward(self, summed: Tensor, x: Tensor) -> Tensor:
        return x + self.norm(summed)


class NormAndNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1) + torch.full((x.shape[0], 8), 0.5)


PATTERNS: dict[type[nn.Module], int] = {
    AddNorm: 3, Straight: 2, Handed: 3, CastBack: 3, OldNorm: 3, Turned: 2, Multiplied: 0, Late: 0, Sized: 0,
}  # fmt: skip
"""What follows a sum, and how many operators become one with it: none where the pattern is another."""


def fused_patterns() -> None:
    x = numbers(5, 8)
    for kind, count in PATTERNS.items():
        torch.manual_seed(0)
        model = Block(kind()).eval().requires_grad_(False)
        for compiled in (False, True) if kind is OldNorm else (False,):
            weave = TokenWeave(compiled=compiled)
            fast = df.compile(model, weave, operators="eager")
            before = counters["stats"]["unique_graphs"]
            plan = compare(model, fast, x)
            # What follows a sum: for three rows, and then for any number.
            assert counters["stats"]["unique_graphs"] - before == (3 if compiled else 1)
            fused = [task for task in plan.tasks if task.replace]
            assert [len(task.items) for task in fused] == [count] * (2 if count else 0), f"{kind}: {plan}"
            assert is_split(plan, "all_reduce")
            for _ in range(2):
                compare(model, fast, x)


class StandIn(Link):
    """Sums in one place, as symmetric memory does: whoever keeps a result sees the next one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(1 << 12)
        self.sums = 0

    def sum(self, x: Tensor, group: str) -> Tensor:
        self.place.fill_(torch.nan)
        self.sums += 1
        mine = self.place[: x.numel()].view(x.shape)
        mine.copy_(functional.all_reduce(x, "sum", group))
        return mine


def sums_in_one_place() -> None:
    x = numbers(6, 8)
    for kind, count in PATTERNS.items():
        torch.manual_seed(0)
        model = Block(kind()).eval().requires_grad_(False)
        weave = TokenWeave(parts=6)
        weave.fusions.link = StandIn()
        compare(model, df.compile(model, weave, operators="eager"), x)
        assert weave.fusions.link.sums == (6 if count else 0), kind


def compiled_operators() -> None:
    """Inductor compiles collectives, and what is around them."""
    model = tensor_parallel(1)
    fast = df.compile(model, operators="inductor", fullgraph=True)
    for name in ("token_weave", "comm_overlap", "comet"):
        fast.set_scheduler(name)
        for batch in (6, 5):
            plan = compare(model, fast, numbers(batch, 8))
            assert is_split(plan, "all_reduce")
    assert fast.stats.operators_compiled


def declared_collectives() -> None:
    """A library's own collectives, of which its user has said that they are some."""
    group = library.declare()
    model = library.team_model()
    fast = df.compile(model, operators="eager", fullgraph=True)
    for name in STRATEGIES:
        fast.set_scheduler(name)
        plan = compare(model, fast, numbers(6, 8))
        sums = [op for op in graph_of(fast).ops if op.groups]
        assert [op.groups for op in sums] == [(group,)] * 2 and not any(op.refusal for op in sums)
        for op in ("0.sum", "1.sum_"):
            assert lanes_of(plan, op) == {"network"} and is_split(plan, op), plan
    fast.set_scheduler("auto", among=["comm_overlap"], seconds=1)  # ranks find out together
    compare(model, fast, numbers(6, 8))
    assert fast.explain(numbers(6, 8)).decision.tried


def declared_dims() -> None:
    """Slices of the batch's rows that are moved between ranks keep it whole; slices of other dims don't."""
    library.declare()

    class Gathers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = library.team_gather(x + 1, -1, "all:0")
            long = library.team_gather(wide * 2, 0, "all:0")
            return wide + long[: x.size(0)]

    fast = df.compile(Gathers(), "comm_overlap", operators="eager", fullgraph=True)
    compare(Gathers(), fast, numbers(6, 4))
    wide, long = (op for op in graph_of(fast).ops if op.groups)
    assert wide.splittable and "moves rows of the batch between ranks" in str(long.refusal)


CASES: dict[str, Callable[[], None]] = {
    "llama_prefill": llama_prefill,
    "llama_decode": llama_decode,
    "mixtral": partial(moe, pretrained.mixtral),
    "qwen3_moe": partial(moe, pretrained.qwen3_moe),
    **in_double(
        experts_exchanged, chunks_by_choice, rows_exchanged, sequence_parallel, spread_between_operators,
        fused_patterns, sums_in_one_place, compiled_operators, declared_collectives, declared_dims,
    ),
}  # fmt: skip
