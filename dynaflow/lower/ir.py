"""The IR of lowering: a plan as instructions on variables, grouped into steps on lanes.

A variable holds some micro-batches of one value of the graph. Instructions list the variables that they read and make,
from which each pass derives what it needs; nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from dynaflow._torch import Boxed
from dynaflow.core.plan import happens_before
from dynaflow.lower.compile_ops import Condition
from dynaflow.lower.fuse_tasks import Parts
from dynaflow.runtime.arena import View

Size = int | str
"""A number; or, in an elastic program, an expression over its extents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Var:
    """A tensor that the program handles, or a number among its arguments."""

    id: int
    kind: Literal["argument", "made", "joined", "buffer", "slice"]
    value: int
    """The graph's value."""
    parts: Parts
    """The micro-batches that it holds."""
    whole: bool
    """Whether these are all micro-batches."""
    argument: int = -1
    """Position among the arguments, if it is one."""
    base: Var | None = None
    """What it is a slice of."""

    @property
    def root(self) -> Var:
        return self.base or self

    def __str__(self) -> str:
        """Its name in generated code."""
        parts = "" if self.whole else "".join(f"_{m}" for m in self.parts)
        match self.kind:
            case "argument":
                return f"a{self.argument}"
            case "made":
                return f"v{self.value}{parts}"
            case "buffer":
                return f"b{self.value}{parts}"
            case "slice":
                return f"{self.base}_{'_'.join(map(str, self.parts))}"
        return f"j{self.value}_{self.id}"


Vars = tuple[Var, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """A view of some rows."""

    out: Var
    base: Var
    cuts: tuple[tuple[int, Size, Size], ...]
    """Of each dim that is cut: the start and the length."""

    @property
    def reads(self) -> Vars:
        return (self.base,)

    @property
    def makes(self) -> Vars:
        return (self.out,)

    def __str__(self) -> str:
        return f"{self.out} = {self.base}{''.join(f'.narrow({d}, {start}, {n})' for d, start, n in self.cuts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A copy that joins several tensors."""

    out: Var
    reads: Vars
    join: Callable[..., Any]
    nbytes: int

    @property
    def makes(self) -> Vars:
        return (self.out,)

    def __str__(self) -> str:
        return f"{self.out} = join({', '.join(map(str, self.reads))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """Allocates a buffer."""

    out: Var
    new: Callable[[], Any]
    reads: Vars = ()

    @property
    def makes(self) -> Vars:
        return (self.out,)

    def __str__(self) -> str:
        return f"{self.out} = new()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of compiled operators."""

    makes: Vars
    call: Boxed
    op: int
    """The first operator: it names the function."""
    sizes: tuple[Size, ...]
    args: Vars
    into: Vars
    """Buffers, or slices of some, that results are written into."""
    lends: bool
    """What it makes may share memory with what it reads."""

    @property
    def reads(self) -> Vars:
        return self.args + self.into

    def __str__(self) -> str:
        into = f" into {', '.join(map(str, self.into))}" if self.into else ""
        given = ", ".join(map(str, (*self.sizes, *self.args)))
        return f"{assignment(self.makes)}op{self.op}({given}){into}{' lends' if self.lends else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """A call of a user's function that replaces operators."""

    makes: Vars
    function: Callable[..., Any]
    task: int
    reads: Vars
    lends: bool = True

    def __str__(self) -> str:
        return f"{assignment(self.makes)}f{self.task}({', '.join(map(str, self.reads))}) lends"


Instruction = Narrow | Join | New | Call | Replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What runs for one task, or for several that are one call."""

    tasks: tuple[int, ...]
    lane: str
    title: str
    after: tuple[int, ...]
    """Steps of other lanes that this one waits for."""
    before: tuple[Instruction, ...] = ()
    call: Call | Replace | None = None
    """None if no result is used."""
    then: tuple[Narrow, ...] = ()
    """Slices of what it makes."""
    frees_first: Vars = ()
    """Variables to free before the call. `frees`: after it."""
    frees: Vars = ()

    @property
    def needs(self) -> Iterator[Instruction]:
        """Instructions whose reads are reads of the step."""
        yield from self.before
        if self.call is not None:
            yield self.call

    @property
    def reads(self) -> Vars:
        return _once(v for i in self.needs for v in i.reads)

    @property
    def makes(self) -> Vars:
        return _once(v for i in (*self.needs, *self.then) for v in i.makes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory that some micro-batches of a value are written into."""

    var: Var
    own: bool
    """Allocated for each run, since the caller or a user's function gets it. Else in the arena."""
    view: View
    """Its layout; and, once it is placed, its offset in the arena."""
    nbytes: int
    new: Callable[[], Any]
    """Allocates it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The graph's last views and numbers, computed from the program's results."""

    function: Callable[..., Any]
    sizes: tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Straight-line code, by lanes. The first lane is the caller's own."""

    arguments: int
    inputs: Vars
    """The arguments that are values of the graph."""
    lanes: tuple[str, ...]
    partitioned: bool = False
    """Lanes have SM partitions: then none of them is the caller's own."""
    boxed: bool = False
    """The list of arguments is emptied, and they are freed like other variables."""
    extents: tuple[str, ...] = ()
    """Names of the sizes of its micro-batches, which an elastic program takes as one more argument."""
    start: tuple[Instruction, ...] = ()
    steps: tuple[Step, ...] = ()
    end: tuple[Join, ...] = ()
    results: Vars = ()
    clones: Vars = ()
    """Results that are copied out of the memory of a CUDA graph."""
    epilogue: Epilogue | None = None
    made_aside: Vars = ()
    """Results on the device that were made on a lane other than the caller's."""
    buffers: tuple[Buffer, ...] = ()
    buffer_slices: tuple[Narrow, ...] = ()
    views: tuple[tuple[Var, View], ...] = ()
    """Variables that lie in the arena."""
    arena_bytes: int = 0
    conditions: frozenset[tuple[Parts, Condition]] = frozenset()
    """Of an elastic program: the sizes of these micro-batches for which its operators were compiled."""

    @property
    def joined_bytes(self) -> int:
        """Bytes that a run copies to join micro-batches."""
        joins = (i for i in (*(i for s in self.steps for i in s.before), *self.end) if isinstance(i, Join))
        return sum(join.nbytes for join in joins)

    @property
    def final_reads(self) -> frozenset[Var]:
        """Variables that the end needs."""
        return frozenset((*(v for join in self.end for v in join.reads), *self.results))

    @property
    def happens_before(self) -> tuple[int, ...]:
        """For each step, a bit mask of the steps that are certain to have ended when it starts."""
        return happens_before(self.steps)

    def on_one_lane(self) -> Program:
        """The same calls one after the other, on one lane."""
        lane = self.lanes[0]
        steps = tuple(replace(step, lane=lane, after=()) for step in self.steps)
        return replace(self, lanes=(lane,), partitioned=False, steps=steps, made_aside=())

    def __str__(self) -> str:
        """For people and golden files."""
        lines = [f"program({', '.join(map(str, self.inputs))})" + (f" extents {self.extents}" if self.extents else "")]
        lines += [f"    {i}" for i in self.start]
        for number, step in enumerate(self.steps):
            waits = f", after {', '.join(map(str, step.after))}" if step.after else ""
            lines.append(f"  {number} on {step.lane}{waits}  # {step.title}")
            lines += [f"    free {v}" for v in step.frees_first]
            lines += [f"    {i}" for i in (*step.needs, *step.then)]
            lines += [f"    free {v}" for v in step.frees]
        lines += [f"    {i}" for i in self.end]
        lines.append(f"  return {', '.join(map(str, self.results))}{' by the epilogue' if self.epilogue else ''}")
        for buffer in self.buffers:
            where = "own" if buffer.own else "arena"
            lines.append(f"  {where} {buffer.var}: {buffer.nbytes} bytes")
        lines += [f"  {var} at {view.offset} of {self.arena_bytes}" for var, view in self.views]
        return "\n".join(lines) + "\n"


def _once(found: Iterable[Var]) -> Vars:
    return tuple(dict.fromkeys(found))


def listed(found: Iterable[Any]) -> str:
    return ", ".join(map(str, found))


def tuple_of(found: Iterable[Var]) -> str:
    """With a comma after each, so that one alone is a tuple too."""
    return "".join(f"{v}, " for v in found).rstrip()


def assignment(makes: Vars) -> str:
    """What stands before a call that makes these variables."""
    return f"{tuple_of(makes)} = " if makes else ""
