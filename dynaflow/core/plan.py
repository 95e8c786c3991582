"""A schedule as plain data: immutable, hashable, printable, JSON in and out.

A Plan answers every question about its schedule without a device or a model. The order of `tasks` is the order in which
the host issues them, and on each lane the order in which they run. `after` holds the waits between lanes that the
lanes' own order does not imply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property, total_ordering
from typing import Any, Protocol

from dynaflow.core.json_codec import decode
from dynaflow.errors import PlanError, shown

FORMAT = 1
MOST_SMS = 1024
"""An upper bound for a lane's SMs, or threads."""
MOST_PRIORITY = 1024
"""An upper bound in either direction. Devices have far fewer."""


@total_ordering
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """A slice of the batch: rows [start, stop), and the requests it holds when the batch is ragged.

    It can be used as its index: `lane=f"lane{op.micro_batch % 2}"`.
    """

    index: int
    start: int
    stop: int
    requests: tuple[int, int] | None = None
    """Half-open range of requests, when the batch is tokens packed from several requests."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __index__(self) -> int:
        return self.index

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MicroBatch):
            return astuple(self) == astuple(other)
        return self.index == other

    def __hash__(self) -> int:
        return hash(self.index)

    def __lt__(self, other: MicroBatch | int) -> bool:
        return self.index < int(other)

    def __mod__(self, count: int) -> int:
        return self.index % count

    def __str__(self) -> str:
        return str(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A named stream on CUDA, a worker thread on CPU.

    The first lane of a plan is the caller's own stream. If a lane has a share on CUDA, each lane gets an SM partition,
    and none is the caller's.
    """

    name: str
    sms: int | None = None
    """Its share: SMs on CUDA, threads on CPU. None: what the other lanes' shares leave."""
    priority: int = 0
    """Stream priority: lower is more urgent, 0 is normal. Ignored on CPU and on the caller's own stream."""

    def __str__(self) -> str:
        notes = [f"{self.sms} SMs"] if self.sms is not None else []
        notes += [f"priority {self.priority}"] if self.priority else []
        return self.name + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One operator for one micro-batch, or for several merged."""

    op: str
    micro_batches: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op}[{','.join(map(str, self.micro_batches))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One execution on a lane: an item, or several fused into `replace`."""

    items: tuple[Item, ...]
    lane: str
    after: tuple[int, ...] = ()
    """Earlier tasks, on other lanes, that this one waits for."""
    replace: str | None = None
    """The function called in place of the items, as `module:qualname`."""

    def __str__(self) -> str:
        return " + ".join(map(str, self.items)) + (f" -> {self.replace}" if self.replace else "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs, where, and after what. A sequential plan has no `tasks`: the uncut graph runs."""

    graph: str
    """Fingerprint of the partitioned graph that this plan is for."""
    micro_batches: tuple[MicroBatch, ...]
    lanes: tuple[Lane, ...]
    tasks: tuple[Task, ...]
    code: str = field(default="", compare=False, repr=False)
    """The generated function that runs the plan; filled in when the plan is lowered."""

    @property
    def sequential(self) -> bool:
        return not self.tasks

    @property
    def partitioned(self) -> bool:
        """Some lane has a share, so that the device is divided among the lanes."""
        return any(lane.sms is not None for lane in self.lanes)

    def shares(self, sms: int) -> dict[str, int | None]:
        """For each lane, how many of a device's SMs it may use; None: all."""
        taken = sum(lane.sms for lane in self.lanes if lane.sms and lane.sms != sms)
        return {lane.name: None if not taken or lane.sms == sms else lane.sms or sms - taken for lane in self.lanes}

    @property
    def batch_size(self) -> int:
        return self.micro_batches[-1].stop

    @cached_property
    def happens_before(self) -> tuple[int, ...]:
        """For each task, a bit mask of the tasks that end before it starts."""
        return happens_before(self.tasks)

    def on_one_lane(self, lane: str = "main") -> Plan:
        """The same tasks on one lane, in the order in which they are issued."""
        tasks = tuple(replace(task, lane=lane, after=()) for task in self.tasks)
        return replace(self, lanes=(Lane(name=lane),) if tasks else (), tasks=tasks)

    def __str__(self) -> str:
        sizes = ", ".join(str(m.size) for m in self.micro_batches)
        head = f"Plan: batch of {self.batch_size} as [{sizes}]"
        if self.sequential:
            return head + ", in sequence: the uncut graph"
        lines = [head + f", {len(self.tasks)} tasks on lanes {', '.join(map(str, self.lanes))}"]
        number, lane = len(str(len(self.tasks))), max((len(lane.name) for lane in self.lanes), default=0)
        for i, task in enumerate(self.tasks):
            wait = f"   after {', '.join(map(str, task.after))}" if task.after else ""
            lines.append(f"{i:>{number}}  {task.lane:<{lane}}  {task}{wait}")
        return "\n".join(lines)

    def to_json(self, indent: int | None = None) -> str:
        data = {"format": FORMAT, **asdict(self)}
        del data["code"]
        return json.dumps(data, indent=indent)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Reads the text of `to_json`. The plan may call functions by name only if its scheduler lists them in
        `functions`."""
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as e:  # not JSON, not a text, too long a number, too deep
            raise PlanError(f"not a plan: the text is not JSON ({e})", advice="pass the text of Plan.to_json()") from e
        return Plan.from_dict(data)

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Reads the parsed JSON of a plan."""
        if not isinstance(data, dict) or data.get("format") != FORMAT or isinstance(data["format"], bool):
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"not a plan of format {FORMAT} (found {shown(found)})",
                advice="make the plan again with this version of dynaflow",
            )
        parts = {name: data[name] for name in ("graph", "micro_batches", "lanes", "tasks") if name in data}
        try:
            plan: Plan = decode(Plan, parts)
        except ValueError as e:
            raise PlanError(f"malformed plan: {e}", advice="pass what Plan.to_json() gave, unedited") from e
        if not plan.micro_batches:
            raise PlanError("malformed plan: no micro-batch", advice="pass what Plan.to_json() gave, unedited")
        return plan


class Ordered(Protocol):
    """Something that runs on a lane, after others."""

    @property
    def lane(self) -> str: ...
    @property
    def after(self) -> tuple[int, ...]: ...


def happens_before(tasks: Iterable[Ordered]) -> tuple[int, ...]:
    """Bit i of entry j is set when task i ends before task j starts."""
    masks: list[int] = []
    last_on: dict[str, int] = {}
    for j, task in enumerate(tasks):
        mask = 0
        previous = last_on.get(task.lane)
        if previous is not None:
            mask = masks[previous] | 1 << previous
        for i in task.after:
            if 0 <= i < j:  # a wait for a later task orders nothing; the check rejects it
                mask |= masks[i] | 1 << i
        masks.append(mask)
        last_on[task.lane] = j
    return tuple(masks)


def is_name(name: object) -> bool:
    """Whether a lane may have this name: it is printed, drawn, and written into comments."""
    return isinstance(name, str) and name.isprintable() and name.strip() != ""


def operator_by_operator(plan: Plan, ops: Iterable[str], lane: str = "main") -> Plan:
    """A sequential plan, operator by operator."""
    tasks = tuple(Task(items=(Item(op=op, micro_batches=(0,)),), lane=lane) for op in ops)
    return replace(plan, lanes=(Lane(name=lane),), tasks=tasks)
