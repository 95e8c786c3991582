"""Random schedulers: what they ask for is legal, but for those that make one mistake on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynaflow import OpSchedulerBase, SplitFunc
from dynaflow.capture.captured_graph import concrete
from dynaflow.errors import SplitError
from dynaflow.schedule.context import ScheduleContext
from dynaflow.schedule.fusion import fusion_values
from dynaflow.schedule.op_item import OpItem
from tests.fuzz.compare import Mismatch
from tests.fuzz.dice import Dice

LANES = ("main", "side", "third", "fourth")


class RandomScheduler(OpSchedulerBase):
    """Any schedule that the context allows."""

    rounds = 0
    """Batches are padded to a multiple of this."""

    def __init__(self, dice: Dice, functions: Sequence[str] = (), rules: Sequence[Any] = ()) -> None:
        self.dice = dice
        self.rules = list(rules)
        if functions and dice.one_in(3):
            self.rules.append(SplitFunc(dice.pick(functions), optional=True))
        self.parts = dice.pick([1, 2, 3, 4, 2, 3, 4, 5])
        """Into how many it cuts a batch, if that has as many rows."""
        self.whole = dice.one_in(20)
        self.executed: set[OpItem] = set()

    @property
    def may_split(self) -> bool:
        return self.parts > 1 and not self.whole

    def __str__(self) -> str:
        rules = ", ".join(map(str, self.rules))
        return f"{type(self).__name__} of {self.parts} parts{f', {rules}' if rules else ''}"

    def partition(self) -> list[Any]:
        return list(self.rules)

    def schedule(self, ctx: ScheduleContext) -> Any:
        dice, self.executed = self.dice, set()
        if self.whole:
            return ctx.sequential()
        self._split(ctx)
        lanes = LANES[: 1 + dice.below(4)]
        fuses, merges = dice.one_in(3) and not self.elastic, dice.one_in(2)  # the functions are made for one size
        while ready := ctx.get_ready_ops():
            item = dice.pick(ready)
            lane = dice.pick(lanes)
            others = [i for i in ready if i.op is item.op and i is not item]
            if others and merges and not dice.one_in(3):
                chosen = [item, *(i for i in others if not dice.one_in(3))]
                self._execute(ctx, chosen, lane)
            elif fuses and len(chain := self._chain(ctx, item, others)) > 1:
                self._execute(ctx, chain, lane, replace_func=fused(ctx, chain))
            else:
                self._execute(ctx, [item], lane)
        return None

    def _execute(self, ctx: ScheduleContext, items: list[OpItem], *args: Any, **options: Any) -> None:
        ctx.execute(items, *args, **options)
        self.executed.update(items)

    def _split(self, ctx: ScheduleContext) -> None:
        dice, rows = self.dice, ctx.batch_size
        parts = min(self.parts, rows)
        if parts == 1:
            return
        sizes: list[int] | int = parts
        if not self.elastic and not dice.one_in(3):
            sizes = [1] * parts
            for _ in range(rows - parts):
                sizes[dice.below(parts)] += 1
        try:
            ctx.split(sizes)
        except SplitError as e:
            if any(op.splittable for op in ctx.ops) and ctx.has_batch:
                raise Mismatch(f"split({sizes}) of {rows} rows: {e}") from e

    def _chain(self, ctx: ScheduleContext, first: OpItem, others: list[OpItem]) -> list[OpItem]:
        """`first` and operators that follow it, for the same micro-batches, as far as nothing else is missing.

        Sometimes for a second micro-batch as well, one after the other.
        """
        chain = self._grown(ctx, [first], first)
        if others and self.dice.one_in(2):
            second = self.dice.pick(others)
            longer = self._grown(ctx, [*chain, second], second)
            grown = len(longer) - len(chain) - 1
            if bool(grown) == (len(chain) > 1):  # an item with no neighbour is no part of a chain
                return longer
        return chain

    def _grown(self, ctx: ScheduleContext, chain: list[OpItem], first: OpItem) -> list[OpItem]:
        for op in ctx.ops:
            if len(chain) > 1 and self.dice.one_in(3):
                break
            if not any(i.op.index in op.after and i.micro_batches == first.micro_batches for i in chain):
                continue
            item = next((i for i in ctx.items(op) if i.micro_batches == first.micro_batches), None)
            if item is not None and item not in self.executed and ctx.is_ready([*chain, item]):
                chain = [*chain, item]
        return chain


class RandomElasticScheduler(RandomScheduler):
    """One schedule, drawn once, for batches of all sizes."""

    elastic = True

    def key(self, ctx: ScheduleContext) -> str:
        return "any"


class RandomBucketScheduler(RandomScheduler):
    """Pads batches."""

    rounds = 4

    def bucket(self, batch_size: int) -> int:
        return -(-batch_size // self.rounds) * self.rounds


class RandomElasticBucketScheduler(RandomBucketScheduler, RandomElasticScheduler):
    """Both."""


def draw_scheduler(dice: Dice, functions: Sequence[str], rules: Sequence[Any], buckets: int = 8) -> RandomScheduler:
    """One in `buckets` pads."""
    kinds = {
        (False, False): RandomScheduler,
        (True, False): RandomElasticScheduler,
        (False, True): RandomBucketScheduler,
        (True, True): RandomElasticBucketScheduler,
    }
    return kinds[dice.one_in(4), dice.one_in(buckets)](dice, functions, rules)


def fused(ctx: ScheduleContext, items: list[OpItem]) -> Callable[..., Any]:
    """A function that computes what the items do, by calling their own modules."""
    graph = ctx.graph
    chain = [(i.op, i.micro_batches) for i in items]
    reads, writes = fusion_values(graph, chain)
    numbers = []
    for op, ms in chain:
        rows = sum(ctx.micro_batches[m].size for m in ms)
        sizes = {**graph.graph.hints, **ctx.sizes, **{s: rows for space in graph.batch_axes for s in space}}
        numbers.append([concrete(e, sizes) for e in op.symbols])

    def run(*args: Any) -> tuple[Any, ...]:
        known = dict(zip(reads, args, strict=True))
        for (op, ms), given in zip(chain, numbers, strict=True):
            made = op.module(*given, *[known[v, ms] for v in op.reads])
            known.update({(v, ms): tensor for v, tensor in zip(op.writes, made, strict=True)})
        return tuple(known[key] for key in writes)

    return run
