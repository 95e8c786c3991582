"""Copies from host memory on the copy engine, a few operators before their use, and frees them after it.

A model larger than the device's memory then runs as fast as it computes or as fast as its weights are copied,
whichever is slower. `df.offload(model, device)` moves the weights to host memory; anything else that a model fetches by
`torch.ops.dynaflow.fetch`, such as a cache, is handled the same way. Tensors that training saves for the backward pass
are copied to the host beside the computation, and back in the same way (`df.compile(..., offload_saved=1 << 20)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import dynaflow as df

FETCH, STORE = "fetch", "store"


class Prefetch(df.WrappingScheduler):
    """Fetches on their own lane, `ahead` operators before the one that uses them; `inner` schedules the rest.

    It needs memory for the weights of `ahead` + 1 operators: each fetch waits until an earlier operator is done with
    its weights. Stores go to another lane, and operators wait until at most `behind` of them are in flight. `inner`
    sees the graph without fetches and stores; its `key` is not used. None: all in order, on one lane.
    """

    def __init__(self, inner: df.OpSchedulerBase | None = None, ahead: int = 1, behind: int = 4) -> None:
        super().__init__(inner)
        self.at_least(0, ahead=ahead, behind=behind)
        self.ahead, self.behind = ahead, behind

    def partition(self) -> list[df.SplitFunc | df.SplitModule]:
        return [
            *self.inner.partition(),
            df.SplitFunc(torch.ops.dynaflow.fetch, tag=FETCH, optional=True),
            df.SplitFunc(torch.ops.dynaflow.store, tag=STORE, optional=True),
        ]

    def cache_key(self) -> Any:
        return self.ahead, self.behind

    def schedule(self, ctx: df.ScheduleContext) -> Any:
        if not any(op.tags & {FETCH, STORE} for op in ctx.ops):
            return self.inner.schedule(ctx)
        rest: Any = _WithoutFetches(ctx, self.ahead, self.behind)
        return self.inner.schedule(rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Load:
    """The fetches for one operator, and their users: that operator and, rarely, later ones."""

    fetches: list[df.Op] = field(default_factory=list)
    users: list[df.Op] = field(default_factory=list)


class _WithoutFetches:
    """The context for the inner scheduler: it hides fetches and stores, and issues them in time."""

    def __init__(self, ctx: df.ScheduleContext, ahead: int, behind: int) -> None:
        self._ctx, self._ahead, self._behind = ctx, ahead, behind
        self.ops = tuple(op for op in ctx.ops if not op.tags & {FETCH, STORE})
        self._unstored = [op for op in ctx.ops if STORE in op.tags]
        self._stored: list[df.OpItem] = []  # issued, and no operator waits for them yet
        self._left: dict[int, set[int]] = {}  # operator -> micro-batches for which it has not been executed
        self._begun: set[int] = set()  # operators that have been executed for some micro-batch
        self._held: list[_Load] = []  # issued, and no later fetch waits for the end of their use
        loads: dict[int, _Load] = {}
        for fetch in (op for op in ctx.ops if FETCH in op.tags):
            users = [op for op in self.ops if fetch.index in op.after]
            load = loads.setdefault(users[0].index if users else fetch.index, _Load())
            load.fetches.append(fetch)
            load.users.extend(op for op in users if op not in load.users)
        self._todo = [loads[first] for first in sorted(loads)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def get_ready_ops(self) -> list[df.OpItem]:
        self._fetch_ahead()
        ready = [item for item in self._ctx.get_ready_ops() if not item.tags & {FETCH, STORE}]
        unused = [load for load in self._held if not self._is_begun(load)]
        if not self._todo or len(unused) > self._ahead:
            return ready
        # If one micro-batch used what was fetched ahead now, the next fetch would have to wait for the others.
        return [item for item in ready if not any(item.op in load.users for load in unused)] or ready

    def execute(self, ops: df.OpItem | Sequence[df.OpItem], *args: Any, **kwargs: Any) -> None:
        self._fetch_ahead()
        items = list(ops) if isinstance(ops, Sequence) else [ops]
        for load in [load for load in self._todo if any(item.op in load.users for item in items)]:
            self._fetch(load)  # early: it is used now
        if len(self._stored) > self._behind:  # stores run in order: waiting for the last of these is enough
            done = self._stored[-1 - self._behind]
            kwargs["after"] = [*kwargs.get("after", ()), done]
            del self._stored[: -self._behind or None]
        self._ctx.execute(ops, *args, **kwargs)
        for item in items:
            self._begun.add(item.op.index)
            self._left[item.op.index].difference_update(item.micro_batches)
        self._store_made()
        self._fetch_ahead()

    def sequential(self) -> None:
        while ops := self.get_ready_ops():
            self.execute(ops[0])

    def _fetch_ahead(self) -> None:
        """Issues the next fetches for which there is room; those for the model's next operator in any case."""
        if not self._left:  # the batch is split by now
            self._left = {op.index: {m for i in self._ctx.items(op) for m in i.micro_batches} for op in self.ops}
        following = next((op for op in self.ops if self._left[op.index]), None)
        while self._todo and all(self._is_done(a) for fetch in self._todo[0].fetches for a in fetch.after):
            room = len(self._held) <= self._ahead or any(map(self._is_over, self._held))
            if not room and following not in self._todo[0].users:
                break
            self._fetch(self._todo[0])

    def _store_made(self) -> None:
        for store in [op for op in self._unstored if all(self._is_done(a) for a in op.after)]:
            self._unstored.remove(store)
            for item in self._ctx.items(store):
                self._ctx.execute(item, lane="store")
                self._stored.append(item)

    def _fetch(self, load: _Load) -> None:
        """Issues it on the copy lane, after an earlier one if more than `ahead` others are in memory."""
        over = [held for held in self._held if self._is_over(held)][: max(0, len(self._held) - self._ahead)]
        last = [item for held in over for user in held.users for item in self._ctx.items(user)]
        for fetch in load.fetches:
            for item in self._ctx.items(fetch):
                self._ctx.execute(item, lane="copy", after=last)
        self._held = [*(held for held in self._held if held not in over), load]
        self._todo.remove(load)

    def _is_done(self, op: int) -> bool:
        return not self._left.get(op)

    def _is_over(self, load: _Load) -> bool:
        return all(self._is_done(user.index) for user in load.users)

    def _is_begun(self, load: _Load) -> bool:
        return any(user.index in self._begun for user in load.users)
