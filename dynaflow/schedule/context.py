"""What a scheduler sees and may ask. It records; nothing runs here."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import sympy
import torch

from dynaflow.capture.captured_graph import Phase
from dynaflow.core import validate
from dynaflow.core.device import device_for
from dynaflow.core.plan import MOST_PRIORITY, MOST_SMS, Item, Lane, MicroBatch, Plan, Task, is_name
from dynaflow.cost.costs import Costs
from dynaflow.errors import ScheduleError, SplitError, shown, user_line
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.split import Requests, parts_of, requests_of, split_requests, split_rows

DEFAULT_LANE = "main"
FACT_NAMES = ""
"""Stands, among the facts that were read, for the question which facts there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpItem:
    """An operator for one micro-batch; for all of them when the operator can't be split or has no batch."""

    op: Op
    micro_batch: MicroBatch
    micro_batches: tuple[int, ...]
    """Indices of the micro-batches that it covers."""

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def tags(self) -> frozenset[str]:
        return self.op.tags

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.micro_batches))}]"


class Facts(Mapping[str, Any]):
    """Free-form facts from the host system. Remembers which were read: the plan depends on those."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        self.read.add(FACT_NAMES)
        return iter(self._facts)

    def __len__(self) -> int:
        self.read.add(FACT_NAMES)
        return len(self._facts)


class Trials(Protocol):
    """Other schedulers tried on the arguments at hand."""

    cudagraph: bool

    @property
    def args(self) -> Sequence[Any]: ...

    def plan(self, scheduler: Any) -> Any: ...

    def lowered(self, scheduler: Any) -> Any: ...

    def watched(self, planned: Any, plan: Plan, on_task: Callable[[Task, str], None]) -> Any: ...


class ScheduleContext:
    """The batch at hand, the operators, and the record of what the scheduler wants done with them."""

    def __init__(
        self,
        graph: OpGraph,
        *,
        batch_size: int,
        has_batch: bool,
        device: torch.device,
        facts: Mapping[str, Any],
        sizes: Mapping[sympy.Symbol, int],
        requests_of: Callable[[Any], Requests | None] = requests_of,
    ) -> None:
        self.batch_size = batch_size
        """Rows in the batch (tokens, when it is ragged); 1 when the graph has no batch."""
        self.ops: tuple[Op, ...] = graph.ops
        self.device = device
        self.facts = Facts(facts)
        self._whole = MicroBatch(index=0, start=0, stop=batch_size)
        self.micro_batches: tuple[MicroBatch, ...] = (self._whole,)
        self.even_split: int | None = 1
        """How many equal parts were asked for; None when sizes were given: those fit one batch size only."""
        self.trials: Trials | None = None
        """For who chooses between schedulers: what each would plan, and how fast that is."""
        self.functions: dict[str, Callable[..., Any]] = {}
        self.graph, self.sizes = graph, sizes
        """The partitioned graph behind `ops`, and what its symbols stand for."""
        self.note: Any = None
        """Why it was decided so, for `fast.explain()`: anything that can be printed."""
        self.later: Callable[[ScheduleContext], Any] | None = None
        self._graph, self._has_batch, self._requests_of = graph, has_batch, requests_of
        self._sequential = False
        self._tasks: list[Task] = []
        self._masks: list[int] = []
        self._last_on: dict[str, int] = {}
        self._declared: dict[str, Lane] = {}
        self._owner: dict[tuple[int, int], int] = {}  # (op, micro-batch) -> task
        self._missing: dict[tuple[int, int], int] | None = None
        self._ready: list[tuple[int, int]] = []
        self._idle_asks = 0

    # What a scheduler calls

    @cached_property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """The sizes of the model's inputs by name, `ctx.inputs["input_ids"]`; its own parameters are not among them."""
        given = ((i.name, i.shape) for i in self._graph.graph.inputs if i.shape is not None and not i.owned)
        return {name: tuple(int(size.xreplace(self._known)) for size in shape.size) for name, shape in given}

    @cached_property
    def _known(self) -> dict[sympy.Symbol, sympy.Integer]:
        return {symbol: sympy.Integer(n) for symbol, n in {**self._graph.graph.hints, **self.sizes}.items()}

    @property
    def phase(self) -> Phase:
        """What is scheduled: "forward" or "backward" in training, else "inference". Operators of both passes have the
        names of their modules; what makes the gradients of weights is "*.weights", with the tag "weights"."""
        return self._graph.graph.phase

    @property
    def sms(self) -> int:
        """What lanes can share: the SMs of the device; on CPU, the threads that torch uses."""
        return device_for(self.device).sms

    def cost(self, item: OpItem | Op) -> float:
        """How long it takes alone on this device, in seconds, as the cost model has it."""
        op, rows = self._op_and_rows(item)
        return self._costs.seconds(op, rows)

    def uses(self, item: OpItem | Op) -> Mapping[str, float]:
        """What it uses meanwhile, by resource ("compute", "memory", "link", ...): a fraction of what there is."""
        op, rows = self._op_and_rows(item)
        return self._costs.uses(op, rows)

    def _op_and_rows(self, item: OpItem | Op) -> tuple[Op, int]:
        if isinstance(item, Op) and self._graph.by_name.get(item.name) is item:
            return item, self.batch_size
        if not isinstance(item, OpItem) or self._graph.by_name.get(item.name) is not item.op:
            raise _not_an_item("cost() or uses()", item)
        return item.op, sum(self.micro_batches[m].size for m in item.micro_batches)

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self._graph, device_for(self.device), sizes=self.sizes)

    def decide_later(self, decide: Callable[[ScheduleContext], Any]) -> None:
        """For `choose`: what it returns holds until `decide`, in a thread of its own, has found something better."""
        advice = "pass a function of the context that returns a scheduler"
        self.later = validate.function(decide, "decide_later(decide)", advice, ScheduleError)

    @property
    def has_batch(self) -> bool:
        """The graph has a batch; whether it can be split is another question, and depends on the cuts."""
        return self._has_batch

    @property
    def max_parts(self) -> int:
        """Into how many micro-batches the batch can be split at most: 1 when it can't be split at all."""
        if not self.can_split:
            return 1
        requests = self._requests_of(self.facts.get("num_tokens"))
        return self.batch_size if requests is None else requests.filled

    def lane(self, name: str, *, sms: int | None = None, priority: int = 0) -> str:
        """Declares a lane that has a share of the device, or a priority, and returns its name.

        Lanes with `sms` run on that many SMs and nowhere else (CUDA grants them in groups: 8 on Hopper), the other
        lanes of the plan on what is left. A lane with all of them (`ctx.sms`) shares them with the others: so a lane
        can be held to a part while another one may use everything. The lower the priority, the more urgent. A lane
        that has neither needs no declaration.
        """
        line = user_line()
        if not is_name(name):
            raise ScheduleError(f"lane({shown(name)}): no name", line=line, advice='pass a name, such as "memory"')
        if sms is not None:
            advice = f"pass a positive number, at most {MOST_SMS}, or leave it out; ctx.sms is what there is"
            sms = validate.integer(sms, f"lane {name!r}: sms", advice, least=1, most=MOST_SMS, error=ScheduleError)
        advice, most = "pass 0, or a negative number for a more urgent lane", MOST_PRIORITY
        what = f"lane {name!r}: priority"
        priority = validate.integer(priority, what, advice, least=-most, most=most, error=ScheduleError)
        lane = Lane(name=name, sms=sms, priority=priority)
        known = self._declared.get(name) or (Lane(name=name) if name in self._last_on else lane)
        if known != lane:
            how = "declared before" if name in self._declared else "in use, undeclared"
            raise ScheduleError(
                f"lane {lane} is {how}: {known}", line=line, advice="declare a lane once, before its first task"
            )
        self._declared[name] = lane
        return name

    def sequential(self) -> None:
        """Run the uncut graph."""
        if self._tasks:
            raise ScheduleError(
                f"sequential() after {len(self._tasks)} execute() calls",
                line=user_line(),
                advice="decide for sequential() before executing anything",
            )
        self._sequential = True

    def split(self, parts: int | Sequence[int]) -> tuple[MicroBatch, ...]:
        """Cut the batch: into `parts` of about equal size, or into the sizes given.

        When `facts["num_tokens"]` gives the lengths of packed requests, cuts fall between requests, and sizes
        count requests (or tokens, if they end at request boundaries).
        """
        if self._missing is not None:
            raise ScheduleError(
                "split() after get_ready_ops() or execute()", line=user_line(), advice="split first, then execute"
            )
        self._require_batch()
        parts = parts_of(parts, "split")
        self.micro_batches = self._cut(parts)
        self.even_split = parts if isinstance(parts, int) else None
        return self.micro_batches

    def get_ready_ops(self) -> list[OpItem]:
        """All operators, of all micro-batches, whose predecessors have been executed. Empty when all are done."""
        self._start()
        self._idle_asks += 1
        if self._idle_asks > 1000 + len(self.ops) * len(self.micro_batches):
            raise ScheduleError(
                f"get_ready_ops() was called {self._idle_asks - 1} times with nothing executed in between",
                op=self.ops[self._ready[0][0]].name if self._ready else None,
                line=user_line(),
                advice="execute at least one of the operators that it returns",
            )
        return [self._item(self.ops[o], m) for o, m in self._ready]

    def before(self, item: OpItem) -> list[OpItem]:
        """What must be executed before it: what makes its values, or touches its memory; and, where it needs something
        of earlier rows, what leaves that for earlier micro-batches."""
        self._start()
        if not isinstance(item, OpItem):
            raise _not_an_item("before()", item)
        return [self._item(self.ops[o], m) for o, m in dict.fromkeys(self._before(item))]

    def is_ready(self, items: Sequence[OpItem]) -> bool:
        """Whether `execute(items)` may come now: what they wait for was executed, or is among them. Some are ready
        together and not one by one: an operator with a state of its own runs for one micro-batch after another."""
        self._start()
        items = _items("is_ready()", items)
        own = {(i.op.index, m) for i in items for m in (i.micro_batches if i.op.splittable else (0,))}
        merged = [_merge(items)] if len({i.op for i in items}) == 1 else items
        return all(unit in self._owner or unit in own for item in merged for unit in self._before(item))

    def items(self, op: Op | str) -> list[OpItem]:
        """The executions of an operator, ready or not: one per micro-batch, or a single one. For fusions."""
        self._start()
        found = self._graph.by_name.get(op.name if isinstance(op, Op) else op if isinstance(op, str) else "")
        if found is None or not (isinstance(op, str) or found is op):
            name = op.name if isinstance(op, Op) else shown(op)
            raise ScheduleError(f"{name} is no operator of this graph", op=name, line=user_line(), advice="see ctx.ops")
        return [self._item(found, m) for m in (range(len(self.micro_batches)) if found.splittable else (0,))]

    def execute(
        self,
        ops: OpItem | Sequence[OpItem],
        lane: str = DEFAULT_LANE,
        replace_func: Callable[..., Any] | None = None,
        after: OpItem | Sequence[OpItem] = (),
    ) -> None:
        """Run one ready operator; several micro-batches of one operator, merged; or a fusion.

        It waits for what it reads. `after` holds what else it is to wait for, of what was executed before: to hold
        back work that could start early but would only be in the way, or take memory.

        A fusion calls `replace_func` in place of the given items. It gets what they read and no earlier one of
        them made: item by item, in the order of `signature(items)`; and returns what they make and others use,
        in the same manner, as a tensor or a tuple. Writes that the items do in place are its duty as well.
        """
        self._start()
        items = _items("execute()", ops)
        self._check_call(items, lane, replace_func)
        fused = replace_func is not None
        merged = items if fused else [_merge(items)]
        deps: set[int] = set()
        inside: set[tuple[int, int]] = set()
        for item in merged:
            for before in self._before(item):
                owner = self._owner.get(before)
                if owner is not None:
                    deps.add(owner)
                elif before not in inside:
                    raise self._not_ready(item, before)
            inside.update(_units(item))
        deps.update(self._executed(_items("execute(after=...)", after), merged[0]))
        for item in merged:  # from here on nothing is refused
            self._mark_done(item, len(self._tasks))
        name = self._named(replace_func) if replace_func else None
        self._record(tuple(Item(op=i.name, micro_batches=i.micro_batches) for i in merged), lane, deps, name)
        self._idle_asks = 0

    def signature(self, items: Sequence[OpItem]) -> tuple[list[str], list[str]]:
        """The names of what a fusion of `items` gets and returns, in order."""
        self._start()
        given = _items("signature()", items)
        self._check_items(given)
        reads, writes = fusion_values(self._graph, [(i.op, i.micro_batches) for i in given])
        names = self._graph.values
        return [names[v].name for v, _ in reads], [names[v].name for v, _ in writes]

    # What becomes of it

    def finish(self) -> Plan:
        """The plan that the scheduler has described."""
        if self._sequential or (not self._tasks and not self.ops):
            return self.whole()
        self._start()
        left = [op for op in self.ops if any((op.index, m) not in self._owner for m in self._units(op))]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ScheduleError(
                f"operator {left[0].name!r} was never executed{more}",
                op=left[0].name,
                line=left[0].line,
                advice="execute what get_ready_ops() returns until it returns nothing, or return ctx.sequential()",
            )
        # The first lane is the caller's own stream, where what it gave can be let go as soon as it is used.
        names = sorted(self._last_on, key=lambda name: name != DEFAULT_LANE)
        lanes = tuple(self._declared.get(name, Lane(name=name)) for name in names)
        return Plan(
            graph=self._graph.fingerprint, micro_batches=self.micro_batches, lanes=lanes, tasks=tuple(self._tasks)
        )

    def whole(self) -> Plan:
        """The plan that runs the uncut graph."""
        return Plan(graph=self._graph.fingerprint, micro_batches=(self._whole,), lanes=(), tasks=())

    @property
    def can_split(self) -> bool:
        return self._has_batch and any(op.splittable for op in self.ops)

    def resized(self, plan: Plan) -> Plan:
        """The same decisions for this context's batch: the same number of equal parts, in the same order."""
        return replace(plan, micro_batches=self._cut(len(plan.micro_batches)), code="")

    # Inside

    def _cut(self, parts: int | Sequence[int]) -> tuple[MicroBatch, ...]:
        requests = self._requests_of(self.facts.get("num_tokens"))
        if requests is None or parts == 1:
            return split_rows(parts, self.batch_size)
        return split_requests(parts, requests, self.batch_size)

    def _start(self) -> None:
        """From the first question on, the split is fixed: count what each execution waits for."""
        if self._missing is not None:
            return
        self._missing = {}
        for op in self.ops:
            for m in self._units(op):
                count = len(set(self._before(self._item(op, m))))
                self._missing[op.index, m] = count
                if not count:
                    bisect.insort(self._ready, (op.index, m))
        self._users: list[list[Op]] = [[] for _ in self.ops]
        self._followers: list[list[Op]] = [[] for _ in self.ops]
        for op in self.ops:
            for a in op.after:
                self._users[a].append(op)
            for a in op.serial_after if op.splittable else ():
                self._followers[a].append(op)

    def _units(self, op: Op) -> range:
        return range(len(self.micro_batches)) if op.splittable else range(1)

    def _item(self, op: Op, m: int) -> OpItem:
        if op.splittable:
            return OpItem(op=op, micro_batch=self.micro_batches[m], micro_batches=(m,))
        return OpItem(op=op, micro_batch=self._whole, micro_batches=tuple(range(len(self.micro_batches))))

    def _before(self, item: OpItem) -> list[tuple[int, int]]:
        found = []
        for a in item.op.after:
            if not self.ops[a].splittable:
                found.append((a, 0))
            else:
                found.extend((a, m) for m in item.micro_batches)
        for a in item.op.serial_after:
            if item.op.splittable and self.ops[a].splittable:
                found.extend((a, m) for m in range(item.micro_batches[-1]) if m not in item.micro_batches)
        return found

    def _mark_done(self, item: OpItem, task: int) -> None:
        assert self._missing is not None
        for unit in _units(item):
            m = unit[1]
            self._owner[unit] = task
            if unit in self._ready:
                self._ready.remove(unit)
            for user in self._users[item.op.index]:
                self._arrived(user, [m] if user.splittable and item.op.splittable else self._units(user))
            for follower in self._followers[item.op.index] if item.op.splittable else ():
                self._arrived(follower, self._units(follower)[m + 1 :])

    def _arrived(self, op: Op, units: Iterable[int]) -> None:
        """What these executions of an operator wait for is one less."""
        assert self._missing is not None
        for m in units:
            self._missing[op.index, m] -= 1
            if not self._missing[op.index, m] and (op.index, m) not in self._owner:
                bisect.insort(self._ready, (op.index, m))

    def _record(self, items: tuple[Item, ...], lane: str, deps: set[int], function: str | None) -> None:
        last = self._last_on.get(lane)
        mask = 0 if last is None else self._masks[last] | 1 << last
        waits = []
        for dep in sorted(deps, reverse=True):  # the latest implies most
            if not mask >> dep & 1:
                waits.append(dep)
                mask |= self._masks[dep] | 1 << dep
        self._last_on[lane] = len(self._tasks)
        self._masks.append(mask)
        self._tasks.append(Task(items=items, lane=lane, after=tuple(sorted(waits)), replace=function))

    def _named(self, function: Callable[..., Any]) -> str:
        """The name that stands for `function` in the plan: closures of one making get a number each."""
        name = unique = function_name(function)
        number = 1
        while self.functions.setdefault(unique, function) is not function:
            number += 1
            unique = f"{name}#{number}"
        return unique

    def _check_call(self, items: list[OpItem], lane: str, replace_func: Callable[..., Any] | None) -> None:
        line = user_line()
        if self._sequential:
            raise ScheduleError("execute() after sequential()", line=line, advice="call one or the other")
        if not items:
            raise _not_an_item("execute()")
        self._check_items(items)
        if not is_name(lane):
            what = f"lane={shown(lane)} is no name"
            raise ScheduleError(what, op=items[0].name, line=line, advice='pass a name, such as "compute"')
        if replace_func is not None and not callable(replace_func):
            what = f"replace_func={shown(replace_func)} is no function"
            raise ScheduleError(what, op=items[0].name, line=line, advice="pass the function itself")
        for item in items:
            if any(unit in self._owner for unit in _units(item)):
                raise ScheduleError(
                    f"operator {item} was executed already",
                    op=item.name,
                    line=line,
                    advice="execute every item that get_ready_ops() returns once; ask again after executing",
                )
        if len({(i.name, i.micro_batches) for i in items}) < len(items):
            raise ScheduleError(
                f"operator {items[0]} is given twice", op=items[0].name, line=line, advice="name every item once"
            )
        if replace_func is None and len({i.name for i in items}) > 1:
            raise ScheduleError(
                f"execute() got different operators ({items[0].name}, {items[-1].name}) without replace_func",
                op=items[0].name,
                line=line,
                advice="execute each by itself, or pass replace_func= to fuse them",
            )
        if replace_func is not None:
            self._check_chain(items, line)

    def _check_items(self, items: list[OpItem]) -> None:
        for item in items:
            if item not in self.items(item.op):
                raise ScheduleError(
                    f"operator {item} is not of this context",
                    op=item.name,
                    line=user_line(),
                    advice="take items from this context's get_ready_ops() or items(), after split()",
                )

    def _executed(self, after: list[OpItem], waiting: OpItem) -> Iterator[int]:
        """The tasks that ran these items."""
        self._check_items(after)
        for item in after:
            for unit in _units(item):
                owner = self._owner.get(unit)
                if owner is None:
                    raise ScheduleError(
                        f"operator {waiting} is to wait for {item}, which was not executed before",
                        op=waiting.name,
                        line=user_line(),
                        advice="name only items that were executed already in after=",
                    )
                yield owner

    def _check_chain(self, items: list[OpItem], line: str | None) -> None:
        inside = {i.op.index for i in items}
        for n, item in enumerate(items):
            alone = all(i.op is item.op for i in items)
            linked = any(
                (a.op.index in item.op.after or item.op.index in a.op.after)
                and (set(a.micro_batches) & set(item.micro_batches))
                for a in items[:n] + items[n + 1 :]
            )
            if not alone and not linked:
                other = next(i for i in inside if i != item.op.index)
                raise ScheduleError(
                    f"operator {item} does not chain with the others of its fusion ({self.ops[other].name}, ...)",
                    op=item.name,
                    line=line,
                    advice="fuse operators where each uses a result of another, for the same micro-batch",
                )

    def _not_ready(self, item: OpItem, before: tuple[int, int]) -> ScheduleError:
        op = self.ops[before[0]]
        return ScheduleError(
            f"operator {item} is not ready: {op.name}[{before[1]}] comes before it and was not executed",
            op=item.name,
            line=user_line(),
            advice="execute only what get_ready_ops() returns",
        )

    def _require_batch(self) -> None:
        if not self._has_batch:
            raise SplitError(
                "the graph has no batch to split: no input keeps a dimension that may change",
                line=user_line(),
                advice='say which inputs carry it, batch_dims={"x": 0}; for a batch of one row, or where the '
                "model fixes it, use sequential()",
            )
        if not any(op.splittable for op in self.ops):
            op = next((op for op in self.ops if op.refusal), None)
            why = f": {op.name} mixes the rows of the batch ({op.refusal})" if op else ""
            raise SplitError(
                f"no operator of this graph can be split{why}",
                op=op.name if op else None,
                line=op.line if op else user_line(),
                advice="cut around that operator with SplitModule, SplitFunc or mark, so that it alone stays whole; "
                "or declare it splittable=True if every row is treated by itself",
            )


def fusion_values(
    graph: OpGraph, items: Sequence[tuple[Op, tuple[int, ...]]]
) -> tuple[list[tuple[int, tuple[int, ...]]], list[tuple[int, tuple[int, ...]]]]:
    """What a fused call gets, and returns: (value, micro-batches), item by item, each once."""
    made: set[tuple[int, int]] = set()
    reads: list[tuple[int, tuple[int, ...]]] = []
    writes: list[tuple[int, tuple[int, ...]]] = []
    for op, ms in items:
        for v in op.reads:
            if not all((v, m) in made for m in ms) and (v, ms) not in reads:
                reads.append((v, ms))
        made.update((v, m) for v in op.writes for m in ms)
    inside = {op.index for op, _ in items}
    for op, ms in items:
        for v in op.writes:
            users = [u for u in graph.ops if v in u.reads]
            if v in graph.outputs or any(u.index not in inside for u in users) or _partly(items, users, ms):
                writes.append((v, ms))
    return reads, writes


def _partly(items: Sequence[tuple[Op, tuple[int, ...]]], users: list[Op], ms: tuple[int, ...]) -> bool:
    """A user of the value is in the fusion, but not for all of these micro-batches."""
    covered = {(op.index, m) for op, mm in items for m in mm}
    return any((u.index, m) not in covered for u in users for m in ms)


def _items(who: str, given: Any) -> list[OpItem]:
    """One, or several."""
    found = [given] if isinstance(given, OpItem) else validate.members(given)
    if found is None:
        raise _not_an_item(who, given)
    for item in found:
        if not isinstance(item, OpItem) or not isinstance(item.op, Op) or not isinstance(item.micro_batches, tuple):
            raise _not_an_item(who, item)
    return found


def _not_an_item(who: str, *given: Any) -> ScheduleError:
    found = [item.name if isinstance(item, Op) else shown(item) for item in given]
    return ScheduleError(
        f"{who} got {', '.join(found) or 'no operator'}",
        line=user_line(),
        advice="pass what get_ready_ops() returned: one item, or a list of them; ctx.items(name) finds them by name",
    )


def _units(item: OpItem) -> list[tuple[int, int]]:
    """What an item executes: an operator for a micro-batch, each; as a whole, it counts for the first."""
    return [(item.op.index, m) for m in (item.micro_batches if item.op.splittable else (0,))]


def _merge(items: list[OpItem]) -> OpItem:
    if len(items) == 1:
        return items[0]
    indices = tuple(sorted(m for i in items for m in i.micro_batches))
    return OpItem(op=items[0].op, micro_batch=items[0].micro_batch, micro_batches=indices)


def function_name(function: Callable[..., Any]) -> str:
    """What stands for it in a plan."""
    module = getattr(function, "__module__", None) or "__main__"
    return f"{module}:{getattr(function, '__qualname__', type(function).__qualname__)}"
