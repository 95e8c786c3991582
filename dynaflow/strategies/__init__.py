"""Schedules to use by name, or to copy: one file each, written with the public API alone."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from dynaflow.core.importing import imported
from dynaflow.errors import DynaFlowError, ScheduleError, raised_at, shown
from dynaflow.schedule.base import OpSchedulerBase

CLASSES = {
    "sequential": "Sequential",
    "nanoflow": "NanoFlow",
    "dual_batch": "DualBatch",
    "comm_overlap": "CommOverlap",
    "token_weave": "TokenWeave",
    "comet": "Comet",
    "branches": "Branches",
    "prefetch": "Prefetch",
    "optimizer_overlap": "OptimizerOverlap",
    "solver": "Solver",
    "auto": "Auto",
}
"""By name, which is also the file's."""
ALIASES = {
    "optimizer_beside": "optimizer_overlap",
    "searched": "solver",
    "OptimizerBeside": "OptimizerOverlap",
    "Searched": "Solver",
}
"""Former names of strategies and their classes, which still work."""
PLAIN: dict[Any, type] = {bool: Integral, int: Integral, float: Real, str: str, NoneType: NoneType}
"""Annotations by which options are judged, and what passes for them."""


def kind_named(name: str) -> Any:
    return _own(name) if ":" in name else _strategy(name)


def make(name: str, **options: Any) -> OpSchedulerBase:
    """The strategy of this name, or the scheduler of your own at `module:Class` or `file.py:Class`."""
    kind = kind_named(name)
    signature = inspect.signature(kind)
    known = signature.parameters
    try:
        signature.bind(**options)
    except TypeError as e:
        wrong = next((option for option in options if option not in known), None)
        what = f"strategy {name!r} has no option {wrong!r}" if wrong else f"strategy {name!r}: {e}"
        raise ScheduleError(what, advice=f"{_meant(wrong or '', known)}{_told(known.values())}") from None
    for option, value in options.items():
        if wanted := _other_kind(kind, option, value):
            what = f"strategy {name!r}: {option}={shown(value)} is no {wanted}"
            raise ScheduleError(what, advice=_told(known.values()))
    try:
        made: OpSchedulerBase = kind(**options)
    except DynaFlowError:
        raise
    except Exception as e:
        told = ", ".join(f"{option}={shown(value)}" for option, value in options.items())
        what = f"strategy {name!r} can't be made with {told or 'no options'}: {type(e).__name__}: {e}"
        raise ScheduleError(what, line=raised_at(e), advice=_told(known.values())) from e
    return made


def _other_kind(kind: type, option: str, value: Any) -> str:
    """What an option is to be, by its annotation, if a value is something else. Only plain annotations are judged."""
    if takes_several(kind, option) and isinstance(value, str):
        return "list"
    allowed = _allowed(kind, option)
    if not set(allowed) <= set(PLAIN) or any(_is_a(value, a) for a in allowed):
        return ""
    return " or ".join("None" if a is NoneType else a.__name__ for a in allowed)


def takes_several(kind: type, option: str) -> bool:
    """By its annotation: Sequence[str], tuple[str, ...] | None; but not str | Sequence[str]."""
    allowed = _allowed(kind, option)
    several = (list, tuple, set, frozenset, Sequence)
    return str not in allowed and any(get_origin(a) in several or a in several for a in allowed)


def _allowed(kind: type, option: str) -> tuple[Any, ...]:
    try:
        hint = get_type_hints(kind.__init__).get(option)  # type: ignore[misc]
    except Exception:  # a class of the user's may name what only a type checker knows
        return (None,)
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def _is_a(value: Any, wanted: Any) -> bool:
    return isinstance(value, PLAIN[wanted]) and (wanted is bool or not isinstance(value, bool))


def _meant(wanted: str, names: Iterable[str]) -> str:
    return "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(wanted, names, n=1))


def _told(options: Iterable[inspect.Parameter]) -> str:
    """With their defaults, as they are written; but not those that are as long as a list of patterns."""
    usual = {o.name: "" if o.default is o.empty else f"={o.default!r}" for o in options}
    shown = [f"{name}{text if len(text) <= 30 else '=...'}" for name, text in usual.items()]
    return f"its options are {', '.join(shown)}" if shown else "it has no options: leave them out"


def _strategy(name: str) -> Any:
    name = ALIASES.get(name, name)
    if name not in CLASSES:
        if name.endswith(".py"):
            raise ScheduleError(f"{shown(name)} alone is no strategy", advice=f"name a class in it: {name}:Class")
        there = f"there are {', '.join(CLASSES)}; or a scheduler of yours, as module:Class or file.py:Class"
        raise ScheduleError(f"no strategy {shown(name)}", advice=f"{_meant(name[:100], CLASSES)}{there}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), CLASSES[name])


def _own(name: str) -> Any:
    kind = imported(name, "scheduler", ScheduleError)
    if not (isinstance(kind, type) and issubclass(kind, OpSchedulerBase)):
        raise ScheduleError(f"{name!r} is no scheduler", advice="name a subclass of dynaflow.OpSchedulerBase")
    return kind


def named(scheduler: OpSchedulerBase | str | tuple[str, OpSchedulerBase]) -> tuple[str, OpSchedulerBase]:
    """A scheduler, or the strategy of that name, and what to call it."""
    if isinstance(scheduler, tuple):
        return scheduler
    if isinstance(scheduler, str):
        return ALIASES.get(scheduler, scheduler), make(scheduler)
    usual = {k: p.default for k, p in inspect.signature(type(scheduler)).parameters.items()}
    state = {k: v for k, v in vars(scheduler).items() if not k.startswith("_")}
    options = ", ".join(f"{k}={v!r}" for k, v in state.items() if k not in usual or v != usual[k])
    return f"{type(scheduler).__name__}({options})", scheduler


def __getattr__(name: str) -> Any:
    """`dynaflow.strategies.NanoFlow`, imported when asked for: the files need the whole package."""
    for module, kind in CLASSES.items():
        if kind == ALIASES.get(name, name):
            return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
