"""Plans on disk, reused by other processes, for schedulers that have a `cache_key`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import dynaflow
from dynaflow.core.device import device_for
from dynaflow.core.disk_cache import DiskCache, enabled
from dynaflow.core.plan import FORMAT, Plan
from dynaflow.errors import PlanError, ScheduleError, shown
from dynaflow.partition.op_graph import OpGraph
from dynaflow.schedule.base import OpSchedulerBase, WrappingScheduler
from dynaflow.schedule.check import check
from dynaflow.schedule.context import FACT_NAMES, ScheduleContext
from dynaflow.schedule.fusion import function_name

PLAIN = frozenset((int, str, bool, float, NoneType))
"""Types of facts that are keys as they are."""
Functions = Mapping[str, Callable[..., Any]]
_store = DiskCache("plans")
_STARTED = time.time()


class StoredPlan:
    """The disk cache entry of one plan. Made before the scheduler runs, since `schedule` may change its state.

    A plan is found again when everything that it depends on is the same: the scheduler (`identity`), the graph, the
    sizes, the facts that were read, the device and the versions. Which facts are read is known only after the
    scheduler has run, so their names are stored under one key, and the plan under another that has their values in it.
    """

    def __init__(
        self,
        scheduler: OpSchedulerBase,
        graph: OpGraph,
        sizes: tuple[int, ...],
        ctx: ScheduleContext,
        facts: Mapping[str, Any],
    ) -> None:
        self._graph, self._sizes, self._ctx, self._facts = graph, sizes, ctx, facts
        self._scheduler = identity(scheduler) if enabled() else None
        self._functions = registered(scheduler.functions) if self._scheduler else {}

    def load(self) -> tuple[Plan, Functions] | None:
        """The stored plan, checked like any other; None if there is none, or if it is invalid."""
        if self._scheduler is None:
            return None
        ctx, facts = self._ctx, self._facts
        try:
            names = json.loads(_store.get(self._key(None) or "") or "null")
            if names is None:
                return None
            plan = Plan.from_json(_store.get(self._key(names) or "") or "null")
            check(plan, self._graph, ctx.batch_size, facts.get("num_tokens") if len(plan.micro_batches) > 1 else None)
            functions = functions_of(plan, self._functions)
        except Exception:  # an invalid entry: call the scheduler
            return None
        ctx.facts.read.update(names)
        return plan, functions

    def store(self, plan: Plan, functions: Functions) -> bool:
        """Stores the plan, if its functions can be found by name. Returns whether it was stored."""
        known = all(self._functions.get(name) is f for name, f in functions.items())
        if self._scheduler is None or plan.sequential or not known:
            return False
        first = self._key(None) or ""
        names = sorted({*json.loads(_store.get(first) or "[]"), *self._ctx.facts.read})
        second = self._key(names)
        if second is None:
            return False
        _store.put(second, plan.to_json())
        _store.put(first, json.dumps(names))
        return True

    def _key(self, names: Sequence[str] | None) -> str | None:
        """The disk cache key; None if a fact is not plain data."""
        ctx = self._ctx
        try:
            read = None if names is None else tuple((name, fact_value(self._facts, name)) for name in names)
            facts = plain(read)
        except (NotPlain, ScheduleError):
            return None
        device = f"{ctx.device} as {device_for(ctx.device).name}"
        rest = (self._scheduler, self._graph.identity, self._sizes, ctx.batch_size, device, ctx.sms)
        return f"plan {FORMAT} {rest} {facts}"


class NotPlain(Exception):
    """A value has no representation that is equal in another process."""


def identity(scheduler: OpSchedulerBase) -> str | None:
    """The classes of a scheduler, with their source files and cache keys, and of those that it wraps; None if one has
    no cache key of its own, or no source file."""
    parts = []
    while True:
        kind = type(scheduler)
        key = scheduler.cache_key()
        if key is None or _inherits_key(kind):
            return None
        name = f"{kind.__module__}:{kind.__qualname__}"
        try:
            parts.append((name, _versions(), [_source(base) for base in kind.__mro__], plain(key)))
        except NotPlain as e:
            raise ScheduleError(
                f"{kind.__qualname__}.cache_key() returned {shown(key)}, and {e}",
                advice="return numbers, texts, booleans and None, in tuples, lists, dicts or sets; or None",
            ) from None
        except (OSError, TypeError):  # no source file, as in a shell
            return None
        if not isinstance(scheduler, WrappingScheduler):
            return str(parts)
        scheduler = scheduler.inner


def _inherits_key(kind: type) -> bool:
    """Whether its cache key is that of a base class, which does not know what this class's own `schedule` reads."""
    for base in kind.__mro__:
        if "cache_key" in vars(base):
            return False
        if not {"__init__", "schedule"}.isdisjoint(vars(base)):
            return True
    return False


def plain(value: Any) -> str:
    """Plain data as text. Raises NotPlain for anything else."""
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{plain(k)}: {plain(v)}' for k, v in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(plain, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(plain, value))})"
    raise NotPlain(f"{shown(value)} is not plain data")


def _source(kind: type) -> str:
    """A digest of the source file of a class; "" for those that are identified by version."""
    package = kind.__module__.partition(".")[0]
    return "" if package in ("builtins", "dynaflow", "abc", "typing") else _digest(Path(inspect.getfile(kind)))


def _digest(path: Path) -> str:
    if path.stat().st_mtime > _STARTED:
        raise OSError(f"{path} was edited after it was imported, perhaps")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _versions() -> str:
    """The versions of all that makes plans. This package is identified by its source, since it may be edited."""
    package = Path(dynaflow.__file__).parent
    ours = hashlib.sha256("".join(_digest(path) for path in sorted(package.rglob("*.py"))).encode()).hexdigest()
    return f"torch {torch.__version__} python {platform.python_version()} dynaflow {ours}"


def registered(functions: Iterable[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Functions by their names in plans. Names of several functions are left out."""
    if not isinstance(functions, Iterable) or not all(map(callable, functions := list(functions))):
        raise ScheduleError(f"functions={shown(functions)} are not functions", advice="list them: functions = (fused,)")
    found: dict[str, Callable[..., Any]] = {}
    twice: set[str] = set()
    for function in functions:
        name = function_name(function)
        if found.setdefault(name, function) is not function:
            twice.add(name)
    return {name: function for name, function in found.items() if name not in twice}


def functions_of(plan: Plan, known: Functions) -> Functions:
    """The functions that a plan calls by name. Only known ones: the file of a plan may not be trusted."""
    for name in (task.replace for task in plan.tasks):
        if name is not None and name not in known:
            raise PlanError(
                f"the plan calls {name!r}, which its scheduler does not know",
                advice="list the function in the scheduler's `functions`; its module is not imported for a plan",
            )
    return {task.replace: known[task.replace] for task in plan.tasks if task.replace is not None}


def frozen(fact: Any) -> Any:
    """A fact as a dictionary key."""
    if type(fact) in PLAIN:
        return fact
    if isinstance(fact, torch.Tensor) or type(fact).__module__ == "numpy":
        return tuple(fact.reshape(-1).tolist()), tuple(fact.shape)
    if isinstance(fact, Mapping):
        return tuple(sorted(((k, frozen(v)) for k, v in fact.items()), key=repr))
    if isinstance(fact, (list, tuple)):
        return tuple(fact) if PLAIN.issuperset(map(type, fact)) else tuple(map(frozen, fact))
    if isinstance(fact, (set, frozenset)):
        return frozenset(frozen(v) for v in fact)
    return hashable(fact, "a fact")


def hashable(value: Any, what: str) -> Any:
    """The value. Raises unless it is hashable, as cache keys must be."""
    try:
        hash(value)
    except TypeError:
        advice = "a tuple can be, a list or a dict can't"
        raise ScheduleError(f"{what} is {shown(value)}, which can't be part of a key", advice=advice) from None
    return value


def fact_value(facts: Mapping[str, Any], name: str) -> Any:
    return frozen(list(facts) if name == FACT_NAMES else facts.get(name))
