"""What a scheduler sees and may ask. It runs nothing: decisions are recorded by a `PlanRecorder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import sympy
import torch

from dynaflow.capture.captured_graph import Phase
from dynaflow.core import validate
from dynaflow.core.device import device_for
from dynaflow.core.plan import MOST_PRIORITY, MOST_SMS, Lane, MicroBatch, Plan, Task, is_name
from dynaflow.cost.costs import Costs
from dynaflow.errors import ScheduleError, SplitError, shown, user_line
from dynaflow.partition.op_graph import Op, OpGraph
from dynaflow.schedule.op_item import OpItem, not_an_item
from dynaflow.schedule.plan_recorder import DEFAULT_LANE, PlanRecorder
from dynaflow.schedule.split import Requests, parts_of, requests_of, split_requests, split_rows

FACT_NAMES = ""
"""Among the facts that were read: the names of all facts were listed, or counted."""


class Facts(Mapping[str, Any]):
    """Free-form facts from the host system. Records which were read: the plan depends on those."""

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
    """Other schedulers, tried on the arguments of this call (see `engine.scheduler_trials`)."""

    cudagraph: bool

    @property
    def args(self) -> Sequence[Any]: ...

    def plan(self, scheduler: Any) -> Any: ...

    def lowered(self, scheduler: Any) -> Any: ...

    def watched(self, planned: Any, plan: Plan, on_task: Callable[[Task, str], None]) -> Any: ...


class ScheduleContext:
    """The batch, the operators, and the methods by which a scheduler decides what runs where and when."""

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
        """The number of equal parts; None when sizes were given, which fit one batch size only."""
        self.trials: Trials | None = None
        """For `choose`: the plans of other schedulers for this call, and how fast they are."""
        self.functions: dict[str, Callable[..., Any]] = {}
        self.graph, self.sizes = graph, sizes
        """The partitioned graph, and the values of its symbols."""
        self.note: Any = None
        """The reason for the decision, for `fast.explain()`: anything that can be printed."""
        self.later: Callable[[ScheduleContext], Any] | None = None
        self._has_batch, self._requests_of = has_batch, requests_of
        self._sequential = False
        self._declared: dict[str, Lane] = {}
        self._recording: PlanRecorder | None = None

    # What a scheduler calls

    @cached_property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """The sizes of the model's inputs by name, `ctx.inputs["input_ids"]`; its own parameters are not among them."""
        given = ((i.name, i.shape) for i in self.graph.graph.inputs if i.shape is not None and not i.owned)
        return {name: tuple(int(size.xreplace(self._known)) for size in shape.size) for name, shape in given}

    @cached_property
    def _known(self) -> dict[sympy.Symbol, sympy.Integer]:
        return {symbol: sympy.Integer(n) for symbol, n in {**self.graph.graph.hints, **self.sizes}.items()}

    @property
    def phase(self) -> Phase:
        """What is scheduled: "forward" or "backward" in training, else "inference". Operators of both passes have the
        names of their modules; what makes the gradients of weights is "*.weights", with the tag "weights"."""
        return self.graph.graph.phase

    @property
    def sms(self) -> int:
        """What lanes can share: the SMs of the device; on CPU, the threads that torch uses."""
        return device_for(self.device).sms

    def cost(self, item: OpItem | Op) -> float:
        """How long it takes alone on this device, in seconds, by the cost model."""
        op, rows = self._op_and_rows(item)
        return self._costs.seconds(op, rows)

    def uses(self, item: OpItem | Op) -> Mapping[str, float]:
        """What it uses in that time, by resource ("compute", "memory", "link", ...), as a fraction of the total."""
        op, rows = self._op_and_rows(item)
        return self._costs.uses(op, rows)

    def _op_and_rows(self, item: OpItem | Op) -> tuple[Op, int]:
        if isinstance(item, Op) and self.graph.by_name.get(item.name) is item:
            return item, self.batch_size
        if not isinstance(item, OpItem) or self.graph.by_name.get(item.name) is not item.op:
            raise not_an_item("cost() or uses()", item)
        return item.op, sum(self.micro_batches[m].size for m in item.micro_batches)

    @cached_property
    def _costs(self) -> Costs:
        return Costs(self.graph, device_for(self.device), sizes=self.sizes)

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
        can be limited to a part while another one may use everything. The lower the priority, the more urgent. A lane
        that has neither needs no declaration.
        """
        if not is_name(name):
            what = f"lane({shown(name)}): not a name"
            raise ScheduleError(what, line=user_line(), advice='pass a name, such as "memory"')
        if sms is not None:
            advice = f"pass a positive number, at most {MOST_SMS}, or leave it out; ctx.sms is what there is"
            sms = validate.integer(sms, f"lane {name!r}: sms", advice, least=1, most=MOST_SMS, error=ScheduleError)
        advice, most = "pass 0, or a negative number for a more urgent lane", MOST_PRIORITY
        what = f"lane {name!r}: priority"
        priority = validate.integer(priority, what, advice, least=-most, most=most, error=ScheduleError)
        lane = Lane(name=name, sms=sms, priority=priority)
        known = self._declared.get(name) or (Lane(name=name) if name in self._lanes_in_use else lane)
        if known != lane:
            how = "declared before" if name in self._declared else "in use, undeclared"
            raise ScheduleError(
                f"lane {lane} is {how}: {known}", line=user_line(), advice="declare a lane once, before its first task"
            )
        self._declared[name] = lane
        return name

    def sequential(self) -> None:
        """Run the uncut graph."""
        if tasks := self._recording.tasks if self._recording else ():
            raise ScheduleError(
                f"sequential() after {len(tasks)} execute() calls",
                line=user_line(),
                advice="decide for sequential() before executing anything",
            )
        self._sequential = True

    def split(self, parts: int | Sequence[int]) -> tuple[MicroBatch, ...]:
        """Cut the batch: into `parts` of about equal size, or into the sizes given.

        When `facts["num_tokens"]` gives the lengths of packed requests, cuts fall between requests, and sizes
        count requests (or tokens, if they end at request boundaries).
        """
        if self._recording is not None:
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
        return self._recorder().ready()

    def before(self, item: OpItem) -> list[OpItem]:
        """What must be executed before it: what makes its values, or touches its memory; and, where it needs something
        of earlier rows, what leaves that for earlier micro-batches."""
        return self._recorder().before(item)

    def is_ready(self, items: Sequence[OpItem]) -> bool:
        """Whether `execute(items)` may come now: what they wait for was executed, or is among them. Some are ready
        together and not one by one: an operator with a state of its own runs for one micro-batch after another."""
        return self._recorder().is_ready(items)

    def items(self, op: Op | str) -> list[OpItem]:
        """The executions of an operator, ready or not: one per micro-batch, or a single one. For fusions."""
        return self._recorder().items(op)

    def execute(
        self,
        ops: OpItem | Sequence[OpItem],
        lane: str = DEFAULT_LANE,
        replace_func: Callable[..., Any] | None = None,
        after: OpItem | Sequence[OpItem] = (),
    ) -> None:
        """Run one ready operator; several micro-batches of one operator, merged; or a fusion.

        It waits for what it reads. `after` lists items that were executed before and that it is to wait for as well: to
        delay work that could start early but would take resources or memory from other work.

        A fusion calls `replace_func` in place of the given items. It gets what they read and no earlier one of
        them made: item by item, in the order of `signature(items)`; and returns what they make and others use,
        in the same manner, as a tensor or a tuple. It must also do the in-place writes of the items.
        """
        if self._sequential:
            raise ScheduleError("execute() after sequential()", line=user_line(), advice="call one or the other")
        self._recorder().execute(ops, lane, replace_func, after)

    def signature(self, items: Sequence[OpItem]) -> tuple[list[str], list[str]]:
        """The names of what a fusion of `items` takes and returns, in order."""
        return self._recorder().signature(items)

    # What the engine asks for

    def finish(self) -> Plan:
        """The plan that the scheduler has described."""
        if self._sequential or not self.ops:
            return self.whole()
        return self._recorder().finish(self._declared)

    def whole(self) -> Plan:
        """The plan that runs the uncut graph."""
        return Plan(graph=self.graph.fingerprint, micro_batches=(self._whole,), lanes=(), tasks=())

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

    def _recorder(self) -> PlanRecorder:
        """Made by the first question about operators: from then on, the split is fixed."""
        if self._recording is None:
            self._recording = PlanRecorder(self.graph, self.micro_batches, self._whole, self.functions)
        return self._recording

    @property
    def _lanes_in_use(self) -> Mapping[str, int]:
        return self._recording.last_on if self._recording else {}

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
                "or declare it splittable=True if every row is treated independently",
            )
