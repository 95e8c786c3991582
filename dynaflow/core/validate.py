"""Arguments of the public API, checked: each function returns the value, or raises with what was found and what to
pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from dynaflow.errors import DynaFlowError, shown, user_line

Kind = type[DynaFlowError]


def invalid(what: str, value: Any, advice: str, error: Kind = DynaFlowError) -> DynaFlowError:
    return error(f"{what}={shown(value)}", line=user_line(), advice=advice)


def is_integer(value: Any) -> bool:
    """A Python or numpy integer. A bool is a flag, and a float is not exact."""
    is_flag = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")  # numpy's or torch's
    if is_flag or not hasattr(type(value), "__index__"):
        return False
    try:
        operator.index(value)
    except Exception:  # a tensor of several, or of floats
        return False
    return True


def integer(
    value: Any,
    what: str,
    advice: str,
    *,
    least: int | None = None,
    most: int | None = None,
    error: Kind = DynaFlowError,
) -> int:
    found = operator.index(value) if is_integer(value) else None
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        raise invalid(what, value, advice, error)
    return found


def flag(value: Any, what: str, error: Kind = DynaFlowError) -> bool:
    if not isinstance(value, bool):
        raise invalid(what, value, "pass True or False", error)
    return value


def sequence(value: Any, what: str, advice: str, error: Kind = DynaFlowError) -> list[Any]:
    found = members(value)
    if found is None:
        raise invalid(what, value, advice, error)
    return found


def members(value: Any) -> list[Any] | None:
    """The members of a list, tuple or array; None for other values, texts and mappings among them."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # a tensor without dims
        return None


def names(value: Any, what: str, advice: str, error: Kind = DynaFlowError) -> list[str]:
    found = sequence(value, what, advice, error)
    if not all(isinstance(name, str) for name in found):
        raise invalid(what, value, advice, error)
    return found


def mapping(value: Any, what: str, advice: str, error: Kind = DynaFlowError) -> Mapping[str, Any]:
    """A mapping with text keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise invalid(what, value, advice, error)
    return value


def function(value: Any, what: str, advice: str, error: Kind = DynaFlowError) -> Any:
    if not callable(value):
        raise invalid(what, value, advice, error)
    return value
