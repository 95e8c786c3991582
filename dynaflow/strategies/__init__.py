"""Schedules to use by name, or to copy: one module each, with the public API alone.

- `CLASSES` maps the name of a strategy to its class; the module has the same name. Each is imported on first use.
- `make(name, **options)` returns one, or a scheduler of the user's by `module:Class` or `file.py:Class`. A wrong name,
  option or value is reported here.
- What a strategy does, and when it helps, is said in its module: `nanoflow`, `dual_batch`, `comm_overlap`,
  `token_weave` and `comet` split the batch; `branches` runs independent operators side by side; `prefetch` and
  `optimizer_overlap` wrap another scheduler; `solver` searches for an order.
- `auto` measures and chooses among `candidates`; `choice` chooses by a function of the user's.
- `fused` makes the fused calls of `token_weave`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from dynaflow.core.importing import import_object
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
"""Annotations of options that are checked -> the type that a value must have."""


def kind_named(name: str) -> Any:
    return _own(name) if ":" in name else _strategy(name)


def make(name: str, **options: Any) -> OpSchedulerBase:
    """Returns the strategy of this name, or your scheduler at `module:Class` or `file.py:Class`."""
    kind = kind_named(name)
    signature = inspect.signature(kind)
    known = signature.parameters
    try:
        signature.bind(**options)
    except TypeError as e:
        wrong = next((option for option in options if option not in known), None)
        what = f"strategy {name!r} has no option {wrong!r}" if wrong else f"strategy {name!r}: {e}"
        raise ScheduleError(what, advice=f"{_suggestion(wrong or '', known)}{_listed(known.values())}") from None
    for option, value in options.items():
        if wanted := _wrong_kind(kind, option, value):
            what = f"strategy {name!r}: {option}={shown(value)} is not {wanted}"
            raise ScheduleError(what, advice=_listed(known.values()))
    try:
        made: OpSchedulerBase = kind(**options)
    except DynaFlowError:
        raise
    except Exception as e:
        given = ", ".join(f"{option}={shown(value)}" for option, value in options.items())
        what = f"strategy {name!r} can't be made with {given or 'no options'}: {type(e).__name__}: {e}"
        raise ScheduleError(what, line=raised_at(e), advice=_listed(known.values())) from e
    return made


def _wrong_kind(kind: type, option: str, value: Any) -> str:
    """What an option has to be, by its annotation; "" if the value is that. Only plain annotations are checked."""
    if takes_several(kind, option) and isinstance(value, str):
        return "a list"
    allowed = _allowed(kind, option)
    if not set(allowed) <= set(PLAIN) or any(_is_a(value, a) for a in allowed):
        return ""
    return " or ".join("None" if a is NoneType else f"{'an' if a is int else 'a'} {a.__name__}" for a in allowed)


def takes_several(kind: type, option: str) -> bool:
    """Whether an option takes a sequence, by its annotation: Sequence[str], tuple[str, ...] | None; but not
    str | Sequence[str]."""
    allowed = _allowed(kind, option)
    several = (list, tuple, set, frozenset, Sequence)
    return str not in allowed and any(get_origin(a) in several or a in several for a in allowed)


def _allowed(kind: type, option: str) -> tuple[Any, ...]:
    try:
        hint = get_type_hints(kind.__init__).get(option)  # type: ignore[misc]
    except Exception:  # a user's class may use names that only a type checker imports
        return (None,)
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def _is_a(value: Any, wanted: Any) -> bool:
    return isinstance(value, PLAIN[wanted]) and (wanted is bool or not isinstance(value, bool))


def _suggestion(wanted: str, names: Iterable[str]) -> str:
    return "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(wanted, names, n=1))


def _listed(options: Iterable[inspect.Parameter]) -> str:
    """The options with their defaults, except very long ones."""
    usual = {o.name: "" if o.default is o.empty else f"={o.default!r}" for o in options}
    shown = [f"{name}{text if len(text) <= 30 else '=...'}" for name, text in usual.items()]
    return f"its options are {', '.join(shown)}" if shown else "it has no options: leave them out"


def _strategy(name: str) -> Any:
    name = ALIASES.get(name, name)
    if name not in CLASSES:
        if name.endswith(".py"):
            raise ScheduleError(f"{shown(name)} is a file, not a strategy", advice=f"name a class in it: {name}:Class")
        there = f"there are {', '.join(CLASSES)}; or your own scheduler, as module:Class or file.py:Class"
        raise ScheduleError(f"no strategy {shown(name)}", advice=f"{_suggestion(name[:100], CLASSES)}{there}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), CLASSES[name])


def _own(name: str) -> Any:
    kind = import_object(name, "scheduler", ScheduleError)
    if not (isinstance(kind, type) and issubclass(kind, OpSchedulerBase)):
        raise ScheduleError(f"{name!r} is not a scheduler", advice="name a subclass of dynaflow.OpSchedulerBase")
    return kind


def named(scheduler: OpSchedulerBase | str | tuple[str, OpSchedulerBase]) -> tuple[str, OpSchedulerBase]:
    """Returns a name to display and the scheduler, given either or both."""
    if isinstance(scheduler, tuple):
        return scheduler
    if isinstance(scheduler, str):
        return ALIASES.get(scheduler, scheduler), make(scheduler)
    usual = {k: p.default for k, p in inspect.signature(type(scheduler)).parameters.items()}
    state = {k: v for k, v in vars(scheduler).items() if not k.startswith("_")}
    options = ", ".join(f"{k}={v!r}" for k, v in state.items() if k not in usual or v != usual[k])
    return f"{type(scheduler).__name__}({options})", scheduler


def __getattr__(name: str) -> Any:
    """`dynaflow.strategies.NanoFlow`, imported on first use."""
    for module, kind in CLASSES.items():
        if kind == ALIASES.get(name, name):
            return getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
